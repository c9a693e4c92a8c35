/* Whole documents -> sequences of at most T tokens. Inside data/ only. */
#pragma once
#include "data/shard.h"

/* bin[i] = the bin, counted from 0, of item i with length[i] (1 .. T); no bin has more than T.
 * Items are placed by decreasing length, equal ones in order, each into the fullest bin into which
 * it fits, or into a new one. Returns the number of bins. O(n log n + n log T) time, O(n + T)
 * memory. */
int best_fit_decreasing(int *bin, const uint32_t *length, int n, int T);

/* A piece is a document, or a part of a long one. */
typedef struct {
    /* (pieces) its first token, counted through all files; those of a sequence are adjacent */
    uint64_t *start;
    uint32_t *length; /* (pieces) 1 .. T */
    uint32_t *first;  /* (sequences + 1) first piece of each sequence, then `pieces` */
    uint64_t pieces, sequences;
    uint64_t documents, tokens, labels; /* tokens and targets in the pieces */
    /* documents longer than T; truncated tokens, targets */
    uint64_t long_documents, lost_tokens, lost_labels;
} Packing;

/* Packs all documents of the files, in order, in windows of 2^16 pieces; documents longer than T
 * are split or truncated. The same files, T and spec give the same packing. Dies if there is no
 * document or no label. */
Packing packing_make(const Shard *shards, int num_shards, const DataSpec *spec);
void packing_free(Packing *p);
