/* Epoch e of a source has the order numpy_shuffle(seed + e). If only some instances of a source are
 * used, every epoch uses the same instances: the first ones in the order of epoch 0. So a first
 * pass continues unchanged if more instances are used later. */
#include "data/source.h"

#include "data/shuffle.h"
#include "kernels/runtime/error.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- one source ------------------------------------------------------------------------------ */

/* Uses large pages if the system has them, because a shuffle accesses the order randomly. */
static uint32_t *allocate_order(uint64_t n)
{
    const size_t page = 2 << 20, bytes = (n * sizeof(uint32_t) + page - 1) / page * page;
    uint32_t *order = aligned_alloc(page, bytes);
    if (!order)
        die("out of host memory: cannot allocate %zu bytes for the order of %llu sequences", bytes,
            (unsigned long long)n);
    madvise(order, bytes, MADV_HUGEPAGE);
    return order;
}

static bool choose(Source *s, bool (*go_on)(void *arg), void *arg)
{
    const uint64_t n = s->instances.count;
    if (s->size == n || s->chosen)
        return true;
    uint32_t *all = allocate_order(n);
    const bool whole = numpy_shuffle(all, n, s->instances.spec.seed, go_on, arg);
    if (whole) {
        s->chosen = xmalloc(s->size * sizeof *s->chosen);
        memcpy(s->chosen, all, s->size * sizeof *s->chosen);
    }
    free(all);
    return whole;
}

bool source_load(Source *s, uint64_t epoch, bool (*go_on)(void *arg), void *arg)
{
    const DataSpec *spec = &s->instances.spec;
    if (!spec->shuffle || (s->ordered && s->order_epoch == epoch))
        return true;
    s->ordered = false;
    if (!choose(s, go_on, arg))
        return false;
    if (!s->order)
        s->order = allocate_order(s->size);
    s->order_epoch = epoch;
    if (s->chosen && epoch == 0) {
        memcpy(s->order, s->chosen, s->size * sizeof *s->order);
        s->ordered = true;
        return true;
    }
    s->ordered = numpy_shuffle(s->order, s->size, spec->seed + epoch, go_on, arg);
    for (uint64_t i = 0; s->chosen && s->ordered && i < s->size; i++)
        s->order[i] = s->chosen[s->order[i]];
    return s->ordered;
}

uint64_t source_at(const Source *s, uint64_t position)
{
    return s->instances.spec.shuffle ? s->order[position] : position;
}

DataHashes source_content(const Source *s)
{
    DataHashes content = { HASH_OF_NOTHING, HASH_OF_NOTHING };
    for (int f = 0; f < s->instances.num_shards; f++) {
        const Shard *shard = &s->instances.shards[f];
        shard_tell(&s->instances.spec, "sampling", shard->path);
        content.tokens = hash_pages(content.tokens, shard->map, shard->map_bytes);
        if (shard->mask)
            content.masks = hash_pages(content.masks, shard->mask, shard->num_tokens);
        if (shard->image_map)
            content.tokens =
                hash_pages(content.tokens, shard->image_map, images_index_bytes(shard));
    }
    return content;
}

/* ---- opening --------------------------------------------------------------------------------- */

static Source open_mixed(const DataSpec *spec, const MixtureSource *of)
{
    DataSpec own = *spec;
    own.key = xasprintf("data.mix: source '%s'", of->name);
    own.mix = NULL;
    own.num_mix = 0;
    own.paths = of->paths;
    own.num_paths = of->num_paths;
    own.label_mask_paths = of->label_mask_paths;
    own.num_label_mask_paths = of->num_label_mask_paths;
    own.image_paths = of->image_paths;
    own.num_image_paths = of->num_image_paths;
    own.image_features = of->image_features;
    own.drop_last = false;
    Source s = { .instances = instances_open(&own, 1),
                 .name = xstrdup(of->name),
                 .max_repetition = of->max_repetition };
    const uint64_t T = (uint64_t)spec->sequence_length, limit = (uint64_t)of->tokens / T;
    if (of->tokens > 0 && limit == 0)
        die("%s: tokens %ld are less than one sequence of %llu (model.max_sequence_length); give "
            "more tokens, or leave the source out",
            own.key, of->tokens, (unsigned long long)T);
    s.size = of->tokens > 0 && limit < s.instances.count ? limit : s.instances.count;
    s.most = (uint64_t)floor((double)s.size * of->max_repetition + 1e-6);
    return s;
}

Sources sources_open(const DataSpec *spec, int batch)
{
    Sources s = { .count = spec->mix ? spec->num_mix : 1, .mixed = spec->mix != NULL };
    s.source = xcalloc((size_t)s.count, sizeof *s.source);
    if (!s.mixed) {
        s.source[0].instances = instances_open(spec, batch);
        s.source[0].size = s.source[0].instances.count;
        return s;
    }
    CHECK(s.count > 0 && s.count <= MIXTURE_MOST && spec->shuffle, "a mixture of %d sources",
          s.count);
    for (int i = 0; i < s.count; i++) {
        s.source[i] = open_mixed(spec, &spec->mix[i]);
        mixture_add(&s.mix, spec->mix[i].name, spec->mix[i].ratio, spec->seed);
    }
    return s;
}

void sources_close(Sources *s)
{
    for (int i = 0; i < s->count; i++) {
        Source *one = &s->source[i];
        if (s->mixed)
            free((char *)one->instances.spec.key);
        instances_close(&one->instances);
        free(one->name);
        free(one->chosen);
        free(one->order);
    }
    free(s->source);
}

bool sources_images_f32(const Sources *s)
{
    const ImageFeatures *first = NULL;
    for (int i = 0; i < s->count; i++) {
        const ImageFeatures *f = s->source[i].instances.features;
        if (f && first && f->f32 != first->f32)
            die("%s: the features in %s are %s, but the features of %s, in %s, are %s: all "
                "features of a run must have one type. Make one of these folders again with "
                "scripts/make_image_features.py, with --f32 or without",
                f->key, f->folder, f->f32 ? "F32" : "BF16", first->key, first->folder,
                first->f32 ? "F32" : "BF16");
        first = f && !first ? f : first;
    }
    return first && first->f32;
}

uint64_t sources_instances(const Sources *s)
{
    uint64_t n = 0;
    for (int i = 0; i < s->count; i++)
        n += s->source[i].size;
    return n;
}

/* ---- a mixture ------------------------------------------------------------------------------- */

/* taken[i] = number of instances that the mixture took from source i. */
static void count_taken(uint64_t taken[MIXTURE_MOST], const Sources *s,
                        const SourcePosition position[MIXTURE_MOST])
{
    for (int i = 0; i < s->count; i++)
        taken[i] = position[i].mixed;
}

/* Number of instances of the source that may still be used. */
static uint64_t source_left(const Source *s, const SourcePosition *position)
{
    if (position->epoch > s->most / s->size)
        return 0;
    const uint64_t used =
        position->epoch * s->size + (position->instance < s->size ? position->instance : s->size);
    return used < s->most ? s->most - used : 0;
}

int sources_next(const Sources *s, SourcePosition position[MIXTURE_MOST], SourcePosition *from,
                 char *problem, size_t size)
{
    uint64_t taken[MIXTURE_MOST];
    count_taken(taken, s, position);
    const int i = mixture_next(&s->mix, taken);
    SourcePosition *p = &position[i];
    if (source_left(&s->source[i], p) == 0) {
        snprintf(problem, size,
                 "%s: all its %llu sequences have been used, as often as max_repetition %g allows",
                 s->source[i].instances.spec.key, (unsigned long long)s->source[i].size,
                 s->source[i].max_repetition);
        return -1;
    }
    if (p->instance >= s->source[i].size)
        *p = (SourcePosition){ p->epoch + 1, 0, p->mixed };
    *from = *p;
    p->instance++;
    p->mixed++;
    return i;
}

uint64_t sources_left(const Sources *s, const SourcePosition position[MIXTURE_MOST])
{
    uint64_t taken[MIXTURE_MOST], left = UINT64_MAX;
    count_taken(taken, s, position);
    for (int i = 0; i < s->count; i++) {
        const uint64_t lasts =
            mixture_lasts(&s->mix, taken, i, source_left(&s->source[i], &position[i]));
        left = lasts < left ? lasts : left;
    }
    return left;
}

uint64_t sources_given(const Sources *s, const SourcePosition position[MIXTURE_MOST])
{
    uint64_t n = 0;
    for (int i = 0; i < s->count; i++)
        n += position[i].mixed;
    return n;
}

/* How often the source would have been repeated after `needs` more instances. With this value of
 * max_repetition, the source suffices. */
static double repetitions(const Source *s, const SourcePosition *position, uint64_t needs)
{
    const double used =
        (double)position->epoch * (double)s->size + (double)position->instance + (double)needs;
    return ceil(used / (double)s->size * 100) / 100;
}

char *sources_lack(const Sources *s, const SourcePosition position[MIXTURE_MOST],
                   uint64_t instances)
{
    uint64_t taken[MIXTURE_MOST];
    count_taken(taken, s, position);
    for (int i = 0; i < s->count; i++) {
        const Source *one = &s->source[i];
        const unsigned long long T = (unsigned long long)one->instances.spec.sequence_length,
                                 left = source_left(one, &position[i]);
        const unsigned long long needs = mixture_needs(&s->mix, taken, i, instances);
        if (needs > left)
            return xasprintf(
                "%s: %llu tokens are missing: the run takes %llu tokens of this source (%.4g %% of "
                "%llu), and the source has %llu left (%llu sequences of %llu tokens, "
                "max_repetition %g). Raise its max_repetition to %g, add paths%s, lower its ratio, "
                "or end the run %llu tokens from here (max_duration)",
                one->instances.spec.key, (needs - left) * T, needs * T,
                100 * (double)s->mix.weight[i] / (double)s->mix.all,
                (unsigned long long)instances * T, left * T, (unsigned long long)one->size, T,
                one->max_repetition, repetitions(one, &position[i], needs),
                one->size < one->instances.count ? " or raise its tokens" : "",
                (unsigned long long)sources_left(s, position) * T);
    }
    return NULL;
}

PackedData sources_packed(const Sources *s)
{
    PackedData sum = { 0 };
    for (int i = 0; i < s->count; i++) {
        const Packing *p = &s->source[i].instances.packing;
        sum.documents += p->documents;
        sum.pieces += p->pieces;
        sum.tokens += p->tokens;
        sum.labels += p->labels;
    }
    return sum;
}

uint64_t sources_tokens(const Sources *s)
{
    uint64_t n = 0;
    for (int i = 0; i < s->count; i++)
        n += s->source[i].instances.tokens;
    return n;
}

int sources_files(const Sources *s)
{
    int n = 0;
    for (int i = 0; i < s->count; i++)
        n += s->source[i].instances.num_shards;
    return n;
}

uint64_t sources_fingerprint(const Sources *s)
{
    uint64_t hash = HASH_OF_NOTHING;
    for (int i = 0; i < s->count && s->mixed; i++) {
        const Source *of = &s->source[i];
        const uint64_t numbers[] = { of->instances.fingerprint, of->size, of->most,
                                     s->mix.weight[i] };
        hash = hash_bytes(hash, of->name, strlen(of->name) + 1);
        hash = hash_bytes(hash, numbers, sizeof numbers);
    }
    return s->mixed ? hash : s->source[0].instances.fingerprint;
}
