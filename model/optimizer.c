/* The gradient norm and the AdamW step over the shards. */
#include "model/optimizer.h"

#include <math.h>

#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/random.h"

double optimizer_grad_norm(const Fsdp *f)
{
    float s;
    device_zero(f->square_sum, sizeof s);
    for (int u = 0; u < f->num_units; u++)
        if (f->shard[u].count)
            sum_squares(f->square_sum, f->shard[u].grad);
    device_get(&s, f->square_sum, sizeof s);
    double total = s;
    comm_sum_over(&total, 1, RANKS_SHARD);
    return sqrt(total);
}

static void step_unit(const UnitShape *shape, const Shard *s, const Config *c, AdamW a)
{
    float weight_decay = a.weight_decay;
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        size_t first, n = shard_part(s, p, &first), at = p->offset + first;
        if (n == 0 || p->region == FROZEN)
            continue;
        bool decays = p->is_norm ? c->optimizer.decay_norm_and_bias : p->is_embedding ? c->optimizer.decay_embeddings : true;
        a.weight_decay = decays ? weight_decay : 0;
        size_t group = s->m.format.group > s->v.format.group ? s->m.format.group : s->v.format.group;
        if (group)      /* a last group that is not full goes on in the padding behind the parameter, which is 0 */
            n = (n + group - 1) / group * group;
        adamw(shard_view(s, s->master, at, n), shard_view(s, s->m, at, n), shard_view(s, s->v, at, n),
              shard_view(s, s->grad, at, n), a, shape->first + p->number + first);
    }
}

void optimizer_step(Fsdp *f, const Config *c, long step, long update, double lr, double grad_scale)
{
    AdamW a = { .lr = (float)lr, .beta1 = (float)c->optimizer.beta1, .beta2 = (float)c->optimizer.beta2,
                .eps = (float)c->optimizer.eps, .weight_decay = (float)c->optimizer.weight_decay,
                .correction1 = (float)(1 - pow(c->optimizer.beta1, update)),
                .correction2 = (float)(1 - pow(c->optimizer.beta2, update)),
                .grad_scale = (float)grad_scale, .seed = random_bits(c->seed, step) };
    for (int u = 0; u < f->num_units; u++)
        step_unit(&f->shape[u], &f->shard[u], c, a);
    fsdp_updated(f);
}
