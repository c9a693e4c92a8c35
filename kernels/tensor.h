/* A Tensor is a view: a row-major matrix in some Format, in device memory that an Arena owns.
 * Tensors are passed by value. On the CPU back end device memory is ordinary memory. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* DYNAMIC8 and UDYNAMIC8 are the signed and the unsigned dynamic map of bitsandbytes
 * (kernels/dynamic8.h). Only adamw8bit uses them. */
typedef enum { F32, BF16, E4M3, E5M2, DYNAMIC8, UDYNAMIC8 } DType;

enum { DYNAMIC8_GROUP = 256 }; /* the only group size of the dynamic maps */
/* Scales of FP8 operands are this number of floats apart: cuBLASLt wants 16-byte alignment. */
enum { SCALE_FLOATS = 4 };

/* How values are stored. 8-bit codes have scales: value = scale * code.
 *   group       number of consecutive elements of a row that share a scale; 0: all elements do
 *   expand      a power k, stored next to the scale, stretches each FP8 group to the range of the
 *               format [COAT sec. 4]; only for the optimizer's moments
 *   bf16_scale  the scale of an FP8 group is BF16, with the range of floats, instead of one byte;
 *               only for moments without expansion; format_of_moment sets it */
typedef struct {
    DType dtype;
    int group;
    bool expand, bf16_scale;
} Format;

typedef struct {
    /* (rows, cols), 256-byte aligned; if data and data_t are both NULL, the tensor is absent */
    void *data;
    void *data_t; /* (cols, rows): transposed FP8 codes, same scale; or NULL */
    /* group 0: one float (16 bytes are allocated). Otherwise (rows, cols/group) scales. A scale of
     * an activation is one byte; a scale of an FP8 moment is a BF16 or, if the format is expanded,
     * an fp8_pair; a scale of a dynamic map is a float. NULL for F32 and BF16 tensors. */
    void *scale;
    Format format;
    int rows, cols;
    /* for gradients: true if nothing was accumulated in this step yet; the first accumulation then
     * overwrites the tensor */
    bool empty;
    /* for FP8 operands with one scale: the max|x| from which the scale was computed
     * (scale_is_reused in kernels.h); NULL: max|x| is measured each time */
    float *scale_amax;
    const bool *scale_reused; /* whether the scale is reused, in host memory; NULL: it is not */
    /* for FP8 operands: GEMMs with this operand as first input may use short accumulators */
    bool fast;
    /* for FP8 operands with one scale: (cols) column factors in device memory, powers of two.
     * channel[c] times a value of column c is scale * code. NULL: all factors are 1. See
     * swiglu_forward. */
    float *channel;
} Tensor;

/* The rows first .. first + count - 1 of a tensor. */
typedef struct {
    int first, count;
} RowRange;

/* Bump allocator of device memory. If memory is NULL, the allocator only measures: a plan runs once
 * to size the arena, and once to place every tensor. */
typedef struct {
    char *memory;
    size_t used;
} Arena;

void *arena_alloc(Arena *a, size_t bytes); /* 256-byte aligned */
Tensor tensor_alloc(Arena *a, Format f, int rows, int cols);
/* a view of `data`; f.dtype is F32 or BF16 */
Tensor tensor_at(void *data, Format f, int rows, int cols);
/* Views t as n consecutive elements: (n / 256, 256) if 256 divides n, so that n may exceed 2^31;
 * else (1, n). */
Tensor tensor_flat(Tensor t, size_t n);
/* A view of some rows. If t is FP8 with one scale, the view has no data_t. */
Tensor tensor_rows(Tensor t, int first, int rows);

/* Item number `item` of a tensor of `items` equal matrices, one below the other. If the tensor is FP8
 * without groups, each matrix has its own scale, SCALE_FLOATS floats apart, and its own transposed
 * codes. */
Tensor tensor_item(Tensor t, int item, int items);

bool tensor_exists(Tensor t); /* true if the tensor has data or data_t */
bool format_equal(Format a, Format b);
bool format_is_fp8(Format f);      /* E4M3 or E5M2 */
bool format_is_dynamic8(Format f); /* DYNAMIC8 or UDYNAMIC8 */
bool format_has_scales(Format f);  /* all formats but F32 and BF16 */
/* "bf16", "e4m3/16", "e4m3/128+" (expanded), "dynamic8/256"; the last 16 results stay valid */
const char *format_name(Format f);
/* false if text is not a format name */
bool format_parse(Format *f, const char *text);
size_t dtype_size(DType d); /* bytes of an element */
/* Returns the bytes of the scales of n elements, in whole groups; 0 for formats without scales. */
size_t format_scale_bytes(Format f, size_t n);
/* true for FP8 groups with scales of one byte, which moments do not have */
bool format_has_byte_scales(Format f);
/* format f with the scales that moments have */
Format format_of_moment(Format f);
size_t tensor_numel(Tensor t);
/* bytes of data, data_t and scale together */
size_t tensor_bytes(Tensor t);
