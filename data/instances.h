/* The instances of a data set: the tokens of each sequence. Inside data/ only. */
#pragma once
#include "data/documents.h"
#include "data/images.h"
#include "data/packing.h"

typedef struct {
    DataSpec spec; /* the spec without its paths, which the caller owns */
    Shard *shards; /* (num_shards) */
    int num_shards;
    /* (num_shards + 1): number of instances (packed: of tokens) in all files before this one; the
     * last entry: in all files */
    uint64_t *first;
    Packing packing; /* result of packing, if spec.best_fit */
    /* (num_shards) boundaries by metadata; NULL: packed, or documents end after an eos */
    Begins *begins;
    ImageFeatures *features; /* NULL: the data have no images */
    uint64_t *start;         /* (num_shards): number of tokens in all files before this one */
    /* value of each token of all files (loader_use_values), in a mapped file; NULL: none */
    const void *values, *mapped;
    uint64_t count;       /* number of instances */
    uint64_t tokens;      /* number of tokens in all files */
    uint64_t fingerprint; /* hash of all inputs on which the tokens of instances depend */
} Instances;

/* Opens and checks the files. Finds and packs the documents if spec asks for this. Dies on errors,
 * and if there are fewer instances than an epoch needs for steps of `batch` sequences. */
Instances instances_open(const DataSpec *spec, int batch);
void instances_close(Instances *s);

/* One sequence: arrays of T elements. */
typedef struct {
    int *tokens, *targets;
    uint8_t *begins;
    /* a pointer for each token, to its features or NULL. images NULL: the model reads only text */
    const void **images;
    char *values; /* spec.value_bytes of each target; NULL: not needed */
} Row;

/* Reads instance i. Returns its number of labels, or -1 with a message in `error`: an id is beyond
 * the vocabulary, or features are missing or not finite. */
long instance_read(Row row, const Instances *s, uint64_t i, char *error, size_t size);

/* Copies the values of an instance's targets, `row` (T), of `bytes` bytes each, to `values`, which
 * has a value for each token of all files, in the order of the files. */
void instance_put_values(void *values, const Instances *s, uint64_t i, const void *row, int bytes);

/* Fills the row with padding from token t on. The padding is a separate document. */
void row_pad(Row row, const DataSpec *spec, int t);
