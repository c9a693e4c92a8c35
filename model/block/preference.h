/* Preference pairs of a micro-batch: their loss, and the weight of each label in its gradient. */
#pragma once
#include "model/shape/buffers.h"

/* A pair of a sequence: the chosen side has tokens [begin, middle), the rejected [middle, end). */
typedef struct {
    int begin, middle, end;
} PairRange;

/* Finds the first pair of a sequence of T tokens from token p->end on. Documents 2i and 2i + 1 of a
 * sequence are a pair; a last document without a partner is padding. begins: 1 where a document
 * begins. Returns false if there is no further pair. Start with a PairRange of zeros. */
bool preference_next(PairRange *p, const uint8_t *begins, int T);

/* The pairs and the labels of chosen sides in a batch: arrays (sequences, T) on the host. */
typedef struct {
    double pairs, labels;
} PairCount;
PairCount preference_count(const int *targets, const uint8_t *begins, int sequences, int T);

/* Call it when m->losses has the cross entropy of each label. Adds the micro-batch's pairs to
 * m->pair_sums, and writes the weight of each label to m->weighed.weight: the derivative of (number of
 * pairs) x (loss of the step) by the label's cross entropy. Returns the largest absolute weight; 1
 * if all are 0. Waits for the device. */
float preference_weigh(Model *m);
