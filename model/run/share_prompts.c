#include "model/run/share_prompts.h"

#include "kernels/comm.h"
#include "kernels/error.h"

void prompts_share(Prompts *p, const char *path, const ModelConfig *m)
{
    if (comm_rank() == 0)
        prompts_read(p, path, m->vocab_size, m->max_sequence_length - 1);
    comm_broadcast(&p->count, sizeof p->count, 0);
    if (comm_rank() != 0)
        p->start = xmalloc(sizeof *p->start * (size_t)(p->count + 1));
    comm_broadcast(p->start, sizeof *p->start * (size_t)(p->count + 1), 0);
    if (comm_rank() != 0)
        p->token = xmalloc(sizeof *p->token * p->start[p->count]);
    comm_broadcast(p->token, sizeof *p->token * p->start[p->count], 0);
}
