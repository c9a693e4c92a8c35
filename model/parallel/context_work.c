#include "model/parallel/context_work.h"

#include <stdlib.h>

double context_pairs(const ModelConfig *c, int tokens)
{
    const double n = tokens, w = c->sliding_window < tokens ? c->sliding_window : tokens,
                 all = n * n / 2, slides = w * (n - w / 2);
    double sum = 0;
    for (int l = 0; l < c->n_layers; l++)
        sum += layer_slides(c, l) ? slides : all;
    return sum / c->n_layers;
}

/* For each query head, a pair of query and key takes two products of length head_dim in forward and
 * five in backward. Forward exchanges q, k, v and the output. Backward exchanges the output's
 * gradient, q, k, v and the output, and the gradients of q, k, v. All of these are BF16; a rank's
 * own part is not sent. A GPU computes OPERATIONS_PER_BYTE while it sends a byte: 400 TFLOP/s in
 * attention, 270 GB/s to another GPU of its host (H200). */
double context_token_pairs(const ModelConfig *c, int ranks)
{
    enum { OPERATIONS_PER_BYTE = 1500 };
    const double key_heads = c->n_kv_heads > ranks ? c->n_kv_heads : ranks, heads = c->n_heads;
    const double operations = 7 * 2 * heads,
                 bytes = 2.0 * 3 * (heads + 2 * key_heads + heads) * (ranks - 1) / ranks;
    return bytes * OPERATIONS_PER_BYTE / operations;
}

static int compare(double a, double b)
{
    return (a > b) - (a < b);
}

static int by_work(const void *a, const void *b)
{
    const OwnDocument *x = a, *y = b;
    const int ranks = compare(x->rank, y->rank), pairs = compare(x->pairs, y->pairs);
    return ranks ? ranks : pairs ? pairs : compare(x->index, y->index);
}

static int by_level(const void *a, const void *b)
{
    const OwnDocument *x = a, *y = b;
    const int levels = compare(x->level, y->level);
    return levels ? levels : compare(x->index, y->index);
}

static double time_of(double level, const ContextWork *w)
{
    double most = 0;
    for (int r = 0; r < w->ranks; r++)
        most = w->exchanged[r] > most ? w->exchanged[r] : most;
    return level + w->pairs / w->ranks + w->token_pairs * most;
}

int context_leave_out(OwnDocument *d, int count, ContextWork *work)
{
    qsort(d, (size_t)count, sizeof *d, by_work);
    for (int i = 0; i < count; i++) {
        d[i].level = d[i].pairs + (i > 0 && d[i - 1].rank == d[i].rank ? d[i - 1].level : 0);
        work->pairs += d[i].pairs;
        work->exchanged[d[i].rank] += d[i].tokens;
    }
    qsort(d, (size_t)count, sizeof *d, by_level);
    int best = 0;
    double least = time_of(0, work);
    for (int i = 0; i < count; i++) {
        work->pairs -= d[i].pairs;
        work->exchanged[d[i].rank] -= d[i].tokens;
        const double time = time_of(d[i].level, work);
        if (time <= least) {
            least = time;
            best = i + 1;
        }
    }
    return best;
}
