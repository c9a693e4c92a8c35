/* OLMo's downstream evaluators: multiple choice, and bits per byte of answers. */
#pragma once
#include <stdatomic.h>

#include "data/requests.h"
#include "model/model.h"

/* If the task's metric is bpb, only the scores bpb and bpb_v2 are valid. problem: as in
 * EvalResult. */
typedef struct {
    const char *label;
    Metric metric;
    double score[NUM_METRICS];
    int questions;
    bool cut;
    char *problem;
} DownstreamResult;

/* Dies if the request file of c->eval[i] is missing or invalid. */
void downstream_check(const Config *c, int i);

/* Asks all questions of c->eval[i], or only the questions that are completely in the first
 * eval_subset_num_batches batches of choices. A sequence has several choices; no choice attends to
 * another. All ranks must call this. If *stop becomes true on any rank meanwhile, the result is
 * `cut` and invalid. */
DownstreamResult downstream_evaluate(const Config *c, int i, Model *m, ParamStore *store,
                                     const atomic_int *stop);

/* Computes the scores of the first `questions` questions from the log-probability (natural
 * logarithm) of each choice. Of equally likely choices the first is chosen, as by torch.argmax. */
void downstream_score(double score[NUM_METRICS], const Requests *r, int questions,
                      const double *log_probability);

/* Packs the choices of these questions, in their order, into sequences of up to T tokens: sequence
 * s has choices first[s] to first[s + 1] - 1, without choices that repeat earlier ones. Returns the
 * number of sequences; the caller frees *first. */
int downstream_pack(int **first, const Requests *r, int questions, int T);
