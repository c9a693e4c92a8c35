/* Chooses which documents context ranks exchange (context.h). All ranks share the attention of an
 * exchanged document, by heads. A document that lies entirely on one rank can skip the exchange:
 * this rank then computes all of the document's attention, while other ranks may wait. So short
 * documents skip the exchange; long documents skip it only if all ranks have some. Work is counted
 * in pairs of a query and a key, with all heads. */
#pragma once
#include "model/shape/config.h"

/* A document that lies entirely on one rank. */
typedef struct OwnDocument {
    int index, rank, tokens; /* index: number of the document in the micro-batch */
    /* pairs: the document's work. level: work of its rank if this document, and the rank's
     * documents with less work, skip the exchange */
    double pairs, level;
} OwnDocument;

/* The tokens that are always exchanged. */
typedef struct {
    int ranks;
    /* pairs: work of these tokens on all ranks together. exchanged: [ranks] number of these tokens
     * on each rank. token_pairs: exchanging one token takes as long as this number of pairs */
    double pairs, *exchanged, token_pairs;
} ContextWork;

/* Returns the number of pairs in a document of this many tokens, as the mean over blocks, which may
 * have windows. */
double context_pairs(const ModelConfig *c, int tokens);
/* The value of ContextWork.token_pairs. */
double context_token_pairs(const ModelConfig *c, int ranks);

/* Chooses which documents skip the exchange: on each rank, those with the least work. Sorts d, so
 * that these documents come first, and returns their number. The number gives the least time,
 *
 *     largest level + (pairs of all exchanged documents) / ranks + token_pairs * (most tokens that a rank exchanges)
 *
 * Changes work. */
int context_leave_out(OwnDocument *d, int count, ContextWork *work);
