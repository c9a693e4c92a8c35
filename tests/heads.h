/* Shapes of attention and names of their results, for tests of attention and RoPE. */
#pragma once
#include "tests/golden.h"

typedef struct {
    const char *name;
    int B, T, H, K, D;
    bool documents, odd;
    int window;
} Shape;

static char label[128];
static inline const char *name(const char *op, const FormatRow *f, const Shape *s)
{
    snprintf(label, sizeof label, "%s/%s/%s", op, f->name, s->name);
    return label;
}

static inline void check(const char *op, const FormatRow *f, const Shape *s, Tensor t,
                         const double *ref, const double *bound)
{
    check_close(name(op, f, s), t, ref, bound);
    golden_check(label, t, bound);
}

static inline double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

static inline float *rope_table(int T, int D)
{
    float *host = keep(sizeof *host * (size_t)(T * D)),
          *table = guarded(sizeof *host * (size_t)(T * D));
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            double angle = t * pow(10000, -2.0 * i / D);
            host[t * D + 2 * i] = (float)cos(angle), host[t * D + 2 * i + 1] = (float)sin(angle);
        }
    device_put(table, host, sizeof *host * (size_t)(T * D));
    return table;
}

static inline Attention attention_of(const Shape *s)
{
    return (Attention){ .B = s->B,
                        .T = s->T,
                        .H = s->H,
                        .K = s->K,
                        .D = s->D,
                        .scale = 1 / sqrtf((float)s->D),
                        .norm = { RMS_NORM, 1e-5f },
                        .rope = rope_table(s->T, s->D),
                        .window = s->window };
}
