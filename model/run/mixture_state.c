#include "model/run/mixture_state.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/update/schedule.h"

void mixture_describe(TrainState *state, const Config *c, const Loader *l)
{
    state->num_mix = c->data.num_mix;
    for (int i = 0; i < c->data.num_mix; i++) {
        MixtureSourceState *m = &state->mix[i];
        *m = (MixtureSourceState){ .weight = mixture_weight(c->data.mix[i].ratio),
                                   .fingerprint = loader_source_fingerprint(l, i),
                                   .content = loader_source_content(l, i) };
        strcpy(m->name, c->data.mix[i].name);
    }
}

/* The index of the source in `then`; -1: none. */
static int find(const TrainState *then, const char *name)
{
    for (int i = 0; i < then->num_mix; i++)
        if (strcmp(then->mix[i].name, name) == 0)
            return i;
    return -1;
}

static bool same_files(const MixtureSourceState *a, uint64_t fingerprint, DataHashes content)
{
    return a->fingerprint == fingerprint && a->content.tokens == content.tokens &&
           a->content.masks == content.masks;
}

const char *mixture_other_files(const TrainState *then, const TrainState *now)
{
    for (int i = 0; i < now->num_mix; i++) {
        const int k = find(then, now->mix[i].name);
        if (k >= 0 && !same_files(&now->mix[i], then->mix[k].fingerprint, then->mix[k].content))
            return now->mix[i].name;
    }
    return NULL;
}

/* Whether `then` and `now` have the same sources with the same ratios, in any order. */
static bool same_mixture(const TrainState *then, const TrainState *now)
{
    int sources = 0;
    for (int i = 0; i < then->num_mix; i++)
        sources += then->mix[i].weight > 0;
    for (int i = 0; i < now->num_mix; i++) {
        const int k = find(then, now->mix[i].name);
        if (k < 0 || then->mix[k].weight != now->mix[i].weight)
            return false;
    }
    return sources == now->num_mix;
}

static SourcePosition position_of(const MixtureSourceState *m, const TrainState *then)
{
    const int k = find(then, m->name);
    if (k >= 0 && same_files(m, then->mix[k].fingerprint, then->mix[k].content))
        return then->loader.source[k];
    if (then->num_mix == 0 && same_files(m, then->fingerprint, then->content))
        return (SourcePosition){ then->loader.epoch, then->loader.instance, 0 };
    return (SourcePosition){ 0 };
}

void mixture_continue(TrainState *now, const TrainState *then)
{
    const bool same = same_mixture(then, now) && !mixture_other_files(then, now);
    const int count = now->num_mix;
    now->loader = (LoaderState){ 0 };
    for (int i = 0; i < count; i++) {
        now->loader.source[i] = position_of(&now->mix[i], then);
        if (!same)
            now->loader.source[i].mixed = 0;
    }
    for (int k = 0; k < then->num_mix && now->num_mix < MIXTURE_MOST; k++)
        if (find(now, then->mix[k].name) < 0) {
            const SourcePosition *p = &then->loader.source[k];
            now->mix[now->num_mix] = then->mix[k];
            now->mix[now->num_mix].weight = 0;
            now->loader.source[now->num_mix++] = (SourcePosition){ p->epoch, p->instance, 0 };
        }
}

void mixture_check(const Loader *l, long steps)
{
    char *lack = loader_lack(l, (uint64_t)steps);
    if (lack)
        die("%s", lack);
}

long mixture_steps(const Config *c, const Loader *l, const char *key, double epochs)
{
    const double given = (double)loader_given(l), all = given + (double)loader_left(l),
                 batch = c->global_train_batch_size;
    if (epochs > 1)
        die("%s: %gep: data.mix has only one epoch: it ends when the first source reaches its "
            "max_repetition. Raise max_repetition of the sources, and give 1ep, tokens or steps",
            key, epochs);
    if (epochs * all < batch)
        die("%s is less than one step: data.mix has %.0f sequences until a source reaches its "
            "max_repetition, but a step needs %.0f",
            key, all, batch);
    return (long)fmax(floor((epochs * all - given) / batch + 1e-9), 0);
}

void mixture_print(const Config *c, const TrainState *now, const Loader *l, long last_step)
{
    double all = 0;
    if (c->data.num_mix > 0 && now->step > 0 && loader_given(l) == 0)
        printf("mix: changed at step %ld: the new ratios count from here on\n", now->step);
    for (int i = 0; i < c->data.num_mix; i++)
        all += (double)now->mix[i].weight;
    for (int i = 0; i < c->data.num_mix; i++) {
        const SourcePosition *p = &now->loader.source[i];
        const double n = (double)loader_source_instances(l, i),
                     share = (double)now->mix[i].weight / all;
        const double sequences =
            schedule_tokens(c, now->step, last_step) / c->model.max_sequence_length;
        const double from = (double)p->epoch + (double)p->instance / n;
        printf("mix: %s: %.4g %% of the tokens; epochs %.4g to %.4g of its %.0f sequences\n",
               now->mix[i].name, 100 * share, from, from + share * sequences / n, n);
    }
    for (int i = c->data.num_mix; i < now->num_mix; i++)
        printf("mix: %s: no longer in the mixture; its position, sequence %llu of epoch %llu, is "
               "kept\n",
               now->mix[i].name, (unsigned long long)now->loader.source[i].instance,
               (unsigned long long)now->loader.source[i].epoch);
}
