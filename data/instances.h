/* The instances of a data set: the tokens of each sequence. Inside data/ only. */
#pragma once
#include "data/documents.h"
#include "data/images.h"
#include "data/packing.h"

typedef struct {
    DataSpec spec; /* the spec, without its paths, which the caller owns */
    Shard *shards; /* (num_shards) */
    int num_shards;
    /* (num_shards + 1): instances (packed: tokens) in all files before this one; the last: in
     * all */
    uint64_t *first;
    Packing packing;         /* of spec.best_fit */
    Begins *begins;          /* (num_shards); NULL: packed, or documents end after an eos */
    ImageFeatures *features; /* NULL: no images */
    uint64_t count;          /* instances */
    uint64_t tokens;         /* number of tokens in all files */
    uint64_t fingerprint;    /* hash of everything that the tokens of instances depend on */
} Instances;

/* Opens and checks the files, and finds and packs the documents if spec says so. Dies on errors,
 * and if there are fewer instances than an epoch needs with steps of `batch`. */
Instances instances_open(const DataSpec *spec, int batch);
void instances_close(Instances *s);

/* One sequence; T elements each. images: pointers to the features of tokens, or NULL; NULL if the
 * model reads only text. */
typedef struct {
    int *tokens, *targets;
    uint8_t *begins;
    const void **images;
} Row;

/* Reads instance i. Returns its number of labels; -1: an id is beyond the vocabulary, or features
 * are not finite or missing, as described in `error`. */
long instance_read(Row row, const Instances *s, uint64_t i, char *error, size_t size);

/* Fills the row from token t on with padding, as a document of its own. */
void row_pad(Row row, const DataSpec *spec, int t);
