/* From token shards on disk to this rank's part of each training step, in OLMo's order. */
#pragma once
#include "data/batch.h"
#include "data/doubling.h"
#include "data/hash.h"
#include "data/mixture.h"
#include "data/spec.h"

/* instance: the next instance of the epoch, counted over all ranks. With a mixture only `source` is
 * used; entries of `source` beyond the mixture's number of sources do not change. */
typedef struct {
    uint64_t epoch, instance;
    SourcePosition source[MIXTURE_MOST];
} LoaderState;

typedef struct Loader Loader;

/* Opens and checks every file. Dies if a file is missing, empty, truncated, or not a multiple of
 * itemsize; the message names the file and a remedy. `batch`: sequences per step over all ranks,
 * divisible by `world`. Packs documents if spec asks for it; packing reads all tokens, or the
 * metadata, and all label masks. The thread that reads ahead starts with the first request for a
 * step. */
Loader *loader_open(const DataSpec *spec, int batch, int rank, int world);
/* As loader_open, but instead of dying returns NULL and sets *problem to the message, malloc'ed.
 * Without an error *problem is NULL. */
Loader *loader_try_open(char **problem, const DataSpec *spec, int batch, int rank, int world);
/* number of instances per epoch (over all sources), before drop_last drops the incomplete step */
uint64_t loader_instances(const Loader *l);
/* number of steps from this instance to the end of the epoch; for instance 0 this is the whole
 * epoch */
uint64_t loader_steps(const Loader *l, uint64_t instance);

/* The following three functions are for data.mix. */
/* number of instances taken since the mixture last changed */
uint64_t loader_given(const Loader *l);
/* number of instances from the next step on, until a source would be used more often than its
 * max_repetition */
uint64_t loader_left(const Loader *l);
/* the error text, malloc'ed, if the sources lack instances for this many steps; NULL: there are
 * enough */
char *loader_lack(const Loader *l, uint64_t steps);

/* The following three functions are for source i of a mixture. loader_fingerprint and
 * loader_content, below, describe the hashes. */
/* number of instances of one epoch of the source */
uint64_t loader_source_instances(const Loader *l, int i);
uint64_t loader_source_fingerprint(const Loader *l, int i);
DataHashes loader_source_content(const Loader *l, int i);
PackedData loader_packed(const Loader *l); /* all 0 unless spec->best_fit */
uint64_t loader_tokens(const Loader *l);   /* number of tokens in all files */
int loader_files(const Loader *l);
/* hash of the file names, file sizes, T and itemsize, and of the documents if they are packed or
 * come from metadata: shows whether the data changed */
uint64_t loader_fingerprint(const Loader *l);
/* hashes up to 3 pages of each file */
DataHashes loader_content(const Loader *l);
/* *b is valid until the next call. Returns false at the end of an unshuffled pass, or at the
 * limit */
bool loader_next(Loader *l, Batch *b);
/* the error in the next step's data, with which loader_next would die; NULL: there is none. Waits
 * for the data */
const char *loader_problem(Loader *l);
/* waits at most `seconds`; returns true if loader_next need not wait. The last batch stays valid */
bool loader_wait(Loader *l, double seconds);
void loader_seek(Loader *l, LoaderState s); /* also removes a limit */

/* Starts with smaller batches: the batch size is batch / 2^count at first, and doubles after each
 * of these numbers of further steps (doubling.h). Call this after loader_seek. */
void loader_double(Loader *l, const uint64_t *until, int count);

/* Says that at most `steps` more steps will be requested: nothing is read or shuffled for later
 * steps. */
void loader_limit(Loader *l, uint64_t steps);
/* Stored values belong to all tokens, in the order of the files (loader_tokens), for example
 * log-probabilities under a reference model. The following two functions need data without a
 * mixture. */
/* Further batches get these values (Batch.values), spec.value_bytes for each token. They lie in a
 * file mapped by map.h, which the loader unmaps. NULL: no more values. */
void loader_use_values(Loader *l, const void *mapped, const void *values);
/* Copies the values of the targets of a sequence of b, `row` (T), of `bytes` bytes each, to
 * `values`, which has loader_tokens() values in the order of the files. */
void loader_put_values(const Loader *l, const Batch *b, int sequence, void *values, const void *row,
                       int bytes);

LoaderState loader_state(const Loader *l); /* position of the step that loader_next returns next */
void loader_close(Loader *l);
