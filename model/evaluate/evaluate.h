/* Loss and perplexity on held-out shards. */
#pragma once
#include <stdatomic.h>

#include "data/loader.h"
#include "model/model.h"

/* loss: mean per label; NAN: no labels. problem: an error in the data of any rank, malloc'ed, which
 * makes the other members invalid; NULL: no error */
typedef struct {
    const char *label;
    double loss;
    long labels;
    /* sums over preference pairs of all ranks; PAIR_COUNT 0: the set has none */
    double pairs[NUM_PAIR_SUMS];
    bool cut;
    char *problem;
} EvalResult;

/* Dies if the data of an evaluation of this run is missing or invalid. Returns lines that describe
 * the data, malloc'ed: one for each set, or one for all if there are many. All ranks must call
 * this. */
char *evaluate_check(const Config *c);

/* One pass, in file order, over the shards of c->eval[i] (at most eval_subset_num_batches batches).
 * All ranks must call this. If *stop becomes true on any rank meanwhile, the result is `cut` and
 * invalid; stop NULL: the evaluation never stops early. */
EvalResult evaluate(const Config *c, int i, Model *m, ParamStore *store, const atomic_int *stop);

/* Takes what the model computed of a micro-batch: sequences from `first` on of the batch. */
typedef struct {
    void (*put)(void *who, const Loader *l, const Batch *b, int first, const Model *m);
    void *who;
} ScoreSink;

/* One pass over the loader's data, which are unshuffled, that passes each micro-batch to the sink.
 * All ranks must call this. */
void evaluate_scores(ScoreSink sink, Loader *l, const Config *c, Model *m, ParamStore *store);

/* The mean loss of pairs, including the term of sft_weight. NAN without pairs. */
double evaluate_pair_loss(const double pairs[NUM_PAIR_SUMS], const Preference *p);
