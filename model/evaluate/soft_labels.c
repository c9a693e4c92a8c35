#include "model/evaluate/soft_labels.h"

#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/hash.h"
#include "data/map.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/evaluate/reference.h"
#include "model/evaluate/sum_over_ranks.h"
#include "model/formats/adapter.h"

/* tokenizer: a hash of tokenizer.json; 0: unknown. k: the largest number of entries of a token */
typedef struct {
    char magic[8];
    uint64_t tokens, entries, tokenizer;
    uint32_t vocabulary, k, choice;
    float temperature;
    char unused[16];
} Header;
_Static_assert(sizeof(Header) == 64, "words are aligned");
static const char MAGIC[8] = "coatsft1";

/* ---- names ----------------------------------------------------------------------------------- */

static char *path_of(const Loader *l, const Config *c, const char *folder)
{
    ReferenceHashes h = reference_hashes(l, c);
    const int words[] = { c->top_k, (int)c->choice };
    h.recipe = hash_bytes(h.recipe, words, sizeof words);
    h.recipe = hash_bytes(h.recipe, &c->distill.temperature, sizeof c->distill.temperature);
    return xasprintf("%s/soft-%016llx-%016llx-%016llx.bin", folder, (unsigned long long)h.model,
                     (unsigned long long)h.recipe, (unsigned long long)h.data);
}

static uint64_t hash_of_file(const char *folder, const char *name)
{
    char *path = xasprintf("%s%s", folder, name);
    struct stat status;
    uint64_t hash = 0;
    if (stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0) {
        size_t bytes;
        const void *map = map_file(&bytes, "tokenizer", path);
        hash = hash_bytes(HASH_OF_NOTHING, map, bytes);
        unmap_file(map);
    }
    free(path);
    return hash;
}

/* Of the tokenizer that the run's checkpoints get. */
static uint64_t tokenizer_hash(const Config *c)
{
    const char *own[] = { c->tokenizer, c->load_path,
                          c->load_path && adapter_is(c->load_path) ? c->model.lora.base_path
                                                                   : NULL };
    uint64_t hash = 0;
    for (int i = 0; i < 3 && !hash; i++)
        if (own[i])
            hash = hash_of_file(own[i], "/tokenizer.json");
    if (!hash && c->tokenizer)
        hash = hash_of_file(c->tokenizer, "");
    return hash;
}

/* ---- writing --------------------------------------------------------------------------------- */

struct SoftWriter {
    const Config *config;
    char *path, *part_path;
    FILE *part;       /* this rank's entries */
    uint64_t entries; /* in `part` */
    uint64_t *words;  /* of all tokens; those of other ranks' tokens are 0 */
    uint64_t tokens;
    int *columns; /* of a micro-batch */
    float *logps;
    uint64_t *row; /* words of a sequence */
};

SoftWriter *soft_writer_open(const Loader *l, const Config *c, const char *folder)
{
    const size_t T = (size_t)c->model.max_sequence_length,
                 chosen = (size_t)c->device_train_microbatch_size * T * (size_t)c->top_k;
    SoftWriter *w = xcalloc(1, sizeof *w);
    *w = (SoftWriter){ .config = c,
                       .path = path_of(l, c, folder),
                       .tokens = loader_tokens(l),
                       .words = xcalloc(loader_tokens(l), sizeof *w->words),
                       .columns = xmalloc(chosen * sizeof *w->columns),
                       .logps = xmalloc(chosen * sizeof *w->logps),
                       .row = xmalloc(T * sizeof *w->row) };
    w->part_path = xasprintf("%s.part%d", w->path, comm_rank());
    w->part = fopen(w->part_path, "wb+");
    if (!w->part)
        die("%s: cannot write: %m", w->part_path);
    return w;
}

/* Makes the entries of a token from its k columns. Returns their number. */
static int make_entries(uint8_t *entries, double *tail, const int *column, const float *logp, int k,
                        EntryChoice choice)
{
    double probability[MOST_SOFT], sum = 0;
    int id[MOST_SOFT], count = 0;
    for (int i = 0; i < k; i++) {
        if (choice != CHOOSE_TOP && count > 0 && id[count - 1] == column[i]) { /* drawn again */
            probability[count - 1] += choice == CHOOSE_COUNTS;
            continue;
        }
        id[count] = column[i];
        probability[count++] = choice == CHOOSE_COUNTS ? 1 : exp(logp[i]);
    }
    for (int i = 0; i < count; i++)
        sum += probability[i];
    for (int i = 0; i < count; i++)
        soft_put(entries + SOFT_ENTRY * i, (uint32_t)id[i],
                 choice == CHOOSE_TOP ? probability[i] : probability[i] / sum);
    *tail = choice == CHOOSE_TOP ? fmax(1 - sum, 0) : 0;
    return count;
}

void soft_writer_put(void *writer, const Loader *l, const Batch *b, int first, const Model *m)
{
    SoftWriter *w = writer;
    const int T = m->text.T, k = m->soft.k;
    uint8_t entries[SOFT_ENTRY * MOST_SOFT];
    model_chosen_columns(m, w->columns, w->logps);
    for (int i = 0; i < m->text.attn.B && first + i < b->sequences; i++) {
        for (int t = 0; t < T; t++) {
            const size_t at = ((size_t)i * (size_t)T + (size_t)t) * (size_t)k;
            double tail = 0;
            w->row[t] = 0;
            if (w->columns[at] < 0)
                continue;
            const int count =
                make_entries(entries, &tail, w->columns + at, w->logps + at, k, w->config->choice);
            w->row[t] = soft_word(w->entries, count, tail);
            w->entries += (uint64_t)count;
            if (fwrite(entries, SOFT_ENTRY, (size_t)count, w->part) != (size_t)count)
                die("%s: cannot write: %m", w->part_path);
        }
        loader_put_values(l, b, first + i, w->words, w->row, sizeof *w->row);
    }
}

/* The number of entries of all ranks before this one; *all: of all ranks. */
static uint64_t entries_before(const SoftWriter *w, uint64_t *all)
{
    double *count = xcalloc((size_t)comm_size(), sizeof *count), before = 0, sum = 0;
    count[comm_rank()] = (double)w->entries;
    comm_sum(count, comm_size());
    for (int i = 0; i < comm_size(); i++) {
        before += i < comm_rank() ? count[i] : 0;
        sum += count[i];
    }
    free(count);
    *all = (uint64_t)sum;
    return (uint64_t)before;
}

static void copy_entries(SoftWriter *w, FILE *f, uint64_t at)
{
    char buffer[1 << 16];
    rewind(w->part);
    bool good = fseeko(f, (off_t)at, SEEK_SET) == 0;
    for (size_t n; good && (n = fread(buffer, 1, sizeof buffer, w->part)) > 0;)
        good = fwrite(buffer, 1, n, f) == n;
    if (!good || ferror(w->part) || fflush(f) != 0 || fsync(fileno(f)) != 0 || fclose(f) != 0)
        die("%s: cannot write soft labels: %m", w->path);
}

static Header header_of(const SoftWriter *w, uint64_t entries)
{
    const Config *c = w->config;
    Header h = { .tokens = w->tokens,
                 .entries = entries,
                 .tokenizer = tokenizer_hash(c),
                 .vocabulary = (uint32_t)c->model.vocab_size,
                 .k = (uint32_t)c->top_k,
                 .choice = (uint32_t)c->choice,
                 .temperature = (float)c->distill.temperature };
    memcpy(h.magic, MAGIC, sizeof h.magic);
    return h;
}

char *soft_writer_close(SoftWriter *w)
{
    uint64_t all;
    const uint64_t before = entries_before(w, &all);
    char *whole = xasprintf("%s.part", w->path), *path = w->path;
    if (all >= SOFT_OFFSETS)
        die("%llu entries of soft labels; a file has fewer than 2^38: divide the data",
            (unsigned long long)all);
    for (uint64_t i = 0; i < w->tokens; i++)
        w->words[i] += w->words[i] ? before : 0; /* the number of the first entry */
    sum_over_ranks((uint32_t *)w->words, 2 * w->tokens);
    if (comm_rank() == 0) {
        const Header h = header_of(w, all);
        FILE *f = fopen(whole, "wb");
        if (!f || fwrite(&h, sizeof h, 1, f) != 1 ||
            fwrite(w->words, sizeof *w->words, w->tokens, f) != w->tokens || fclose(f) != 0)
            die("%s: cannot write soft labels: %m", path);
    }
    comm_barrier();
    FILE *f = fopen(whole, "rb+");
    if (!f)
        die("%s: cannot write soft labels: %m", path);
    copy_entries(w, f, sizeof(Header) + w->tokens * sizeof *w->words + before * SOFT_ENTRY);
    fclose(w->part);
    unlink(w->part_path);
    comm_barrier();
    if (comm_rank() == 0 && rename(whole, path) != 0)
        die("%s: cannot rename: %m", whole);
    comm_barrier();
    free(whole), free(w->part_path), free(w->words), free(w->columns), free(w->logps), free(w->row);
    free(w);
    return path;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Returns the only file for these data in a folder, or `given` if it is a file; malloc'ed. */
static char *find(const Loader *l, const Config *c, const char *given)
{
    struct stat status;
    if (stat(given, &status) == 0 && S_ISREG(status.st_mode))
        return xstrdup(given);
    char *pattern = xasprintf("%s/soft-*-*-%016llx.bin", given,
                              (unsigned long long)reference_hashes(l, c).data);
    glob_t found;
    const int status_of_glob = glob(pattern, 0, NULL, &found);
    if (status_of_glob != 0)
        die("distill.targets: no soft labels for these data, which need %s. Make them with the "
            "teacher and the same data, sequence length and packing: ./train --score=%s --top_k=%d",
            pattern, given, c->top_k);
    if (found.gl_pathc > 1)
        die("distill.targets: %zu files for these data in %s, among them %s and %s; give the file "
            "instead of the folder",
            found.gl_pathc, given, found.gl_pathv[0], found.gl_pathv[1]);
    char *path = xstrdup(found.gl_pathv[0]);
    globfree(&found);
    free(pattern);
    return path;
}

static void check_vocabulary(const Header *h, const Config *c, const char *path)
{
    const uint64_t own = tokenizer_hash(c);
    if (h->tokenizer && own && h->tokenizer != own)
        die("%s: the teacher's tokenizer.json differs from the student's, so its ids mean other "
            "texts; use a teacher with the same tokenizer",
            path);
    if ((!h->tokenizer || !own) && h->vocabulary != (uint32_t)c->model.vocab_size)
        die("%s: the teacher has %u ids, the student %d. Vocabularies of different sizes are "
            "allowed only if both folders have the same tokenizer.json",
            path, h->vocabulary, c->model.vocab_size);
}

static void check(const Header *h, size_t bytes, const Loader *l, const Config *c, const char *path)
{
    if (bytes < sizeof *h || memcmp(h->magic, MAGIC, sizeof MAGIC) != 0)
        die("%s: is no file of soft labels", path);
    if (h->tokens != loader_tokens(l))
        die("%s: has soft labels of %llu tokens; the data have %llu", path,
            (unsigned long long)h->tokens, (unsigned long long)loader_tokens(l));
    if (bytes != sizeof *h + h->tokens * sizeof(uint64_t) + h->entries * SOFT_ENTRY)
        die("%s: is truncated: %zu bytes", path, bytes);
    check_vocabulary(h, c, path);
    if (h->temperature != (float)c->distill.temperature)
        die("%s: was written with --distill.temperature=%g; this run has %g", path, h->temperature,
            c->distill.temperature);
    if (h->k > (uint32_t)c->top_k)
        die("%s: has up to %u entries of a token; use --top_k=%u", path, h->k, h->k);
    if (c->distill.kind == DISTILL_REVERSE && h->choice != CHOOSE_TOP)
        die("%s: distill.loss reverse_kl needs the probability of all other ids; drawn ids have "
            "none: use --top_k_by=rank or --distill.loss=forward_kl",
            path);
}

const uint8_t *soft_labels_use(Loader *l, const Config *c)
{
    size_t bytes;
    char *path = find(l, c, c->distill.targets);
    const Header *h = map_file(&bytes, "distill.targets", path);
    check(h, bytes, l, c, path);
    const uint64_t *words = (const uint64_t *)(h + 1);
    loader_use_values(l, h, words);
    free(path);
    return (const uint8_t *)(words + h->tokens);
}
