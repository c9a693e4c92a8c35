#include "model/run/inputs.h"

#include <stdlib.h>

#include "kernels/random.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

static uint64_t text_hash(const char *text)
{
    uint64_t h = 0;
    for (; *text; text++)
        h = random_bits(h, (unsigned char)*text);
    return h;
}

void inputs_agree(const Config *c)
{
    comm_agree("configurations", text_hash(c->text));
    comm_agree("checkpoints to continue", text_hash(c->load_folder ? c->load_folder : ""));
}

/* Broadcasts the list of rank 0: `count` elements of `size` bytes. */
static void *broadcast_list(void *own, size_t count, size_t size)
{
    void *list = comm_rank() == 0 ? own : xmalloc(size * count + 1);
    comm_broadcast(list, size * count, 0);
    return list;
}

void inputs_read_prompts(Prompts *p, const char *path, const ModelConfig *m,
                         const char *no_features)
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
