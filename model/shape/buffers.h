/* What a model has in device memory besides its parameters: every buffer with its shape.
 *
 * Dimensions: B sequences of T tokens, N = B*T, divided by context and tensor ranks; C model width;
 * H query heads, K key/value heads of width D; S = (H+2K)*D width of [q|k|v]; F MLP width; V rows
 * of the embedding; L blocks; W ranks. With t tensor ranks H, K and F are this rank's, and what
 * layers and attention read and write has t N rows (Model.rows) where N is written; the stream,
 * norms' inputs and statistics, branches and dres have N. */
#pragma once
#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "model/shape/overlay.h"
#include "model/shape/params.h"

/* As many rows or columns of an FP8 operand: GPUs multiply these by sixteens. */
static inline int fp8_padded(int count)
{
    enum { MULTIPLE = 16 };
    return (count + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

/* A block's activations: members by name, as BLOCK_TENSORS and BLOCK_FLOATS list them, and all
 * tensors by number. */
#define ACT_TENSOR(name, tokens) Tensor name;
#define ACT_FLOATS(name) float *name;
typedef struct {
    union {
        struct {
            BLOCK_TENSORS(ACT_TENSOR)
        };
        Tensor tensor[NUM_ACTS];
    };
    BLOCK_FLOATS(ACT_FLOATS)
    Keep keep; /* which of these forward saves */
    /* of this block's own memory, one piece; in a slot, and ... */
    size_t own_bytes;
    int slot;       /* ... which; ... */
    bool on_host;   /* ... whether it leaves for the host, ... */
    size_t host_at; /* ... and where it is there (offload.h) */
    /* the model's, with this block's sliding window and rotary table */
    Attention attn;
    /* attn for whole sequences and this rank's heads: attention itself (context.h) */
    Attention heads;
    /* k, v (P, K*D) of the sequence that decode.h continues; NULL unless the run generates */
    KvCache cache;
} Acts;

#undef ACT_TENSOR
#undef ACT_FLOATS

/* The product of linear layer l's input with its adapter's A. */
static inline Tensor acts_xa(const Acts *a, Linear l)
{
    return a->tensor[ACT_xa_qkv + (int)l];
}

/* What backward writes and the next block overwrites: members as WORK_TENSORS lists them. */
#define WORK_TENSOR(name) Tensor name;
typedef struct {
    WORK_TENSORS(WORK_TENSOR)
    float *dres_amax; /* [1] max|dres|, from which dy gets its scale; or NULL */
} BackwardScratch;
#undef WORK_TENSOR

/* What context ranks exchange in a micro-batch (context.h), in host memory. */
typedef struct {
    /* of each rank, some may be empty; ranges that this rank's pieces make, where they touch */
    int pieces, ranges;
    RowRange *whole; /* [c][pieces] those of rank r: rows of qkv_heads and its like */
    RowRange *range; /* [ranges] of this rank's rows outside attention */
    /* [c][pieces] this rank's pieces with the heads of rank r: rows of `exchanged` */
    RowRange *packed;
    int *own_start; /* (B T/c + 1) where documents begin in this rank's part */
    /* see Documents: of whole sequences, of this rank's part */
    bool *left_out, *own_left_out;
    /* (B T) documents that lie in one rank's part, from which those left out are chosen */
    struct OwnDocument *own;
    double *exchanged; /* [c] each rank's tokens of the other documents */
} ContextExchange;

/* What is done on the queue of exchanges between tensor ranks while a block computes
 * (tensor_ranks.h): rows are gathered, rows made again are, sums are there. */
typedef enum { EXCHANGE_ROWS, EXCHANGE_AGAIN, EXCHANGE_SUMS, NUM_EXCHANGES } Exchange;
typedef struct {
    DeviceMark *ready, *done[NUM_EXCHANGES];
} Exchanges;

/* Rows that pass through blocks, and how these compute them: of one width and one attention. A
 * model's text is one. */
typedef struct {
    const ModelConfig *config; /* the model's; with tensor ranks own_config */
    ModelConfig *own_config;   /* has this rank's heads and MLP width; else NULL */
    Recipe recipe;
    float lora_scale;     /* of adapters */
    bool forward_only;    /* nothing is kept for a backward pass, and there is no `work` */
    bool trains_matrices; /* of blocks: false if only adapters are trained */

    /* sizes */
    int L, N; /* blocks; rows of a micro-batch, this rank's */
    /* tN: rows in blocks' layers and attention, those of t tensor ranks; N while generating */
    int rows;
    /* rows of a tile of the MLP, in blocks whose MLP backward runs again; `rows`: no tiles */
    int tile;
    int T;                     /* tokens of a sequence */
    int context, context_rank; /* ranks that share sequences; which part is this rank's */
    /* ranks that compute layers together; which part is this rank's */
    int tensor_ranks, tensor_rank;
    Exchanges *exchanges; /* with tensor ranks; else NULL */
    int P;                /* positions that a token can have: T, or more with caches */
    int last;             /* with caches: the row of the last token */

    /* attention */
    /* what blocks have in common; its B: every micro-batch's; its T: this rank's part */
    Attention attn;
    bool documents; /* attention stays inside documents */
    /* of whole sequences; with context ranks those that stay in one part are left out */
    Documents docs;
    /* with context ranks: of this rank's part; those that are exchanged are left out; count 0:
     * none */
    Documents own_docs;
    ContextExchange exchange;
    int *doc_start, *own_doc_start; /* (B*T + 1), (B*T/c + 1): device memory */
    int *host_doc_start;            /* (B*T + 1) host memory */
    int *host_part;                 /* (tN) host memory: see context_part */
    float *rope[NUM_ROTATIONS];     /* (P, D/2, 2) cosine and sine; NULL: no block has them */

    BackwardScratch work;
    /* (C, F) a block's down with the factors of swiglu_operand's columns: matmul's operand */
    Tensor down_folded;
} Stream;

/* Device memory for one block's saved activations at a time: what was in it is on its way to the
 * host, or the next is on its way back, and the compute queue has not waited for that yet. */
typedef struct {
    DeviceMark *left, *back;
    bool leaves, comes;
} Slot;

typedef struct BlockPass BlockPass;

/* Saved activations that are on the host while other blocks compute: see offload.h. */
typedef struct {
    int pieces;        /* blocks times micro-batches in flight */
    int slots;         /* those whose saved activations are on the device: all, or fewer */
    size_t at, bytes;  /* if fewer: where in the arena the slots begin; of a slot */
    int leaving;       /* pieces that leave */
    size_t host_bytes; /* of pinned host memory for these, */
    char *host;        /* which is here */
    Slot *slot;        /* [slots] */
    DeviceMark *computed;
    /* [passes] of the micro-batches at work, ...; NULL: nothing is saved, or nothing moves */
    BlockPass *pass;
    int passes, next; /* ... of which `next` comes next */
} Offload;

/* What is on its way to a neighbouring stage (stages.h): the stream or its gradient, and with the
 * gradient its amax, or NULL. */
typedef struct {
    Tensor stream, amax;
    DeviceMark *ready, *left;
} Outgoing;

/* Features of images on the host, in a batch of whole sequences: row[i] has the Cv values of token
 * i, in F32 or BF16; NULL: it is no place of an image. row NULL: the batch has no images. */
typedef struct {
    const void *const *row;
    DType dtype;
} ImageRows;

/* Only models with images have these (projector.h). rows: the micro-batch's rows of features,
 * padded. */
typedef struct {
    int rows;
    Tensor x; /* (N, Cv) features */
    int *at;  /* (N) the token of each row, or -1 */
    /* (N, C) shared: before GELU and after it; the projector's output, or its gradient */
    Tensor h, act, y;
    void *host_x; /* (N, Cv) host memory */
    int *host_at; /* (N) host memory */
} ImageBuffers;

/* blocks: saved activations of all; work: buffers that all blocks share, with the head's; cache: of
 * all blocks. */
typedef struct {
    size_t units, blocks, work, head, cache, total;
} PlanBytes;

typedef struct Model {
    Stream text;

    /* [units] activations of the micro-batch at work; units that are no block use attn_res, where
     * they read the stream */
    Acts *unit_acts;
    Acts *acts; /* those of the first block on */
    /* [num_sets][units]: unit_acts is one of them. Micro-batch i of a stage's chunk with n in
     * flight (pipeline.h) has set i % n */
    Acts *sets;
    int num_sets;
    Offload offload;
    ImageBuffers image;
    ImageRows images; /* of the next batch: see model_use_images */
    Outgoing outgoing[NUM_NEIGHBOURS];

    /* the head */
    float *final_stats; /* (N, 2) mean and rstd of the last block's output */
    Tensor final_h;     /* (N, C) the head's operand */
    Tensor logits;      /* (chunk, V): never all N rows */
    /* (chunk, V) their gradient in format.head, if that is FP8: its transpose overwrites the
     * logits */
    Tensor dlogits;
    /* (chunk, C), (V, C) then: E4M3 operands, of the weight only the transpose; in these three
     * chunk and V are padded: fp8_padded */
    Tensor head_h, head_w;
    bool has_head; /* this rank's stage ends with the head, which makes the losses */

    /* the batch and its losses */
    int *targets;         /* (N) device memory */
    TokenAt *sorted;      /* (N) the tokens as the embedding wants them */
    TokenAt *host_sorted; /* (N) host memory */
    float *losses;        /* (2, N) cross entropy and z-loss per token */
    float *sums;          /* [2] their sums since model_zero_losses */

    /* this step has had a micro-batch: its operands' scale_amax are known, ... */
    bool in_step;
    bool scales_reused; /* ... and valid for this one */

    /* unless NULL: called in forward after each unit but the head, with its weights (NULL: it is
     * another stage's, and its output has come); if `observed`, memory that blocks share holds its
     * values, since it keeps them until then */
    void (*observe)(void *observer, int unit, const UnitTensors *w);
    void *observer;
    bool observed;

    /* memory */
    PlanBytes bytes; /* of device memory, by purpose */
    /* of the scales of FP8 operands, for a step: num_sets times amax_bytes */
    float *amaxes;
    /* [units + 1] amax_at: where a unit's begin in those of a set */
    size_t amax_bytes, *amax_at;
    /* what all blocks and the head share, and where it lies in ... */
    OverlaidBuffer shared[NUM_BUFFERS];
    void *shared_memory; /* shared_bytes; part of ... */
    size_t shared_bytes;
    size_t shared_least; /* bytes of them that hold something at the same time, at most */
    void *memory;        /* the arena: all of the above that is device memory */
} Model;

/* In how many parts tokens are between layers: the tensor ranks; 1 while generating, where each of
 * them has all. */
static inline int row_parts(const Stream *s)
{
    return s->tensor_ranks == 1 ? 1 : s->rows / s->N;
}

/* Rows of the buffers of the MLP (gate, up, SwiGLU and their gradients) in a block with this
 * `keep`: a tile, or all. */
static inline int mlp_rows(const Stream *s, Keep keep)
{
    return keep_recomputes(keep) ? s->tile : s->rows;
}
