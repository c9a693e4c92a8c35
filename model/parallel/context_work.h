/* Chooses which documents context ranks exchange (context.h). All ranks share the attention of an
 * exchanged document, by heads. A document that lies in one rank's part can stay there: its tokens
 * need no exchange, but this rank computes all of the document's attention, while other ranks may
 * wait. So short documents stay; long documents stay only if all ranks have some. Work is counted
 * in pairs of a query and a key, with all heads. */
#pragma once
#include "model/shape/config.h"

/* A document that lies in one rank's part. */
typedef struct OwnDocument {
    int index, rank, tokens; /* index: number of the document in the micro-batch */
    /* pairs: the document's work. level: the work of its rank if this document and the rank's
     * documents with less work stay */
    double pairs, level;
} OwnDocument;

/* The tokens that are exchanged in any case. */
typedef struct {
    int ranks;
    /* pairs: work of these tokens on all ranks together. exchanged: [ranks] number of these tokens
     * on each rank. token_pairs: exchanging one token takes as long as this number of pairs */
    double pairs, *exchanged, token_pairs;
} ContextWork;

/* The number of pairs in a document with this number of tokens, as the mean over blocks, which may
 * have windows. */
double context_pairs(const ModelConfig *c, int tokens);
/* The value of ContextWork.token_pairs. */
double context_token_pairs(const ModelConfig *c, int ranks);

/* Sorts d. Returns how many documents at its start stay: the number with the least time,
 *
 *     largest level + (pairs of all exchanged documents) / ranks + token_pairs * (most tokens that a rank exchanges)
 *
 * where on each rank the documents with the least work stay. Changes work. */
int context_leave_out(OwnDocument *d, int count, ContextWork *work);
