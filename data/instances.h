/* The instances of a data set: which tokens a sequence is made of. Inside data/ only. */
#pragma once
#include "data/documents.h"
#include "data/packing.h"

typedef struct {
    DataSpec  spec;             /* without its paths, which are the caller's */
    Shard    *shards;           /* (num_shards) */
    int       num_shards;
    uint64_t *first;            /* (num_shards + 1): number of each file's first instance, packed: token; their sum */
    Packing   packing;          /* of spec.best_fit */
    Begins   *begins;           /* (num_shards); NULL: packed, or documents end behind an eos */
    uint64_t  count;            /* instances */
    uint64_t  tokens;           /* in all files */
    uint64_t  fingerprint;      /* of what decides which tokens instance i is */
} Instances;

/* Opens and checks the files, finds the documents and packs them if spec asks for it. Dies, also if there are fewer instances than
 * an epoch must have with steps of `batch`. */
Instances instances_open (const DataSpec *spec, int batch);
void      instances_close(Instances *s);

/* Of one sequence; of T each. */
typedef struct { int *tokens, *targets; uint8_t *begins; } Row;

/* Instance i. Returns its labels; -1: an id is beyond the vocabulary, which `error` says. */
long instance_read(Row row, const Instances *s, uint64_t i, char *error, size_t size);

/* Padding as a document of its own, from token t on. */
void row_pad(Row row, const DataSpec *spec, int t);
