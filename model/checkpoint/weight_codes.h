/* A weight matrix as codes of 8 or 4 bits and scales, as read by inference engines: value = scale *
 * code.
 *
 * A scale is the largest magnitude of its elements divided by the largest code; `rounded`: to the
 * nearest BF16. Codes are chosen for the stored scale: code = w / scale in F32, rounded to nearest,
 * ties to even. So every loader gets the same weights, in whatever type it computes. If a scale
 * would be below 2^-126, as for zeros, it is 2^-7 and the codes are 0. DIFFERS: llm-compressor 0.14
 * rounds the quotient to BF16 before it rounds to a code. Its scales are the same; its squared
 * errors are larger.
 *
 * w (rows, cols): F32, finite. Scales are F32 here; rounded ones have BF16 values. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* E4M3 with a scale per block of `high` x `wide` elements: scale (ceil(rows / high), ceil(cols /
 * wide)). A scale per row is a block of 1 x cols. */
void codes_fp8(uint8_t *codes, float *scale, const float *w, size_t rows, size_t cols, size_t high,
               size_t wide, bool rounded);

/* Integers from -128 to 127 with a scale per row: the largest magnitude / 127.5, rounded. */
void codes_int8(int8_t *codes, float *scale, const float *w, size_t rows, size_t cols);

/* LLM.int8() [Dettmers et al. 2022, arXiv 2208.07339; bitsandbytes 0.50, int8_vectorwise_quant]: w
 * in F16, `most` is the largest magnitude of a row, code = round(w (127 / most)), value = code most
 * / 127. A row of zeros: most and codes are 0. Replaces w by its F16 values. */
void codes_int8_llm(int8_t *codes, float *most, float *w, size_t rows, size_t cols);

/* For integers from -8 to 7 with a scale per `group` consecutive elements of a row: scale (rows,
 * cols / group). Chooses the scale with the least sum of |w - value|^2.4 among p * (largest
 * magnitude / 7.5), p = 1, 0.99, .. 0.21, rounded [Frantar et al. 2022, arXiv 2210.17323; its code,
 * --mse]. group: a multiple of 32. */
void codes_int4_scales(float *scale, const float *w, size_t rows, size_t cols, size_t group);
void codes_int4(int8_t *codes, const float *scale, const float *w, size_t rows, size_t cols,
                size_t group);

/* Packs eight codes per word: code + 8 in four bits each, the first code in the lowest four bits.
 * n: a multiple of 8. */
void codes_int4_pack(uint32_t *packed, const int8_t *codes, size_t n);
