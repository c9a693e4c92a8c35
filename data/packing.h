/* Whole documents -> sequences of at most T tokens. Inside data/ only. */
#pragma once
#include "data/shard.h"

/* bin[i] = the bin, counted from 0, that item i of length[i] (1 .. T) is put into, so that no bin has more than T: items by
 * decreasing length, equal ones in order, each into the fullest bin that has room for it, or into a new one. Returns the number of
 * bins. O(n log n + n log T) time, O(n + T) memory. */
int best_fit_decreasing(int *bin, const uint32_t *length, int n, int T);

/* A piece is a document, or what long documents are cut to. */
typedef struct {
    uint64_t *start;           /* (pieces) its first token, counted through all files; those of a sequence stand together */
    uint32_t *length;          /* (pieces) 1 .. T                                                                   */
    uint32_t *first;           /* (sequences + 1) first piece of each sequence, and at last `pieces`                */
    uint64_t  pieces, sequences;
    uint64_t  documents, tokens, labels;             /* in the pieces: tokens, and those that are targets           */
    uint64_t  long_documents, lost_tokens, lost_labels;     /* documents longer than T; what is cut off of them     */
} Packing;

/* All documents of the files in order, cut to T as spec->split says, packed in windows of 2^16 pieces. The same files, T and spec
 * give the same packing. Dies if there is no document or no label. */
Packing packing_make(const Shard *shards, int num_shards, const DataSpec *spec);
void    packing_free(Packing *p);
