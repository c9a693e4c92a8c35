/* Finds documents by eos or by metadata. Metadata is needed if a chat template ends each turn of a
 * conversation with the eos. */
#include "data/documents.h"

#include "kernels/runtime/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

/* how many tokens or rows are read between two reports of progress to the watchdog (spec->beat): a
 * few milliseconds of work */
enum { TOKENS_A_BEAT = 1 << 22, ROWS_A_BEAT = 1 << 16 };

static void each_by_eos(const Shard *s, const DataSpec *spec, DocumentFn *take, void *arg)
{
    uint64_t start = 0;
    for (uint64_t i = 0; i < s->num_tokens; i++) {
        if (i % TOKENS_A_BEAT == 0)
            shard_tell(spec, "looking for documents in", s->path);
        if ((int64_t)token_at(s, i) != spec->eos_token_id)
            continue;
        take(arg, start, i + 1);
        start = i + 1;
    }
    if (start < s->num_tokens)
        take(arg, start, s->num_tokens);
}

/* ---- metadata -------------------------------------------------------------------------------- */

static char *metadata_path(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path,
               *dot = strrchr(name, '.');
    const int stem = dot && dot > name ? (int)(dot - path) : (int)strlen(path);
    return xasprintf("%.*s.csv.gz", stem, path);
}

const char *documents_by_eos(const DataSpec *spec)
{
    return spec->key ? "document_boundaries: eos in that data section"
                     : "--data.document_boundaries=eos";
}

static gzFile open_metadata(const Shard *s, const DataSpec *spec, const char *path)
{
    struct stat status;
    errno = 0;
    const bool regular = stat(path, &status) == 0 && S_ISREG(status.st_mode);
    gzFile f = regular ? gzopen(path, "rb") : NULL;
    if (!f)
        die("%s: document_boundaries metadata needs %s for %s: %s. Put it there (rows START,END as "
            "written by `dolma tokens` and "
            "scripts/make_shards.py), or let documents end at model.eos_token_id: %s",
            s->key, path, s->path, regular || errno ? strerror(errno) : "it is not a regular file",
            documents_by_eos(spec));
    gzbuffer(f, 1 << 18);
    return f;
}

/* Reads the next row, without its line end, truncated to `size`. Returns false if there is no next
 * row, or if it cannot be read completely. */
static bool read_row(gzFile f, char *row, int size)
{
    int length = 0, c, error;
    /* `?` replaces NUL, which would end the text; both make the row invalid */
    while ((c = gzgetc(f)) != -1 && c != '\n')
        if (length < size - 1)
            row[length++] = c ? (char)c : '?';
    row[length] = '\0';
    row[strcspn(row, "\r")] = '\0';
    gzerror(f, &error);
    return c == '\n' || (length > 0 && error == Z_OK);
}

/* Reads a row "12,345" or "12,345,...". */
static bool parse_row(uint64_t *start, uint64_t *end, const char *row)
{
    char *at;
    errno = 0;
    if (*row < '0' || *row > '9')
        return false;
    *start = strtoull(row, &at, 10);
    if (*at != ',' || at[1] < '0' || at[1] > '9')
        return false;
    *end = strtoull(at + 1, &at, 10);
    return (*at == '\0' || *at == ',') && errno == 0;
}

static void each_by_metadata(const Shard *s, const DataSpec *spec, DocumentFn *take, void *arg)
{
    static const char remedy[] =
        "Make both files again together, or let documents end at model.eos_token_id";
    char *path = metadata_path(s->path), row[512];
    uint64_t before = 0, start, end;
    gzFile f = open_metadata(s, spec, path);
    for (long line = 1; read_row(f, row, sizeof row); line++) {
        if (line % ROWS_A_BEAT == 1)
            shard_tell(spec, "looking for documents in", path);
        const bool parsed = parse_row(&start, &end, row),
                   fits = parsed && start >= before && end >= start && end <= s->num_tokens;
        if (!fits)
            gzclose(f);
        if (!parsed)
            die("%s:%ld: found '%.60s', expected START,END: the number of the first token of a "
                "document of %s, and the number after the document's last token. %s: %s",
                path, line, row, s->path, remedy, documents_by_eos(spec));
        if (!fits)
            die("%s:%ld: found a document of tokens %llu to %llu, expected a document within %llu "
                "to %llu: a document must begin after the previous row's document and lie in %s. "
                "%s: %s",
                path, line, (unsigned long long)start, (unsigned long long)end,
                (unsigned long long)before, (unsigned long long)s->num_tokens, s->path, remedy,
                documents_by_eos(spec));
        if (end > start)
            take(arg, start, end);
        before = end;
    }
    int error;
    const char *said = gzerror(f, &error);
    char *text = xstrdup(error == Z_ERRNO ? strerror(errno) : said);
    gzclose(f);
    if (error != Z_OK)
        die("%s: cannot read after token %llu: %s. Damaged or truncated: download it again. %s: %s",
            path, (unsigned long long)before, text, remedy, documents_by_eos(spec));
    free(text);
    free(path);
}

void documents_each(const Shard *s, const DataSpec *spec, DocumentFn *take, void *arg)
{
    if (spec->metadata)
        each_by_metadata(s, spec, take, arg);
    else
        each_by_eos(s, spec, take, arg);
}

/* ---- documents in unpacked sequences --------------------------------------------------------- */

static void add_begin(Begins *b, uint64_t at)
{
    if (b->count > 0 && b->at[b->count - 1] == at)
        return;
    if ((b->count & (b->count - 1)) == 0)
        b->at = xrealloc(b->at, (b->count ? 2 * b->count : 1) * sizeof *b->at);
    b->at[b->count++] = at;
}

static void take_begins(void *begins, uint64_t start, uint64_t end)
{
    add_begin(begins, start);
    add_begin(begins, end);
    ((Begins *)begins)->inside += end - start;
}

Begins documents_begins(const Shard *s, const DataSpec *spec)
{
    Begins b = { 0 };
    documents_each(s, spec, take_begins, &b);
    return b;
}

void documents_mark(uint8_t *begins, const Begins *b, uint64_t first, int T)
{
    uint64_t low = 0, high = b->count; /* binary search for the first boundary that is >= `first` */
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (b->at[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    memset(begins, 0, (size_t)T);
    begins[0] = 1;
    for (; low < b->count && b->at[low] < first + (uint64_t)T; low++)
        begins[b->at[low] - first] = 1;
}
