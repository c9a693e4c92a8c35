/* Token files: Dolma shards (headerless little-endian uint16 or uint32, `.npy` in name only) and
 * llm.c's `.bin`.
 *
 * Files are mapped into memory, not read. Opening a file costs one page, ranks on one host share the
 * page cache, and no file descriptor stays open. Errors are reported here,
 * before the first step. One error is found later, when a token is read: an id beyond the
 * vocabulary after a file's first tokens. */
#include "data/shard.h"

#include "data/map.h"
#include "data/pattern.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    BIN_HEADER_INTS = 256, /* llm.c: magic, version, number of tokens, zeros */
    HEAD_TOKENS = 1000,    /* tokens that are checked in every file when it is opened */
    MASK_BYTES = 1 << 20,  /* bytes that are checked in every file that may be a label mask */
    EOS_SAMPLE = 1 << 20,  /* tokens searched for the end of documents, over all files */
    EOS_FILES = 64,        /* number of files that are searched, at most */
};

typedef struct {
    char **names;
    int count;
} NameList;

/* ---- names ----------------------------------------------------------------------------------- */

static void name_add(NameList *list, const char *name)
{
    if (list->count % 64 == 0)
        list->names = xrealloc(list->names, (list->count + 64) * sizeof *list->names);
    list->names[list->count] = strdup(name);
    CHECK(list->names[list->count], "out of host memory");
    list->count++;
}

/* Refuses texts, tables and compressed files. A pattern like part-* may match them together with
 * the shards. */
static void refuse_foreign_suffix(const char *key, const char *path)
{
    static const char *const foreign[] = {
        ".gz",  ".zst",     ".zip",   ".csv", ".json", ".jsonl",
        ".txt", ".parquet", ".arrow", ".idx", ".yaml",
    };
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++)
        if (text_ends_with(path, foreign[i]))
            die("%s: %s is not a token file (%s). Use a pattern that matches token files only, "
                "such as "
                "part-*.npy; turn text into token files with scripts/make_shards.py",
                key, path, foreign[i]);
}

/* Expands a path: a file of exactly this name, or else a pattern. */
static void expand(NameList *list, const char *key, const char *path)
{
    struct stat status;
    if (stat(path, &status) == 0 || !pattern_is(path)) {
        name_add(list, path);
        return;
    }
    int error;
    Matches found = pattern_match(path, &error);
    if (error)
        die("%s: cannot list the files of the pattern '%s': %s. Check the rights of the folder",
            key, path, strerror(error));
    if (found.count == 0)
        die("%s: no file matches the pattern '%s'. Check the folder (relative paths start where "
            "the program was "
            "started) and quote the pattern in YAML",
            key, path);
    for (int i = 0; i < found.count; i++)
        name_add(list, found.path[i]);
    pattern_free(&found);
}

static NameList expand_all(const char *key, char **paths, int num_paths)
{
    NameList list = { 0 };
    for (int i = 0; i < num_paths; i++)
        expand(&list, key, paths[i]);
    for (int i = 0; i < list.count; i++)
        refuse_foreign_suffix(key, list.names[i]);
    return list;
}

static void name_list_free(NameList *list)
{
    for (int i = 0; i < list->count; i++)
        free(list->names[i]);
    free(list->names);
}

/* ---- opening one file ------------------------------------------------------------------------ */

/* Reads llm.c's header, if the file has one. The header's dtype overrides memmap_dtype. */
static bool read_bin_header(Shard *s)
{
    int32_t header[3];
    size_t header_bytes = BIN_HEADER_INTS * sizeof(int32_t);
    if (s->map_bytes < header_bytes)
        return false;
    memcpy(header, s->map, sizeof header);
    if (header[0] != 20240520 && header[0] != 20240801)
        return false;

    int version = header[0] == 20240520 ? 1 : 7;
    s->itemsize = header[0] == 20240520 ? 2 : 4;
    if (header[1] != version)
        die("%s: %s has the magic number %d of llm.c, but version %d where %d is expected: make it "
            "again "
            "with llm.c's dev/data scripts",
            s->key, s->path, header[0], header[1], version);
    s->num_tokens = (uint32_t)header[2];
    size_t expected = header_bytes + s->num_tokens * s->itemsize;
    if (s->num_tokens == 0)
        die("%s: the header of %s says 0 tokens: make it again, or leave it out", s->key, s->path);
    if (s->map_bytes != expected)
        die("%s: the header of %s says %llu tokens of %d bytes, so it should have %zu bytes, but "
            "it has %zu: "
            "truncated? Download or make it again",
            s->key, s->path, (unsigned long long)s->num_tokens, s->itemsize, expected,
            s->map_bytes);
    s->tokens = (const uint8_t *)s->map + header_bytes;
    return true;
}

/* Whether tokens have twice the configured size. Then every second number is an upper half: 0 or
 * (4-byte tokens, large vocabularies) 1 to 3, unlike any text. (Tokens of half the configured size
 * give ids beyond every vocabulary.) */
static bool looks_wider(const Shard *s, uint64_t count)
{
    bool low_halves_differ = false;
    if (count < 64)
        return false;
    for (uint64_t i = 0; i + 1 < count; i += 2) {
        if (token_at(s, i + 1) > 3)
            return false;
        low_halves_differ |= token_at(s, i) > 3;
    }
    return low_halves_differ;
}

/* Whether the file is a label mask, which a pattern for a whole folder may match: all its bytes are
 * 0 or 1, and some upper bytes of tokens are 1. The mask of a long prompt begins with many zeros,
 * so up to MASK_BYTES bytes are checked. In a token file, a byte above 1 soon ends the check. */
static bool looks_like_mask(const Shard *s)
{
    const uint8_t *byte = s->tokens;
    const size_t bytes = s->num_tokens * (size_t)s->itemsize,
                 most = bytes < MASK_BYTES ? bytes : MASK_BYTES;
    bool in_upper_halves = false;
    for (size_t i = 0; i < most; i++) {
        if (byte[i] > 1)
            return false;
        in_upper_halves |= byte[i] && i % (size_t)s->itemsize > 0;
    }
    return in_upper_halves && bytes >= 64;
}

/* Checks the first page of a file for a foreign format, a wrong dtype, and ids of another
 * tokenizer. */
static void check_head(const Shard *s, bool has_header, int vocab_size)
{
    uint64_t count = s->num_tokens < HEAD_TOKENS ? s->num_tokens : HEAD_TOKENS;
    if (!has_header && looks_like_mask(s))
        die("%s: %s looks like a label mask, not like tokens: its bytes are 0 and 1. Use a "
            "narrower pattern, such as "
            "'folder/token_ids_part_*.npy'; masks go into label_mask_paths",
            s->key, s->path);
    if (!has_header && looks_wider(s, count))
        die("%s: %s looks like %d-byte tokens: in its first %llu %d-byte numbers every second one "
            "is 0 to 3. %s",
            s->key, s->path, 2 * s->itemsize, (unsigned long long)count, s->itemsize,
            s->itemsize == 2
                ? "Set data.memmap_dtype to uint32"
                : "Convert it: numpy.fromfile(file, 'int64').astype('uint32').tofile(...)");
    int ids[HEAD_TOKENS];
    int bad = shard_read(ids, s, 0, (int)count, vocab_size);
    if (bad >= 0) {
        char text[4096];
        shard_describe_bad_id(text, sizeof text, s, bad, vocab_size);
        die("%s", text);
    }
}

static const char *key_of(const DataSpec *spec)
{
    return spec->key ? spec->key : "data.paths";
}

static Shard shard_open(const char *path, const DataSpec *spec)
{
    Shard s = { .key = key_of(spec), .path = strdup(path), .itemsize = spec->itemsize };
    CHECK(s.path, "out of host memory");
    s.map = map_file(&s.map_bytes, s.key, path);
    if (s.map_bytes >= 6 && memcmp(s.map, "\x93NUMPY", 6) == 0)
        die("%s: %s has a numpy header; token files have none, only the numbers as written by "
            "ndarray.tofile. "
            "Convert it: python3 -c \"import numpy; numpy.load('%s').tofile('tokens.npy')\"",
            s.key, path, path);
    if (s.map_bytes >= 8 && memcmp(s.map, "BIN.TOK\n", 8) == 0)
        die("%s: %s is a token file of llmq, which is not supported. Use headerless uint16 or "
            "uint32 tokens "
            "(scripts/make_shards.py) or llm.c's .bin",
            s.key, path);

    bool has_header = read_bin_header(&s);
    if (!has_header) {
        if (s.map_bytes % s.itemsize)
            die("%s: %s has %zu bytes, which is not a multiple of %d, the size of a token: "
                "truncated, or of "
                "another type? Download it again or set data.memmap_dtype (now %s)",
                s.key, path, s.map_bytes, s.itemsize, s.itemsize == 2 ? "uint16" : "uint32");
        s.tokens = s.map;
        s.num_tokens = s.map_bytes / s.itemsize;
    }
    check_head(&s, has_header, spec->vocab_size);
    return s;
}

static const char *mask_key_of(const DataSpec *spec)
{
    return spec->key ? spec->key : "data.label_mask_paths";
}

static void open_mask(Shard *s, const DataSpec *spec, const char *path)
{
    const char *key = mask_key_of(spec);
    size_t bytes;
    s->mask = map_file(&bytes, key, path);
    if (bytes != s->num_tokens)
        die("%s: %s has %zu bytes, but %s has %llu tokens; a label mask is a headerless file of "
            "one byte (0 or 1) for each token",
            key, path, bytes, s->path, (unsigned long long)s->num_tokens);
}

/* Whether any byte of the mask is not 0. The first such byte must be 1: other values, such as the
 * characters 0 and 1, are an error. */
static bool has_label(const Shard *s, const char *key, const char *path)
{
    uint64_t i = 0;
    while (i < s->num_tokens && s->mask[i] == 0)
        i++;
    if (i < s->num_tokens && s->mask[i] != 1)
        die("%s: %s: byte %llu is %d; expected 0 or 1, as written by numpy.array(mask, "
            "bool).tofile(...). Make the mask again",
            key, path, (unsigned long long)i, s->mask[i]);
    return i < s->num_tokens;
}

/* Dies if no mask has a label, for example after a wrong chat template: nothing would be learned,
 * and the loss would not show it. */
static void check_masks(const Shard *shards, const NameList *masks, const DataSpec *spec)
{
    int empty = 0, first = 0;
    for (int i = masks->count - 1; i >= 0; i--)
        if (!has_label(&shards[i], mask_key_of(spec), masks->names[i])) {
            empty++;
            first = i;
        }
    char others[48] = "";
    if (empty > 1)
        snprintf(others, sizeof others, " (and %d other%s)", empty - 1, empty > 2 ? "s" : "");
    if (empty > 0 && empty == masks->count)
        die("%s: %s%s: all bytes are 0, so that no token is a target and nothing can be learned. "
            "Make the masks again (does the "
            "chat template mark the assistant's turns?), or leave label_mask_paths out to train on "
            "every token",
            mask_key_of(spec), masks->names[first], others);
    if (empty > 0 && !spec->reopened)
        warn("%s: %s%s: all bytes are 0: nothing is learned from its tokens", mask_key_of(spec),
             masks->names[first], others);
}

/* The values next to a.npy are in a.SUFFIX. */
static void open_values(Shard *s, const DataSpec *spec)
{
    const char *dot = strrchr(s->path, '.');
    const int stem = dot && !strchr(dot, '/') ? (int)(dot - s->path) : (int)strlen(s->path);
    char *path = xasprintf("%.*s.%s", stem, s->path, spec->value_suffix);
    size_t bytes;
    s->values = map_file(&bytes, key_of(spec), path);
    if (bytes != s->num_tokens * (size_t)spec->value_bytes)
        die("%s: %s has %zu bytes, but %s has %llu tokens, with %d bytes of values each",
            key_of(spec), path, bytes, s->path, (unsigned long long)s->num_tokens,
            spec->value_bytes);
    free(path);
}

void shard_tell(const DataSpec *spec, const char *verb, const char *path)
{
    char doing[96];
    if (!spec->beat)
        return;
    snprintf(doing, sizeof doing, "%s %s", verb, path_tail(path));
    spec->beat(doing);
}

/* ---- all files ------------------------------------------------------------------------------- */

Shard *shards_open(int *num, const DataSpec *spec)
{
    CHECK(spec->itemsize == 2 || spec->itemsize == 4, "itemsize %d", spec->itemsize);
    NameList names = expand_all(key_of(spec), spec->paths, spec->num_paths);
    NameList masks =
        expand_all(mask_key_of(spec), spec->label_mask_paths, spec->num_label_mask_paths);
    if (names.count == 0)
        die("%s is empty: name at least one file of tokens", key_of(spec));
    if (masks.count > 0 && masks.count != names.count)
        die("%s names %d files, %s %d: every token file needs its mask, in the same order",
            spec->key ? xasprintf("%s: label_mask_paths", spec->key) : "data.label_mask_paths",
            masks.count, spec->key ? "its paths" : "data.paths", names.count);

    Shard *shards = xcalloc(names.count, sizeof *shards);
    for (int i = 0; i < names.count; i++) {
        shard_tell(spec, "opening", names.names[i]);
        shards[i] = shard_open(names.names[i], spec);
        if (masks.count > 0)
            open_mask(&shards[i], spec, masks.names[i]);
        if (spec->value_suffix)
            open_values(&shards[i], spec);
    }
    check_masks(shards, &masks, spec);
    *num = names.count;
    name_list_free(&names);
    name_list_free(&masks);
    return shards;
}

void shards_open_others(Shard *shards, int num, const DataSpec *spec, const char *key, char **paths,
                        int num_paths, void (*open)(void *who, Shard *s, const char *path),
                        void *who)
{
    NameList names = expand_all(key, paths, num_paths);
    if (names.count != num)
        die("%s names %d files, %s %d: every token file needs its index of images, in the same "
            "order",
            key, names.count, spec->key ? "its paths" : "data.paths", num);
    for (int i = 0; i < num; i++)
        open(who, &shards[i], names.names[i]);
    name_list_free(&names);
}

void shards_close(Shard *shards, int num)
{
    for (int i = 0; i < num; i++) {
        unmap_file(shards[i].map);
        unmap_file(shards[i].mask);
        unmap_file(shards[i].values);
        unmap_file(shards[i].image_map);
        free(shards[i].images_before);
        free(shards[i].path);
    }
    free(shards);
}

int shard_read(int *ids, const Shard *s, uint64_t first, int count, int vocab_size)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t id = token_at(s, first + i);
        largest = id > largest ? id : largest;
        ids[i] = (int)id;
    }
    if (largest < (uint32_t)vocab_size)
        return -1;
    int bad = 0;
    while ((uint32_t)ids[bad] < (uint32_t)vocab_size)
        bad++;
    return bad;
}

void shard_describe_bad_id(char *text, size_t size, const Shard *s, uint64_t offset, int vocab_size)
{
    uint32_t id = token_at(s, offset);
    bool two_ids =
        s->itemsize == 4 && id >> 16 < (uint32_t)vocab_size && (id & 0xffff) < (uint32_t)vocab_size;
    snprintf(
        text, size, "%s: %s: token %llu (counted from 0) is %u, but the vocabulary has %d ids. %s",
        s->key, s->path, (unsigned long long)offset, id, vocab_size,
        two_ids
            ? "As two 2-byte numbers it fits: should data.memmap_dtype (now uint32) be uint16?"
            : "Was it tokenized for another model? Use that tokenizer's model.vocab_size, check "
              "data.memmap_dtype, or tokenize again");
}

/* known: ids that end documents in well-known data. 50279 ends documents of Dolma v1.5 and v1.6,
 * although tokenizer files and some configurations say 0; 100257 is the eos of the dolma2
 * tokenizer. The function samples the starts of files spread over the list. */
void shards_check_eos(const Shard *shards, int num, const DataSpec *spec)
{
    static const int known[] = { 0, 50279, 100257 };
    enum { KNOWN = sizeof known / sizeof known[0] };
    uint64_t seen = 0, eos = 0, others[KNOWN] = { 0 };
    int files = num < EOS_FILES ? num : EOS_FILES;
    if (spec->eos_token_id < 0)
        return;
    for (int f = 0; f < files; f++) {
        const Shard *s = &shards[(uint64_t)f * num / files];
        uint64_t count = s->num_tokens < EOS_SAMPLE / (uint64_t)files
                             ? s->num_tokens
                             : EOS_SAMPLE / (uint64_t)files;
        for (uint64_t i = 0; i < count; i++) {
            int id = (int)token_at(s, i);
            eos += id == spec->eos_token_id;
            for (int k = 0; k < KNOWN; k++)
                others[k] += id == known[k] && id != spec->pad_token_id && id != spec->eos_token_id;
        }
        seen += count;
    }
    int best = 0;
    for (int k = 1; k < KNOWN; k++)
        best = others[k] > others[best] ? k : best;
    if (others[best] > 10 * eos)
        warn("model.eos_token_id is %d, which occurs %llu times in %llu sampled tokens, while %d "
             "occurs %llu times: if this token ends documents, set model.eos_token_id to %d",
             spec->eos_token_id, (unsigned long long)eos, (unsigned long long)seen, known[best],
             (unsigned long long)others[best], known[best]);
    else if (eos == 0)
        warn("model.eos_token_id is %d, which does not occur in %llu sampled tokens: %s does not "
             "mark the ends of documents, or marks them with another id",
             spec->eos_token_id, (unsigned long long)seen, shards[0].path);
}
