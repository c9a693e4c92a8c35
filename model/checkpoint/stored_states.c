/* Works on a chunk of a rank's shard at a time: reads the chunk to the host, tensor by tensor, in
 * the files' format, and encodes it in the run's format. In the unit's region, groups start at
 * multiples of their size and chunks at multiples of PARAM_ALIGN, so no group is split.
 * kernels/values.h converts the values, on all cores. */
#include "model/checkpoint/stored_states.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dynamic8.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/values.h"
#include "model/checkpoint/crc32c.h"
#include "model/store/param_store_sizes.h"

enum { MAX_SLICES = 16 }; /* threads that convert a chunk */

/* ---- formats --------------------------------------------------------------------------------- */

/* The dynamic map that codes of type U8 use: the map of an optimizer that has an 8-bit state of
 * this name. */
static DType dynamic_map(const char *state, DType otherwise)
{
    const Optimizer *o;
    for (int i = 0; (o = optimizer_at(i)); i++)
        for (int k = 0; k < o->num_states; k++)
            if (strcmp(o->state[k].name, state) == 0 && format_is_dynamic8(o->state[k].own))
                return o->state[k].own.dtype;
    return otherwise;
}

static bool scales_fit(const StoredStates *s, int state, SafeFile *const *files, int count)
{
    for (int i = 0; i < s->layout.num_entries; i++) {
        const LayoutEntry *p = &s->layout.entry[i];
        const SafeTensor *t = p->kind == ENTRY_SCALE && p->state == state
                                  ? safetensors_find_in(files, count, p->name).tensor
                                  : NULL;
        if (t && (t->dims != p->dims || t->shape[0] != p->shape[0]))
            return false;
    }
    return true;
}

static void lay_out(StoredStates *s, const ParamStore *store)
{
    ParamStore there = *store;
    there.optimizer = &s->optimizer;
    layout_free(&s->layout);
    s->layout = layout_make(NULL, LAYOUT_OPTIMIZER, &there, 0);
}

/* Finds the size of FP8 groups, which is the same for all weights, from the numbers of scales. With
 * small tensors, several sizes are possible. Then chooses the run's size, if the format is
 * otherwise equal, and else the smallest size, which gives each element the same scale. */
static void choose_group(StoredStates *s, int state, Format there, Format ours,
                         const ParamStore *store, SafeFile *const *files, int count)
{
    OptimizerState *o = &s->optimizer.state[state];
    there.group = ours.group;
    const bool alike = format_equal(there, ours);
    for (int size = alike ? 0 : 1; size <= PARAM_ALIGN; size = size ? 2 * size : 1) {
        there.group = size ? size : ours.group;
        o->own = o->elsewhere = there;
        lay_out(s, store);
        if (scales_fit(s, state, files, count))
            return;
    }
    die("%s%s: no group size fits the number of scales of %s: these are the states of another "
        "model",
        files[0]->path, count > 1 ? " and the files next to it" : "",
        s->optimizer.state[state].name);
}

/* Returns the first tensor of this state in the files: of a weight in a layer if there is one,
 * otherwise of another weight. NULL: there is none. */
static const SafeTensor *find_state(const StoredStates *s, const ParamStore *store, int state,
                                    bool in_layer, SafeFile *const *files, int count)
{
    const SafeTensor *t = NULL;
    for (int i = 0; i < s->layout.num_entries && !t; i++) {
        const LayoutEntry *p = &s->layout.entry[i];
        if (p->kind == ENTRY_STATE && p->state == state &&
            store->shape[p->unit].kind->is_layer == in_layer)
            t = safetensors_find_in(files, count, p->name).tensor;
    }
    return t;
}

/* The format of a tensor by its type and the type of its scales; `ours` if no format of states has
 * these types. */
static Format format_of(const SafeTensor *t, const char *state, Format ours, SafeFile *const *files,
                        int count)
{
    char *name = xasprintf("%s.scale", t ? t->name : "");
    const SafeTensor *scale = safetensors_find_in(files, count, name).tensor;
    free(name);
    const bool expanded = scale && strcmp(scale->dtype, "U32") == 0;
    if (t && strcmp(t->dtype, "F32") == 0)
        return (Format){ F32, 0, false };
    if (t && strcmp(t->dtype, "BF16") == 0)
        return (Format){ BF16, 0, false };
    if (t && scale && strcmp(t->dtype, "U8") == 0)
        return (Format){ dynamic_map(state, ours.dtype), DYNAMIC8_GROUP, false };
    if (t && scale && strcmp(t->dtype, "F8_E4M3") == 0)
        return format_of_moment((Format){ E4M3, PARAM_ALIGN, expanded });
    if (t && scale && strcmp(t->dtype, "F8_E5M2") == 0)
        return format_of_moment((Format){ E5M2, PARAM_ALIGN, expanded });
    return ours;
}

StoredStates stored_states(const ParamStore *store, SafeFile *const *files, int count)
{
    StoredStates s = { .optimizer = *store->optimizer };
    lay_out(&s, store);
    for (int i = 0; i < s.optimizer.num_states; i++) {
        OptimizerState *state = &s.optimizer.state[i];
        Format *there[2] = { &state->own, &state->elsewhere }, ours[2];
        const SafeTensor *t[2];
        state->from = OWN_FORMATS;
        for (int k = 0; k < 2; k++) {
            ours[k] = optimizer_format(store->optimizer, i, &store->recipe, k == 0);
            t[k] = find_state(&s, store, i, k == 0, files, count);
            *there[k] = format_of(t[k], state->name, ours[k], files, count);
        }
        const int found = t[0] ? 0 : 1;
        if (format_is_fp8(*there[found]))
            choose_group(&s, i, *there[found], ours[found], store, files, count);
        for (int k = 0; k < 2; k++) {
            if (!t[k] || (!format_has_scales(*there[k]) && !format_has_scales(ours[k])))
                *there[k] = ours[k];
            s.converts |= !format_equal(*there[k], ours[k]);
        }
    }
    lay_out(&s, store);
    return s;
}

void stored_states_free(StoredStates *s)
{
    layout_free(&s->layout);
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    StoredStates *s;
    SafeFile *const *files;
    int count;
} Reading;

/* Number of elements of a chunk, a multiple of PARAM_ALIGN. */
static size_t chunk_elements(void)
{
    return safetensors_chunk / sizeof(float) / PARAM_ALIGN * PARAM_ALIGN;
}

static Tensor host_tensor(Format f)
{
    const size_t n = chunk_elements();
    Tensor t = { .format = f, .rows = 1, .cols = (int)n, .data = xmalloc(n * dtype_size(f.dtype)) };
    if (format_has_scales(f))
        t.scale = xmalloc(format_scale_bytes(f, n));
    return t;
}

static void free_host(Tensor t)
{
    free(t.data);
    free(t.scale);
}

/* Returns the range of [from, to), elements of the unit's region, that belongs to the entry and to
 * its tensor t. For scales, the range counts groups. */
static Range overlap(const LayoutEntry *p, const SafeTensor *t, size_t from, size_t to)
{
    const size_t end = p->first + t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
    Range r = { from / p->per > p->first ? from / p->per : p->first,
                to / p->per < end ? to / p->per : end };
    return r.first < r.end ? r : (Range){ 0, 0 };
}

/* Reads elements [first, first + n) of the unit's region, and their scales, into x. Padding, which
 * is in no tensor, becomes 0. */
static void read_chunk(const Reading *r, Tensor x, int unit, int state, size_t first, size_t n)
{
    Layout *l = &r->s->layout;
    memset(x.data, format_is_dynamic8(x.format) ? dynamic8_encode(0, x.format.dtype) : 0,
           n * dtype_size(x.format.dtype));
    if (x.scale)
        memset(x.scale, 0, format_scale_bytes(x.format, n));
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        if (p->unit != unit || p->state != state)
            continue;
        const Found found = safetensors_find_in(r->files, r->count, p->name);
        const SafeTensor *t = found.tensor;
        const Range range = overlap(p, t, first, first + n);
        const size_t bytes = (range.end - range.first) * p->bytes;
        if (bytes == 0)
            continue;
        char *dst = (char *)(p->kind == ENTRY_SCALE ? x.scale : x.data) +
                    (range.first - first / p->per) * p->bytes;
        watchdog_mark("reading and converting the optimizer's states", -1);
        safetensors_read(found.file, dst, t, (range.first - p->first) * p->bytes, bytes);
        if (t->has_sum)
            l->sum[i] = crc32c(l->sum[i], dst, bytes);
    }
}

/* ---- converting ------------------------------------------------------------------------------ */

typedef struct {
    Tensor there, here;
    float *x;
    size_t first, n;
} Conversion;

static void *convert_slice(void *slice)
{
    const Conversion *s = slice;
    tensor_load(s->x + s->first, s->there, s->first, s->n);
    tensor_store(s->here, s->first, s->x + s->first, s->n);
    return NULL;
}

/* Number of this rank's cores: its share of the host's cores. */
static int num_slices(void)
{
    cpu_set_t cores;
    const int all = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1,
              own = all / comm_local_size();
    return own < 1 ? 1 : own > MAX_SLICES ? MAX_SLICES : own;
}

/* here = there, for n elements, through the buffer x. An element with dynamic range expansion takes
 * about 0.1 us: a 7B model takes half an hour on one core. */
static void convert(Tensor here, Tensor there, float *x, size_t n)
{
    const size_t count = (size_t)num_slices(), blocks = n / PARAM_ALIGN;
    Conversion slice[MAX_SLICES];
    pthread_t thread[MAX_SLICES];
    bool runs[MAX_SLICES] = { false };
    slice[0] = (Conversion){ there, here, x, 0, PARAM_ALIGN };
    /* before threads start, because the first use of a format fills its tables */
    convert_slice(&slice[0]);
    for (size_t i = 0; i < count; i++) {
        const size_t first = blocks * i / count * PARAM_ALIGN,
                     end = blocks * (i + 1) / count * PARAM_ALIGN;
        slice[i] = (Conversion){ there, here, x, first, end - first };
        runs[i] = i + 1 < count && pthread_create(&thread[i], NULL, convert_slice, &slice[i]) == 0;
        if (!runs[i])
            convert_slice(&slice[i]);
    }
    for (size_t i = 0; i < count; i++)
        if (runs[i])
            pthread_join(thread[i], NULL);
}

/* The format of a unit's state in the files. */
static Format format_there(const StoredStates *s, const ParamStore *store, int unit, int state)
{
    return optimizer_format(&s->optimizer, state, &store->recipe,
                            store->shape[unit].kind->is_layer);
}

static bool is_converted(const StoredStates *s, const ParamStore *store, int unit, int state)
{
    return !format_equal(format_there(s, store, unit, state),
                         store->shard[unit].state[state].format);
}

/* x: a buffer for one chunk. */
static void read_state(const Reading *r, const ParamStore *store, int unit, int state, float *x)
{
    const Shard *shard = &store->shard[unit];
    const Tensor dst = shard->state[state];
    const Tensor there = host_tensor(format_there(r->s, store, unit, state)),
                 here = host_tensor(dst.format);
    const Slice own = shard_state(shard, state);
    for (size_t at = 0, n; at < own.count; at += n) {
        n = own.count - at < (size_t)here.cols ? own.count - at : (size_t)here.cols;
        const size_t scales = format_scale_bytes(here.format, n);
        read_chunk(r, there, unit, state, own.first + at, n);
        convert(here, there, x, n);
        device_put((char *)dst.data + at * dtype_size(dst.format.dtype), here.data,
                   n * dtype_size(dst.format.dtype));
        if (scales)
            device_put((char *)dst.scale + format_scale_bytes(here.format, at), here.scale, scales);
    }
    free_host(there);
    free_host(here);
}

/* Sets is_read of the entries that must be converted: layout_read then only checks them. */
static void check_entries(const Reading *r, const ParamStore *store)
{
    const Layout *l = &r->s->layout;
    for (int i = 0; i < l->num_entries; i++) {
        LayoutEntry *p = &l->entry[i];
        p->is_read = is_converted(r->s, store, p->unit, p->state);
        if (!p->is_read)
            continue;
        if (store->shape[p->unit].tensor_ranks > 1)
            die("%s: the formats of the optimizer's states differ from this run's, and tensor "
                "ranks cannot convert states; resume and save once with --parallelism.tensor=1, or "
                "use the optimizer and the recipe of the checkpoint's run",
                r->files[0]->path);
        const Found f = layout_need(p, r->files, r->count);
        if (strcmp(f.tensor->dtype, p->dtype) != 0)
            die("%s: tensor %s is stored as %s, but other tensors of this state are stored as %s",
                f.file->path, p->name, f.tensor->dtype, p->dtype);
    }
}

/* Sets l->sum to this rank's contribution to the checksum of each converted tensor. */
static void shift_sums(const Reading *r, const ParamStore *store)
{
    Layout *l = &r->s->layout;
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        if (!p->is_read)
            continue;
        const SafeTensor *t = safetensors_find_in(r->files, r->count, p->name).tensor;
        const Slice s = shard_state(&store->shard[p->unit], p->state);
        const Range range = overlap(p, t, s.first, s.first + s.count);
        const size_t count = t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
        l->sum[i] = crc32c_shift(l->sum[i], (p->first + count - range.end) * p->bytes);
    }
}

/* Reports each conversion once per state; twice if states of blocks and of other weights differ. */
static void print_conversion(const Reading *r, const ParamStore *store, int state)
{
    static const char *const where[2] = { " of the blocks", " outside the blocks" };
    const OptimizerState *o = &r->s->optimizer.state[state];
    const Format from[2] = { o->own, o->elsewhere };
    Format to[2];
    for (int k = 0; k < 2; k++)
        to[k] = optimizer_format(store->optimizer, state, &store->recipe, k == 0);
    const bool same = format_equal(from[0], from[1]) && format_equal(to[0], to[1]);
    for (int k = 0; k < (same ? 1 : 2); k++)
        if (!format_equal(from[k], to[k]))
            printf("loading: %s%s is converted from %s to %s\n", o->name, same ? "" : where[k],
                   format_name(from[k]), format_name(to[k]));
}

static void read_converted(const Reading *r, const ParamStore *store)
{
    float *x = xmalloc(chunk_elements() * sizeof *x);
    check_entries(r, store);
    for (int i = 0; i < r->s->optimizer.num_states; i++) {
        if (comm_rank() == 0)
            print_conversion(r, store, i);
        progress_begin("loading");
        for (int u = 0; u < store->num_units; u++) {
            progress_show((double)u / store->num_units, r->s->optimizer.state[i].name);
            if (is_converted(r->s, store, u, i))
                read_state(r, store, u, i, x);
        }
        progress_end();
    }
    free(x);
    shift_sums(r, store);
}

void stored_states_read(StoredStates *s, ParamStore *store, SafeFile *const *files, int count)
{
    if (s->converts)
        read_converted(&(Reading){ s, files, count }, store);
    layout_read(&s->layout, store, files, count);
}
