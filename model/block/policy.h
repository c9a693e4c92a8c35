/* Documents of a policy in a micro-batch: their loss, and the weight of each label in its
 * gradient. */
#pragma once
#include "model/shape/buffers.h"

/* The documents with labels, and the labels, in a batch: arrays (sequences, T) on the host. */
typedef struct {
    double documents, labels;
} PolicyCount;
PolicyCount policy_count(const int *targets, const uint8_t *begins, int sequences, int T);

/* Call it when m->losses has the cross entropy of each label and, after them, the entropy. Adds the
 * micro-batch's labels to m->policy_sums, and writes the weight of each label to m->weighed.weight:
 * the derivative of policy_terms x (loss of the step) by the label's cross entropy. Returns the
 * largest absolute weight; 1 if all are 0. Waits for the device. */
float policy_weigh(Model *m);

/* By what the sum of the losses of the global batch is divided. */
double policy_terms(const Policy *p, PolicyCount n);
