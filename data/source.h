/* The sources of training data, and the order in which each is read: one for data.paths, or those
 * of a mixture. Only for data/. */
#pragma once
#include "data/hash.h"
#include "data/instances.h"
#include "data/mixture.h"

typedef struct {
    Instances instances;
    char *name;    /* NULL: data.paths */
    uint64_t size; /* instances of an epoch */
    uint64_t most; /* with a mixture: number of instances that may be used, repetitions included */
    double max_repetition;
    /* (size) the instances that are used if not all are; NULL: all, or not yet */
    uint32_t *chosen;
    /* (size) the order of epoch order_epoch, valid if `ordered`; NULL: not shuffled, or no epoch
     * yet */
    uint32_t *order;
    uint64_t order_epoch;
    bool ordered;
} Source;

typedef struct {
    Source *source;
    int count;
    bool mixed; /* by `mix` */
    Mixture mix;
} Sources;

/* Opens and checks all files; dies as instances_open, and if a source of a mixture has no
 * instance. */
Sources sources_open(const DataSpec *spec, int batch);
void sources_close(Sources *s);
uint64_t sources_instances(const Sources *s); /* number of instances of an epoch of each source */
/* sources_tokens: tokens in all files; sources_files: number of files */
uint64_t sources_tokens(const Sources *s);
int sources_files(const Sources *s);
PackedData sources_packed(const Sources *s);    /* sums over sources */
uint64_t sources_fingerprint(const Sources *s); /* see loader_fingerprint */

/* Loads the order of an epoch. False: go_on(arg), called every few milliseconds, returned false. */
bool source_load(Source *s, uint64_t epoch, bool (*go_on)(void *arg), void *arg);
/* the instance at a position of the loaded epoch */
uint64_t source_at(const Source *s, uint64_t position);
DataHashes source_content(const Source *s);

/* Whether features of images are F32. Dies if those of some sources are and others are BF16. */
bool sources_images_f32(const Sources *s);

/* Takes the next instance of a mixture: advances the position *from and returns the number of its
 * source. -1: that source has reached its max_repetition, as `problem` then says. */
int sources_next(const Sources *s, SourcePosition position[MIXTURE_MOST], SourcePosition *from,
                 char *problem, size_t size);

/* Instances that the mixture has from these positions on, until a source has no repetition left;
 * those that it has given. */
uint64_t sources_left(const Sources *s, const SourcePosition position[MIXTURE_MOST]);
uint64_t sources_given(const Sources *s, const SourcePosition position[MIXTURE_MOST]);

/* The error text if the sources lack instances for this many more: what is missing, and what helps;
 * NULL: nothing. malloc'ed. */
char *sources_lack(const Sources *s, const SourcePosition position[MIXTURE_MOST],
                   uint64_t instances);
