/* Maps elements of units to bytes of files.
 *
 * The files describe the model, not the run: they do not depend on the number of ranks, and contain
 * neither padding of units nor padding rows of the vocabulary. A rank owns a range of elements of
 * each unit; it copies the intersection of that range with each tensor to or from the tensor's
 * offset in the file. Ranks with the same range share the work of writing. Reading uses chunks of
 * bounded size. Writing has two steps: first all slices of this rank are copied to one buffer in
 * host memory, in the order of the entries; then this buffer is written to the files. Training
 * waits only for the first step.
 *
 * 8-bit states are copied unchanged: codes, and the scales of all groups of a tensor. If a group
 * contains elements of two tensors, its scales are stored with both tensors.
 *
 * One rank writes each byte of a tensor. Each copy of the model reads every byte, and checks it
 * once. So each rank computes the checksum of its own slice; the exclusive or of the shifted
 * checksums is the checksum of the tensor. */
#include "model/checkpoint/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/tower.h"
#include "model/store/param_store_sizes.h"

static Range intersect(Range a, Range b)
{
    Range r = { a.first > b.first ? a.first : b.first, a.end < b.end ? a.end : b.end };
    return r.first < r.end ? r : (Range){ 0, 0 };
}

/* ---- entries --------------------------------------------------------------------------------- */

static const char *dtype_in_file(DType d)
{
    static const char *const name[] = { [F32] = "F32",      [BF16] = "BF16",   [E4M3] = "F8_E4M3",
                                        [E5M2] = "F8_E5M2", [DYNAMIC8] = "U8", [UDYNAMIC8] = "U8" };
    return name[d];
}

/* Adds `entry`, whose kind, state and position are set already, to the layout for the tensor t. */
static LayoutEntry *add_entry(Layout *l, LayoutEntry entry, const HfTensor *t, const char *suffix)
{
    l->entry = xrealloc(l->entry, (size_t)(l->num_entries + 1) * sizeof *l->entry);
    LayoutEntry *p = &l->entry[l->num_entries++];
    *p = entry;
    p->per = 1;
    const int length = snprintf(p->name, sizeof p->name, "%s%s", t->name, suffix);
    CHECK(length < (int)sizeof p->name, "the name %s%s is too long", t->name, suffix);
    return p;
}

static void add_values(Layout *l, LayoutEntry entry, const HfTensor *t, const char *suffix,
                       Format f)
{
    LayoutEntry *p = add_entry(l, entry, t, suffix);
    p->dtype = dtype_in_file(f.dtype);
    p->bytes = dtype_size(f.dtype);
    p->count = p->held = t->rows * t->cols;
    if (p->cut)
        p->held /= (size_t)p->cut->tensor_ranks;
    p->dims = t->vector ? 1 : 2;
    p->shape[0] = t->vector ? t->cols : t->rows;
    p->shape[1] = t->cols;
    p->max_rows = t->vector ? t->cols : t->max_rows;
}

/* shape (groups, 1) */
static void add_scales(Layout *l, LayoutEntry entry, const HfTensor *t, const char *suffix,
                       Format f)
{
    if (!format_has_scales(f))
        return;
    CHECK(f.group && PARAM_ALIGN % f.group == 0, "a state in %s", format_name(f));
    LayoutEntry *p = add_entry(l, entry, t, suffix);
    size_t group = (size_t)f.group, end = p->first + t->rows * t->cols;
    const size_t ranks = p->cut ? (size_t)p->cut->tensor_ranks : 1;
    /* a scale is an absmax, an fp8_pair of kernels/fp8.h, or S */
    p->dtype = format_is_dynamic8(f) ? "F32" : f.expand ? "U32" : "BF16";
    p->per = group;
    p->bytes = format_scale_bytes(f, group);
    p->first /= group;
    p->count = (end + group - 1) / group - p->first;
    p->held = p->count / ranks;
    p->dims = 2;
    p->shape[0] = p->max_rows = p->count;
    p->shape[1] = 1;
}

static void add_states(Layout *l, LayoutEntry entry, const HfTensor *t, const ParamStore *store)
{
    const bool matrix = store->shape[t->unit].param[t->param].is_operand;
    for (int i = 0; i < store->optimizer->num_states; i++) {
        if (store->optimizer->state[i].of == (matrix ? STATE_OF_OTHERS : STATE_OF_MATRICES))
            continue;
        const Format format = optimizer_format(store->optimizer, i, &store->recipe,
                                               store->shape[t->unit].kind->is_layer);
        char suffix[64];
        entry.state = i;
        entry.kind = ENTRY_STATE;
        snprintf(suffix, sizeof suffix, ".%s", store->optimizer->state[i].name);
        add_values(l, entry, t, suffix, format);
        entry.kind = ENTRY_SCALE;
        snprintf(suffix, sizeof suffix, ".%s.scale", store->optimizer->state[i].name);
        add_scales(l, entry, t, suffix, format);
    }
}

static void add_tensor(Layout *l, LayoutKind kind, const ParamStore *store, const HfTensor *t)
{
    const UnitLayout *shape = &store->shape[t->unit];
    const Param *p = &shape->param[t->param];
    const Region region = p->region;
    const size_t in_param = t->first / (size_t)p->tensor_ranks;
    const LayoutEntry entry = { .kind = ENTRY_WEIGHT,
                                .unit = t->unit,
                                .param = t->param,
                                .region = region,
                                .first = p->offset + in_param,
                                .cut = p->tensor_ranks > 1 ? p : NULL,
                                .in_param = in_param,
                                .in_whole = t->first,
                                .is_copy = shape->tensor_ranks > 1 && p->tensor_ranks == 1 &&
                                           store->tensor_rank > 0 };
    const bool low = t->adapter || t->with_adapter;
    HfTensor named = *t;
    if (kind == LAYOUT_ADAPTER && t->with_adapter)
        hf_adapter_name(named.name, t->name, NULL);
    if (kind == LAYOUT_MODEL       ? !t->adapter
        : kind == LAYOUT_OPTIMIZER ? false
                                   : low == (kind == LAYOUT_ADAPTER))
        add_values(l, entry, &named, "",
                   region == TRAINED ? store->recipe.master : store->recipe.frozen);
    else if (kind == LAYOUT_OPTIMIZER && region == TRAINED)
        add_states(l, entry, t, store);
}

/* Assigns units to files: if a unit does not fit into the current file, it starts the next file. */
static void divide(Layout *l, int num_units, size_t limit)
{
    size_t *bytes = xcalloc((size_t)num_units, sizeof *bytes), filled = 0;
    int *file = xcalloc((size_t)num_units, sizeof *file), last = 0;
    for (int i = 0; i < l->num_entries; i++)
        bytes[l->entry[i].unit] += l->entry[i].count * l->entry[i].bytes;
    for (int u = 0; u < num_units; u++) {
        /* the last unit of a model with a tied head and no norm weights is empty */
        if (filled > 0 && bytes[u] > 0 && filled + bytes[u] > limit) {
            last++;
            filled = 0;
        }
        filled += bytes[u];
        file[u] = last;
    }
    for (int i = 0; i < l->num_entries; i++)
        l->entry[i].file = file[l->entry[i].unit];
    l->num_files = last + 1;
    free(bytes);
    free(file);
}

Layout layout_make(const char *folder, LayoutKind kind, const ParamStore *store, size_t file_limit)
{
    Layout l = { 0 };
    for (int i = 0; i < store->num_tensors; i++)
        add_tensor(&l, kind, store, &store->tensor[i]);
    l.sum = xcalloc((size_t)l.num_entries, sizeof *l.sum);
    for (int i = 0; i < l.num_entries; i++)
        name_index_add(&l.names, l.entry[i].name, i);
    name_index_sort(&l.names);
    if (!folder)
        return l;
    divide(&l, store->num_units, kind == LAYOUT_ADAPTER ? SIZE_MAX : file_limit);
    l.file = xcalloc((size_t)l.num_files, sizeof *l.file);
    for (int i = 0; i < l.num_files; i++) {
        char path[4096];
        if (kind == LAYOUT_OPTIMIZER)
            snprintf(path, sizeof path, "%s/optimizer-%05d.states", folder, i + 1);
        else if (kind == LAYOUT_ADAPTER)
            snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
        else if (l.num_files == 1 && !tower_exists())
            snprintf(path, sizeof path, "%s/model.safetensors", folder);
        else
            snprintf(path, sizeof path, "%s/model-%05d-of-%05d.safetensors", folder, i + 1,
                     l.num_files);
        l.file[i] = safetensors_new(path);
        for (int k = 0; k < l.num_entries; k++)
            if (l.entry[k].file == i)
                safetensors_add(l.file[i], l.entry[k].name, l.entry[k].dtype, l.entry[k].dims,
                                l.entry[k].shape);
        safetensors_lay_out(l.file[i]);
    }
    return l;
}

void layout_free(Layout *l)
{
    for (int i = 0; l->file && i < l->num_files; i++)
        safetensors_close(l->file[i]);
    free(l->file);
    free(l->entry);
    name_index_free(&l->names);
    free(l->sum);
    *l = (Layout){ 0 };
}

/* ---- device memory --------------------------------------------------------------------------- */

/* This rank's range of the entry's region, counted in units of the entry's `per`. The range is
 * empty for region QUANTIZED, because files have another format. */
static Range held_by(const LayoutEntry *p, const Shard *s)
{
    const Slice own = p->kind == ENTRY_WEIGHT ? s->slice[p->region] : shard_state(s, p->state);
    return p->region == QUANTIZED ? (Range){ 0, 0 }
                                  : (Range){ own.first / p->per, (own.first + own.count) / p->per };
}

static const Tensor *tensor_of(const LayoutEntry *p, const Shard *s)
{
    return p->kind == ENTRY_WEIGHT ? &s->slice[p->region].stored : &s->state[p->state];
}

/* The address of element i of the entry's region, which this rank holds. i counts units of
 * `per`. */
static char *address_of(const LayoutEntry *p, const Shard *s, size_t i)
{
    const Tensor *t = tensor_of(p, s);
    return (char *)(p->kind == ENTRY_SCALE ? t->scale : t->data) +
           (i - held_by(p, s).first) * p->bytes;
}

Tensor layout_part(const LayoutEntry *p, const Shard *s)
{
    const Tensor *t = tensor_of(p, s);
    const size_t group = t->format.group ? (size_t)t->format.group : 1;
    const Range entry = { p->first / group * group,
                          (p->first + p->held + group - 1) / group * group };
    const Range r = intersect(held_by(p, s), entry);
    const Slice own = p->kind == ENTRY_WEIGHT ? s->slice[p->region] : shard_state(s, p->state);
    return r.end > r.first ? slice_view(&own, *t, r.first, r.end - r.first) : (Tensor){ 0 };
}

/* Sets *at to the position, in the file's tensor, of element i of the entry's region. Returns how
 * many elements, up to `end`, are consecutive both in the region and in the file. */
static size_t run_of(const LayoutEntry *p, size_t i, size_t end, size_t *at)
{
    *at = i - p->first;
    if (!p->cut)
        return end - i;
    const size_t n = param_run(p->cut, p->in_param + *at * p->per, at) / p->per;
    *at = (*at - p->in_whole) / p->per;
    return n < end - i ? n : end - i;
}

/* ---- checksums ------------------------------------------------------------------------------- */

/* The contribution to a checksum by elements [at, at + n) of a tensor that has `count` elements of
 * `size` bytes. sum: the checksum of these elements alone. */
static uint32_t run_sum(uint32_t sum, size_t at, size_t n, size_t count, size_t size)
{
    return crc32c_shift(sum, (count - at - n) * size);
}

/* Combines the contributions of the group's ranks. */
static void sum_over(Layout *l, Ranks g)
{
    const size_t n = (size_t)l->num_entries;
    uint32_t *all = xmalloc((size_t)comm_group_size(g) * n * sizeof *all);
    comm_gather(all, l->sum, n * sizeof *all, g);
    memset(l->sum, 0, n * sizeof *l->sum);
    for (size_t i = 0; i < (size_t)comm_group_size(g) * n; i++)
        l->sum[i % n] ^= all[i];
    free(all);
}

void layout_sum(Layout *l)
{
    sum_over(l, RANKS_ALL);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* The elements of an entry that this rank writes. */
static Range own_part(const LayoutEntry *p, const Range *own)
{
    if (p->is_copy)
        return (Range){ 0, 0 };
    Range region = own[p->unit * NUM_REGIONS + (int)p->region];
    return intersect((Range){ region.first / p->per, region.end / p->per },
                     (Range){ p->first, p->first + p->held });
}

size_t layout_bytes(const Layout *l, const Range *own)
{
    size_t bytes = 0;
    for (int i = 0; i < l->num_entries; i++) {
        Range r = own_part(&l->entry[i], own);
        bytes += (r.end - r.first) * l->entry[i].bytes;
    }
    return bytes;
}

void layout_snapshot(void *snapshot, const Layout *l, const Range *own, const ParamStore *store)
{
    char *dst = snapshot;
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        Range r = own_part(p, own);
        size_t bytes = (r.end - r.first) * p->bytes;
        if (bytes)
            device_get(dst, address_of(p, &store->shard[p->unit], r.first), bytes);
        dst += bytes;
    }
}

const char *layout_write(Layout *l, const Range *own, const void *snapshot)
{
    const char *src = snapshot;
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        SafeFile *file = l->file[p->file];
        const Range r = own_part(p, own);
        l->sum[i] = 0;
        if (r.first == r.end)
            continue;
        if (file->fd < 0 && !safetensors_open_write(file))
            return file->problem;
        const SafeTensor *t = safetensors_find(file, p->name);
        for (size_t e = r.first, n, at; e < r.end; e += n, src += n * p->bytes) {
            n = run_of(p, e, r.end, &at);
            if (!safetensors_write(file, t, at * p->bytes, src, n * p->bytes))
                return file->problem;
            l->sum[i] ^= run_sum(crc32c(0, src, n * p->bytes), at, n, p->count, p->bytes);
        }
    }
    for (int i = 0; i < l->num_files; i++)
        if (!safetensors_sync(l->file[i]))
            return l->file[i]->problem;
    return NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

static const char *shape_text(char text[64], int dims, const size_t *shape)
{
    int n = snprintf(text, 64, "(");
    for (int i = 0; i < dims && n < 50; i++)
        n += snprintf(text + n, (size_t)(64 - n), i ? ", %zu" : "%zu", shape[i]);
    snprintf(text + n, (size_t)(64 - n), ")");
    return text;
}

static void check_entry(const LayoutEntry *p, const SafeFile *file, const SafeTensor *t)
{
    char found[64], expected[64];
    if (p->kind == ENTRY_WEIGHT && !convert_knows(t->dtype))
        die("%s: tensor %s is stored as %s; expected F32, BF16 or F16", file->path, t->name,
            t->dtype);
    if (strcmp(t->dtype, p->dtype) != 0 && (!convert_knows(t->dtype) || !convert_knows(p->dtype)))
        die("%s: tensor %s is stored as %s, but the recipe and the optimizer need %s; use the "
            "recipe "
            "and the optimizer of the saved run, or "
            "start a new run with new moments: --load_path of this folder, --reset_optimizer_state "
            "and another "
            "--save_folder",
            file->path, t->name, t->dtype, p->dtype);
    bool fits = t->dims == p->dims && (t->shape[0] == p->shape[0] || t->shape[0] == p->max_rows) &&
                (p->dims == 1 || t->shape[1] == p->shape[1]);
    if (!fits)
        die("%s: tensor %s has shape %s, the configured model needs %s; the configuration must "
            "describe the model in "
            "that folder%s",
            file->path, t->name, shape_text(found, t->dims, t->shape),
            shape_text(expected, p->dims, p->shape),
            text_ends_with(file->path, "/adapter_model.safetensors")
                ? ", and the base must be the one with which the adapters were trained"
                : "");
}

static size_t numel(const SafeTensor *t)
{
    return t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
}

void layout_fetch(EntryReader *r, void *to, const char *dtype, size_t at, size_t n)
{
    const LayoutEntry *p = r->entry;
    const SafeTensor *t = r->from.tensor;
    const bool same = t && strcmp(t->dtype, dtype) == 0;
    char reading[64];
    snprintf(reading, sizeof reading, "reading %s", path_tail(r->from.file->path));
    watchdog_mark(reading, -1);
    if (t) {
        const size_t size = (t->end - t->begin) / numel(t);
        void *raw = same ? to : r->raw;
        safetensors_read(r->from.file, raw, t, at * size, n * size);
        if (t->has_sum)
            r->sum = crc32c(r->sum, raw, n * size);
        if (!same)
            convert_decode(to, t->dtype, raw, n);
    } else
        coded_source_read(to, r->files, r->count, p->name, p->shape[0], p->shape[1], at, n);
    if (!same && strcmp(dtype, "BF16") == 0)
        convert_encode(to, dtype, to, n);
}

/* For an entry that consists of some columns of a matrix stored as codes. Reads elements from e on,
 * up to `end` or as many as `step` elements of the matrix contain; returns their number. Reads
 * whole rows, because each read of codes also reads the matrix's scales. */
static size_t fetch_columns(EntryReader *r, char *values, size_t e, size_t end, size_t step)
{
    const LayoutEntry *p = r->entry;
    const size_t cols = (size_t)p->cut->cols, all = p->shape[1], first = e - p->first,
                 row = first / cols;
    const size_t stop = p->first + (row + step / all) * cols, last = end < stop ? end : stop;
    layout_fetch(r, values, p->dtype, row * all, ((last - 1 - p->first) / cols + 1 - row) * all);
    for (size_t from = e, n, at; from < last; from += n) {
        n = run_of(p, from, last, &at);
        memmove(values + (from - e) * p->bytes, values + (at - row * all) * p->bytes, n * p->bytes);
    }
    return last - e;
}

/* values: a buffer of safetensors_chunk bytes, like r->raw. Returns the contribution of this rank's
 * slice to the tensor's checksum; 0 if the tensor has no checksum. */
static uint32_t read_entry(EntryReader *r, const Shard *s, void *values)
{
    const LayoutEntry *p = r->entry;
    const SafeTensor *t = r->from.tensor;
    const size_t count = t ? numel(t) : p->count;
    const size_t wide = p->bytes > sizeof(float) ? p->bytes : sizeof(float),
                 step = safetensors_chunk / wide;
    const Range own =
        intersect(held_by(p, s), (Range){ p->first, p->first + (p->cut ? p->held : count) });
    uint32_t sum = 0;
    const bool columns = !t && p->cut && p->cut->split == SPLIT_COLUMNS;
    for (size_t e = own.first, n, at; e < own.end; e += n) {
        n = run_of(p, e, own.end, &at);
        n = n < step ? n : step;
        r->sum = 0;
        if (columns)
            n = fetch_columns(r, values, e, own.end, step);
        else
            layout_fetch(r, values, p->dtype, at, n);
        device_put(address_of(p, s, e), values, n * p->bytes);
        sum ^= t ? run_sum(r->sum, at, n, count, (t->end - t->begin) / count) : 0;
    }
    return p->is_copy ? 0 : sum;
}

/* Whether loading rounds a frozen weight. Then the run has no exact copy of the weight. dtype: type
 * in the file. */
static bool is_rounded(const LayoutEntry *p, const char *dtype)
{
    return p->region == FROZEN && strcmp(p->dtype, "BF16") == 0 && strcmp(dtype, "BF16") != 0;
}

Found layout_need(const LayoutEntry *p, SafeFile *const *files, int count)
{
    const Found f = safetensors_find_in(files, count, p->name);
    if (!f.tensor)
        die("%s%s: there is no tensor %s, which the configured model needs", files[0]->path,
            count > 1 ? " and the files next to it" : "", p->name);
    check_entry(p, f.file, f.tensor);
    return f;
}

Found layout_find(const LayoutEntry *p, SafeFile *const *files, int count)
{
    const SafeFile *coded = coded_source_find(files, count, p->name);
    return coded ? (Found){ coded, NULL } : layout_need(p, files, count);
}

/* Combines l->sum, the contribution of each rank, and checks it. All ranks of a shard group must
 * call this. A unit that two stages have is counted once. */
static void check_sums(Layout *l, const ParamStore *store, SafeFile *const *files, int count)
{
    for (int i = 0; i < l->num_entries && store->pipe.stages > 1; i++)
        if (pipeline_stage_of(&store->pipe, store->shape->config, l->entry[i].unit) !=
            store->pipe.stage)
            l->sum[i] = 0;
    sum_over(l, RANKS_COPY);
    for (int i = 0; i < l->num_entries; i++) {
        const Found found = safetensors_find_in(files, count, l->entry[i].name);
        const SafeTensor *t = found.tensor;
        if (t && t->has_sum && t->sum != l->sum[i])
            die("%s: tensor %s has the checksum %08x, expected %08x from trainer.json: its bytes "
                "have changed since they were "
                "saved. Copy the file again or load another checkpoint (if you edited the file, "
                "delete "
                "crc32c from trainer.json)",
                found.file->path, t->name, l->sum[i], t->sum);
    }
}

void layout_read(Layout *l, ParamStore *store, SafeFile *const *files, int count)
{
    void *raw = xmalloc(safetensors_chunk), *values = xmalloc(safetensors_chunk);
    bool rounded = false;
    double all = 0, done = 0;
    for (int i = 0; i < l->num_entries; i++)
        all += (double)l->entry[i].count;
    progress_begin("loading");
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        progress_show(done / all, p->name);
        done += (double)p->count;
        if (p->region == QUANTIZED || p->is_read)
            continue;
        EntryReader r = { p, files, count, layout_find(p, files, count), raw, 0 };
        const char *dtype = r.from.tensor ? r.from.tensor->dtype : "codes and scales";
        /* in a run without training, the computation rounds these weights anyway */
        if (is_rounded(p, dtype) && !rounded && store->first_trained < store->num_units)
            warn("%s: frozen tensors are stored as %s in this folder and rounded to bf16 in this "
                 "run; --format.frozen=f32 keeps the exact values",
                 r.from.file->path, dtype);
        rounded |= is_rounded(p, dtype);
        l->sum[i] = read_entry(&r, &store->shard[p->unit], values);
    }
    free(raw);
    free(values);
    progress_end();
    check_sums(l, store, files, count);
}
