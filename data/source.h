/* The sources of training data, and the order in which each is read: one for data.paths, or those
 * of a mixture. Only for data/. */
#pragma once
#include "data/hash.h"
#include "data/instances.h"
#include "data/mix.h"

typedef struct {
    Instances instances;
    char *name;    /* NULL: data.paths */
    uint64_t size; /* instances of an epoch */
    uint64_t most; /* of a mixture: instances that may be used, repetitions included */
    double max_repetition;
    /* (size) the instances that are used if not all are; NULL: all, or not yet */
    uint32_t *chosen;
    /* (size) of epoch order_epoch, if it is `ordered`; NULL: not shuffled, or no epoch yet */
    uint32_t *order;
    uint64_t order_epoch;
    bool ordered;
} Source;

typedef struct {
    Source *source;
    int count;
    bool mixed; /* by `mix` */
    Mix mix;
} Sources;

/* Opens and checks all files; dies as instances_open, and if a source of a mixture has no
 * instance. */
Sources sources_open(const DataSpec *spec, int batch);
void sources_close(Sources *s);
uint64_t sources_instances(const Sources *s); /* of an epoch of each */
uint64_t sources_tokens(const Sources *s);    /* in all files; sources_files: these */
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

/* The source of a mixture's next instance: moves *from, its position, on, and returns its number.
 * -1: the source has no repetition left; then `problem` says so. */
int sources_next(const Sources *s, SourcePosition position[MIX_MOST], SourcePosition *from,
                 char *problem, size_t size);

/* Instances that the mixture has from these positions on, until a source has no repetition left;
 * those that it has given. */
uint64_t sources_left(const Sources *s, const SourcePosition position[MIX_MOST]);
uint64_t sources_given(const Sources *s, const SourcePosition position[MIX_MOST]);

/* The error text if the sources lack instances for this many more: what is missing, and what helps;
 * NULL: nothing. malloc'ed. */
char *sources_lack(const Sources *s, const SourcePosition position[MIX_MOST], uint64_t instances);
