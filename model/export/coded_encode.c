#include "model/export/coded_encode.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/dynamic8.h"
#include "kernels/fp8.h"
#include "kernels/nf4_map.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/weight_codes.h"

enum { BLOCK = 128, NF4_BLOCKS = NF4_GROUP / NF4_BLOCK, MOST_THREADS = 64 };

/* ---- statistics of whole matrices ------------------------------------------------------------ */

bool coded_looks_first(Coded c)
{
    return c.kind == CODED_FP8_TENSOR || c.kind == CODED_NF4;
}

bool coded_shares(Coded c)
{
    return c.kind == CODED_FP8_TENSOR;
}

void coded_look(CodedView *v, Coded c, const float *w, size_t n)
{
    if (c.kind == CODED_FP8_TENSOR)
        v->amax = fmaxf(v->amax, abs_max(w, n));
    else
        for (size_t i = 0; i < n; i += NF4_BLOCK, v->blocks++)
            v->sum[v->blocks % NF4_BLOCKS] += abs_max(w + i, n - i < NF4_BLOCK ? n - i : NF4_BLOCK);
}

/* Computes the offset as nf4_offset does. */
static float offset_of(const CodedView *v)
{
    double total = 0;
    for (int i = 0; i < NF4_BLOCKS; i++)
        total += v->sum[i];
    return (float)(total / (double)v->blocks);
}

/* ---- encoding -------------------------------------------------------------------------------- */

static void encode_nf4(void *const out[], float offset, const float *w, size_t n)
{
    Nf4Group group;
    for (size_t at = 0, g = 0; at < n; at += NF4_GROUP, g++) {
        const size_t count = n - at < NF4_GROUP ? n - at : NF4_GROUP;
        nf4_encode_group(&group, w + at, count, offset);
        memcpy((uint8_t *)out[0] + at / 2, group.codes, (count + 1) / 2);
        memcpy((uint8_t *)out[1] + at / NF4_BLOCK, group.absmax,
               (count + NF4_BLOCK - 1) / NF4_BLOCK);
        ((float *)out[2])[g] = group.nested;
    }
}

/* Multiplies by 1/S, as the trainer does when it quantizes operands [kernels.h, quantize]. */
static void encode_operand(uint8_t *codes, float amax, const float *w, size_t n)
{
    const float inverse = 1 / fp8_scale(amax, E4M3);
    for (size_t i = 0; i < n; i++)
        codes[i] = fp8_encode(w[i] * inverse, E4M3);
}

void coded_int4(void *const out[CODED_TENSORS], Coded c, const int8_t *codes, const float *scale,
                size_t n)
{
    codes_int4_pack(out[0], codes, n);
    convert_encode(out[1], "BF16", scale, n / c.group);
}

static void encode_int4(void *const out[], Coded c, const float *w, size_t rows, size_t cols)
{
    float *scale = xmalloc(rows * cols / c.group * sizeof *scale);
    int8_t *codes = xmalloc(rows * cols);
    codes_int4_scales(scale, w, rows, cols, c.group);
    codes_int4(codes, scale, w, rows, cols, c.group);
    coded_int4(out, c, codes, scale, rows * cols);
    free(codes);
    free(scale);
}

/* Encodes on one thread. */
static void encode(void *const out[], Coded c, const CodedView *v, float *w, size_t cols, size_t n)
{
    const size_t rows = n / cols;
    float *scale = xmalloc((rows + 1) * ((cols + BLOCK - 1) / BLOCK) * sizeof *scale);
    switch (c.kind) {
    case CODED_FP8_ROWS:
        codes_fp8(out[0], scale, w, rows, cols, 1, cols, true);
        convert_encode(out[1], "BF16", scale, rows);
        break;
    case CODED_FP8_BLOCKS:
        codes_fp8(out[0], scale, w, rows, cols, BLOCK, BLOCK, true);
        convert_encode(out[1], "BF16", scale, rows / BLOCK * (cols / BLOCK));
        break;
    case CODED_FP8_INVERSE: codes_fp8(out[0], out[1], w, rows, cols, BLOCK, BLOCK, false); break;
    case CODED_FP8_TENSOR: encode_operand(out[0], v->amax, w, n); break;
    case CODED_INT8:
        codes_int8(out[0], scale, w, rows, cols);
        convert_encode(out[1], "BF16", scale, rows);
        break;
    case CODED_INT8_LLM: codes_int8_llm(out[0], out[1], w, rows, cols); break;
    case CODED_INT4: encode_int4(out, c, w, rows, cols); break;
    case CODED_NF4: encode_nf4(out, offset_of(v), w, n); break;
    }
    free(scale);
}

/* ---- by several threads ---------------------------------------------------------------------- */

/* Processes elements at .. at + n - 1 of `job`. */
typedef void TaskFn(const void *job, size_t at, size_t n);
typedef struct {
    pthread_t thread;
    TaskFn *work;
    const void *job;
    size_t at, n;
} Task;

static void *run_task(void *task)
{
    const Task *p = task;
    p->work(p->job, p->at, p->n);
    return NULL;
}

/* Divides n elements among threads, in whole units. */
static void run_tasks(TaskFn *work, const void *job, size_t n, size_t unit)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const size_t threads = cores < 1 ? 1 : cores > MOST_THREADS ? MOST_THREADS : (size_t)cores;
    const size_t each = ((n + unit - 1) / unit + threads - 1) / threads * unit;
    Task task[MOST_THREADS];
    size_t count = 0;
    for (size_t at = 0; at < n; at += each, count++) {
        Task *p = &task[count];
        *p = (Task){ .work = work, .job = job, .at = at, .n = n - at < each ? n - at : each };
        if (at + each < n)
            CHECK(pthread_create(&p->thread, NULL, run_task, p) == 0,
                  "cannot start a thread that encodes weights");
        else
            run_task(p);
    }
    for (size_t i = 0; i + 1 < count; i++)
        pthread_join(task[i].thread, NULL);
}

typedef struct {
    void *const *out;
    const CodedTensor *tensor;
    int tensors;
    Coded c;
    const CodedView *v;
    float *w;
    size_t cols;
} Encoding;

static void encode_range(const void *job, size_t at, size_t n)
{
    const Encoding *e = job;
    void *out[CODED_TENSORS] = { NULL };
    for (int i = 0; i < e->tensors; i++)
        out[i] = e->tensor[i].per ? (char *)e->out[i] + at / e->tensor[i].per * e->tensor[i].bytes
                                  : NULL;
    encode(out, e->c, e->v, e->w + at, e->cols, n);
}

void coded_encode(void *const out[CODED_TENSORS], Coded c, const CodedView *v, float *w,
                  size_t cols, size_t n)
{
    CodedTensor tensor[CODED_TENSORS];
    const int tensors = coded_tensors(tensor, c, n / cols, cols);
    run_tasks(encode_range, &(Encoding){ out, tensor, tensors, c, v, w, cols }, n,
              coded_unit(c, cols));
}

typedef struct {
    float *scale;
    const float *w;
    size_t group;
} Scaling;

static void scale_range(const void *job, size_t at, size_t n)
{
    const Scaling *s = job;
    codes_int4_scales(s->scale + at / s->group, s->w + at, n / s->group, s->group, s->group);
}

void coded_int4_scales(float *scale, Coded c, const float *w, size_t rows, size_t cols)
{
    run_tasks(scale_range, &(Scaling){ scale, w, c.group }, rows * cols, c.group);
}

/* ---- whole tensors --------------------------------------------------------------------------- */

/* Writes the quantization state as bitsandbytes does. Spaces (valid JSON) pad it to the length in
 * the header, which was written earlier. */
static void nf4_state(char *to, size_t bytes, float offset, size_t rows, size_t cols)
{
    const int length = snprintf(
        to, bytes,
        "{\"quant_type\": \"nf4\", \"blocksize\": %d, \"dtype\": \"bfloat16\", \"shape\": [%zu, "
        "%zu], \"nested_blocksize\": %d, \"nested_dtype\": \"float32\", \"nested_offset\": %.17g}",
        (int)NF4_BLOCK, rows, cols, (int)NF4_BLOCKS, (double)offset);
    CHECK(length > 0 && (size_t)length < bytes, "a state of %d bytes", length);
    memset(to + length, ' ', bytes - (size_t)length);
}

void coded_whole(void *to, size_t bytes, const char *suffix, Coded c, const CodedView *v,
                 size_t rows, size_t cols)
{
    const int64_t shape[2] = { (int64_t)rows, (int64_t)cols };
    const float scale = fp8_scale(v->amax, E4M3);
    const struct {
        const char *suffix;
        const void *from;
        size_t bytes;
    } tensors[] = {
        { ".weight_shape", shape, sizeof shape },
        { ".weight_scale", &scale, sizeof scale },
        { ".weight_format", "", 1 }, /* 0: weights are stored row by row */
        { ".weight.nested_quant_map", dynamic8_map(DYNAMIC8), 256 * sizeof(float) },
        { ".weight.quant_map", nf4_map(), 16 * sizeof(float) },
    };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (strcmp(suffix, tensors[i].suffix) == 0) {
            CHECK(bytes == tensors[i].bytes, "%s in %zu bytes", suffix, bytes);
            memcpy(to, tensors[i].from, bytes);
            return;
        }
    CHECK(c.kind == CODED_NF4, "there is no %s", suffix);
    nf4_state(to, bytes, offset_of(v), rows, cols);
}
