/* Best-fit decreasing (as in OLMo-core and TRL), in windows of consecutive documents.
 *
 * A window limits memory, fits into caches, and costs almost nothing: at its end only a few of
 * thousands of sequences could have been filled by later documents (65,536 conversations of 700
 * tokens are 11,200 sequences of 4096). Packing sorts the sequences of a window by the length of
 * their longest document. So pack_window shuffles the sequences of a window, with the number of the
 * window as seed: the first sequences of a validation set are then like the rest. Training shuffles
 * all sequences again in each epoch. */
#include "data/packing.h"

#include "data/documents.h"
#include "data/shuffle.h"
#include "kernels/runtime/error.h"

#include <stdlib.h>
#include <string.h>

enum { WINDOW = 1 << 16, NONE = -1 };

/* ---- bins ------------------------------------------------------------------------------------ */

/* Bins, sorted by their free space: one list of bins for each number of free tokens, and a binary
 * tree over these lists. A node is true if a list below it has a bin. */
typedef struct {
    int *newest; /* (T + 1) the last bin added to each list, or NONE */
    int *next;   /* (bins) the bin that was added before this one to the same list */
    bool *any;   /* (2 leaves) node i has the children 2i and 2i + 1 */
    int leaves;  /* number of leaves: 2^k > T */
} Spaces;

static void update_tree(Spaces *r, int space)
{
    int i = r->leaves + space;
    r->any[i] = r->newest[space] != NONE;
    for (i /= 2; i > 0; i /= 2)
        r->any[i] = r->any[2 * i] || r->any[2 * i + 1];
}

static void add_bin(Spaces *r, int bin, int space)
{
    r->next[bin] = r->newest[space];
    r->newest[space] = bin;
    update_tree(r, space);
}

/* Removes the bin with the least space that is >= *space, and sets *space to the space left in this
 * bin. Returns NONE if there is no such bin. */
static int take_bin(Spaces *r, int *space)
{
    int i = r->leaves + *space;
    /* go up to the first right sibling with a bin below it, then down to the least free space */
    if (!r->any[i]) {
        while (i > 1 && (i % 2 == 1 || !r->any[i + 1]))
            i /= 2;
        if (i == 1)
            return NONE;
        for (i++; i < r->leaves;)
            i = r->any[2 * i] ? 2 * i : 2 * i + 1;
    }
    *space = i - r->leaves;
    const int bin = r->newest[*space];
    r->newest[*space] = r->next[bin];
    update_tree(r, *space);
    return bin;
}

static int by_decreasing_length(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

int best_fit_decreasing(int *bin, const uint32_t *length, int n, int T)
{
    Spaces r = { .leaves = 1 };
    /* sort keys: T - length in the upper half, the item's number in the lower half */
    uint64_t *order = xmalloc(((size_t)n + 1) * sizeof *order);
    while (r.leaves <= T)
        r.leaves *= 2;
    r.newest = xmalloc(((size_t)T + 1) * sizeof *r.newest);
    r.next = xmalloc(((size_t)n + 1) * sizeof *r.next);
    r.any = xcalloc(2 * (size_t)r.leaves, sizeof *r.any);
    memset(r.newest, 0xff, ((size_t)T + 1) * sizeof *r.newest); /* all entries become NONE */
    for (int i = 0; i < n; i++)
        order[i] = (uint64_t)((uint32_t)T - length[i]) << 32 | (uint32_t)i;
    qsort(order, (size_t)n, sizeof *order, by_decreasing_length);

    int bins = 0;
    for (int k = 0; k < n; k++) {
        const int i = (int)(uint32_t)order[k];
        int space = (int)length[i];
        bin[i] = take_bin(&r, &space);
        if (bin[i] == NONE) {
            bin[i] = bins++;
            space = T;
        }
        add_bin(&r, bin[i], space - (int)length[i]);
    }
    free(r.newest);
    free(r.next);
    free(r.any);
    free(order);
    return bins;
}

/* ---- windows --------------------------------------------------------------------------------- */

typedef struct {
    const DataSpec *spec;
    const Shard *shard; /* the current file */
    uint64_t before;    /* number of tokens in all files before `shard` */
    Packing p;
    uint64_t most_pieces, most_sequences; /* capacity of p, in pieces and in sequences */
    uint64_t windows;
    uint64_t start[WINDOW];
    uint32_t length[WINDOW], middle[WINDOW];
    int count;
    int bin[WINDOW];
    /* bins: the bins in shuffled order. at: index of each bin's next piece */
    uint32_t bins[WINDOW], at[WINDOW];
    /* with pairs: the first side of the next pair; end 0: there is none */
    uint64_t side_start, side_end;
} Packer;

static uint64_t grown(uint64_t space, uint64_t needed)
{
    while (space < needed)
        space = space ? space + space / 2 : WINDOW;
    return space;
}

static void reserve(Packer *k)
{
    Packing *p = &k->p;
    if (k->most_pieces < p->pieces + WINDOW) {
        k->most_pieces = grown(k->most_pieces, p->pieces + WINDOW);
        p->start = xrealloc(p->start, k->most_pieces * sizeof *p->start);
        p->length = xrealloc(p->length, k->most_pieces * sizeof *p->length);
        if (k->spec->pairs)
            p->middle = xrealloc(p->middle, k->most_pieces * sizeof *p->middle);
    }
    if (k->most_sequences < p->sequences + WINDOW + 1) {
        k->most_sequences = grown(k->most_sequences, p->sequences + WINDOW + 1);
        p->first = xrealloc(p->first, k->most_sequences * sizeof *p->first);
    }
}

/* Appends the pieces of the window, sequence by sequence. Within a sequence, pieces keep their
 * order in the files. */
static void pack_window(Packer *k)
{
    Packing *p = &k->p;
    if (k->count == 0)
        return;
    shard_tell(k->spec, "packing documents of", k->shard->path);
    const int bins = best_fit_decreasing(k->bin, k->length, k->count, k->spec->sequence_length);
    reserve(k);
    numpy_shuffle(k->bins, (uint64_t)bins, k->windows++, NULL, NULL);
    memset(k->at, 0, sizeof k->at);
    for (int i = 0; i < k->count; i++)
        k->at[k->bin[i]]++; /* counts the pieces of each bin */
    uint32_t next = (uint32_t)p->pieces;
    for (int b = 0; b < bins; b++) {
        const uint32_t bin = k->bins[b], pieces = k->at[bin];
        p->first[p->sequences++] = k->at[bin] = next;
        next += pieces;
    }
    for (int i = 0; i < k->count; i++) {
        const uint32_t to = k->at[k->bin[i]]++;
        p->start[to] = k->start[i];
        p->length[to] = k->length[i];
        if (p->middle)
            p->middle[to] = k->middle[i];
    }
    p->pieces += (uint64_t)k->count;
    k->count = 0;
}

/* ---- documents ------------------------------------------------------------------------------- */

/* Number of targets among tokens [start, end) of the file. */
static uint64_t count_labels(const Shard *s, uint64_t start, uint64_t end)
{
    uint64_t labels = 0;
    for (uint64_t i = start; s->mask && i < end; i++)
        labels += s->mask[i] != 0;
    return s->mask ? labels : end - start;
}

static void add_piece(Packer *k, uint64_t start, uint64_t length)
{
    Packing *p = &k->p;
    if (k->count == WINDOW)
        pack_window(k);
    if (p->pieces + (uint64_t)k->count == UINT32_MAX)
        die("%s: more than 2^32 documents cannot be packed; use fewer files, or "
            "--data.packing=concat",
            k->shard->key);
    k->start[k->count] = k->before + start;
    k->length[k->count++] = (uint32_t)length;
    p->tokens += length;
    /* the first token of a document is not a target */
    p->labels += count_labels(k->shard, start + 1, start + length);
}

/* Pieces of a split document overlap by one token, so that no target is lost. */
static void take_document(void *packer, uint64_t start, uint64_t end)
{
    Packer *k = packer;
    const uint64_t T = (uint64_t)k->spec->sequence_length;
    k->p.documents++;
    k->p.long_documents += end - start > T;
    for (; end - start > T && k->spec->split; start += T - 1)
        add_piece(k, start, T);
    if (end - start > T) {
        k->p.lost_tokens += end - start - T;
        k->p.lost_labels += count_labels(k->shard, start + T, end);
        end = start + T;
    }
    add_piece(k, start, end - start);
}

/* Takes a side of a pair. The second side follows the first side without a gap, so that a pair is
 * one range of tokens. */
static void take_side(void *packer, uint64_t start, uint64_t end)
{
    Packer *k = packer;
    const unsigned long long pair = ++k->p.documents / 2, T = (unsigned)k->spec->sequence_length;
    if (k->side_end == 0) {
        k->side_start = start;
        k->side_end = end;
        return;
    }
    if (k->side_end != start)
        die("%s: %s: the rejected side of pair %llu does not begin where its chosen side ends, but "
            "%llu tokens later; make the shards with scripts/make_pair_shards.py",
            k->shard->key, k->shard->path, pair, (unsigned long long)(start - k->side_end));
    if (end - k->side_start > T)
        die("%s: %s: pair %llu has %llu tokens; both sides must fit into one sequence of %llu "
            "(model.max_sequence_length). Give longer sequences, or make the shards with a smaller "
            "--max-length",
            k->shard->key, k->shard->path, pair, (unsigned long long)(end - k->side_start), T);
    add_piece(k, k->side_start, end - k->side_start);
    k->middle[k->count - 1] = (uint32_t)(start - k->side_start);
    /* the first token of the second side is not a target either */
    k->p.labels -= count_labels(k->shard, start, start + 1);
    k->side_end = 0;
}

static void check_sides(const Packer *k)
{
    if (k->side_end > 0)
        die("%s: %s has a document without a partner; expected preference pairs: documents 2i and "
            "2i + 1 are a chosen and a rejected side, as scripts/make_pair_shards.py writes them",
            k->shard->key, k->shard->path);
}

static void check_packing(const Packing *p, const Shard *shards, int num_shards,
                          const DataSpec *spec)
{
    uint64_t all = 0;
    for (int f = 0; f < num_shards; f++)
        all += shards[f].num_tokens;
    if (p->documents == 0)
        die("%s: the metadata of %s%s name no document; make them again, or %s", shards[0].key,
            shards[0].path, num_shards > 1 ? " and of all other files" : "",
            documents_by_eos(spec));
    if (p->labels == 0)
        die("%s: no token of the %llu documents is a target (%s%s): %s", shards[0].key,
            (unsigned long long)p->documents, shards[0].path, num_shards > 1 ? ", ..." : "",
            p->lost_labels ? "each document is cut after model.max_sequence_length tokens, "
                             "and all targets come later; --data.long_documents=split keeps the "
                             "rest of each document"
                           : "check the label masks and the ends of documents");
    if (spec->reopened)
        return;
    if (p->lost_tokens > 0)
        warn("%s: %llu of %llu documents are longer than a sequence of %d tokens; truncation "
             "removes %llu tokens, %llu of them "
             "labels. --data.long_documents=split or a larger model.max_sequence_length keeps them",
             shards[0].key, (unsigned long long)p->long_documents, (unsigned long long)p->documents,
             spec->sequence_length, (unsigned long long)p->lost_tokens,
             (unsigned long long)p->lost_labels);
    const uint64_t in_documents =
        p->tokens + p->lost_tokens - (spec->split && !spec->pairs ? p->pieces - p->documents : 0);
    if (in_documents < all)
        warn("%s: according to the metadata, %llu of %llu tokens are in no document; the run does "
             "not train on these tokens",
             shards[0].key, (unsigned long long)(all - in_documents), (unsigned long long)all);
}

Packing packing_make(const Shard *shards, int num_shards, const DataSpec *spec)
{
    CHECK(spec->sequence_length >= 2, "T %d: no label fits", spec->sequence_length);
    Packer *k = xcalloc(1, sizeof *k);
    k->spec = spec;
    for (int f = 0; f < num_shards; f++) {
        k->shard = &shards[f];
        documents_each(k->shard, spec, spec->pairs ? take_side : take_document, k);
        check_sides(k);
        k->before += k->shard->num_tokens;
    }
    pack_window(k);
    reserve(k);
    k->p.first[k->p.sequences] = (uint32_t)k->p.pieces;
    const Packing p = k->p;
    free(k);
    check_packing(&p, shards, num_shards, spec);
    return p;
}

void packing_free(Packing *p)
{
    free(p->start);
    free(p->length);
    free(p->middle);
    free(p->first);
}
