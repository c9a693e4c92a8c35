#include "model/update/schedule.h"

#include <math.h>

#include "kernels/runtime/error.h"

int schedule_batch(const Config *c, long step)
{
    int halvings = 0;
    for (int i = 0; i < c->batch_warmup.count; i++)
        halvings += step <= c->batch_warmup.step[i];
    return c->global_train_batch_size >> halvings;
}

/* The last step that has the batch size of `step`; -1: the batch size stays. */
static long last_alike(const Config *c, long step)
{
    for (int i = 0; i < c->batch_warmup.count; i++)
        if (step <= c->batch_warmup.step[i])
            return c->batch_warmup.step[i];
    return -1;
}

static double tokens_of_step(const Config *c, long step)
{
    return (double)schedule_batch(c, step) * c->model.max_sequence_length;
}

double schedule_tokens(const Config *c, long first, long last)
{
    double sum = 0;
    for (long at = first, end; at < last; at = end) {
        end = last_alike(c, at + 1);
        end = end < 0 || end > last ? last : end;
        sum += (double)(end - at) * tokens_of_step(c, at + 1);
    }
    return sum;
}

double schedule_steps_for(const Config *c, long step, double tokens)
{
    double steps = 0;
    while (tokens > 0) {
        const long end = last_alike(c, step + 1);
        const double needed = ceil(tokens / tokens_of_step(c, step + 1));
        if (end < 0 || needed <= (double)(end - step))
            return steps + needed;
        tokens -= schedule_tokens(c, step, end);
        steps += (double)(end - step);
        step = end;
    }
    return steps;
}

int schedule_length(const Config *c, long step)
{
    const int min = c->length_warmup.min, T = c->model.max_sequence_length;
    if (step > c->length_warmup.steps)
        return T;
    const double length =
        min + (double)(T - min) * (double)(step - 1) / (double)c->length_warmup.steps;
    return (int)(length / min) * min;
}

double schedule_duration(const Config *c)
{
    const double steps = (double)c->max_duration.steps, tokens = (double)c->max_duration.tokens;
    if (tokens > 0)
        return c->scheduler.in_tokens ? tokens : schedule_steps_for(c, 0, tokens);
    return c->scheduler.in_tokens ? schedule_tokens(c, 0, c->max_duration.steps) : steps;
}

double schedule_end(const Config *c, double run)
{
    return c->scheduler.t_max ? c->scheduler.t_max : run;
}

static double warmup_of(const Config *c, double end)
{
    return c->scheduler.warmup_fraction > 0 ? round(c->scheduler.warmup_fraction * end)
                                            : c->scheduler.t_warmup;
}

double schedule_lr(const Config *c, RunLength length, long step, long tokens)
{
    bool in_tokens = c->scheduler.in_tokens;
    double t = in_tokens ? tokens : step, lr = c->optimizer.lr;
    double end = schedule_end(c, in_tokens ? length.tokens : length.steps),
           warmup = warmup_of(c, end);
    double start_lr = c->scheduler.warmup_min_lr < 0 ? 0.1 * lr : c->scheduler.warmup_min_lr;
    double final_lr = c->scheduler.alpha_f * lr;

    if (c->scheduler.name == CONSTANT)
        return lr;
    if (t < warmup)
        return start_lr + (lr - start_lr) * t / warmup;
    double done = t >= end ? 1 : (t - warmup) / (end - warmup);
    switch (c->scheduler.name) {
    case COSINE_WITH_WARMUP: return final_lr + (lr - final_lr) * (1 + cos(M_PI * done)) / 2;
    case LINEAR_WITH_WARMUP: return lr - (lr - final_lr) * done;
    case INVERSE_SQRT_WITH_WARMUP: return lr * sqrt(fmax(warmup, 1) / fmax(t, 1));
    case WSD: {
        double decay = c->scheduler.t_decay, left = fmax(end - t, 0);
        return left >= decay ? lr : final_lr + (lr - final_lr) * left / decay;
    }
    default: return lr;
    }
}

double schedule_max_grad_norm(const Config *c, long step, long tokens)
{
    long t = c->scheduler.in_tokens ? tokens : step;
    return t <= c->scheduler.grad_clip_warmup_steps
               ? c->max_grad_norm * c->scheduler.grad_clip_warmup_factor
               : c->max_grad_norm;
}

void schedule_check(const Config *c, double run, const char *where)
{
    const double end = schedule_end(c, run), warmup = warmup_of(c, end);
    const double decay = c->scheduler.name == WSD ? c->scheduler.t_decay : 0;
    const char *unit = c->scheduler.in_tokens ? "tokens" : "steps";
    if (decay > 0 && end > 0 && warmup + decay > end)
        die("%sscheduler.t_warmup %.0f and t_decay %.0f do not fit %s, which is %.0f %s; shorten "
            "one of them",
            where, warmup, decay, c->scheduler.t_max ? "t_max" : "max_duration", end, unit);
    if (run > 0 && warmup > run)
        warn("%sthe learning rate is still warming up when the run ends: scheduler.t_warmup %.0f, "
             "max_duration %.0f %s",
             where, warmup, run, unit);
}
