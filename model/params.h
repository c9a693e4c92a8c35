/* The parameters of a model: which tensors there are, unit by unit, and where each lies in its unit's flat buffer.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of width D;
 * S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W ranks. */
#pragma once
#include "kernels/nf4.h"
#include "model/config.h"

/* Every parameter that some kind of unit (units.h) has: a field here and a row of the kind; a kind of its own may overlay `tensor`
 * with other names. As weights or as their gradients, the parameters that a unit lacks have data == NULL. */
enum { NUM_PARAMS = 19 };
typedef union {
    struct {
        Tensor embed;       /* (V, C)  embedding; also the head's matrix if tied               */
        Tensor norm0;       /* (1, C)  blocks: input norm of attention; OLMo-2: norm of its output */
        Tensor qkv;         /* (S, C)                                                          */
        Tensor qnorm;       /* (1, H*D); Qwen3: (1, D), the same for each head                 */
        Tensor knorm;       /* (1, K*D); Qwen3: (1, D)                                         */
        Tensor out;         /* (C, H*D)                                                        */
        Tensor norm1;       /* (1, C)  input norm of the MLP; OLMo-2: norm of its output       */
        Tensor gate_up;     /* (2F, C) rows of gate, then rows of up                           */
        Tensor down;        /* (C, F)                                                          */
        Tensor norm;        /* (1, C)  head: final norm                                        */
        Tensor head;        /* (V, C)                                                          */
        /* adapters; rows for the targeted ones of q, k, v and of gate, up alone, from top to bottom */
        Tensor qkv_a;       /* (3 rank, C)                                                     */
        Tensor qkv_b;       /* (S, rank)                                                       */
        Tensor out_a;       /* (rank, H*D)                                                     */
        Tensor out_b;       /* (C, rank)                                                       */
        Tensor gate_up_a;   /* (2 rank, C)                                                     */
        Tensor gate_up_b;   /* (2F, rank)                                                      */
        Tensor down_a;      /* (rank, F)                                                       */
        Tensor down_b;      /* (C, rank)                                                       */
    };
    Tensor tensor[NUM_PARAMS];
} Unit;

/* A unit's flat buffer has regions, each laid out and sharded by itself: what is trained; what is frozen: it has neither gradients
 * nor optimizer states, and is stored in the recipe's format for frozen weights; and of what is frozen the matrices that are stored
 * as lora.base says, E4M3 codes or whole groups of NF4. Elements of the last are bytes. */
typedef enum { TRAINED, FROZEN, BASE, NUM_REGIONS } Region;

/* The linear layers of a block, each with one matrix for what reads the same input. */
typedef enum { LINEAR_QKV, LINEAR_OUT, LINEAR_GATE_UP, LINEAR_DOWN, NUM_LINEARS } Linear;

/* How a parameter is cut among ranks that compute a layer together: by rows, the layer's outputs; by columns, its inputs; or not at
 * all, since each of them needs all of it [Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053, sec. 3]. */
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS } Split;

typedef enum { ALWAYS, WITH_NORM_WEIGHTS, WITH_QK_NORM, UNTIED, ADAPTED } Condition;
/* OUTPUTS: of the linear layer, of those of its tensors that the parameter has; LORA_RANKS: the rank for each of these. */
typedef enum { ONE, D_MODEL, Q_WIDTH, Q_NORM, K_NORM, MLP, VOCABULARY, LORA_RANK, OUTPUTS, LORA_RANKS } Size;
typedef enum { ONES, ZEROS, STD_EMBEDDING, STD_IN, STD_ATTENTION_OUT, STD_MLP_OUT, STD_HEAD, STD_ADAPTER } Init;

/* A parameter that units of a kind have, in the order of their flat buffer. */
typedef struct {
    const char *name;
    size_t      place;      /* offset in Unit */
    Size        rows, cols;
    Split       split;
    Init        init;
    Condition   condition;
    Linear      linear;     /* whose matrix it is, or whose adapter's */
} ParamRow;

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
