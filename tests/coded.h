/* Shared by tests of codes and scales: a model whose matrices fit every format, and the values of
 * codes by their definition. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/safetensors.h"
#include "tests/exported.h"
#include "tests/saved.h"

/* Returns a model whose shapes are multiples of 128. */
static inline ModelConfig wide(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.d_model = 128, m.n_layers = 1, m.n_heads = 4, m.n_kv_heads = 2, m.head_dim = 64,
    m.mlp_width = 256, m.vocab_size = 20;
    m.experts.count = m.experts.count > 0 ? 2 : 0;
    return m;
}

/* Puts values into the first block's q_proj, from element `at` on. */
static inline void put_in_q(Run *r, size_t at, const float *values, size_t n)
{
    const Param *qkv = r->store.shape[1].param;
    while (strcmp(qkv->name, "qkv") != 0)
        qkv++;
    device_put((float *)r->store.shard[1].slice[TRAINED].stored.data + qkv->offset + at, values,
               n * sizeof *values);
}

/* Returns the value of a finite code by its definition, in a format with these numbers of bits. */
static inline double value_of(unsigned code, int exponent_bits, int mantissa_bits)
{
    const int bias = (1 << (exponent_bits - 1)) - 1,
              e = (int)(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double m = code & ((1u << mantissa_bits) - 1);
    const double x =
        e ? ldexp(1 + ldexp(m, -mantissa_bits), e - bias) : ldexp(m, 1 - bias - mantissa_bits);
    return code >> (exponent_bits + mantissa_bits) & 1 ? -x : x;
}

static inline float bf16_value(uint16_t code)
{
    return (float)value_of(code, 8, 7);
}

/* Returns the number with mantissa_bits mantissa bits that is nearest to x; ties go to even. least:
 * the smallest exponent. */
static inline double nearest(double x, int mantissa_bits, int least)
{
    int e;
    frexp(x, &e);
    const double unit = ldexp(1, (e - 1 < least ? least : e - 1) - mantissa_bits);
    return nearbyint(x / unit) * unit;
}

/* Sets 128 elements of q_proj, from element 128 row on. The largest is 1.7. The others are
 * midpoints of two codes times the scale s, or the floats next to these midpoints, where a quotient
 * by s and a product with 1/s round differently. fp8: the codes are E4M3; false: integers. */
static inline void put_middles(Run *r, size_t row, float s, bool fp8)
{
    float w[128] = { 1.7f };
    for (int i = 1; i < 127; i++) {
        const double middle =
            fp8 ? (value_of((unsigned)i - 1, 4, 3) + value_of((unsigned)i, 4, 3)) / 2
                : i - 64 + 0.5;
        const float at = (float)(middle * (double)s);
        w[i] = row % 3 == 0 ? at : nextafterf(at, row % 3 == 1 ? 2 : -2);
    }
    put_in_q(r, 128 * row, w, 128);
}

/* Saves a model as `wide` returns it, in F32, with a row of zeros, a row with an outlier, and rows
 * of midpoints. Returns the folder. */
static inline const char *save_wide(SmallModel a)
{
    Run r;
    const ModelConfig m = wide(a);
    const Format f32 = { F32, 0 };
    const float zeros[128] = { 0 }, outlier = 3.21f;
    open_run(&r, &m, f32, f32, f32);
    store_init(&r.store, &r.config.model, 3);
    put_in_q(&r, 0, zeros, 128);
    put_in_q(&r, 200, &outlier, 1);
    for (size_t row = 2; row < 8; row++)
        put_middles(&r, row, (float)nearest((double)(1.7f / (row < 5 ? 448 : 127.5f)), 7, -126),
                    row < 5);
    save(&r, 1);
    const char *folder = lasting(step_folder(&r, 1));
    close_run(&r);
    return folder;
}

static inline SafeFile *open_folder(const char *folder)
{
    return safetensors_open(text("%s/model.safetensors", folder));
}

/* Returns the bytes of a tensor, valid until release(). Fails unless the tensor exists with this
 * type. */
static inline const void *bytes_in(const SafeFile *f, const char *name, const char *dtype)
{
    const SafeTensor *t = safetensors_find(f, name);
    if (!t || strcmp(t->dtype, dtype) != 0)
        fail_msg("%s: no tensor %s of %s", f->path, name, dtype);
    void *bytes = keep(t->end - t->begin);
    safetensors_read(f, bytes, t, 0, t->end - t->begin);
    return bytes;
}
