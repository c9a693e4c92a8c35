/* Gradients as ranks send them to each other. */
#include <float.h>
#include <math.h>

#include "kernels/cpu/cpu.h"

typedef union {
    float value;
    uint32_t bits;
} Float32;

static const Float32 NOT_A_NUMBER = { .bits = 0x7fc00000 };

/* The bits of a magnitude have the order of integers, with infinity and NaN above all numbers. */
static Float32 largest_magnitude(const float *x)
{
    Float32 most = { 0 };
    for (int i = 0; i < WIRE_GROUP; i++) {
        const Float32 magnitude = { fabsf(x[i]) };
        most.bits = magnitude.bits > most.bits ? magnitude.bits : most.bits;
    }
    return most;
}

static float scale_of(float amax, Wire w, WireScale s)
{
    if (!(amax <= FLT_MAX))
        return NOT_A_NUMBER.value;
    return w == WIRE_FP8    ? fp8_scale(amax, E4M3)
           : w == WIRE_INT8 ? fmaxf(amax, 0x1p-90f) / 127
                            : *s.scale * s.factor;
}

static void encode_group(uint8_t *codes, float *scale, const float *x, Wire w, WireScale s)
{
    *scale = scale_of(largest_magnitude(x).value, w, s);
    const float inverse = 1 / *scale;
    for (int i = 0; i < WIRE_GROUP; i++) {
        const float v = x[i] * inverse;
        codes[i] = *scale != *scale ? 0
                   : w == WIRE_INT8 ? (uint8_t)(int8_t)rintf(fminf(fmaxf(v, -127), 127))
                                    : fp8_encode(v, E4M3);
        if (w == WIRE_FP8_LM && fabsf(v) >= WIRE_CUT)
            ++*s.cut;
    }
}

void backend_wire_encode(Tensor message, Tensor x, Wire w, WireScale s)
{
    check_wire_encode(message, x, w, s);
    const size_t bytes = wire_record_bytes(w);
    float values[WIRE_VALUES];
    for (int r = 0; r < x.rows; r++) {
        uint8_t *record = (uint8_t *)message.data + (size_t)r * bytes;
        tensor_load(values, x, (size_t)r * WIRE_VALUES, WIRE_VALUES);
        if (w == WIRE_BF16)
            tensor_store(message, (size_t)r * WIRE_VALUES, values, WIRE_VALUES);
        for (int g = 0; g < WIRE_VALUES / WIRE_GROUP && w != WIRE_BF16; g++)
            encode_group(record + g * WIRE_GROUP, (float *)(record + WIRE_VALUES) + g,
                         values + g * WIRE_GROUP, w, s);
    }
}

static void decode_record(float *values, Tensor messages, size_t r, Wire w)
{
    const uint8_t *record = (const uint8_t *)messages.data + r * wire_record_bytes(w);
    const float *scale = (const float *)(record + WIRE_VALUES);
    if (w == WIRE_BF16)
        tensor_load(values, messages, r * WIRE_VALUES, WIRE_VALUES);
    for (int i = 0; i < WIRE_VALUES && w != WIRE_BF16; i++)
        values[i] = (w == WIRE_INT8 ? (float)(int8_t)record[i] : fp8_decode(record[i], E4M3)) *
                    scale[i / WIRE_GROUP];
}

void backend_wire_sum(Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w)
{
    check_wire_sum(y, x, messages, ranks, own, w);
    const size_t apart = (size_t)(messages.rows / (ranks - 1));
    float values[WIRE_VALUES], sum[WIRE_VALUES];
    for (size_t r = 0; r < (size_t)x.rows; r++) {
        for (int i = 0; i < WIRE_VALUES; i++)
            sum[i] = 0;
        for (int k = 0; k < ranks; k++) {
            if (k == own)
                tensor_load(values, x, r * WIRE_VALUES, WIRE_VALUES);
            else
                decode_record(values, messages, (size_t)(k - (k > own)) * apart + r, w);
            for (int i = 0; i < WIRE_VALUES; i++)
                sum[i] += values[i];
        }
        tensor_store(y, r * WIRE_VALUES, sum, WIRE_VALUES);
    }
}
