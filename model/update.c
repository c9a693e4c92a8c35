/* The gradient norm, and the optimizer's step over the shards. */
#include "model/update.h"

#include <math.h>

#include "kernels/random.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"

double optimizer_grad_norm(const Fsdp *f)
{
    float s;
    device_zero(f->square_sum, sizeof s);
    for (int u = 0; u < f->num_units; u++)
        if (f->shard[u].slice[TRAINED].count)
            sum_squares(f->square_sum, f->shard[u].grad);
    device_get(&s, f->square_sum, sizeof s);
    double total = s;
    comm_sum_over(&total, 1, RANKS_SHARD);
    return sqrt(total);
}

/* Elements that may not be divided: the largest group of a state that share a scale. */
static size_t largest_group(const Fsdp *f, const Shard *s)
{
    size_t group = 0;
    for (int i = 0; i < f->optimizer->num_states; i++)
        group = (size_t)s->state[i].format.group > group ? (size_t)s->state[i].format.group : group;
    return group;
}

static void step_unit(const Fsdp *f, int u, const Config *c, StepParams step)
{
    const UnitShape *shape = &f->shape[u];
    const Shard *s = &f->shard[u];
    const Slice *own = &s->slice[TRAINED];
    const size_t group = largest_group(f, s);
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        size_t first, n = shard_part(s, p, &first), at = p->offset + first;
        Tensor state[MAX_STATES] = { 0 };
        if (n == 0 || p->region != TRAINED)
            continue;
        bool decays = p->is_norm ? c->optimizer.decay_norm_and_bias : p->is_embedding ? c->optimizer.decay_embeddings : true;
        step.weight_decay = decays ? c->optimizer.weight_decay : 0;
        if (group)      /* a last group that is not full goes on in the padding behind the parameter, which is 0 */
            n = (n + group - 1) / group * group;
        for (int k = 0; k < f->optimizer->num_states; k++)
            state[k] = slice_view(own, s->state[k], at, n);
        f->optimizer->step(slice_view(own, own->stored, at, n), state, slice_view(own, s->grad, at, n), &step,
                           shape->first + p->number + first);
    }
}

void optimizer_step(Fsdp *f, const Config *c, long step, long update, double lr, double grad_scale)
{
    const StepParams params = { .lr = lr, .beta1 = c->optimizer.beta1, .beta2 = c->optimizer.beta2, .eps = c->optimizer.eps,
                                .grad_scale = grad_scale, .update = update, .seed = random_bits(c->seed, step) };
    for (int u = 0; u < f->num_units; u++)
        step_unit(f, u, c, params);
    fsdp_updated(f);
}
