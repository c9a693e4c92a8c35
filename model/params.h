/* The parameters of a model: which tensors there are, unit by unit, and where each lies in its unit's flat buffer.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of width D;
 * S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W ranks. */
#pragma once
#include "kernels/nf4.h"
#include "model/units.h"

/* A unit's flat buffer has regions, each laid out and sharded by itself: what is trained; what is frozen: it has neither gradients
 * nor optimizer states, and is stored in the recipe's format for frozen weights; and of what is frozen the matrices that are stored
 * as lora.base says, E4M3 codes or whole groups of NF4. Elements of the last are bytes. */
typedef enum { TRAINED, FROZEN, BASE, NUM_REGIONS } Region;

/* Rows of a parameter that are a tensor elsewhere: q, k and v of qkv; gate and up; all, or those of ids that exist. */
enum { MAX_PARTS = LOW_RANK_PARTS };
typedef struct {
    int first, rows;
    int tensor;             /* its number among those of the linear layer; of other parameters 0 */
} Part;

/* A parameter's place in its unit. */
typedef struct {
    const char *name;       /* field of Unit: "qkv"                                            */
    int    id;              /* index into Unit.tensor                                          */
    int    rows, cols;
    Split  split;
    int    num_parts;
    Part   part[MAX_PARTS]; /* from top to bottom; padding follows                             */
    Region region;
    size_t offset;          /* elements from the region's start ...                            */
    size_t stored;          /* ... and how many are stored                                     */
    size_t place;           /* the same start where the region is in a format that computes; a multiple of PARAM_ALIGN */
    size_t number;          /* ... and from the unit's start, whatever is frozen: seeds random numbers */
    bool   is_norm, is_embedding;      /* for weight decay                                     */
    bool   is_adapter, is_b;       /* A or B of a linear layer, of ...                         */
    Linear linear;          /* ... this one; or its matrix                                     */
    bool   is_operand;      /* a block's matrix: an operand in the recipe's format; the others are in the stream's */
    bool   has_padding;     /* its rows from vocab_size on are padding and stay 0              */
    float  init_std;        /* 0: starts as ones (norms) or, of adapters, zeros (B)            */
} Param;
enum { PARAM_ALIGN = 256 }; /* elements: whole optimizer groups of 128 or 256, 256-byte aligned in any format */

static inline size_t param_numel(const Param *p)
{
    return (size_t)p->rows * (size_t)p->cols;
}

/* n rounded up to a multiple of it. */
static inline size_t param_align(size_t n)
{
    return (n + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

typedef struct {
    const struct UnitKind *kind;
    int    number;          /* which of its kind, from 0 on: of blocks the layer */
    int    num_params;
    Param  param[NUM_PARAMS];
    size_t numel[NUM_REGIONS]; /* of the regions, padding included: multiples of PARAM_ALIGN * W, of NF4 of groups * W */
    size_t computing[NUM_REGIONS];     /* the same in a format that computes, without the padding for W */
    size_t first;           /* number of its first element in the model                        */
    const ModelConfig *config;
} UnitShape;

/* The parameters of a unit, all trained, and laid out for W ranks; .first is left to the caller. */
void unit_shape(UnitShape *u, const ModelConfig *c, int unit, int world);

/* Lays the regions out anew, after Param.region was changed. */
void unit_lay_out(UnitShape *u, int world);

/* Elements of all parameters, as all ranks and runs count them: what lies between two units' numbers. */
size_t unit_numbers(const UnitShape *u);

/* A matrix in NF4, its groups, plain or not (nf4.h), at `groups`; and how many that are. */
Nf4    param_nf4(const Param *p, const void *groups, bool plain);
size_t param_nf4_groups(const Param *p);

/* What B of a linear layer's adapter is beside, without its weights: num_parts 0 if it has none. */
LowRank adapter_parts(const ModelConfig *c, Linear linear);
