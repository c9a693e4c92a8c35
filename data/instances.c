/* An instance is T consecutive tokens of one file (fewer than T tokens at the end of the file are
 * not used). With spec.best_fit, an instance is the documents of one packed sequence, then padding.
 * Instances are numbered over all files or, with best_fit, over all packed sequences. The packing
 * depends only on the files, T and spec's fields about documents; seeds and ranks do not change
 * it. */
#include "data/instances.h"

#include "data/hash.h"
#include "data/sequence.h"
#include "kernels/runtime/error.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening --------------------------------------------------------------------------------- */

/* Numbers the instances. A file too short for one instance is no error, because collections of
 * shards often have a few such files. */
static void count_instances(Instances *s)
{
    int T = s->spec.sequence_length, unused = 0;
    for (int f = 0; f < s->num_shards; f++) {
        uint64_t count = s->shards[f].num_tokens / T;
        s->first[f + 1] = s->first[f] + count;
        unused += count == 0;
    }
    s->count = s->first[s->num_shards];
    if (unused && s->count > 0 && !s->spec.reopened)
        warn("%s: %d of %d files have less than one sequence of %d tokens and are not used",
             s->shards[0].key, unused, s->num_shards, T);
}

static void pack_instances(Instances *s)
{
    for (int f = 0; f < s->num_shards; f++)
        s->first[f + 1] = s->first[f] + s->shards[f].num_tokens;
    s->packing = packing_make(s->shards, s->num_shards, &s->spec);
    s->count = s->packing.sequences;
}

static void check_count(const Instances *s, int batch)
{
    const int T = s->spec.sequence_length;
    const uint64_t n = s->count, needed = s->spec.drop_last ? batch : 1;
    if (n > (uint64_t)UINT32_MAX + 1)
        die("%s: %llu sequences of %d tokens are more than the 2^32 that the shuffled order can "
            "number; "
            "use fewer files or a larger model.max_sequence_length",
            s->shards[0].key, (unsigned long long)n, T);
    if (n < needed)
        die("%s: %llu tokens in %d file%s make %llu sequence%s of %d tokens, fewer than the %llu "
            "of one "
            "step. Add data, or lower %smodel.max_sequence_length",
            s->shards[0].key, (unsigned long long)s->tokens, s->num_shards,
            s->num_shards == 1 ? "" : "s", (unsigned long long)n, n == 1 ? "" : "s", T,
            (unsigned long long)needed, needed > 1 ? "global_train_batch_size or " : "");
}

/* Does not hash the names of folders, because data may move. NOTE: the hash of unpacked files
 * without metadata must never change. */
static uint64_t hash_files(const Instances *s)
{
    uint64_t hash = HASH_OF_NOTHING;
    for (int f = 0; f < s->num_shards; f++) {
        const Shard *shard = &s->shards[f];
        const char *slash = strrchr(shard->path, '/'), *name = slash ? slash + 1 : shard->path;
        uint64_t numbers[] = { shard->num_tokens, (uint64_t)shard->itemsize,
                               (uint64_t)(shard->mask != NULL) };
        hash = hash_bytes(hash, name, strlen(name) + 1);
        hash = hash_bytes(hash, numbers, sizeof numbers);
    }
    uint64_t T = s->spec.sequence_length;
    hash = hash_bytes(hash, &T, sizeof T);
    if (s->features)
        hash = hash_bytes(hash, &s->features->id, sizeof s->features->id);
    if (s->spec.best_fit) {
        const Packing *p = &s->packing;
        hash = hash_bytes(hash, p->start, p->pieces * sizeof *p->start);
        hash = hash_bytes(hash, p->length, p->pieces * sizeof *p->length);
        hash = hash_bytes(hash, p->first, (p->sequences + 1) * sizeof *p->first);
        if (p->middle)
            hash = hash_bytes(hash, p->middle, p->pieces * sizeof *p->middle);
    }
    for (int f = 0; f < s->num_shards && s->begins; f++)
        hash = hash_bytes(hash, s->begins[f].at, s->begins[f].count * sizeof *s->begins[f].at);
    return hash;
}

/* Finds the documents. Warns if tokens are in no document: then the corpus was filtered, or the
 * metadata belongs to another file. */
static void find_begins(Instances *s)
{
    uint64_t inside = 0;
    s->begins = xcalloc(s->num_shards, sizeof *s->begins);
    for (int f = 0; f < s->num_shards; f++) {
        s->begins[f] = documents_begins(&s->shards[f], &s->spec);
        inside += s->begins[f].inside;
    }
    if (inside < s->tokens && !s->spec.reopened)
        warn("%s: according to the metadata, %llu of %llu tokens are in no document; data.packing "
             "concat trains on these tokens, best_fit does not",
             s->shards[0].key, (unsigned long long)(s->tokens - inside),
             (unsigned long long)s->tokens);
}

Instances instances_open(const DataSpec *spec, int batch)
{
    Instances s = { .spec = *spec };
    s.shards = shards_open(&s.num_shards, spec);
    if (spec->num_image_paths > 0) {
        s.features = features_open(spec->key ? spec->key : "data.image_features",
                                   spec->image_features, spec->image_rows, spec->image_cols);
        features_check_tower(s.features, spec->image_tower, spec->image_model, spec->reopened);
        images_open(s.shards, s.num_shards, spec, s.features);
    }
    s.spec.paths = s.spec.label_mask_paths = s.spec.image_paths = NULL;
    s.first = xcalloc(s.num_shards + 1, sizeof *s.first);
    s.start = xcalloc(s.num_shards, sizeof *s.start);
    for (int f = 0; f < s.num_shards; f++) {
        s.start[f] = s.tokens;
        s.tokens += s.shards[f].num_tokens;
    }
    if (spec->best_fit)
        pack_instances(&s);
    else
        count_instances(&s);
    check_count(&s, batch);
    if (spec->metadata && !spec->best_fit)
        find_begins(&s);
    if (!spec->reopened && !spec->metadata)
        shards_check_eos(s.shards, s.num_shards, spec);
    s.fingerprint = hash_files(&s);
    return s;
}

void instances_close(Instances *s)
{
    for (int f = 0; f < s->num_shards && s->begins; f++)
        free(s->begins[f].at);
    free(s->begins);
    shards_close(s->shards, s->num_shards);
    features_close(s->features);
    packing_free(&s->packing);
    free(s->first);
    free(s->start);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The file of an instance (packed: of a token): the last file with first <= number. */
static int find_shard(const Instances *s, uint64_t number)
{
    int low = 0, high = s->num_shards;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (s->first[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The value of token `offset` of file f, after which those of the next tokens follow; NULL: none. */
static const char *values_at(const Instances *s, int f, uint64_t offset)
{
    const size_t bytes = (size_t)s->spec.value_bytes;
    if (s->shards[f].values)
        return s->shards[f].values + offset * bytes;
    return s->values ? (const char *)s->values + (s->start[f] + offset) * bytes : NULL;
}

/* Reads n tokens of file f from `offset` on, with targets and values. Returns the number of labels,
 * or -1 with a message in `error`. */
static long read_tokens(Row row, const Instances *s, int f, uint64_t offset, int n, char *error,
                        size_t size)
{
    const DataSpec *spec = &s->spec;
    const Shard *shard = &s->shards[f];
    if (row.values && values_at(s, f, offset))
        memcpy(row.values, values_at(s, f, offset + 1),
               (size_t)(n - 1) * (size_t)spec->value_bytes);
    shard_tell(spec, "reading", shard->path);
    int bad = shard_read(row.tokens, shard, offset, n, spec->vocab_size);
    if (bad >= 0) {
        shard_describe_bad_id(error, size, shard, offset + bad, spec->vocab_size);
        return -1;
    }
    if (spec->max_count > 0 &&
        sequence_repeats(row.tokens, n, spec->min_period, spec->max_period, spec->max_count)) {
        memset(row.targets, -1, n * sizeof *row.targets);
        return 0;
    }
    const long labels =
        sequence_targets(row.targets, row.tokens, shard->mask ? shard->mask + offset : NULL, n,
                         spec->mask_padding ? spec->pad_token_id : -1);
    if (!row.images)
        return labels;
    const long masked = images_read(row.images, row.targets, row.tokens, shard, spec, s->features,
                                    offset, n, error, size);
    return masked < 0 ? -1 : labels - masked;
}

static long read_cut(Row row, const Instances *s, uint64_t i, char *error, size_t size)
{
    const int T = s->spec.sequence_length, f = find_shard(s, i);
    const uint64_t offset = (i - s->first[f]) * T;
    const long labels = read_tokens(row, s, f, offset, T, error, size);
    if (s->begins)
        documents_mark(row.begins, &s->begins[f], offset, T);
    else if (labels >= 0)
        sequence_begins(row.begins, row.tokens, T, s->spec.eos_token_id);
    return labels;
}

/* A document of a packed sequence: tokens [start, start + n) of all files, from position t of the
 * sequence on. */
typedef struct {
    uint64_t start;
    uint32_t piece;
    int t, n;
    bool second; /* the second side of a pair */
} Packed;

/* Advances d to the next document of sequence i. Returns false at the end; then d->t is the number
 * of the sequence's tokens. Start with { .piece = first[i] }. */
static bool next_packed(Packed *d, const Packing *p, uint64_t i)
{
    const bool other = p->middle && d->n > 0 && !d->second;
    d->t += d->n;
    d->start += (uint64_t)d->n;
    d->piece += d->n > 0 && !other;
    d->second = other;
    if (d->piece == p->first[i + 1])
        return false;
    if (!other)
        d->start = p->start[d->piece];
    const uint32_t first = p->middle ? p->middle[d->piece] : p->length[d->piece];
    d->n = (int)(other ? p->length[d->piece] - first : first);
    return true;
}

static long read_packed(Row row, const Instances *s, uint64_t i, char *error, size_t size)
{
    long labels = 0;
    Packed d = { .piece = s->packing.first[i] };
    while (next_packed(&d, &s->packing, i)) {
        const int f = find_shard(s, d.start);
        const Row piece = { row.tokens + d.t, row.targets + d.t, row.begins + d.t,
                            row.images ? row.images + d.t : NULL,
                            row.values ? row.values + d.t * s->spec.value_bytes : NULL };
        const long found = read_tokens(piece, s, f, d.start - s->first[f], d.n, error, size);
        if (found < 0)
            return -1;
        memset(piece.begins, 0, d.n);
        piece.begins[0] = 1;
        labels += found;
    }
    row_pad(row, &s->spec, d.t);
    return labels;
}

void instance_put_values(void *values, const Instances *s, uint64_t i, const void *row, int bytes)
{
    const size_t each = (size_t)bytes, T = (size_t)s->spec.sequence_length;
    if (!s->spec.best_fit) {
        const int f = find_shard(s, i);
        const uint64_t at = s->start[f] + (i - s->first[f]) * T;
        memcpy((char *)values + (at + 1) * each, row, (T - 1) * each);
        return;
    }
    for (Packed d = { .piece = s->packing.first[i] }; next_packed(&d, &s->packing, i);)
        memcpy((char *)values + (d.start + 1) * each, (const char *)row + (size_t)d.t * each,
               (size_t)(d.n - 1) * each);
}

long instance_read(Row row, const Instances *s, uint64_t i, char *error, size_t size)
{
    return s->spec.best_fit ? read_packed(row, s, i, error, size)
                            : read_cut(row, s, i, error, size);
}

void row_pad(Row row, const DataSpec *spec, int t)
{
    const int padding = spec->pad_token_id >= 0   ? spec->pad_token_id
                        : spec->eos_token_id >= 0 ? spec->eos_token_id
                                                  : 0;
    for (int i = t; i < spec->sequence_length; i++) {
        row.tokens[i] = padding;
        row.targets[i] = -1;
        row.begins[i] = i == t;
        if (row.images)
            row.images[i] = NULL;
    }
}
