/* Multiple choice and bits per byte of answers: OLMo's downstream evaluators. */
#pragma once
#include <signal.h>

#include "data/requests.h"
#include "model/model.h"

/* Of a task whose metric is bpb only that and bpb_v2 have a meaning. problem: as EvalResult's. */
typedef struct {
    const char *label;
    Metric metric;
    double score[NUM_METRICS];
    int    questions;
    bool   cut;
    char  *problem;
} DownstreamResult;

/* Dies if the request file of c->eval[i] is missing or unfit. */
void downstream_check(const Config *c, int i);

/* All questions of c->eval[i], or those that are whole in the first eval_subset_num_batches batches of choices. The sequences of a
 * micro-batch hold several choices each, which attention keeps apart. All ranks call. Cut: as in evaluate. */
DownstreamResult downstream_evaluate(const Config *c, int i, Model *m, Fsdp *f, const volatile sig_atomic_t *stop);

/* The scores of the first `questions` questions by each choice's log-probability, natural logarithm. Of equal choices the first is
 * chosen, as torch.argmax does. */
void downstream_score(double score[NUM_METRICS], const Requests *r, int questions, const double *log_probability);

/* Sequences of up to T tokens for the choices of these questions, in their order: sequence s holds the choices first[s] to
 * first[s + 1] - 1 of which each is the first of its kind. Returns their number; the caller frees *first. */
int downstream_pack(int **first, const Requests *r, int questions, int T);
