/* The transformer: its weights, what forward leaves for backward, and the calls that run it.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of width D;
 * S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W ranks. */
#pragma once
#include "kernels/kernels.h"
#include "model/config.h"

/* The tensors of one unit, as weights or as their gradients. A unit is what is gathered and sharded as a whole:
 * unit 0 the embedding (also the head if tied), units 1..L the blocks, unit L+1 the final norm and the head.
 * A tensor that the architecture lacks has data == NULL. */
enum { MAX_PARAMS = 8 };
typedef union {
    struct {
        Tensor norm0;       /* (1, C) input norm of attention; OLMo-2: norm of its output      */
        Tensor qkv;         /* (S, C)                                                          */
        Tensor qnorm;       /* (1, H*D)                                                        */
        Tensor knorm;       /* (1, K*D)                                                        */
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
    int    slot;            /* index into Unit.tensor                                          */
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

/* What block_forward leaves for block_backward. Tensors that hold the same values in the same format are the same
 * memory ("= x"); what backward recomputes or needs only for a moment is memory that all blocks share ("shared").
 *                                                                           f32, bf16       coat                    */
typedef struct {
    Tensor res0, res1; /* (N, C) residual stream: block input; before the MLP  own           shared, one for both      */
    Tensor x0, x1;     /* (N, C) norm inputs (OLMo-2: branch outputs)          = res0, res1  e4m3/16                   */
    Tensor branch0, branch1;       /* (N, C) branch outputs in front of a norm (OLMo-2)  = x0, x1    shared               */
    float *stats0, *stats1;        /* (N, 2) mean and rstd of x0, x1                                                   */
    Tensor h0, h1;     /* (N, C) operands of the branches' first GEMMs         own           e4m3, shared              */
    Tensor proj;       /* (N, S) [q|k|v] as the GEMM writes it                 = qkv         = qkv                     */
    Tensor qkv;        /* (N, S) ... as saved                                  own           own, bf16                 */
    Tensor rot;        /* (N, S) ... as attention reads it                     = qkv, or shared with QK-norm or clip   */
    float *qk_stats;   /* (N, 2) rstd of q and k, with QK-norm                                                         */
    Tensor mix;        /* (N, H*D) attention output as attention writes it     = att         = att                     */
    Tensor att;        /* (N, H*D) ... as saved                                own           own, bf16                 */
    Tensor att_op;     /* (N, H*D) ... as GEMM operand                         = att         e4m3, shared              */
    float *lse;        /* (B, H, T) log-sum-exp of the scores; see attention_forward                                   */
    Tensor wide;       /* (N, 2F) [gate|up] as the GEMM writes it              = gate_up     shared                    */
    Tensor gate_up;    /* (N, 2F) ... as saved                                 own           e4m3/16                   */
    Tensor act;        /* (N, F) silu(gate)*up, GEMM operand                   own           e4m3, shared              */
} Acts;

/* Buffers that all blocks share. */
typedef struct {
    Tensor dres;       /* (N, C) dLoss/d(residual stream)                                                              */
    float *dres_amax;  /* [1] max|dres|, where dy gets its scale from it; else NULL                                    */
    Tensor dy;         /* (N, C) gradient of a branch's last GEMM; = dres where nothing stands between                 */
    Tensor dh;         /* (N, C) gradient of a branch's first operand                                                  */
    Tensor dact;       /* (N, F)                                                                                       */
    Tensor dgate_up;   /* (N, 2F) GEMM operand                                                                         */
    Tensor datt;       /* (N, H*D)                                                                                     */
    Tensor dqkv;       /* (N, S)                                                                                       */
    Tensor dqkv_op;    /* (N, S) GEMM operand; = dqkv if formats agree                                                 */
} Work;

/* block: saved activations of one; work: buffers that all blocks share. */
typedef struct { size_t units, block, work, head, total; } PlanBytes;

typedef struct {
    const ModelConfig *config;
    Recipe    recipe;
    Attention attn;            /* its B and T: every micro-batch's                              */
    Documents docs;
    int       L, N;            /* blocks; tokens of a micro-batch                              */
    Acts     *acts;            /* [L+1]; of the last only res0 is used: the last block's output */
    Work      work;
    float    *final_stats;     /* (N, 2) mean and rstd of the last block's output              */
    Tensor    final_h;         /* (N, C) the head's operand                                    */
    Tensor    logits;          /* (chunk, V): never all N rows                                 */
    int      *targets, *doc_start;     /* (N), (N+1): device memory                            */
    float    *losses;          /* (2, N) cross entropy and z-loss per token                    */
    float    *sums;            /* [2] their sums since model_losses                            */
    float    *rope;            /* (T, D/2, 2) cosine and sine                                  */
    TokenAt  *sorted;          /* (N) the tokens as the embedding wants them                   */
    int      *host_doc_start;  /* (N+1) host memory                                            */
    TokenAt  *host_sorted;     /* (N) host memory                                              */
    bool      documents;       /* attention stays inside documents                             */
    void    (*observe)(void *observer, int blocks, const Unit *w);     /* unless NULL: called in forward when so many blocks */
    void     *observer;        /* have run, the last with weights w; memory that blocks share still holds its values */
    PlanBytes bytes;           /* of device memory, by purpose                                 */
    void     *memory;          /* the arena: all of the above that is device memory            */
} Model;

/* block.c */
void block_forward (const Model *m, const Unit *w, Acts *a, Acts *next);
void block_backward(const Model *m, const Unit *w, Unit *dw, const Acts *a);
void norm_to_stream_backward(const Model *m, Tensor dnorm, Tensor x, const float *stats, Tensor norm, bool accumulate);

/* params.c: the units of an architecture, and initial values. */
void unit_shape(UnitShape *u, const ModelConfig *c, int unit, int world);   /* .first is left to the caller */
Unit unit_views(const UnitShape *u, void *data, Format f);                  /* F32 or BF16 tensors in a flat buffer */
Tensor param_view(const Param *p, void *data, Format f);                    /* one of them */

/* plan.c: everything a run needs in one allocation. model_plan measures, model_place allocates. */
struct Fsdp;
/* shards, rank: see fsdp_plan. */
void model_plan (Model *m, struct Fsdp *f, const Config *c, int shards, int rank);
void model_place(Model *m, struct Fsdp *f, const Config *c, int shards, int rank);
void model_print_plan(const Model *m, const struct Fsdp *f);                /* on stdout */
size_t model_planned_bytes(const Model *m, const struct Fsdp *f);           /* of device memory on this rank */
void model_free  (Model *m, struct Fsdp *f);

/* model.c */
typedef struct { double loss, zloss; } Losses;

/* Forward of one micro-batch, attn.B sequences (host arrays (B, T); target -1: masked); adds its losses to the sums.
 * With backward, gradients of scale * (sum of losses + z_weight * sum of z-losses) are added to those in `f`. */
void     model_step(Model *m, struct Fsdp *f, const int *tokens, const int *targets,
                    float scale, float z_weight, bool backward);
Losses   model_losses(Model *m);                     /* sums over tokens; waits for the device, then starts them from 0 */
