/* Gradients as ranks send them to each other.
 *
 * A message consists of records of WIRE_VALUES consecutive values. In 8 bits, a record has
 * WIRE_VALUES codes and then the F32 scales of its two groups of WIRE_GROUP values:
 *
 *     WIRE_BF16    the values in BF16, and no scales
 *     WIRE_FP8     E4M3: S = fp8_scale(max|x|) of the group, code = x (1/S) as in `quantize`
 *     WIRE_INT8    S = max(max|x|, 2^-90) / 127, code = x (1/S) rounded to nearest even, at most 127
 *                  in magnitude
 *     WIRE_FP8_LM  E4M3 with a given scale, the same for all groups of a tensor and on all ranks
 *                  [Peng et al. 2023, arXiv 2310.18313, sec. 2.1]
 *
 * A group with NaN or infinity has the scale NaN and codes 0, so that its values are NaN on all
 * ranks. All back ends write the same bytes for the same gradients. NCCL does not add codes:
 * reductions of FP8 round after each addition, and their error grows with the number of ranks. Here
 * each value is rounded once, and wire_sum adds in F32. */
#pragma once
#include "kernels/tensor.h"

typedef enum { WIRE_NONE, WIRE_BF16, WIRE_FP8, WIRE_INT8, WIRE_FP8_LM } Wire;
enum { WIRE_VALUES = 256, WIRE_GROUP = 128 };
/* a magnitude, in units of the scale, from which on E4M3 cuts more than rounding does */
#define WIRE_CUT 464.0f

static inline size_t wire_record_bytes(Wire w)
{
    return w == WIRE_BF16 ? WIRE_VALUES * 2
                          : WIRE_VALUES + WIRE_VALUES / WIRE_GROUP * sizeof(float);
}

/* A message of so many records, a row each: BF16 stands for any two bytes. */
static inline Tensor wire_message(void *data, size_t records, Wire w)
{
    return tensor_at(data, (Format){ BF16, 0, false }, (int)records,
                     (int)(wire_record_bytes(w) / 2));
}

/* The scale of WIRE_FP8_LM: *scale * factor. *cut grows by the number of values of at least WIRE_CUT
 * scales. Both are in device memory. The other formats read neither. */
typedef struct {
    const float *scale;
    float factor;
    uint64_t *cut;
} WireScale;

/* message (R) = x (R, WIRE_VALUES), F32 or BF16. */
void wire_encode(Tensor message, Tensor x, Wire w, WireScale s);

/* y = the sum over W ranks, in the order of ranks, in F32, rounded once. own: number of this rank,
 * whose values are x. messages ((W - 1) M): M >= R records of each other rank, in order, of which
 * the first R are read. y and x are (R, WIRE_VALUES), F32 or BF16 in the same format, and may be the
 * same memory. */
void wire_sum(Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w);
