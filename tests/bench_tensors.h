/* Inputs of benchmarks: the shapes of a model, and tensors in device memory until release(). */
#pragma once
#include <math.h>

#include "kernels/random.h"
#include "tests/bench.h"

enum { MAX_TENSORS = 96 };

/* chunk: number of rows of logits that exist at once (loss_chunk of model/plan/plan.c); params:
 * number of parameters of one block; micro_batches: number of micro-batches of a step */
typedef struct {
    const char *name;
    int B, T, C, H, K, D, F, V, chunk;
    long params;
    int L, micro_batches;
} Model;

static const Format F32_ = { .dtype = F32 }, BF16_ = { .dtype = BF16 }, E4M3_ = { .dtype = E4M3 };
static const Format E4M3_16 = { .dtype = E4M3, .group = 16 }, E5M2_ = { .dtype = E5M2 };
static const Tensor NONE = { 0 };
static const LoraProduct NO_PRODUCT = { 0 };

/* These functions return how often a step runs an operation: once per block, once per chunk of
 * logits, or once per micro-batch. */
static inline double blocks(const Model *m)
{
    return (double)m->L * m->micro_batches;
}
static inline double chunks(const Model *m)
{
    return (double)m->micro_batches * m->B * m->T / m->chunk;
}

/* block_params returns the number of parameters of all blocks; the next function adds embedding and
 * head. */
static inline double block_params(const Model *m)
{
    return (double)m->L * m->params;
}
static inline double all_params(const Model *m)
{
    return block_params(m) + 2.0 * m->V * m->C;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void *held[MAX_TENSORS];
static int num_held;

static inline void *hold(size_t bytes)
{
    if (num_held == MAX_TENSORS)
        exit(fprintf(stderr, "bench_kernels: more than %d tensors\n", MAX_TENSORS));
    return held[num_held++] = device_alloc(bytes);
}

static inline void release(void)
{
    device_sync();
    while (num_held > 0)
        device_free(held[--num_held]);
}

static inline Tensor make(Format f, int rows, int cols)
{
    Tensor t = { .format = f, .rows = rows, .cols = cols };
    t.data = hold(tensor_numel(t) * dtype_size(f.dtype));
    if (format_has_scales(f))
        t.scale = hold(f.group ? format_scale_bytes(f, tensor_numel(t)) : 16);
    return t;
}

static inline Tensor make_operand(Format f, int rows, int cols)
{
    Tensor t = make(f, rows, cols);
    t.data_t = hold(tensor_numel(t));
    return t;
}

static inline Tensor rows_only(Tensor t)
{
    t.data_t = NULL;
    return t;
}

static inline Tensor transpose_only(Tensor t)
{
    t.data = NULL;
    return t;
}

static inline Tensor make_normal(Format f, int rows, int cols, float std)
{
    static uint64_t seed;
    Tensor t = make(f, rows, cols);
    init_normal(t, std, 0, ++seed, 0);
    return t;
}

static bool scales_reused;

static inline Tensor with_range(Tensor t)
{
    t.scale_amax = hold(sizeof(float));
    t.scale_reused = &scales_reused;
    return t;
}

/* Runs the call once before it is timed, so that the timed call finds its values within the range
 * of the reused scale. */
#define TIME_IN_RANGE(name, bytes, call) \
    do { \
        call; \
        scales_reused = true; \
        TIME_BYTES(name, bytes, call); \
        scales_reused = false; \
    } while (0)

/* ---- attention ------------------------------------------------------------------------------- */

static inline Attention attention_of(const Model *m)
{
    const int pairs = m->D / 2;
    Attention a = { .B = m->B,
                    .T = m->T,
                    .H = m->H,
                    .K = m->K,
                    .D = m->D,
                    .scale = (float)(1 / sqrt(m->D)),
                    .norm = { RMS_NORM, 1e-6f } };
    size_t bytes = (size_t)m->T * (size_t)m->D * sizeof(float);
    float *table = malloc(bytes), *rope = hold(bytes);
    for (int t = 0; t < m->T; t++)
        for (int i = 0; i < pairs; i++) {
            double angle = t * pow(10000, -(double)i / pairs);
            table[2 * (t * pairs + i)] = (float)cos(angle);
            table[2 * (t * pairs + i) + 1] = (float)sin(angle);
        }
    device_put(rope, table, bytes);
    free(table);
    a.rope = rope;
    return a;
}
