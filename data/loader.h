/* Token shards on disk -> this rank's part of each training step, in OLMo's order. */
#pragma once
#include "data/spec.h"

typedef struct {
    int       sequences;       /* of this rank in this step                                                     */
    int      *tokens;          /* (sequences, T)                                                                */
    int      *targets;         /* (sequences, T): the next token; -1 at the last position and where masked      */
    uint8_t  *begins;          /* (sequences, T): 1 where a document begins                                     */
    uint32_t *index;           /* (sequences): number of each instance in the data set; UINT32_MAX: empty       */
    long      labels;          /* targets >= 0 of this rank                                                     */
} Batch;

typedef struct { uint64_t epoch, instance; } LoaderState;   /* instance: next one of the epoch, over all ranks */

typedef struct { uint64_t tokens, masks; } DataSample;      /* hashes of some bytes of each file; 0: not known */

/* What best-fit packing has made: documents as they are in the files; pieces of them in sequences, which are more where long ones
 * are split; tokens and targets in the pieces, without padding. */
typedef struct { uint64_t documents, pieces, tokens, labels; } PackedData;

typedef struct Loader Loader;

/* Checks every file (missing, empty, truncated, size not a multiple of itemsize: die names file and remedy).
 * `batch`: sequences per step over all ranks, divisible by `world`. Packs documents if
 * spec says so: that reads all tokens, or the metadata, and all label masks. The thread that reads ahead starts when the first step
 * is asked for. */
Loader  *loader_open (const DataSpec *spec, int batch, int rank, int world);
/* The same, but where it would die it returns NULL and what is wrong, malloc'ed, in *problem, else NULL there. */
Loader  *loader_try_open(char **problem, const DataSpec *spec, int batch, int rank, int world);
uint64_t loader_instances(const Loader *l);        /* per epoch, before dropping the tail */
uint64_t loader_steps    (const Loader *l, uint64_t instance);      /* of an epoch from there on: 0: of a whole one */
PackedData loader_packed (const Loader *l);        /* all 0 unless spec->best_fit */
uint64_t loader_tokens   (const Loader *l);        /* in all files */
int      loader_files    (const Loader *l);
uint64_t loader_fingerprint(const Loader *l);   /* of file names and sizes, T, itemsize, and of documents if they are
                                                   packed or come from metadata: shows whether data changed */
DataSample loader_sample(const Loader *l);         /* reads 3 pages of each file, of which one is in memory already */
bool     loader_next (Loader *l, Batch *b);     /* b is valid until the next call; false: end of
                                                   an unshuffled pass, or of what loader_limit allows */
const char *loader_problem(Loader *l);          /* what is wrong with the data of the next step, of which loader_next
                                                   would die; NULL: nothing. Waits for them */
bool     loader_wait (Loader *l, double seconds);   /* so long at most; true: loader_next need not wait. The last batch
                                                       stays valid */
void     loader_seek (Loader *l, LoaderState s);    /* also takes a limit back */

/* No more than `steps` are asked for from here on: nothing is read or shuffled for later ones. */
void     loader_limit(Loader *l, uint64_t steps);
LoaderState loader_state(const Loader *l);         /* of the step that loader_next would give next */
void     loader_close(Loader *l);
