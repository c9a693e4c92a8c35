/* Steps of training data: shards -> instances -> shuffled order -> this rank's sequences of each
 * step.
 *
 * An instance is the content of a sequence (instances.h). Epoch e has the order numpy_shuffle(seed
 * + e), or file order. Step k has the positions k*G .. k*G+G-1 of that order, where G is the batch;
 * rank r of W takes every W-th of these positions, starting with the r-th. So the data of a step do
 * not depend on the number of ranks, and a resumed run only needs epoch and position. Without
 * drop_last, empty sequences fill the last step of a shuffled epoch: an epoch has every label once,
 * and the next epoch begins with a new step. With a mixture, a step takes the mixture's next
 * instances; each source has its own epochs (source.h), which may begin inside a step.
 *
 * A thread fills a ring of batches ahead of the training loop:
 *     EMPTY -fill-> READY -loader_next-> HELD -loader_next-> EMPTY          head - tail = entries READY or HELD
 * (1) Only the thread touches the orders of sources, `ahead` and EMPTY entries. Only the caller
 *     touches READY and HELD entries.
 * (2) loader_seek and loader_limit stop the thread, and the next request for a step starts it
 *     again. So no batch of the old position survives, and a resumed run shuffles its own epoch
 *     first.
 * (3) The thread neither prints nor calls MPI. It stores an error in the entry, even if a file can
 *     no longer be read. When the step of this entry is due, loader_problem returns the error, or
 *     loader_next dies. So the step of an error does not depend on how far the thread is ahead. */
#include "data/loader.h"

#include "data/hash.h"
#include "data/map.h"
#include "data/source.h"
#include "kernels/runtime/error.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ENTRIES = 3 }; /* one batch that the caller holds, two that are ready */

typedef struct {
    Batch batch;      /* owns its arrays, sized for a full step */
    LoaderState next; /* position of the loader after this step */
    bool end;         /* there is no step: the unshuffled pass ended, or the limit is reached */
    char error[4096]; /* the error in the data of this step; "": no error */
} Entry;

struct Loader {
    Sources sources;
    DataSpec spec; /* the spec without paths and sources */
    int batch, rank, world;

    LoaderState position; /* position of the step that loader_next returns next */
    Doubling doubling;
    uint64_t steps, ahead_steps; /* number of steps since loader_double that the caller got, and
                                  * that the thread filled */
    bool held;                   /* the caller uses the batch of entry `tail` */
    uint64_t left;               /* number of steps until the limit */

    uint64_t shuffled;   /* the epoch that the thread shuffles */
    LoaderState ahead;   /* position of the step that the thread fills next */
    uint64_t ahead_left; /* number of steps until the limit, from `ahead` on */

    Entry entries[ENTRIES];
    uint64_t head, tail; /* number of entries filled, and of entries returned, since the thread
                          * started */
    bool stop, runs;     /* runs: the thread exists */
    pthread_t thread;
    pthread_mutex_t mutex; /* guards head, tail, stop */
    pthread_cond_t changed;
};

/* ---- position -------------------------------------------------------------------------------- */

/* Number of instances, over all ranks, of the step at position s: a full batch; at the end, the
 * remaining instances or none. */
static uint64_t step_instances(const Loader *l, const LoaderState *s, uint64_t batch)
{
    uint64_t left = loader_instances(l) - s->instance;
    if (l->sources.mixed || left >= batch)
        return batch;
    return l->spec.drop_last ? 0 : left;
}

/* At the end of an epoch, moves a shuffled position to the start of the next epoch. NOTE: saved
 * positions are not settled, because the end of an epoch depends on the batch size, which a resumed
 * run may change. */
static LoaderState settle(const Loader *l, LoaderState s, uint64_t batch)
{
    if (l->spec.shuffle && step_instances(l, &s, batch) == 0)
        return (LoaderState){ s.epoch + 1, 0 };
    return s;
}

static void beat(const Loader *l, const char *doing)
{
    if (l->spec.beat)
        l->spec.beat(doing);
}

/* ---- filling an entry (thread) --------------------------------------------------------------- */

static bool may_go_on(void *loader)
{
    Loader *l = loader;
    char doing[64];
    snprintf(doing, sizeof doing, "shuffling epoch %llu", (unsigned long long)l->shuffled + 1);
    beat(l, doing);
    pthread_mutex_lock(&l->mutex);
    bool stop = l->stop;
    pthread_mutex_unlock(&l->mutex);
    return !stop;
}

/* Returns false if it was stopped before the order was complete. */
static bool load_order(Loader *l, Source *source, uint64_t epoch)
{
    l->shuffled = epoch;
    return source_load(source, epoch, may_go_on, l);
}

static Row row_of(const Loader *l, const Batch *b, int i)
{
    const size_t at = (size_t)i * (size_t)l->spec.sequence_length;
    return (Row){ b->tokens + at, b->targets + at, b->begins + at,
                  b->images ? b->images + at : NULL,
                  b->values ? (char *)b->values + at * (size_t)l->spec.value_bytes : NULL };
}

/* The argument of read_instance when map_read calls it. */
typedef struct {
    const Loader *loader;
    const Source *source;
    Entry *entry;
    uint64_t instance;
    long labels;
} Filling;

static void read_instance(void *what)
{
    Filling *f = what;
    Entry *entry = f->entry;
    const Row row = row_of(f->loader, &entry->batch, entry->batch.sequences);
    f->labels =
        instance_read(row, &f->source->instances, f->instance, entry->error, sizeof entry->error);
}

/* Fills the entry's next sequence with the instance at a position of the loaded epoch of source s.
 * Returns false if this causes an error, which the entry then describes. */
static bool fill_sequence(const Loader *l, Entry *entry, int s, uint64_t position)
{
    Batch *b = &entry->batch;
    const Source *source = &l->sources.source[s];
    Filling f = { l, source, entry, source_at(source, position), -1 };
    char *problem = map_read(read_instance, &f);
    if (problem)
        snprintf(entry->error, sizeof entry->error, "%s", problem);
    free(problem);
    if (f.labels < 0)
        return false;
    b->source[b->sequences] = (uint8_t)s;
    b->index[b->sequences++] = (uint32_t)f.instance;
    b->labels += f.labels;
    return true;
}

/* Fills all sequences of the step at position s. Returns false if it was stopped before the step
 * was complete. */
static bool fill_positions(Loader *l, Entry *entry, const LoaderState *s, uint64_t count,
                           uint64_t batch)
{
    if (count > 0 && !load_order(l, &l->sources.source[0], s->epoch))
        return false;
    for (uint64_t i = l->rank; i < count; i += l->world)
        if (!fill_sequence(l, entry, 0, s->instance + i))
            return true;
    for (Batch *b = &entry->batch;
         l->spec.shuffle && count > 0 && b->sequences < (int)batch / l->world; b->sequences++) {
        row_pad(row_of(l, b, b->sequences), &l->spec, 0);
        b->index[b->sequences] = UINT32_MAX;
    }
    return true;
}

/* Fills the sequences of a step of a mixture. Returns false if it was stopped before the step was
 * complete. Every rank advances through all positions, but loads only the orders and instances of
 * its own positions. */
static bool fill_mixed(Loader *l, Entry *entry, SourcePosition position[MIXTURE_MOST],
                       uint64_t count)
{
    Batch *b = &entry->batch;
    memset(b->share, 0, sizeof b->share);
    for (uint64_t i = 0; i < count; i++) {
        SourcePosition from;
        const int s = sources_next(&l->sources, position, &from, entry->error, sizeof entry->error);
        if (s < 0)
            return true;
        b->share[s]++;
        if (i % (uint64_t)l->world != (uint64_t)l->rank)
            continue;
        if (!load_order(l, &l->sources.source[s], from.epoch))
            return false;
        if (!fill_sequence(l, entry, s, from.instance))
            return true;
    }
    return true;
}

/* Returns false if it was stopped before the step was complete. */
static bool fill_entry(Loader *l, Entry *entry)
{
    const uint64_t batch = doubling_batch(&l->doubling, l->ahead_steps);
    const LoaderState s = settle(l, l->ahead, batch);
    uint64_t count = l->ahead_left > 0 ? step_instances(l, &s, batch) : 0;
    entry->batch.sequences = 0;
    entry->batch.labels = 0;
    entry->error[0] = '\0';
    entry->end = count == 0;
    l->ahead = s;
    l->ahead.instance += l->sources.mixed ? 0 : count;
    l->ahead_left -= count > 0;
    l->ahead_steps += count > 0;
    const bool whole = l->sources.mixed ? fill_mixed(l, entry, l->ahead.source, count)
                                        : fill_positions(l, entry, &s, count, batch);
    entry->next = l->ahead;
    return whole;
}

/* Waits after the last entry, too: the thread ends only when stop_thread joins it. */
static void *fill_ring(void *loader)
{
    Loader *l = loader;
    for (bool last = false;;) {
        pthread_mutex_lock(&l->mutex);
        while ((last || l->head - l->tail == ENTRIES) && !l->stop) {
            beat(l, NULL);
            pthread_cond_wait(&l->changed, &l->mutex);
        }
        bool stop = l->stop;
        Entry *entry = &l->entries[l->head % ENTRIES];
        pthread_mutex_unlock(&l->mutex);
        if (stop || !fill_entry(l, entry))
            break;
        last = entry->end || entry->error[0];

        pthread_mutex_lock(&l->mutex);
        l->head++;
        pthread_cond_signal(&l->changed);
        pthread_mutex_unlock(&l->mutex);
    }
    beat(l, NULL);
    return NULL;
}

static void start_thread(Loader *l)
{
    if (l->runs)
        return;
    beat(l, "reading data");
    l->runs = true;
    l->ahead = l->position;
    l->ahead_left = l->left;
    l->ahead_steps = l->steps;
    l->head = l->tail = 0;
    l->held = l->stop = false;
    int error = pthread_create(&l->thread, NULL, fill_ring, l);
    if (error)
        die("cannot start the thread that reads the data: %s", strerror(error));
}

static void stop_thread(Loader *l)
{
    if (!l->runs)
        return;
    l->runs = false;
    pthread_mutex_lock(&l->mutex);
    l->stop = true;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    pthread_join(l->thread, NULL);
}

/* ---- the caller's side ----------------------------------------------------------------------- */

Loader *loader_open(const DataSpec *spec, int batch, int rank, int world)
{
    CHECK(spec->sequence_length > 0 && spec->vocab_size > 0, "T %d, V %d", spec->sequence_length,
          spec->vocab_size);
    CHECK(batch > 0 && world > 0 && batch % world == 0 && rank >= 0 && rank < world,
          "batch %d, rank %d of %d", batch, rank, world);
    CHECK(spec->max_count == 0 || spec->min_period > 0, "min_period %d", spec->min_period);
    Loader *l = xcalloc(1, sizeof *l);
    l->batch = batch;
    l->doubling.batch = (uint64_t)batch;
    l->rank = rank;
    l->world = world;
    l->sources = sources_open(spec, batch);
    l->spec = *spec;
    l->spec.paths = l->spec.label_mask_paths = NULL;
    l->spec.mix = NULL;

    for (int i = 0; i < ENTRIES; i++) {
        l->entries[i].batch = batch_make(batch / world, spec->sequence_length, spec->image_rows > 0,
                                         spec->value_bytes);
        l->entries[i].batch.images_f32 = sources_images_f32(&l->sources);
    }
    pthread_mutex_init(&l->mutex, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&l->changed, &clock);
    pthread_condattr_destroy(&clock);
    l->left = UINT64_MAX;
    beat(l, NULL);
    return l;
}

/* The argument of the function that error_catch calls. */
typedef struct {
    const DataSpec *spec;
    int batch, rank, world;
    Loader *loader;
} Opening;

static void open_loader(void *what)
{
    Opening *o = what;
    o->loader = loader_open(o->spec, o->batch, o->rank, o->world);
}

Loader *loader_try_open(char **problem, const DataSpec *spec, int batch, int rank, int world)
{
    Opening o = { spec, batch, rank, world, NULL };
    const void *newest = map_newest();
    *problem = error_catch(open_loader, &o);
    if (*problem)
        unmap_files_since(newest);
    if (*problem && spec->beat)
        spec->beat(NULL);
    return o.loader;
}

uint64_t loader_instances(const Loader *l)
{
    return sources_instances(&l->sources);
}

uint64_t loader_steps(const Loader *l, uint64_t instance)
{
    const uint64_t n = loader_instances(l), left = instance < n ? n - instance : 0,
                   batch = l->batch;
    return (left + (l->spec.drop_last ? 0 : batch - 1)) / batch;
}

uint64_t loader_given(const Loader *l)
{
    return sources_given(&l->sources, l->position.source);
}

uint64_t loader_left(const Loader *l)
{
    return sources_left(&l->sources, l->position.source);
}

char *loader_lack(const Loader *l, uint64_t steps)
{
    return sources_lack(&l->sources, l->position.source,
                        doubling_sum(&l->doubling, l->steps, steps));
}

uint64_t loader_source_instances(const Loader *l, int i)
{
    return l->sources.source[i].size;
}

uint64_t loader_source_fingerprint(const Loader *l, int i)
{
    return l->sources.source[i].instances.fingerprint;
}

DataHashes loader_source_content(const Loader *l, int i)
{
    const DataHashes s = source_content(&l->sources.source[i]);
    beat(l, NULL);
    return s;
}

PackedData loader_packed(const Loader *l)
{
    return sources_packed(&l->sources);
}

uint64_t loader_tokens(const Loader *l)
{
    return sources_tokens(&l->sources);
}

int loader_files(const Loader *l)
{
    return sources_files(&l->sources);
}

uint64_t loader_fingerprint(const Loader *l)
{
    return sources_fingerprint(&l->sources);
}

DataHashes loader_content(const Loader *l)
{
    DataHashes sum = source_content(&l->sources.source[0]);
    for (int i = 1; i < l->sources.count; i++) {
        const DataHashes s = source_content(&l->sources.source[i]);
        sum.tokens = hash_bytes(sum.tokens, &s.tokens, sizeof s.tokens);
        sum.masks = hash_bytes(sum.masks, &s.masks, sizeof s.masks);
    }
    beat(l, NULL);
    return sum;
}

/* Gives the caller's entry back to the thread. */
static void let_go(Loader *l)
{
    if (l->held) {
        l->tail++;
        l->held = false;
        pthread_cond_signal(&l->changed);
    }
}

bool loader_wait(Loader *l, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long ns = until.tv_nsec + (long)(seconds * 1e9);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    start_thread(l);
    pthread_mutex_lock(&l->mutex);
    int status = 0;
    while (l->head - l->tail == l->held && status != ETIMEDOUT)
        status = pthread_cond_timedwait(&l->changed, &l->mutex, &until);
    bool ready = l->head - l->tail > l->held;
    pthread_mutex_unlock(&l->mutex);
    return ready;
}

/* Waits until the entry of the next step is ready. */
static const Entry *next_entry(Loader *l)
{
    start_thread(l);
    pthread_mutex_lock(&l->mutex);
    while (l->head - l->tail == l->held)
        pthread_cond_wait(&l->changed, &l->mutex);
    const Entry *entry = &l->entries[(l->tail + l->held) % ENTRIES];
    pthread_mutex_unlock(&l->mutex);
    return entry;
}

const char *loader_problem(Loader *l)
{
    const Entry *entry = next_entry(l);
    return entry->error[0] ? entry->error : NULL;
}

/* After the end of an unshuffled pass, returns false until loader_seek starts another pass. */
bool loader_next(Loader *l, Batch *b)
{
    start_thread(l);
    pthread_mutex_lock(&l->mutex);
    let_go(l);
    pthread_mutex_unlock(&l->mutex);
    const Entry *entry = next_entry(l);
    if (entry->error[0])
        die("%s", entry->error);
    if (entry->end)
        return false;
    l->held = true;
    l->position = entry->next;
    l->left--;
    l->steps++;
    *b = entry->batch;
    return true;
}

void loader_seek(Loader *l, LoaderState s)
{
    if (s.instance > loader_instances(l))
        die("cannot continue at sequence %llu of epoch %llu: data.paths has only %llu sequences of "
            "%d tokens. Give the "
            "data and model.max_sequence_length of the checkpoint's run",
            (unsigned long long)s.instance, (unsigned long long)s.epoch,
            (unsigned long long)loader_instances(l), l->spec.sequence_length);
    stop_thread(l);
    l->position = s;
    l->left = UINT64_MAX;
}

void loader_double(Loader *l, const uint64_t *until, int count)
{
    CHECK(count <= MOST_UNTIL && l->batch % ((long)l->world << count) == 0,
          "%d doublings to a batch of %d on %d ranks", count, l->batch, l->world);
    stop_thread(l);
    memcpy(l->doubling.until, until, (size_t)count * sizeof *until);
    l->doubling.count = count;
    l->steps = 0;
}

void loader_limit(Loader *l, uint64_t steps)
{
    stop_thread(l);
    l->left = steps;
}

void loader_use_values(Loader *l, const void *mapped, const void *values)
{
    Instances *instances = &l->sources.source[0].instances;
    stop_thread(l);
    if (instances->values)
        unmap_file(instances->mapped);
    instances->mapped = mapped;
    instances->values = values;
}

void loader_put_values(const Loader *l, const Batch *b, int sequence, void *values, const void *row,
                       int bytes)
{
    if (b->index[sequence] != UINT32_MAX)
        instance_put_values(values, &l->sources.source[0].instances, b->index[sequence], row,
                            bytes);
}

LoaderState loader_state(const Loader *l)
{
    return l->position;
}

void loader_close(Loader *l)
{
    loader_use_values(l, NULL, NULL);
    pthread_mutex_destroy(&l->mutex);
    pthread_cond_destroy(&l->changed);
    for (int i = 0; i < ENTRIES; i++)
        batch_free(&l->entries[i].batch);
    sources_close(&l->sources);
    free(l);
}
