/* Token shards on disk -> this rank's part of each training step, in OLMo's order. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *key;           /* the configuration's name of `paths`, for messages; NULL: data.paths            */
    char **paths;              /* shard files or glob patterns, in order                                        */
    int    num_paths;
    char **label_mask_paths;   /* parallel bool files, or NULL                                                  */
    int    num_label_mask_paths;
    int    itemsize;           /* bytes of a token in headerless files: 2 or 4 (memmap_dtype)                   */
    int    sequence_length;    /* T                                                                             */
    int    vocab_size;         /* ids from here on are an error                                                 */
    int    eos_token_id;       /* -1: none                                                                      */
    int    pad_token_id;       /* -1: none; a padded token is never a target                                    */
    bool   mask_padding;       /* targets equal to pad_token_id are masked                                      */
    bool   shuffle;            /* false: file order (evaluation)                                                */
    uint64_t seed;             /* of the shuffle; epoch e uses seed + e                                         */
    bool   drop_last;          /* false (evaluation): the last step may be short                                */
    bool   again;              /* was opened before: no warnings                                                */
    int    max_period, min_period, max_count;   /* OLMo's instance_filter: n-grams of min .. max tokens that occur
                                * max_count times running mask the labels of the whole instance; 0: off         */
} DataSpec;

typedef struct {
    int       sequences;       /* of this rank in this step                                                     */
    int      *tokens;          /* (sequences, T)                                                                */
    int      *targets;         /* (sequences, T): the next token; -1 at the last position and where masked      */
    uint32_t *index;           /* (sequences): number of each instance in the data set                          */
    long      labels;          /* targets >= 0 of this rank                                                     */
} Batch;

typedef struct { uint64_t epoch, instance; } LoaderState;   /* instance: next one of the epoch, over all ranks */

typedef struct Loader Loader;

/* Checks every file (missing, empty, truncated, size not a multiple of itemsize: die names file and remedy).
 * `batch`: sequences per step over all ranks, divisible by `world`. Starts the prefetch thread. */
Loader  *loader_open (const DataSpec *spec, int batch, int rank, int world);
uint64_t loader_instances(const Loader *l);        /* per epoch, before dropping the tail */
uint64_t loader_tokens   (const Loader *l);        /* in all files */
uint64_t loader_fingerprint(const Loader *l);   /* of file names and sizes, T, itemsize: shows whether data changed */
bool     loader_next (Loader *l, Batch *b);     /* b is valid until the next call; false: end of an unshuffled pass */
void     loader_seek (Loader *l, LoaderState s);
LoaderState loader_state(const Loader *l);         /* of the step that loader_next would give next */
void     loader_close(Loader *l);

/* Boundaries of the documents in B sequences of T tokens: a document ends behind each eos and at each sequence end.
 * start (up to B*T + 1 entries) gets the first token of each document and B*T; returns the number of documents. */
int document_starts(int *start, int *longest, const int *tokens, int B, int T, int eos);

/* numpy.random.Generator(PCG64(seed)).shuffle of 0 .. n-1, bit for bit. */
void numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed);
