/* A weight matrix as codes of 8 or 4 bits and scales, as inference engines read it: value = scale * code.
 *
 * A scale is the largest magnitude of its elements over the largest code; `rounded`: to the nearest BF16. Codes are chosen for the
 * scale as stored: code = w / scale in F32, to the nearest, ties to even. So every loader, whatever type it computes in, has the
 * same weights. Where a scale would be below 2^-126, as where all elements are 0, it is 2^-7 and the codes are 0. DIFFERS:
 * llm-compressor 0.14 rounds the quotient to BF16 before it rounds it to a code: the same scales, larger squared errors.
 *
 * w (rows, cols): F32, finite. Scales are F32 here; those that are rounded have a BF16 value. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* E4M3, a scale for each block of `high` x `wide` elements: scale (ceil(rows / high), ceil(cols / wide)). A row: 1 x cols. */
void codes_fp8 (uint8_t *codes, float *scale, const float *w, size_t rows, size_t cols, size_t high, size_t wide, bool rounded);

/* Integers from -128 to 127, a scale for each row: the largest magnitude over 127.5, rounded. */
void codes_int8(int8_t *codes, float *scale, const float *w, size_t rows, size_t cols);

/* LLM.int8()'s [Dettmers et al. 2022, arXiv 2208.07339; bitsandbytes 0.50, int8_vectorwise_quant]: w in F16, `most` is the largest
 * magnitude of a row, code = round(w (127 / most)), value = code most / 127. A row of zeros: most and codes are 0. w becomes its
 * F16 values. */
void codes_int8_llm(int8_t *codes, float *most, float *w, size_t rows, size_t cols);

/* Integers from -8 to 7, a scale for each `group` consecutive elements of a row: scale (rows, cols / group). Of the scales
 * p * (largest magnitude / 7.5), p = 1, 0.99, .. 0.21, rounded, the one with the least sum of |w - value|^2.4 [Frantar et al. 2022,
 * arXiv 2210.17323; its code, --mse]. group: a multiple of 32. */
void codes_int4_scales(float *scale, const float *w, size_t rows, size_t cols, size_t group);
void codes_int4(int8_t *codes, const float *scale, const float *w, size_t rows, size_t cols, size_t group);

/* Eight codes a word: code + 8 in four bits each, the first in the lowest four. n: a multiple of 8. */
void codes_int4_pack(uint32_t *packed, const int8_t *codes, size_t n);
