/* Learning-rate schedules, gradient norm and the AdamW step over the shards. */
#include "model/optimizer.h"

#include <math.h>

#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/random.h"

double schedule_lr(const Config *c, RunLength length, long step, long tokens)
{
    bool in_tokens = c->scheduler.in_tokens;
    double t = in_tokens ? tokens : step, warmup = c->scheduler.t_warmup, lr = c->optimizer.lr;
    double end = c->scheduler.t_max ? c->scheduler.t_max : in_tokens ? length.tokens : length.steps;
    double start_lr = c->scheduler.warmup_min_lr < 0 ? 0.1 * lr : c->scheduler.warmup_min_lr;
    double final_lr = c->scheduler.alpha_f * lr;

    if (c->scheduler.name == CONSTANT)
        return lr;
    if (t < warmup)
        return start_lr + (lr - start_lr) * t / warmup;
    double done = t >= end ? 1 : (t - warmup) / (end - warmup);
    switch (c->scheduler.name) {
    case COSINE_WITH_WARMUP:
        return final_lr + (lr - final_lr) * (1 + cos(M_PI * done)) / 2;
    case LINEAR_WITH_WARMUP:
        return lr - (lr - final_lr) * done;
    case INVERSE_SQRT_WITH_WARMUP:
        return lr * sqrt(fmax(warmup, 1) / fmax(t, 1));
    case WSD: {
        double decay = c->scheduler.t_decay, left = fmax(end - t, 0);
        return left >= decay ? lr : final_lr + (lr - final_lr) * left / decay;
    }
    default:
        return lr;
    }
}

double schedule_max_grad_norm(const Config *c, long step, long tokens)
{
    long t = c->scheduler.in_tokens ? tokens : step;
    return t <= c->scheduler.grad_clip_warmup_steps ? c->max_grad_norm * c->scheduler.grad_clip_warmup_factor
                                                    : c->max_grad_norm;
}

double optimizer_grad_norm(const Fsdp *f)
{
    float s;
    device_zero(f->norm, sizeof s);
    for (int u = 0; u < f->num_units; u++)
        if (f->shard[u].count)
            sum_squares(f->norm, f->shard[u].grad);
    device_get(&s, f->norm, sizeof s);
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
        if (n == 0)
            continue;
        bool decays = p->is_norm ? c->optimizer.decay_norm_and_bias : p->is_embedding ? c->optimizer.decay_embeddings : true;
        a.weight_decay = decays ? weight_decay : 0;
        size_t group = s->m.format.group > s->v.format.group ? s->m.format.group : s->v.format.group;
        if (group)      /* a last group that is not full goes on in the padding behind the parameter, which is 0 */
            n = (n + group - 1) / group * group;
        adamw(shard_view(s, s->master, at, n), shard_view(s, s->m, at, n), shard_view(s, s->v, at, n),
              shard_view(s, s->grad, at, n), a, shape->first + at);
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
