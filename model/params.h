/* The parameters of a model: which tensors there are, unit by unit, and where each lies in its unit's flat buffer.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of width D;
 * S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W ranks. */
#pragma once
#include "model/config.h"

/* The tensors of one unit, as weights or as their gradients. A unit is what is gathered and sharded as a whole:
 * unit 0 the embedding (also the head if tied), units 1..L the blocks, unit L+1 the final norm and the head.
 * A tensor that the architecture lacks has data == NULL. */
enum { MAX_PARAMS = 8 };
typedef union {
    struct {
        Tensor norm0;       /* (1, C) input norm of attention; OLMo-2: norm of its output      */
        Tensor qkv;         /* (S, C)                                                          */
        Tensor qnorm;       /* (1, H*D); Qwen3: (1, D), the same for each head                 */
        Tensor knorm;       /* (1, K*D); Qwen3: (1, D)                                         */
        Tensor out;         /* (C, H*D)                                                        */
        Tensor norm1;       /* (1, C) input norm of the MLP; OLMo-2: norm of its output        */
        Tensor gate_up;     /* (2F, C) rows of gate, then rows of up                           */
        Tensor down;        /* (C, F)                                                          */
    };
    struct { Tensor embed; };          /* (V, C)            unit 0   */
    struct { Tensor norm, head; };     /* (1, C), (V, C)    unit L+1 */
    Tensor tensor[MAX_PARAMS];
} Unit;

/* A parameter's place in its unit's flat buffer. */
typedef struct {
    const char *name;       /* field of Unit: "qkv"                                            */
    int    id;              /* index into Unit.tensor                                          */
    int    rows, cols;
    size_t offset;          /* elements from the unit's start; a multiple of PARAM_ALIGN       */
    bool   is_norm, is_embedding;      /* for weight decay                                     */
    bool   is_operand;      /* a block's matrix: an operand in the recipe's format; the others are in the stream's */
    bool   has_padding;     /* its rows from vocab_size on are padding and stay 0              */
    float  init_std;        /* 0: starts as ones (norms)                                       */
} Param;
enum { PARAM_ALIGN = 256 }; /* elements: whole optimizer groups of 128, 256-byte aligned in any format */

/* n rounded up to a multiple of it. */
static inline size_t param_align(size_t n)
{
    return (n + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

typedef struct {
    int    num_params;
    Param  param[MAX_PARAMS];
    size_t numel;           /* of the flat buffer, padding included: a multiple of PARAM_ALIGN * W */
    size_t first;           /* number of its first element in the model: seeds random numbers  */
} UnitShape;

void unit_shape(UnitShape *u, const ModelConfig *c, int unit, int world);   /* .first is left to the caller */
Unit unit_views(const UnitShape *u, void *data, Format f);                  /* F32 or BF16 tensors in a flat buffer */
Tensor param_view(const Param *p, void *data, Format f);                    /* one of them */

