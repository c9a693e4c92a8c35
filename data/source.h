/* The sources of training data, and the order in which each is read. Without a mixture, data.paths
 * is the only source. Inside data/ only. */
#pragma once
#include "data/hash.h"
#include "data/instances.h"
#include "data/mixture.h"

typedef struct {
    Instances instances;
    char *name;    /* NULL: the source is data.paths */
    uint64_t size; /* number of instances of an epoch */
    uint64_t most; /* with a mixture: number of instances that may be used, with repetitions */
    double max_repetition;
    /* (size) the instances in use, if only some are used; NULL: all are used, or they are not
     * chosen yet */
    uint32_t *chosen;
    /* (size) the order of epoch order_epoch, valid if `ordered`; NULL: not shuffled, or no epoch
     * loaded yet */
    uint32_t *order;
    uint64_t order_epoch;
    bool ordered;
} Source;

typedef struct {
    Source *source;
    int count;
    bool mixed; /* the sources are mixed by `mix` */
    Mixture mix;
} Sources;

/* Opens and checks all files. Dies on the errors of instances_open, and if a source of a mixture
 * has no instance. */
Sources sources_open(const DataSpec *spec, int batch);
void sources_close(Sources *s);
uint64_t sources_instances(const Sources *s); /* instances of one epoch, summed over all sources */
uint64_t sources_tokens(const Sources *s);    /* number of tokens in all files */
int sources_files(const Sources *s);          /* number of files */
PackedData sources_packed(const Sources *s);  /* sums over sources */
uint64_t sources_fingerprint(const Sources *s); /* see loader_fingerprint */

/* Loads the order of an epoch. Calls go_on(arg) every few milliseconds; returns false if go_on
 * returned false. */
bool source_load(Source *s, uint64_t epoch, bool (*go_on)(void *arg), void *arg);
/* the instance at a position of the loaded epoch */
uint64_t source_at(const Source *s, uint64_t position);
DataHashes source_content(const Source *s);

/* Whether features of images are F32. Dies if features of some sources are F32 and of others
 * BF16. */
bool sources_images_f32(const Sources *s);

/* Takes the next instance of a mixture. Sets *from to the position of this instance in its source,
 * advances the source, and returns the number of the source. Returns -1 if this source has reached
 * its max_repetition; `problem` then describes this. */
int sources_next(const Sources *s, SourcePosition position[MIXTURE_MOST], SourcePosition *from,
                 char *problem, size_t size);

/* Number of instances that the mixture has from these positions on, until a source has no
 * repetition left. */
uint64_t sources_left(const Sources *s, const SourcePosition position[MIXTURE_MOST]);
/* Number of instances taken before these positions, since the mixture last changed. */
uint64_t sources_given(const Sources *s, const SourcePosition position[MIXTURE_MOST]);

/* Returns NULL if the sources can give `instances` more instances. Otherwise returns an error text,
 * malloc'ed, that says what is missing and what helps. */
char *sources_lack(const Sources *s, const SourcePosition position[MIXTURE_MOST],
                   uint64_t instances);
