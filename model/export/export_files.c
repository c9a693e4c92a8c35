#include "model/export/export_files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/folder.h"
#include "model/export/merge.h"
#include "model/checkpoint/tower.h"

/* number of elements in memory at once; or one coded_unit, if that is more */
static size_t chunk_elements(void)
{
    return safetensors_chunk / sizeof(float);
}

static size_t numel(const HfTensor *t)
{
    return t->rows * t->cols;
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Describes the exported tensors of e. */
static int outputs(CodedTensor to[CODED_TENSORS], const Export *x, const Entry *e)
{
    const HfTensor *t = &e->tensor;
    if (e->is_coded)
        return coded_tensors(to, x->coded, t->rows, t->cols);
    to[0] = (CodedTensor){ .suffix = "",
                           .dtype = x->dtype,
                           .dims = t->vector ? 1 : 2,
                           .per = 1,
                           .shape = { t->vector ? t->cols : t->rows, t->cols },
                           .bytes = safetensors_dtype_size(x->dtype) };
    return 1;
}

/* The caller frees the result. */
static char *output_name(const Entry *e, const CodedTensor *t)
{
    const size_t stem = strlen(e->tensor.name) - (e->is_coded ? strlen(".weight") : 0);
    return xasprintf("%.*s%s", (int)stem, e->tensor.name, t->suffix);
}

static size_t output_bytes(const CodedTensor *t)
{
    size_t n = safetensors_dtype_size(t->dtype);
    for (int i = 0; i < t->dims; i++)
        n *= t->shape[i];
    return n;
}

void export_divide(Export *x, size_t file_limit)
{
    size_t filled = 0;
    for (int i = 0; i < x->num_entries; i++) {
        CodedTensor to[CODED_TENSORS];
        size_t bytes = 0;
        for (int k = outputs(to, x, &x->entry[i]); k-- > 0;)
            bytes += output_bytes(&to[k]);
        if (filled > 0 && filled + bytes > file_limit) {
            x->num_files++;
            filled = 0;
        }
        filled += bytes;
        x->entry[i].file = x->num_files;
    }
    x->num_files++;
}

void export_create_files(Export *x)
{
    x->file = xcalloc((size_t)x->num_files, sizeof *x->file);
    for (int i = 0; i < x->num_files; i++) {
        char *path =
            x->num_files == 1 && !tower_exists()
                ? xasprintf("%s/model.safetensors", x->temporary)
                : xasprintf("%s/model-%05d-of-%05d.safetensors", x->temporary, i + 1, x->num_files);
        x->file[i] = safetensors_new(path);
        free(path);
    }
    for (int i = 0; i < x->num_entries; i++) {
        CodedTensor to[CODED_TENSORS];
        for (int k = 0, count = outputs(to, x, &x->entry[i]); k < count; k++) {
            char *name = output_name(&x->entry[i], &to[k]);
            safetensors_add(x->file[x->entry[i].file], name, to[k].dtype, to[k].dims, to[k].shape);
            free(name);
        }
    }
    for (int i = 0; i < x->num_files; i++) {
        safetensors_lay_out(x->file[i]);
        safetensors_create(x->file[i]);
    }
}

size_t export_bytes(const Export *x)
{
    size_t bytes = 0;
    for (int i = 0; i < x->num_files; i++)
        bytes += x->file[i]->bytes;
    return bytes;
}

json_t *export_index(const Export *x, json_t *map, size_t tower)
{
    for (int i = 0; i < x->num_files; i++)
        for (int k = 0; k < x->file[i]->count; k++)
            json_object_set_new(map, x->file[i]->tensor[k].name,
                                json_string(strrchr(x->file[i]->path, '/') + 1));
    return json_pack("{s:{s:I}, s:o}", "metadata", "total_size",
                     (json_int_t)(export_bytes(x) + tower), "weight_map", map);
}

/* ---- input ----------------------------------------------------------------------------------- */

/* value: the first value of e that is not finite in the requested type. */
static _Noreturn void die_of_value(const Export *x, const Entry *e, float value)
{
    if (!isfinite(value))
        die("%s: tensor %s holds a value that is not finite, so this model is unusable. %s",
            e->from->path, e->tensor.name, folder_say_others(x->folder));
    if (e->is_coded)
        die("%s: tensor %s holds %g, more than LLM.int8() can store: use --dtype=int8 without "
            "--layout",
            e->from->path, e->tensor.name, (double)value);
    die("%s: tensor %s holds %g, more than %s can store: %s", e->from->path, e->tensor.name,
        (double)value, x->dtype,
        strcmp(x->dtype, "F16") == 0 ? "use --dtype=bf16" : "use --dtype=f32");
}

static _Noreturn void die_of_disk(const Export *x, const SafeFile *file)
{
    die("%s; the export is incomplete. Free space or export to another folder; %s can be removed, "
        "or the next export to the same "
        "folder replaces it",
        file->problem, x->temporary);
}

static void check_sum(const Entry *e, uint32_t sum)
{
    const SafeTensor *t = e->source;
    if (t->has_sum && t->sum != sum)
        die("%s: tensor %s has the checksum %08x, expected %08x from trainer.json: its bytes have "
            "changed since they were saved. "
            "Copy the file again or export another checkpoint",
            e->from->path, t->name, sum, t->sum);
}

/* Reads a whole tensor of an adapter; the caller frees it. */
static float *read_adapter(const Export *x, const Entry *e)
{
    const SafeTensor *t = e->source;
    const size_t bytes = t->end - t->begin, n = numel(&e->tensor);
    void *raw = xmalloc(bytes);
    float *values = xmalloc(n * sizeof *values);
    safetensors_read(e->from, raw, t, 0, bytes);
    check_sum(e, crc32c(0, raw, bytes));
    convert_decode(values, t->dtype, raw, n);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            die_of_value(x, e, values[i]);
    free(raw);
    return values;
}

static Merge open_merge(const Export *x, const Entry *e)
{
    float *a = read_adapter(x, e->a), *b = read_adapter(x, e->b);
    const Merge m =
        merge_open(a, b, x->lora.rank, e->tensor.rows, e->tensor.cols, (float)lora_scale(&x->lora));
    free(a);
    free(b);
    return m;
}

/* Reads a matrix from front to back, with its adapter added, or the average of several matrices. */
typedef struct Reading {
    const Export *x;
    const Entry *e;
    size_t chunk; /* number of elements in memory at once */
    Merge merge;
    void *raw;     /* chunk elements of 4 bytes */
    float *values; /* (chunk) the elements in F32 */
    uint32_t sum;
    const Entry *viewed; /* the entry that `view` describes; NULL: none */
    CodedView view;
    /* one Reading for each model of x->other; these Readings use the same `raw` and share one
     * `values` */
    struct Reading *other;
    double *total; /* (chunk) weighted sum of the models; NULL: no average */
} Reading;

/* Starts to read, with memory for `chunk` elements at once. */
static Reading open_reading(const Export *x, size_t chunk)
{
    Reading r = { .x = x,
                  .chunk = chunk,
                  .raw = xmalloc(chunk * sizeof(float)),
                  .values = xmalloc(chunk * sizeof(float)) };
    if (x->num_other == 0)
        return r;
    float *values = xmalloc(chunk * sizeof *values);
    r.total = xmalloc(chunk * sizeof *r.total);
    r.other = xcalloc((size_t)x->num_other, sizeof *r.other);
    for (int i = 0; i < x->num_other; i++)
        r.other[i] = (Reading){ .x = &x->other[i], .chunk = chunk, .raw = r.raw, .values = values };
    return r;
}

static void close_reading(Reading *r)
{
    if (r->other)
        free(r->other[0].values);
    free(r->other);
    free(r->total);
    free(r->raw);
    free(r->values);
}

static void begin_reading(Reading *r, const Entry *e)
{
    for (int i = 0; i < r->x->num_other; i++) {
        const Entry *same = &r->x->other[i].entry[e - r->x->entry];
        CHECK(strcmp(same->tensor.name, e->tensor.name) == 0, "%s instead of %s", same->tensor.name,
              e->tensor.name);
        begin_reading(&r->other[i], same);
    }
    r->e = e;
    r->sum = 0;
    r->merge = e->a ? open_merge(r->x, e) : (Merge){ 0 };
}

/* Reads the next n elements, from `at` on, of the one model into r->values. */
static void read_model(Reading *r, size_t at, size_t n)
{
    const SafeTensor *from = r->e->source;
    const HfTensor *t = &r->e->tensor;
    if (from) {
        const size_t size = safetensors_dtype_size(from->dtype);
        safetensors_read(r->e->from, r->raw, from, at * size, n * size);
        r->sum = crc32c(r->sum, r->raw, n * size);
        convert_decode(r->values, from->dtype, r->raw, n);
    } else
        coded_source_read(r->values, r->x->source.file, r->x->source.count, t->name, t->rows,
                          t->cols, at, n);
    if (r->e->a)
        merge_add(r->values, &r->merge, at, n);
}

static size_t stored(const Entry *e)
{
    return e->source
               ? (e->source->end - e->source->begin) / safetensors_dtype_size(e->source->dtype)
               : numel(&e->tensor);
}

/* Adds the next elements, multiplied by the model's weight. A model may lack the padding rows of
 * the vocabulary. */
static void add_model(double *total, Reading *r, size_t at, size_t n)
{
    const size_t all = stored(r->e), own = at >= all ? 0 : all - at < n ? all - at : n;
    if (own > 0)
        read_model(r, at, own);
    for (size_t i = 0; i < own; i++) {
        if (!isfinite(r->values[i]))
            die_of_value(r->x, r->e, r->values[i]);
        total[i] += r->x->weight * (double)r->values[i];
    }
}

/* Reads the next n elements, from `at` on, into r->values. */
static void read_values(Reading *r, size_t at, size_t n)
{
    if (r->x->num_other == 0) {
        read_model(r, at, n);
        return;
    }
    memset(r->total, 0, n * sizeof *r->total);
    add_model(r->total, r, at, n);
    for (int i = 0; i < r->x->num_other; i++)
        add_model(r->total, &r->other[i], at, n);
    for (size_t i = 0; i < n; i++)
        r->values[i] = (float)r->total[i];
}

/* Number of elements to read: the largest over all models. */
static size_t to_read(const Reading *r)
{
    size_t most = stored(r->e);
    for (int i = 0; i < r->x->num_other; i++)
        most = stored(r->other[i].e) > most ? stored(r->other[i].e) : most;
    return most;
}

static void end_reading(Reading *r)
{
    for (int i = 0; i < r->x->num_other; i++)
        end_reading(&r->other[i]);
    if (r->e->source)
        check_sum(r->e, r->sum);
    merge_close(&r->merge);
}

/* ---- plain tensors --------------------------------------------------------------------------- */

static void write_output(const Export *x, const Entry *e, const CodedTensor *t, size_t at,
                         const void *src, size_t bytes)
{
    SafeFile *file = x->file[e->file];
    char *name = output_name(e, t);
    if (!safetensors_write(file, safetensors_find(file, name), at, src, bytes))
        die_of_disk(x, file);
    free(name);
}

/* How many of n elements of e, from `at` on, are not in padding rows of the vocabulary. Padding
 * rows are only read for the checksum. */
static size_t existing_of(const Entry *e, size_t at, size_t n)
{
    const size_t own = numel(&e->tensor);
    return at >= own ? 0 : own - at < n ? own - at : n;
}

static void write_plain(Reading *r, const Entry *e)
{
    CodedTensor to[CODED_TENSORS];
    outputs(to, r->x, e);
    begin_reading(r, e);
    const size_t all = to_read(r);
    for (size_t at = 0, n; at < all; at += n) {
        n = all - at < r->chunk ? all - at : r->chunk;
        read_values(r, at, n);
        const size_t existing = existing_of(e, at, n),
                     bad = convert_encode(r->raw, r->x->dtype, r->values, existing);
        if (bad < existing)
            die_of_value(r->x, e, r->values[bad]);
        if (existing > 0)
            write_output(r->x, e, &to[0], at * to[0].bytes, r->raw, existing * to[0].bytes);
    }
    end_reading(r);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Number of elements of as many whole units as fit into a chunk. */
static size_t step_of(const Reading *r, const Entry *e)
{
    const size_t unit = coded_unit(r->x->coded, e->tensor.cols);
    return r->chunk / unit * unit;
}

static void read_checked(Reading *r, size_t at, size_t n)
{
    const float most = coded_most(r->x->coded);
    read_values(r, at, n);
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(r->values[i]) <= most))
            die_of_value(r->x, r->e, r->values[i]);
}

/* Whether entries a and b are parts of one matrix that share a scale. */
static bool same_view(const Export *x, const Entry *a, const Entry *b)
{
    return a == b || (coded_shares(x->coded) && a->tensor.unit == b->tensor.unit &&
                      a->tensor.param == b->tensor.param);
}

/* Sets r->view to the statistics of e and of all matrices that share a scale with e. */
static void look(Reading *r, const Entry *e)
{
    if (!coded_looks_first(r->x->coded) || (r->viewed && same_view(r->x, r->viewed, e)))
        return;
    r->viewed = e;
    r->view = (CodedView){ 0 };
    const Entry *first = r->x->entry, *end = first + r->x->num_entries, *other = e;
    while (other > first && same_view(r->x, other - 1, e))
        other--;
    for (; other < end && same_view(r->x, other, e); other++) {
        const size_t all = numel(&other->tensor), step = step_of(r, other);
        begin_reading(r, other);
        for (size_t at = 0, n; at < all; at += n) {
            n = all - at < step ? all - at : step;
            read_checked(r, at, n);
            coded_look(&r->view, r->x->coded, r->values, n);
        }
        end_reading(r);
    }
}

/* Encodes and writes n elements of e from `at` on, to all of its tensors. */
static void write_chunks(const Export *x, const Entry *e, void *const out[], size_t at, size_t n)
{
    CodedTensor to[CODED_TENSORS];
    for (int i = 0, count = outputs(to, x, e); i < count; i++)
        if (to[i].per)
            write_output(x, e, &to[i], at / to[i].per * to[i].bytes, out[i],
                         (n + to[i].per - 1) / to[i].per * to[i].bytes);
}

static void write_whole(const Export *x, const Entry *e, const CodedView *v)
{
    CodedTensor to[CODED_TENSORS];
    for (int i = 0, count = outputs(to, x, e); i < count; i++) {
        const size_t bytes = output_bytes(&to[i]);
        if (to[i].per)
            continue;
        void *whole = xmalloc(bytes);
        coded_whole(whole, bytes, to[i].suffix, x->coded, v, e->tensor.rows, e->tensor.cols);
        write_output(x, e, &to[i], 0, whole, bytes);
        free(whole);
    }
}

/* Allocates, for each tensor, memory for the codes of n elements. */
static void open_chunks(void *out[CODED_TENSORS], const Export *x, const Entry *e, size_t n)
{
    CodedTensor to[CODED_TENSORS];
    memset(out, 0, CODED_TENSORS * sizeof *out);
    for (int i = 0, count = outputs(to, x, e); i < count; i++)
        out[i] = to[i].per ? xmalloc((n / to[i].per + 1) * to[i].bytes) : NULL;
}

static void close_chunks(void *out[CODED_TENSORS])
{
    for (int i = 0; i < CODED_TENSORS; i++)
        free(out[i]);
}

static void write_coded(Reading *r, const Entry *e)
{
    const size_t all = numel(&e->tensor), most = step_of(r, e), step = most < all ? most : all;
    void *out[CODED_TENSORS];
    look(r, e);
    open_chunks(out, r->x, e, step);
    begin_reading(r, e);
    for (size_t at = 0, n; at < all; at += n) {
        n = all - at < step ? all - at : step;
        read_checked(r, at, n);
        coded_encode(out, r->x->coded, &r->view, r->values, e->tensor.cols, n);
        write_chunks(r->x, e, out, at, n);
    }
    end_reading(r);
    close_chunks(out);
    write_whole(r->x, e, &r->view);
}

/* ---- calibration ----------------------------------------------------------------------------- */

static Entry *find_entry(const Export *x, const char *name)
{
    const int i = name_index_find(&x->names, name);
    CHECK(i >= 0, "there is no tensor %s", name);
    return &x->entry[i];
}

void export_read(const Export *x, const char *name, float *values)
{
    const Entry *e = find_entry(x, name);
    Reading r = open_reading(x, chunk_elements());
    begin_reading(&r, e);
    const size_t all = to_read(&r);
    for (size_t at = 0, n; at < all; at += n) {
        n = all - at < r.chunk ? all - at : r.chunk;
        read_checked(&r, at, n);
        memcpy(values + at, r.values, existing_of(e, at, n) * sizeof *values);
    }
    end_reading(&r);
    close_reading(&r);
}

void export_write_int4(Export *x, const char *name, const int8_t *codes, const float *scale)
{
    Entry *e = find_entry(x, name);
    CHECK(e->is_coded && x->coded.kind == CODED_INT4, "%s is not a matrix in int4", name);
    const size_t n = numel(&e->tensor);
    void *out[CODED_TENSORS];
    open_chunks(out, x, e, n);
    coded_int4(out, x->coded, codes, scale, n);
    write_chunks(x, e, out, 0, n);
    close_chunks(out);
    write_whole(x, e, &(CodedView){ 0 });
    e->is_written = x->is_calibrated = true;
}

/* ---- all ------------------------------------------------------------------------------------- */

void export_write(Export *x)
{
    size_t all = 0, done = 0, chunk = chunk_elements();
    for (int i = 0; i < x->num_entries; i++) {
        const size_t unit = x->is_coded ? coded_unit(x->coded, x->entry[i].tensor.cols) : 1;
        chunk = unit > chunk ? unit : chunk;
        all += numel(&x->entry[i].tensor);
    }
    Reading r = open_reading(x, chunk);
    progress_begin("exporting");
    for (int i = 0; i < x->num_entries; i++) {
        Entry *e = &x->entry[i];
        progress_show((double)done / (double)all, e->tensor.name);
        if (!e->is_written)
            (e->is_coded ? write_coded : write_plain)(&r, e);
        e->is_written = true;
        done += numel(&e->tensor);
    }
    progress_end();
    for (int i = 0; i < x->num_files; i++)
        if (!safetensors_sync(x->file[i]))
            die_of_disk(x, x->file[i]);
    close_reading(&r);
}
