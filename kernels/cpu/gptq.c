/* The operations of GPTQ. */
#include "kernels/gptq_layer.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

void backend_gptq_diagonal(float *diagonal, Tensor h)
{
    gptq_check_f32(OPERATION, h, h.rows, h.rows);
    for (int i = 0; i < h.rows; i++)
        diagonal[i] = ((const float *)h.data)[(size_t)i * (size_t)h.cols + (size_t)i];
}

void backend_gptq_damp(Tensor m, Tensor h, const int *order, float damping)
{
    const size_t I = (size_t)h.rows;
    gptq_check_f32(OPERATION, h, h.rows, h.rows);
    gptq_check_f32(OPERATION, m, h.rows, h.rows);
    for (size_t i = 0; i < I; i++)
        for (size_t j = 0; j < I; j++) {
            const float value = ((const float *)h.data)[(size_t)order[i] * I + (size_t)order[j]];
            ((float *)m.data)[i * I + j] = -(i == j ? value + damping : value);
        }
}

/* Replaces s (R,R) by its factor C with s = C CT, from the last column to the first. Elements below
 * the diagonal do not change. */
static void factor(double *s, int R, int *failed)
{
    for (int r = R - 1; r >= 0; r--) {
        const double pivot = s[r * R + r], root = sqrt(pivot);
        if (!(pivot > 0 && pivot < INFINITY))
            *failed = 1;
        s[r * R + r] = root;
        for (int i = 0; i < r; i++)
            s[i * R + r] /= root;
        for (int i = 0; i < r; i++)
            for (int k = i; k < r; k++)
                s[i * R + k] -= s[i * R + r] * s[k * R + r];
    }
}

/* Computes the factor C of H = C CT for the rows R, which begin at `first`, and the columns P
 * before them: H_RP = C_RR (CT)_RP, solved from the last row to the first. */
void backend_gptq_factor(Tensor c, int *failed, Tensor m, int first)
{
    const int R = m.rows, I = m.cols;
    gptq_check_rows(OPERATION, m, first);
    gptq_check_f32(OPERATION, c, R, I);
    double s[GPTQ_COLUMNS * GPTQ_COLUMNS], x[GPTQ_COLUMNS];
    float *to = c.data;
    const float *from = m.data;
    for (int i = 0; i < R * R; i++)
        s[i] = -(double)from[(size_t)(i / R) * (size_t)I + (size_t)(first + i % R)];
    factor(s, R, failed);
    memset(to, 0, tensor_bytes(c));
    for (int r = 0; r < R; r++)
        for (int k = 0; k <= r; k++)
            to[(size_t)r * (size_t)I + (size_t)(first + k)] = (float)s[k * R + r];
    for (size_t col = 0; col < (size_t)first; col++)
        for (int r = R - 1; r >= 0; r--) {
            x[r] = -(double)from[(size_t)r * (size_t)I + col];
            for (int k = r + 1; k < R; k++)
                x[r] -= s[r * R + k] * x[k];
            x[r] /= s[r * R + r];
            to[(size_t)r * (size_t)I + col] = (float)x[r];
        }
}

static float to_nearest(float x)
{
    const float code = nearbyintf(x);
    return code < -8 ? -8 : code > 7 ? 7 : code;
}

void backend_gptq_columns(int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c,
                          int first, int count)
{
    const size_t I = (size_t)w.w.cols, groups = I / (size_t)w.group;
    gptq_check_columns(OPERATION, values, e, w, sums, c, first, count);
    float sum[GPTQ_COLUMNS] = { 0 };
    for (size_t o = 0; o < (size_t)w.w.rows; o++) {
        if (c.data)
            memcpy(sum, (const float *)sums.data + o * (size_t)count, sizeof *sum * (size_t)count);
        for (int j = 0; j < count; j++) {
            const size_t column = (size_t)w.order[first + j], at = o * I + column;
            const float s = w.scale[o * groups + column / (size_t)w.group],
                        weight = ((const float *)w.w.data)[at];
            /* C_kj is of[j * I + k] */
            const float *of = c.data ? (const float *)c.data + (size_t)first : NULL;
            const float code = to_nearest(
                            (of ? weight + sum[j] / of[(size_t)j * I + (size_t)j] : weight) / s),
                        value = s * code;
            const float error = weight - value;
            for (int k = j + 1; k < count && of; k++)
                sum[k] += error * of[(size_t)k * I + (size_t)j];
            q[at] = (int8_t)code;
            tensor_store(values, at, &value, 1);
            ((float *)e.data)[o * I + (size_t)(first + j)] = error;
        }
    }
}
