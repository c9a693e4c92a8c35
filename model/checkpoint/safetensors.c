/* safetensors [huggingface.co/docs/safetensors]: a file begins with the length N of the header, as
 * a little-endian u64. N bytes of JSON follow, padded with spaces to a multiple of 8: {"name":
 * {"dtype", "shape", "data_offsets": [begin, end)}, ...}; offsets count from the end of the header.
 * Then comes the data, which the tensors cover without holes. "__metadata__" has strings and is
 * skipped.
 *
 * The file may be damaged, so offsets and shapes are checked before use; the code divides sizes
 * instead of multiplying, because a product could overflow.
 *
 * A thread may write data, and it must not end the program: functions that write return false on an
 * error and store the reason in the SafeFile. */
#include "model/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/folder.h"

enum { MAX_HEADER = 100000000 };        /* limit of the reference implementation */
static const size_t SYNCED = 256 << 20; /* bytes written between two fsyncs */

size_t safetensors_chunk = 32 << 20;

size_t safetensors_dtype_size(const char *dtype)
{
    static const struct {
        const char *name;
        size_t size;
    } table[] = {
        { "F64", 8 },     { "I64", 8 },     { "U64", 8 }, { "F32", 4 }, { "I32", 4 },
        { "U32", 4 },     { "BF16", 2 },    { "F16", 2 }, { "I16", 2 }, { "U16", 2 },
        { "F8_E4M3", 1 }, { "F8_E5M2", 1 }, { "I8", 1 },  { "U8", 1 },  { "BOOL", 1 },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strcmp(dtype, table[i].name) == 0)
            return table[i].size;
    return 0;
}

static void read_all(const SafeFile *f, void *dst, size_t bytes, size_t at)
{
    while (bytes > 0) {
        ssize_t n = pread(f->fd, dst, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("%s: cannot read %zu bytes at offset %zu: %s", f->path, bytes, at, strerror(errno));
        if (n == 0)
            die("%s: ends at byte %zu, %zu more bytes were expected; copy the file again", f->path,
                at, bytes);
        dst = (char *)dst + n;
        at += (size_t)n;
        bytes -= (size_t)n;
    }
}

/* Stores the error, with errno's reason, in f->problem. */
static bool give_up(SafeFile *f, const char *what)
{
    char reason[256];
    free(f->problem);
    if (asprintf(&f->problem, "%s: cannot %s: %s", f->path, what,
                 strerror_r(errno, reason, sizeof reason)) < 0)
        f->problem = strdup("out of host memory");
    return false;
}

static bool write_all(SafeFile *f, const void *src, size_t bytes, size_t at)
{
    while (bytes > 0) {
        ssize_t n = pwrite(f->fd, src, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            char what[96];
            int error = errno;
            snprintf(what, sizeof what, "write %zu bytes at offset %zu", bytes, at);
            errno = error;
            return give_up(f, what);
        }
        src = (const char *)src + n;
        at += (size_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

/* ---- reading --------------------------------------------------------------------------------- */

static size_t json_size(const SafeFile *f, const char *name, const json_t *value)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        die("%s: tensor %s: the header has a size or offset that is not an integer >= 0", f->path,
            name);
    return (size_t)json_integer_value(value);
}

/* Whether the bytes of t are exactly its shape times `size` bytes. */
static bool shape_fits(const SafeTensor *t, size_t size)
{
    size_t rest = t->end - t->begin;
    bool zero = false;
    for (int i = 0; i < t->dims; i++)
        zero |= t->shape[i] == 0;
    if (zero)
        return rest == 0;
    for (int i = 0; i < t->dims; i++) {
        if (rest % t->shape[i] != 0)
            return false;
        rest /= t->shape[i];
    }
    return rest == size;
}

static void parse_tensor(const SafeFile *f, SafeTensor *t, const char *name, json_t *entry)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape"),
                 *offsets = json_object_get(entry, "data_offsets");
    if (!dtype || strlen(dtype) >= sizeof t->dtype || !json_is_array(shape) ||
        json_array_size(offsets) != 2)
        die("%s: tensor %s: the header needs \"dtype\", \"shape\" and two \"data_offsets\"",
            f->path, name);
    if (json_array_size(shape) > SAFE_DIMS)
        die("%s: tensor %s has %zu dimensions; expected at most %d", f->path, name,
            json_array_size(shape), SAFE_DIMS);

    t->name = strdup(name);
    strcpy(t->dtype, dtype);
    t->dims = (int)json_array_size(shape);
    for (int i = 0; i < t->dims; i++)
        t->shape[i] = json_size(f, name, json_array_get(shape, (size_t)i));
    t->begin = json_size(f, name, json_array_get(offsets, 0));
    t->end = json_size(f, name, json_array_get(offsets, 1));
    size_t size = safetensors_dtype_size(dtype);
    if (t->end < t->begin || (size && !shape_fits(t, size)))
        die("%s: tensor %s: the number of bytes, from %zu to %zu, does not match its shape in %s",
            f->path, name, t->begin, t->end, dtype);
}

static int by_begin(const void *a, const void *b)
{
    const SafeTensor *x = a, *y = b;
    if (x->begin == y->begin)
        return (x->end > y->end) - (x->end < y->end);
    return x->begin > y->begin ? 1 : -1;
}

/* Dies if tensors leave holes or overlap, or if their size differs from the file's. */
static void check_cover(SafeFile *f)
{
    qsort(f->tensor, (size_t)f->count, sizeof *f->tensor, by_begin);
    size_t at = 0;
    for (int i = 0; i < f->count; i++) {
        const SafeTensor *t = &f->tensor[i];
        if (t->begin != at)
            die("%s: tensor %s starts at byte %zu of the data, expected %zu: the header is damaged",
                f->path, t->name, t->begin, at);
        at = t->end;
    }
    if (at != f->bytes)
        die("%s: the header describes %zu bytes of data, the file has %zu; it is truncated or "
            "damaged: copy it again",
            f->path, at, f->bytes);
}

void safetensors_renamed(SafeFile *f)
{
    name_index_free(&f->names);
    for (int i = 0; i < f->count; i++)
        name_index_add(&f->names, f->tensor[i].name, i);
    name_index_sort(&f->names);
}

static void parse_header(SafeFile *f, const char *text, size_t length)
{
    json_error_t error;
    json_t *header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(header))
        die("%s: not a safetensors file: its header is not a JSON object: %s", f->path, error.text);
    f->tensor = xcalloc(json_object_size(header), sizeof *f->tensor);
    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry) if (strcmp(name, "__metadata__") != 0)
        parse_tensor(f, &f->tensor[f->count++], name, entry);
    json_decref(header);
    check_cover(f);
    safetensors_renamed(f);
}

SafeFile *safetensors_open(const char *path)
{
    SafeFile *f = safetensors_new(path);
    struct stat status;
    check_regular(path);
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 || fstat(f->fd, &status) != 0)
        die("%s: %s", path, strerror(errno));

    unsigned char raw[8];
    size_t file_bytes = (size_t)status.st_size;
    uint64_t length = 0;
    if (file_bytes >= sizeof raw) {
        read_all(f, raw, sizeof raw, 0);
        for (int i = 7; i >= 0; i--)
            length = length << 8 | raw[i];
    }
    if (file_bytes >= sizeof raw && memcmp(raw, "version ", sizeof raw) == 0)
        die("%s: this is a Git LFS pointer, not the file itself; get the file with git lfs pull",
            path);
    if (file_bytes < sizeof raw || length < 2 || length > MAX_HEADER ||
        length > file_bytes - sizeof raw)
        die("%s: not a safetensors file, or truncated: the file has %zu bytes, its first 8 bytes "
            "announce a header of %llu bytes",
            path, file_bytes, (unsigned long long)length);
    f->data = sizeof raw + length;
    f->bytes = file_bytes - f->data;
    char *text = xmalloc(length);
    read_all(f, text, length, sizeof raw);
    parse_header(f, text, length);
    free(text);
    return f;
}

const SafeTensor *safetensors_find(const SafeFile *f, const char *name)
{
    const int i = name_index_find(&f->names, name);
    return i < 0 ? NULL : &f->tensor[i];
}

Found safetensors_find_in(SafeFile *const *file, int count, const char *name)
{
    Found f = { 0 };
    for (int i = 0; i < count && !f.tensor; i++)
        f = (Found){ file[i], safetensors_find(file[i], name) };
    return f;
}

Found safetensors_find_ending(SafeFile *const *file, int count, const char *end)
{
    for (int i = 0; i < count; i++)
        for (int t = 0; t < file[i]->count; t++)
            if (text_ends_with(file[i]->tensor[t].name, end))
                return (Found){ file[i], &file[i]->tensor[t] };
    return (Found){ 0 };
}

char *safetensors_shape(const SafeTensor *t)
{
    char *shape = xstrdup(t->dims ? "" : "one value");
    for (int i = 0; i < t->dims; i++)
        shape = xasprintf("%s%s%zu", shape, i ? " x " : "", t->shape[i]);
    return xasprintf("%s of %s", shape, t->dtype);
}

void safetensors_read(const SafeFile *f, void *dst, const SafeTensor *t, size_t at, size_t bytes)
{
    CHECK(at + bytes <= t->end - t->begin, "%s: bytes %zu to %zu of %s", f->path, at, at + bytes,
          t->name);
    read_all(f, dst, bytes, f->data + t->begin + at);
}

/* ---- writing --------------------------------------------------------------------------------- */

SafeFile *safetensors_new(const char *path)
{
    SafeFile *f = xcalloc(1, sizeof *f);
    f->path = strdup(path);
    f->fd = -1;
    return f;
}

void safetensors_add(SafeFile *f, const char *name, const char *dtype, int dims,
                     const size_t *shape)
{
    CHECK(dims <= SAFE_DIMS && safetensors_dtype_size(dtype), "%s: %s with %d dimensions", name,
          dtype, dims);
    f->tensor = xrealloc(f->tensor, (size_t)(f->count + 1) * sizeof *f->tensor);
    SafeTensor *t = &f->tensor[f->count++];
    *t = (SafeTensor){ .name = strdup(name), .dims = dims, .end = safetensors_dtype_size(dtype) };
    strcpy(t->dtype, dtype);
    for (int i = 0; i < dims; i++) {
        t->shape[i] = shape[i];
        t->end *= shape[i];
    }
}

/* Places the tensors whose elements have `size` bytes, in the order in which they were added. */
static void place_size(SafeFile *f, SafeTensor *placed, int *count, size_t size)
{
    for (int i = 0; i < f->count; i++) {
        SafeTensor t = f->tensor[i];
        if (safetensors_dtype_size(t.dtype) != size)
            continue;
        size_t bytes = t.end;
        t.begin = f->bytes;
        t.end = f->bytes += bytes;
        placed[(*count)++] = t;
    }
}

static json_t *describe(const SafeFile *f)
{
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    for (int i = 0; i < f->count; i++) {
        const SafeTensor *t = &f->tensor[i];
        json_t *shape = json_array();
        for (int d = 0; d < t->dims; d++)
            json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
        json_object_set_new(header, t->name,
                            json_pack("{s:s, s:o, s:[II]}", "dtype", t->dtype, "shape", shape,
                                      "data_offsets", (json_int_t)t->begin, (json_int_t)t->end));
    }
    return header;
}

void safetensors_lay_out(SafeFile *f)
{
    SafeTensor *placed = xcalloc((size_t)f->count, sizeof *placed);
    int count = 0;
    for (size_t size = 8; size > 0; size /= 2)
        place_size(f, placed, &count, size);
    free(f->tensor);
    f->tensor = placed;
    safetensors_renamed(f);

    json_t *header = describe(f);
    char *text = json_dumps(header, JSON_COMPACT | JSON_PRESERVE_ORDER);
    size_t length = strlen(text), padded = (length + 7) & ~(size_t)7;
    CHECK(padded <= MAX_HEADER, "%s: a header of %zu bytes", f->path, padded);
    f->header = xmalloc(padded);
    memcpy(f->header, text, length);
    memset(f->header + length, ' ', padded - length);
    f->data = 8 + padded;
    free(text);
    json_decref(header);
}

/* Tells the watchdog that the writing thread makes progress. */
static void beat(const SafeFile *f)
{
    char doing[96];
    snprintf(doing, sizeof doing, "writing %s", path_tail(f->path));
    watchdog_beat(WORKER_SAVE, doing);
}

bool safetensors_open_write(SafeFile *f)
{
    f->fd = open(f->path, O_WRONLY | O_CLOEXEC);
    return f->fd >= 0 || give_up(f, "write");
}

void safetensors_create(SafeFile *f)
{
    f->fd = open(f->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0)
        die("%s: cannot create: %s", f->path, strerror(errno));
    unsigned char raw[8];
    for (int i = 0; i < 8; i++)
        raw[i] = (unsigned char)((uint64_t)(f->data - 8) >> 8 * i);
    if (!write_all(f, raw, sizeof raw, 0) || !write_all(f, f->header, f->data - 8, sizeof raw))
        die("%s", f->problem);
    if (ftruncate(f->fd, (off_t)(f->data + f->bytes)) != 0)
        die("%s: cannot extend to %zu bytes: %s", f->path, f->data + f->bytes, strerror(errno));
}

/* Syncs regularly: otherwise the last fsync could take minutes without a beat for the watchdog. */
bool safetensors_write(SafeFile *f, const SafeTensor *t, size_t at, const void *src, size_t bytes)
{
    CHECK(at + bytes <= t->end - t->begin, "%s: bytes %zu to %zu of %s", f->path, at, at + bytes,
          t->name);
    for (size_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < SYNCED ? bytes - done : SYNCED;
        beat(f);
        if (!write_all(f, (const char *)src + done, n, f->data + t->begin + at + done))
            return false;
        f->unsynced += n;
        if (f->unsynced >= SYNCED && !safetensors_sync(f))
            return false;
    }
    return true;
}

/* some file systems report a full disk only at this call */
bool safetensors_sync(SafeFile *f)
{
    beat(f);
    f->unsynced = 0;
    return f->fd < 0 || folder_fsync(f->fd) || give_up(f, "write");
}

void safetensors_close(SafeFile *f)
{
    if (f->fd >= 0)
        close(f->fd);
    for (int i = 0; i < f->count; i++)
        free(f->tensor[i].name);
    free(f->tensor);
    name_index_free(&f->names);
    free(f->header);
    free(f->path);
    free(f->problem);
    free(f);
}
