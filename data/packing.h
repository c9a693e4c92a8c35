/* Packs whole documents into sequences of at most T tokens. Inside data/ only. */
#pragma once
#include "data/shard.h"

/* Sets bin[i] to the bin, counted from 0, of item i with length[i] (1 .. T); the items of a bin
 * have at most T together. Items are placed by decreasing length, and items of equal length in
 * their order. Each item goes into the fullest bin that has space for it, or into a new bin.
 * Returns the number of bins. O(n log n + n log T) time, O(n + T) memory. */
int best_fit_decreasing(int *bin, const uint32_t *length, int n, int T);

/* A piece is a document, or a part of a long document, or with spec.pairs a pair of documents. */
typedef struct {
    /* (pieces) first token of each piece; token numbers run on over all files. The pieces of a
     * sequence are adjacent */
    uint64_t *start;
    uint32_t *length; /* (pieces) 1 .. T */
    uint32_t *middle; /* with spec.pairs: (pieces) length of the first side; else NULL */
    uint32_t *first;  /* (sequences + 1) first piece of each sequence; the last entry is `pieces` */
    uint64_t pieces, sequences;
    /* documents: number of documents. tokens, labels: number of tokens and targets in the pieces */
    uint64_t documents, tokens, labels;
    /* long_documents: number of documents longer than T. lost_tokens, lost_labels: number of
     * truncated tokens and targets */
    uint64_t long_documents, lost_tokens, lost_labels;
} Packing;

/* Packs all documents of the files, in order, in windows of 2^16 pieces; documents longer than T
 * are split or truncated. The same files, T and spec give the same packing. Dies if there is no
 * document or no label. With spec.pairs, also dies if a file has a document without a partner or a
 * pair of more than T tokens. */
Packing packing_make(const Shard *shards, int num_shards, const DataSpec *spec);
void packing_free(Packing *p);
