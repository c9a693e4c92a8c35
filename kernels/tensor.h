/* A Tensor is a view: a row-major matrix in some Format, in device memory owned by an Arena. Passed by value.
 * With the CPU back end device memory is ordinary memory. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* DYNAMIC8 and UDYNAMIC8: the signed and the unsigned dynamic map of bitsandbytes (kernels/dynamic8.h), only for adamw8bit. */
typedef enum { F32, BF16, E4M3, E5M2, DYNAMIC8, UDYNAMIC8 } DType;

enum { DYNAMIC8_GROUP = 256 };      /* the one group size of the dynamic maps */

/* How values are stored. Codes of 8 bits carry scales: value = scale * code.
 * group: consecutive elements of a row that share one scale; 0: one scale for the whole tensor.
 * expand: a group of FP8 is stretched to the format's range by a power k that is stored beside its scale [COAT sec. 4]: only
 * the optimizer's moments.
 * bf16_scale: a group of FP8 that is not expanded has a scale of two bytes instead of one, with the range of floats: moments
 * too; format_of_moment sets it. */
typedef struct { DType dtype; int group; bool expand, bf16_scale; } Format;

typedef struct {
    void *data;       /* (rows, cols), 256-byte aligned; NULL: the tensor does not exist                       */
    void *data_t;     /* (cols, rows): transposed FP8 codes with the same scale, as operands of FP8 GEMMs; or NULL */
    void *scale;      /* group 0: one float (16 bytes apart); else (rows, cols/group): of FP8 a byte, of moments BF16 or, if
                         expanded, fp8_pair; of the dynamic maps F32. NULL of F32 and BF16                       */
    Format format;
    int    rows, cols;
    bool   empty;     /* of a gradient: holds nothing yet, so what is to be added to it is written; see kernels.h */
    float *range;     /* of an FP8 operand with one scale: see range_is_kept; NULL: max|x| is found each time     */
    const bool *range_kept;    /* host memory, of whoever plans operands; NULL: false                             */
    bool   fast;      /* of an FP8 operand: GEMMs that read it as their first input may add with short accumulators */
} Tensor;

/* Bump allocator of device memory. With base == NULL it only measures:
 * a plan runs once to size the arena, then again to place every tensor in it. */
typedef struct { char *base; size_t used; } Arena;

void  *arena_alloc (Arena *a, size_t bytes);                          /* 256-byte aligned */
Tensor tensor_alloc(Arena *a, Format f, int rows, int cols);
Tensor tensor_at   (void *data, Format f, int rows, int cols);        /* a view of plain memory; f.dtype F32 or BF16 */
Tensor tensor_rows (Tensor t, int first, int rows);                   /* a view of some rows; group 0 FP8 has no data_t */

bool        tensor_exists(Tensor t);                                  /* it has data or data_t */
bool        format_equal (Format a, Format b);
bool        format_is_fp8(Format f);                                  /* E4M3 or E5M2 */
bool        format_is_dynamic8(Format f);                             /* DYNAMIC8 or UDYNAMIC8 */
bool        format_has_scales(Format f);                              /* all but F32 and BF16 */
/* "bf16", "e4m3/16", "e4m3/128+" (expanded), "dynamic8/256"; 16 stay valid */
const char *format_name  (Format f);
bool        format_parse (Format *f, const char *text);               /* false if text is not a format name */
size_t      dtype_size   (DType d);                                   /* bytes of an element */
size_t      format_scale_bytes(Format f, size_t n);                   /* of the scales of n elements, in whole groups; 0 without */
bool        format_has_byte_scales(Format f);                         /* FP8 groups of one byte each: no moment */
Format      format_of_moment(Format f);                               /* f as a moment is stored in it */
size_t      tensor_numel (Tensor t);
size_t      tensor_bytes (Tensor t);                                  /* data, data_t and scale as allocated */
