/* Token shards on disk -> this rank's part of each training step, in OLMo's order. */
#pragma once
#include "data/batch.h"
#include "data/doubling.h"
#include "data/hash.h"
#include "data/mixture.h"
#include "data/spec.h"

/* instance: the next instance of the epoch, over all ranks. With a mixture only `source` is used;
 * its entries beyond the sources of the mixture do not change. */
typedef struct {
    uint64_t epoch, instance;
    SourcePosition source[MIXTURE_MOST];
} LoaderState;

typedef struct Loader Loader;

/* Checks every file (missing, empty, truncated, size not a multiple of itemsize: die names file and
 * remedy). `batch`: sequences per step over all ranks, divisible by `world`. Packs documents if
 * spec says so, which reads all tokens, or the metadata, and all label masks. The thread that reads
 * ahead starts with the first request for a step. */
Loader *loader_open(const DataSpec *spec, int batch, int rank, int world);
/* The same, but instead of dying it returns NULL and sets *problem to the message, malloc'ed; else
 * *problem is NULL. */
Loader *loader_try_open(char **problem, const DataSpec *spec, int batch, int rank, int world);
/* number of instances per epoch (of each source), before the tail is dropped */
uint64_t loader_instances(const Loader *l);
/* number of steps of an epoch from that instance on; 0: of a whole epoch */
uint64_t loader_steps(const Loader *l, uint64_t instance);

/* For data.mix. given: instances taken since the mixture last changed. left: instances from the
 * next step on until a source would be used more often than its max_repetition. lack: the error
 * text if the sources lack instances for this many steps, malloc'ed; NULL: they do not. */
uint64_t loader_given(const Loader *l);
uint64_t loader_left(const Loader *l);
char *loader_lack(const Loader *l, uint64_t steps);

/* Source i of a mixture. fingerprint, content: as those of the loader, below. */
/* number of instances of an epoch of the source */
uint64_t loader_source_instances(const Loader *l, int i);
uint64_t loader_source_fingerprint(const Loader *l, int i);
DataHashes loader_source_content(const Loader *l, int i);
PackedData loader_packed(const Loader *l); /* all 0 unless spec->best_fit */
uint64_t loader_tokens(const Loader *l);   /* number of tokens in all files */
int loader_files(const Loader *l);
/* hash of file names and sizes, T, itemsize, and of documents if they are packed or come from
 * metadata: shows whether data changed */
uint64_t loader_fingerprint(const Loader *l);
/* reads 3 pages of each file, one of them in memory already */
DataHashes loader_content(const Loader *l);
/* b is valid until the next call; false: end of an unshuffled pass, or the limit is reached */
bool loader_next(Loader *l, Batch *b);
/* the error of the next step's data, with which loader_next would die; NULL: none. Waits for the
 * data */
const char *loader_problem(Loader *l);
/* waits at most this long; true: loader_next need not wait. The last batch stays valid */
bool loader_wait(Loader *l, double seconds);
void loader_seek(Loader *l, LoaderState s); /* also removes a limit */

/* The next steps have smaller batches, by a Doubling with these numbers of further steps. Call it
 * after loader_seek. */
void loader_double(Loader *l, const uint64_t *until, int count);

/* At most `steps` will be requested from now on: reads and shuffles nothing for later ones. */
void loader_limit(Loader *l, uint64_t steps);
LoaderState loader_state(const Loader *l); /* position of the step that loader_next returns next */
void loader_close(Loader *l);
