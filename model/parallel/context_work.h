/* Which documents context ranks exchange (context.h). Attention of a document that is exchanged is
 * divided among all ranks, by heads. One that lies in a rank's part can stay there: its tokens need
 * no exchange, but that rank does all of its attention while others may wait. So short documents
 * stay, and long ones only if all ranks have some. Work is counted in pairs of a query and a key,
 * with all heads. */
#pragma once
#include "model/shape/config.h"

/* A document that lies in one rank's part. index: its number in the micro-batch; pairs: its work;
 * level: the work of that rank if this document and those with less work stay. */
typedef struct OwnDocument {
    int index, rank, tokens;
    double pairs, level;
} OwnDocument;

/* What is exchanged in any case: `pairs` of all ranks together, `exchanged` (ranks) tokens of each
 * rank. token_pairs: exchanging one token takes as long as this number of pairs. */
typedef struct {
    int ranks;
    double pairs, *exchanged, token_pairs;
} ContextWork;

/* context_pairs: the number of pairs in a document with this number of tokens; the mean over
 * blocks, which may have windows. context_token_pairs: the value of ContextWork.token_pairs. */
double context_pairs(const ModelConfig *c, int tokens);
double context_token_pairs(const ModelConfig *c, int ranks);

/* Sorts d, and returns how many of the first stay: the number for which the time is least,
 *
 *     largest level + (pairs of all that is exchanged) / ranks + token_pairs * (most tokens that a rank exchanges)
 *
 * where on each rank the documents with the least work stay. Changes work. */
int context_leave_out(OwnDocument *d, int count, ContextWork *work);
