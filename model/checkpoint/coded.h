/* Quantized folders for other programs: the matrices of the blocks are stored as codes and scales.
 * Defines the tensors of a matrix, and the quantization_config of config.json. Embedding, head,
 * norms and routers of experts stay in BF16.
 *
 *   dtype  layout               tensors of a layer N of O outputs and I inputs
 *   fp8    compressed-tensors   N.weight F8_E4M3 (O,I), N.weight_scale BF16 (O,1); with a block of 128: (O/128, I/128)
 *   fp8    the same, trained    N.weight, N.weight_scale F32 (1): the trainer's operands; one for q, k and v, one for gate and up
 *   fp8    fp8                  N.weight, N.weight_scale_inv F32 (O/128, I/128)                   [DeepSeek-V3's folder]
 *   int8   compressed-tensors   N.weight I8 (O,I), N.weight_scale BF16 (O,1)
 *   int8   bitsandbytes         N.weight I8 (O,I), N.SCB F32 (O), N.weight_format U8 ()           [LLM.int8()]
 *   int4   compressed-tensors   N.weight_packed I32 (O, I/8), N.weight_scale BF16 (O, I/group), N.weight_shape I64 (2)
 *   nf4    bitsandbytes         N.weight U8 (O I/2, 1), N.weight.absmax U8 and four more          [kernels/nf4_map.h]
 *
 * compressed-tensors 0.8 to 0.20 (blocks: from 0.12 on) and bitsandbytes 0.50 read these
 * folders. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "model/config/export_options.h"

typedef enum {
    CODED_FP8_ROWS,
    CODED_FP8_BLOCKS,
    CODED_FP8_TENSOR,
    CODED_FP8_INVERSE,
    CODED_INT8,
    CODED_INT8_LLM,
    CODED_INT4,
    CODED_NF4
} CodedKind;

typedef struct {
    CodedKind kind;
    size_t group;
} Coded; /* group: number of weights that share a scale in int4 */

/* Whether weights of this dtype are codes with scales. */
bool coded_knows(ExportType dtype);

/* Dies on options that cannot be combined; the message lists possible options. */
Coded coded_find(const ExportOptions *o);

/* Whether a matrix of this shape cannot be stored in format c. */
bool coded_refuses(Coded c, size_t rows, size_t cols);
/* For the error message: options that can store every matrix whose number of columns is a multiple
 * of `cols`. */
const char *coded_instead(Coded c, size_t cols);

const char *coded_name(Coded c); /* for messages */
/* the largest magnitude of a weight that the format can store */
float coded_most(Coded c);

/* One of the tensors of the matrix NAME.weight. Its name is NAME<suffix>. It has `bytes` bytes for
 * each `per` consecutive elements of the matrix; per 0: coded_whole gives its content. */
enum { CODED_TENSORS = 6 };
typedef struct {
    const char *suffix, *dtype;
    int dims;
    size_t shape[2], per, bytes;
} CodedTensor;

int coded_tensors(CodedTensor to[CODED_TENSORS], Coded c, size_t rows, size_t cols);

/* A matrix is encoded from front to back in multiples of this many elements; the last part may be
 * shorter. */
size_t coded_unit(Coded c, size_t cols);

/* quantization_config of config.json. images: the model has images; its vision tower and projector
 * have no codes. plain: names of modules in the blocks that have no codes (borrowed). */
json_t *coded_config(Coded c, bool images, json_t *plain);
