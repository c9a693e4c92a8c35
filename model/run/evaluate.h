/* Loss and perplexity on held-out shards. */
#pragma once
#include <signal.h>

#include "data/loader.h"
#include "model/model.h"

/* loss: mean per label; NAN: no labels. problem: what is wrong with the data, of whichever rank, malloc'ed; then the rest means
 * nothing. NULL: nothing is */
typedef struct { const char *label; double loss; long labels; bool cut; char *problem; } EvalResult;

/* Dies if the data of an evaluation that this run will make is missing or unfit. All ranks call. */
void evaluate_check(const Config *c);

/* One pass, in file order, over the shards of c->eval[i] (at most eval_subset_num_batches batches). All ranks call. The result is
 * cut, and means nothing, if *stop was set on any rank in the meantime; NULL: nobody stops it. */
EvalResult evaluate(const Config *c, int i, Model *m, Fsdp *f, const volatile sig_atomic_t *stop);
