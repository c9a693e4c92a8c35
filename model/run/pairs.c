#include "model/run/pairs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/evaluate/evaluate.h"
#include "model/evaluate/open_data.h"
#include "model/evaluate/reference.h"
#include "model/evaluate/score.h"
#include "model/run/save_folder.h"

static EvalSet training_set(const Config *c)
{
    return (EvalSet){ .label = "data.paths",
                      .where = "data.paths",
                      .files = c->data.files,
                      .pairs = c->preference.kind != PREFERENCE_NONE };
}

static void write_scores(Run *r, const EvalSet *set, const char *folder)
{
    watchdog_set_patient(true);
    watchdog_mark("computing log-probabilities", -1);
    if (comm_rank() == 0)
        save_folder_make(folder);
    comm_barrier();
    score_write(r->config, set, &r->model, &r->store, folder);
    watchdog_set_patient(false);
}

void pairs_score(Run *r)
{
    const Config *c = r->config;
    const EvalSet set = training_set(c);
    write_scores(r, &set, c->score);
    for (int i = 0; i < c->num_eval; i++)
        if (c->eval[i].pairs && c->top_k == 0)
            write_scores(r, &c->eval[i], c->score);
}

/* Whether the folder has the log-probabilities of this set. */
static bool has_scores(const Config *c, const EvalSet *set, const char *folder, bool exact)
{
    Loader *l = open_data(NULL, c, set);
    const bool found = reference_use(l, c, folder, exact);
    if (!found && (c->preference.reference || !exact))
        reference_missing(l, c, folder);
    loader_close(l);
    return found;
}

void pairs_open(Run *r)
{
    const Config *c = r->config;
    const PreferenceLoss *loss = preference_loss(c->preference.kind);
    if (!loss || !loss->reference)
        return;
    /* the weights of a run that continues are not those of the reference model */
    const bool exact = r->state.step == 0;
    char *folder = reference_folder(c);
    const EvalSet set = training_set(c);
    if (!has_scores(c, &set, folder, exact))
        write_scores(r, &set, folder);
    for (int i = 0; i < c->num_eval; i++)
        if (c->eval[i].pairs && !has_scores(c, &c->eval[i], folder, exact))
            write_scores(r, &c->eval[i], folder);
    if (!reference_use(r->loader, c, folder, exact))
        reference_missing(r->loader, c, folder);
    free(folder);
}

bool pairs_count(Run *r)
{
    const Batch *b = &r->batch;
    if (r->config->preference.kind == PREFERENCE_NONE)
        return false;
    /* ranks that share sequences count them once */
    r->pairs = comm_group_rank(RANKS_SEQUENCE) == 0
                   ? preference_count(b->targets, b->begins, b->sequences, r->model.text.T)
                   : (PairCount){ 0 };
    double x[2] = { r->pairs.pairs, r->pairs.labels };
    comm_sum(x, 2);
    r->pairs = (PairCount){ x[0], x[1] };
    return true;
}

WeighedRows pairs_rows(const Run *r, const Batch *b)
{
    const Preference *p = &r->config->preference;
    if (p->kind == PREFERENCE_NONE)
        return (WeighedRows){ 0 };
    return (WeighedRows){ b->values, p->sft_weight * r->pairs.pairs / fmax(r->pairs.labels, 1),
                          true };
}

/* The loss of a pair if the model equals the reference model. */
static double loss_of_equals(const Preference *p)
{
    return preference_loss(p->kind)->loss(0, 0, p).value;
}

static void print_difference(const Run *r)
{
    const double *sum = r->pair_sums, sides = 2 * sum[PAIR_COUNT],
                 mean = sum[PAIR_DIFFERENCE] / sides;
    const Preference *p = &r->config->preference;
    printf(
        "step 1: the loss of pairs is %+.3g above that of equal models; policy - reference: mean "
        "%.3g,\n  standard deviation %.3g (log-probability of a side)\n",
        sum[PAIR_LOSS] / sum[PAIR_COUNT] - loss_of_equals(p), mean,
        sqrt(fmax(sum[PAIR_SQUARE] / sides - mean * mean, 0)));
}

double pairs_step(Run *r)
{
    const Preference *p = &r->config->preference;
    memcpy(r->pair_sums, r->model.pair_sums, sizeof r->pair_sums);
    comm_sum(r->pair_sums, NUM_PAIR_SUMS);
    if (r->state.step == 0 && comm_rank() == 0 && preference_loss(p->kind)->reference &&
        r->pair_sums[PAIR_COUNT] > 0)
        print_difference(r);
    return evaluate_pair_loss(r->pair_sums, p);
}
