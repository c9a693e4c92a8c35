#include "model/run/agree.h"

#include <stdio.h>

#include "kernels/random.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

bool agree_any(bool own)
{
    double any = own;
    comm_max(&any, 1);
    return any > 0;
}

double agree_least(double own)
{
    double negative = -own;
    comm_max(&negative, 1);
    return -negative;
}

double agree_least_of_stage(double own)
{
    const int ranks = comm_group_size(RANKS_STAGE);
    double least = own, *all = xmalloc(sizeof *all * (size_t)ranks);
    comm_gather(all, &own, sizeof own, RANKS_STAGE);
    for (int r = 0; r < ranks; r++)
        least = all[r] < least ? all[r] : least;
    free(all);
    return least;
}

int agree_first(bool own)
{
    const double first = agree_least(own ? comm_rank() : comm_size());
    return first < comm_size() ? (int)first : -1;
}

char *agree_problem(const char *own)
{
    enum { SIZE = 4096 };
    char text[SIZE] = "";
    const int rank = agree_first(own);
    if (rank < 0)
        return NULL;
    if (rank == comm_rank())
        snprintf(text, sizeof text, "%s", own);
    comm_broadcast(text, sizeof text, rank);
    return rank > 0 ? xasprintf("rank %d: %s", rank, text) : xstrdup(text);
}

static uint64_t text_hash(const char *text)
{
    uint64_t h = 0;
    for (; *text; text++)
        h = random_bits(h, (unsigned char)*text);
    return h;
}

void agree_on_run(const Config *c)
{
    comm_agree("configurations", text_hash(c->text));
    comm_agree("checkpoints to continue", text_hash(c->load_folder ? c->load_folder : ""));
}

/* Rank 0's numbers of `size` bytes. */
static void *broadcast_list(void *own, size_t count, size_t size)
{
    void *list = comm_rank() == 0 ? own : xmalloc(size * count + 1);
    comm_broadcast(list, size * count, 0);
    return list;
}

void agree_on_prompts(Prompts *p, const char *path, const ModelConfig *m, const char *no_features)
{
    const int rows = m->image.feature_size > 0 ? m->image.rows : 0;
    const TokenLimits limits = { m->vocab_size, m->max_sequence_length - 1, m->image.token_id, rows,
                                 no_features };
    if (comm_rank() == 0)
        prompts_read(p, path, &limits);
    comm_broadcast(&p->count, sizeof p->count, 0);
    const size_t count = (size_t)p->count;
    p->start = broadcast_list(p->start, count + 1, sizeof *p->start);
    p->token = broadcast_list(p->token, p->start[count], sizeof *p->token);
    p->first_image = broadcast_list(p->first_image, count + 1, sizeof *p->first_image);
    p->image = broadcast_list(p->image, p->first_image[count], sizeof *p->image);
}
