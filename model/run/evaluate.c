/* Every rank runs the same number of forward passes, because units are gathered together: a rank that has no sequences
 * left runs masked ones. */
#include "model/run/evaluate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/error.h"
#include "kernels/watchdog.h"
#include "model/run/downstream.h"

/* Sequences [first, first + B) of the batch as a full micro-batch; what lies behind its end is masked. */
static void micro_batch(int *tokens, int *targets, uint8_t *begins, const Batch *b, int first, int B, int T)
{
    int n = b->sequences - first;
    n = n < 0 ? 0 : n < B ? n : B;
    memset(tokens, 0, sizeof(int) * B * T);
    memset(begins, 0, (size_t)B * T);
    for (int i = 0; i < B * T; i++)
        targets[i] = -1;
    if (n > 0) {
        memcpy(tokens, b->tokens + (size_t)first * T, sizeof(int) * n * T);
        memcpy(targets, b->targets + (size_t)first * T, sizeof(int) * n * T);
        memcpy(begins, b->begins + (size_t)first * T, (size_t)n * T);
    }
}

static void beat(const char *doing)
{
    watchdog_beat(WORKER_VALIDATION, doing);
}

static Loader *open_set(const Config *c, int i, bool again)
{
    const EvalSet *set = &c->eval[i];
    DataSpec spec = { .key = set->where, .paths = set->paths, .num_paths = set->num_paths, .itemsize = set->itemsize,
                      .sequence_length = c->model.max_sequence_length, .vocab_size = c->model.vocab_size,
                      .eos_token_id = c->model.eos_token_id, .pad_token_id = c->model.pad_token_id,
                      .label_mask_paths = set->label_mask_paths, .num_label_mask_paths = set->num_label_mask_paths,
                      .mask_padding = c->data.mask_padding, .best_fit = set->packing == PACK_BEST_FIT,
                      .split = c->data.long_documents == LONG_SPLIT, .metadata = set->boundaries == BOUNDARIES_METADATA,
                      .again = again, .beat = beat };
    watchdog_mark("opening validation data", -1);
    watchdog_wait_for(WORKER_VALIDATION);
    Loader *l = loader_open(&spec, c->device_eval_batch_size * comm_size(), comm_rank(), comm_size());
    watchdog_wait_for(NO_WORKER);
    return l;
}

void evaluate_check(const Config *c)
{
    for (int i = 0; i < c->num_eval && (c->eval_interval > 0 || c->eval_on_load || c->eval_only); i++)
        if (c->eval[i].downstream)
            downstream_check(c, i);
        else
            loader_close(open_set(c, i, false));
}

EvalResult evaluate(const Config *c, int i, Model *m, Fsdp *f, const volatile sig_atomic_t *stop)
{
    int B = m->attn.B, T = m->attn.T;
    Loader *l = open_set(c, i, true);
    int *tokens = xmalloc(sizeof(int) * B * T), *targets = xmalloc(sizeof(int) * B * T);
    uint8_t *begins = xmalloc((size_t)B * T);
    double total[2] = { 0 };
    bool cut = false;

    model_losses(m);
    Batch b = { 0 };
    for (long n = 0; n != c->eval_subset_num_batches && !cut; n++) {
        watchdog_mark("reading validation tokens", -1);
        watchdog_wait_for(WORKER_VALIDATION);
        bool more = loader_next(l, &b);
        watchdog_wait_for(NO_WORKER);
        double most[2] = { more ? b.sequences : 0, stop && *stop };         /* sequences of a rank; stop */
        comm_max(most, 2);
        cut = most[1] > 0;
        if (most[0] == 0)
            break;
        if (!more)
            b.sequences = 0;
        for (int first = 0; first < most[0]; first += B) {
            watchdog_mark("evaluation", -1);
            micro_batch(tokens, targets, begins, &b, first, B, T);
            model_step(m, f, tokens, targets, begins, 0, 0, PASS_FORWARD);
        }
        watchdog_mark_together("reading the validation losses", -1);
        total[0] += model_losses(m).loss;
        total[1] += b.sequences ? b.labels : 0;
    }
    loader_close(l);
    free(tokens);
    free(targets);
    free(begins);
    comm_sum(total, 2);
    return (EvalResult){ c->eval[i].label, total[1] ? total[0] / total[1] : NAN, (long)total[1], cut };
}
