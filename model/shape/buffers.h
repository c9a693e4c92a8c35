/* All device memory of a model except its parameters: every buffer with its shape.
 *
 * Dimensions: B sequences of T tokens, N = B*T, divided by context and tensor ranks; C model
 * width; H query heads, K key/value heads of width D; S = (H+2K)*D width of [q|k|v]; F MLP
 * width; V rows of the embedding; L blocks; W ranks. With t tensor ranks, H, K and F are this
 * rank's. Then tensors of layers and attention have t N rows (Stream.rows), not N; the stream,
 * inputs and statistics of norms, outputs of branches, and dres have N. */
#pragma once
#include "kernels/collectives.h"
#include "kernels/runtime/transfer.h"
#include "model/shape/overlay.h"
#include "model/shape/params.h"

/* Rounds a number of rows or columns of an FP8 operand up to a multiple of 16, which GPUs need. */
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
    Keep keep; /* which tensors forward saves */
    /* memory that belongs to this block alone, one range of bytes. With offload.h: */
    size_t own_bytes;
    int slot;       /* the slot in which it is while it is on the device */
    bool on_host;   /* whether it is copied to the host */
    size_t host_at; /* its offset in the host's memory */
    /* the model's, with this block's sliding window and rotary table */
    Attention attn;
    /* attn for whole sequences and this rank's heads: attention itself (context.h) */
    Attention heads;
    /* keys and values (P, K*D) of the sequence that decode.h continues; NULL unless the run
     * generates */
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
    float *dres_amax; /* [1] max|dres|, which gives dy its scale; NULL: it is not known */
} BackwardScratch;
#undef WORK_TENSOR

/* What context ranks exchange in a micro-batch (context.h), in host memory. */
typedef struct {
    /* number of segments of each rank, some of them empty; number of ranges after segments of this
     * rank that touch are joined */
    int segments, ranges;
    RowRange *whole; /* [c][segments] segments of rank r: rows of qkv_heads and similar tensors */
    RowRange *range; /* [ranges] of this rank's rows outside attention */
    /* [c][segments] this rank's segments with the heads of rank r: rows of `exchanged` */
    RowRange *packed;
    int *own_start; /* (B T/c + 1) the first tokens of documents in this rank's part */
    /* Documents.left_out for whole sequences, and for this rank's part */
    bool *left_out, *own_left_out;
    /* (B T) documents that lie entirely on one rank: candidates for skipping the exchange */
    struct OwnDocument *own;
    double *exchanged; /* [c] each rank's tokens of all other documents */
} ContextExchange;

/* Exchanges of tensor ranks on a queue of their own while a block computes (tensor_ranks.h): rows
 * are gathered; recomputed rows are gathered; sums are complete. */
typedef enum { EXCHANGE_ROWS, EXCHANGE_AGAIN, EXCHANGE_SUMS, NUM_EXCHANGES } Exchange;

/* Rows of one width that pass through blocks, and all that a block needs to compute them:
 * attention, ranks and scratch memory. The text of a model is a Stream. */
typedef struct {
    const ModelConfig *config; /* the model's; with tensor ranks, own_config */
    ModelConfig *own_config;   /* with this rank's heads and MLP width; NULL without tensor ranks */
    Recipe recipe;
    float lora_scale;     /* factor of the adapters' products */
    bool forward_only;    /* there is no backward pass: nothing is saved, and `work` is empty */
    bool trains_matrices; /* some matrix of a block is trained; false if only adapters are */

    /* sizes */
    int L, N; /* number of blocks; this rank's rows of a micro-batch */
    /* rows in layers and attention: N times the number of tensor ranks; N while generating */
    int rows;
    /* rows of a tile of the MLP, in blocks whose MLP is recomputed; `rows`: no tiles */
    int tile;
    int T;                     /* tokens of a sequence */
    int context, context_rank; /* number of context ranks; this rank's number among them */
    /* number of tensor ranks; this rank's number among them */
    int tensor_ranks, tensor_rank;
    Transfer *exchanges; /* [NUM_EXCHANGES]; NULL without tensor ranks */
    int P;               /* number of positions that a token can have: T, or more with caches */
    int last;            /* with caches: the row of the last token */

    /* attention */
    /* what all blocks share. B: of a micro-batch; T: this rank's part of a sequence */
    Attention attn;
    bool documents; /* attention stays inside documents */
    /* documents of whole sequences. With context ranks, documents that skip the exchange are left
     * out */
    Documents docs;
    /* with context ranks: documents of this rank's part. Exchanged documents are left out. count 0:
     * there are none */
    Documents own_docs;
    ContextExchange exchange;
    int *doc_start, *own_doc_start; /* (B*T + 1), (B*T/c + 1): device memory */
    int *host_doc_start;            /* (B*T + 1) host memory */
    int *host_part;                 /* (tN) host memory of context_part */
    float *rope[NUM_ROTATIONS];     /* (P, D/2, 2) cosine and sine; NULL: no block uses the table */

    /* activations of its blocks in the first set (Model.sets); those of each other set begin
     * `apart` after those of the one before */
    Acts *blocks;
    int apart;
    BackwardScratch work;
    /* (C, F) the matrix `down` of the current block, with the inverse factors of swiglu_operand's
     * columns */
    Tensor down_folded;
} Stream;

/* Device memory for the saved activations of one block at a time. leaves, comes: its last content
 * is being copied to the host, its next content is being copied back, and the compute queue has not
 * waited for the copy yet. */
typedef struct {
    Transfer leave, fetch;
    bool leaves, comes;
} Slot;

typedef struct BlockPass BlockPass;

/* Saved activations that are on the host while other blocks compute: see offload.h. */
typedef struct {
    int saves;         /* blocks times micro-batches in flight */
    int slots;         /* number of saves that fit on the device: all, or fewer */
    size_t at, bytes;  /* if fewer: where the slots begin in the arena; bytes of a slot */
    int leaving;       /* number of saves that leave for the host */
    size_t host_bytes; /* pinned host memory for these saves: its size ... */
    char *host;        /* ... and its address */
    Slot *slot;        /* [slots] */
    /* [passes] all passes of the current micro-batches; NULL: nothing is saved, or nothing moves */
    BlockPass *pass;
    int passes, next; /* next: index of the next pass */
} Offload;

/* What is being sent to a neighbouring stage (stages.h): the stream, or its gradient. amax: of the
 * gradient; it may be no tensor. */
typedef struct {
    Tensor stream, amax;
    Transfer message;
} Outgoing;

/* Features of the images of a batch, on the host, for whole sequences. row[i]: the Cv values, F32
 * or BF16, of token i, or NULL if it is not a token of an image. row NULL: the batch has no images.
 * */
typedef struct {
    const void *const *row;
    DType dtype;
} ImageRows;

/* Buffers of models with images (projector.h). rows: rows of features of the micro-batch, with
 * padding. */
typedef struct {
    int rows;
    Tensor x; /* (N, Cv) features */
    int *at;  /* (N) the token of each row, or -1 */
    /* (N, C) shared: before GELU and after it; the projector's output, or its gradient */
    Tensor h, act, y;
    void *host_x; /* (N, Cv) host memory */
    int *host_at; /* (N) host memory */
} ImageBuffers;

/* Device memory by purpose. blocks: saved activations of all blocks; work: buffers that blocks and
 * head share; cache: keys and values of all blocks. */
typedef struct {
    size_t units, blocks, work, head, cache, total;
} PlanBytes;

typedef struct Model {
    Stream text;

    /* [units] activations of the current micro-batch. A unit that is not a block has only attn_res,
     * where it reads the stream */
    Acts *unit_acts;
    Acts *acts; /* unit_acts from the first block on */
    /* [num_sets][units]: unit_acts points to one of these sets. With n micro-batches of a chunk in
     * flight (pipeline.h), micro-batch i has set i % n */
    Acts *sets;
    int num_sets;
    Offload offload;
    ImageBuffers image;
    ImageRows images; /* images of the next batch: see model_use_images */
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

    /* an earlier micro-batch of this step has set scale_amax of the operands */
    bool in_step;
    bool scales_reused; /* the current micro-batch reuses these scales */

    /* NULL, or a function that forward calls after each unit except the head. w: the unit's
     * weights; NULL: another stage has the unit, and its output has just arrived. If `observed`,
     * the plan keeps shared buffers intact until the call */
    void (*observe)(void *observer, int unit, const UnitTensors *w);
    void *observer;
    bool observed;

    /* memory */
    PlanBytes bytes;
    /* scale_amax of all FP8 operands: num_sets times amax_bytes */
    float *amaxes;
    /* amax_at [units + 1]: where the values of a unit begin in those of a set */
    size_t amax_bytes, *amax_at;
    /* buffers that all blocks and the head share, and their offsets in shared_memory */
    OverlaidBuffer shared[NUM_BUFFERS];
    void *shared_memory; /* shared_bytes; a part of `memory` */
    size_t shared_bytes;
    size_t shared_least; /* the most bytes of shared buffers that are live at the same time */
    void *memory;        /* the arena: all device memory above */
} Model;

static inline Acts *stream_acts(const Stream *s, int set, int layer)
{
    return &s->blocks[set * s->apart + layer];
}

/* Into how many parts tensor parallelism divides the tokens between layers: the number of tensor
 * ranks; 1 while generating, when each rank has all tokens. */
static inline int row_parts(const Stream *s)
{
    return s->tensor_ranks == 1 ? 1 : s->rows / s->N;
}

/* Rows of the MLP's buffers (gate, up, SwiGLU and their gradients) in a block with this `keep`:
 * those of a tile, or all rows. */
static inline int mlp_rows(const Stream *s, Keep keep)
{
    return keep_recomputes(keep) ? s->tile : s->rows;
}
