/* All device memory of a model, except its parameters: every buffer and its shape.
 *
 * Dimensions: B sequences of T tokens, N = B*T, divided by context and tensor ranks; C model width;
 * H query heads, K key/value heads of width D; S = (H+2K)*D width of [q|k|v]; F MLP width; V rows
 * of the embedding; L blocks; W ranks; E experts; R rows of assignments (kernels/experts.h). With t
 * tensor ranks, H, K and F are this rank's numbers. Then tensors of linear layers and attention have t N rows (Stream.rows); the stream, inputs and
 * statistics of norms, outputs of branches, and dres have N rows. */
#pragma once
#include "kernels/collectives.h"
#include "kernels/experts.h"
#include "kernels/runtime/transfer.h"
#include "model/shape/overlay.h"
#include "model/shape/params.h"
#include "model/shape/policy.h"
#include "model/shape/preference.h"

/* Rounds a number of rows or columns of an FP8 operand up to a multiple of 16, which GPUs need. */
static inline int fp8_padded(int count)
{
    enum { MULTIPLE = 16 };
    return (count + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

/* A block's activations: as members with the names of BLOCK_TENSORS and BLOCK_FLOATS, and all
 * tensors as an array. */
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
    int layer;       /* number of the block */
    Routing experts; /* which experts compute which tokens; experts 0: the block has one MLP */
    Keep keep;       /* which tensors forward saves */
    /* memory that belongs to this block alone: one range of bytes. If activations are offloaded
     * (offload.h): */
    size_t own_bytes;
    int slot;       /* slot of this memory while it is on the device */
    bool on_host;   /* whether this memory is copied to the host */
    size_t host_at; /* offset of the copy in host memory */
    /* the model's Attention settings, with this block's sliding window and rotary table */
    Attention attn;
    /* the settings with which attention runs: `attn` for whole sequences with this rank's heads
     * (context.h) */
    Attention heads;
    /* keys and values (P, K*D) of the sequence that decode.h continues; NULL unless the run
     * generates */
    KvCache cache;
} Acts;

#undef ACT_TENSOR
#undef ACT_FLOATS

/* The product of a linear layer's input with A of the layer's adapter. */
static inline Tensor acts_xa(const Acts *a, Linear l)
{
    return a->tensor[ACT_xa_qkv + (int)l];
}

/* Buffers that backward of a block writes and the next block overwrites. WORK_TENSORS lists the
 * members. */
#define WORK_TENSOR(name) Tensor name;
typedef struct {
    WORK_TENSORS(WORK_TENSOR)
    float *dres_amax; /* [1] max|dres|, which determines the scale of dy; NULL: it is not known */
} BackwardScratch;
#undef WORK_TENSOR

/* The rows that context ranks exchange in a micro-batch (context.h); in host memory. */
typedef struct {
    /* segments: number of segments of each rank, some of which may be empty. ranges: number of
     * ranges after adjacent segments of this rank are joined */
    int segments, ranges;
    /* [c][segments] the segments of each rank: rows of qkv_heads and similar tensors */
    RowRange *whole;
    RowRange *range; /* [ranges] ranges of this rank's rows outside attention */
    /* [c][segments] this rank's segments with the heads of each rank: rows of `exchanged` */
    RowRange *packed;
    int *own_start; /* (B T/c + 1) the first tokens of documents in this rank's part */
    /* Documents.left_out: for whole sequences, and for this rank's part */
    bool *left_out, *own_left_out;
    /* (B T) documents that lie entirely on one rank: candidates for skipping the exchange */
    struct OwnDocument *own;
    double *exchanged; /* [c] each rank's number of tokens of all other documents */
} ContextExchange;

/* Communication of tensor ranks on its own queue while a block computes (tensor_ranks.h). */
typedef enum {
    EXCHANGE_ROWS,  /* gathers rows */
    EXCHANGE_AGAIN, /* gathers recomputed rows */
    EXCHANGE_SUMS,  /* completes sums */
    NUM_EXCHANGES
} Exchange;

/* The losses of the router (Experts in config.h) in a pass, and what a step reports about it. */
typedef struct {
    int groups; /* number of groups of tokens with statistics of their own, in a micro-batch */
    /* (L + 1, 2E + 3) for each block, sums of its statistics over the step's micro-batches; then
     * its load-balancing loss. Row L has the loss of all blocks together (BALANCE_POOLED) */
    Tensor sums;
    Tensor pooled;    /* (1, 2E + 2) BALANCE_POOLED: sum of the blocks' statistics */
    float balance, z; /* factors of route_backward */
    Tensor bias;      /* (L, E) F32, what `route` adds to p; absent without bias_gamma */
} RouterLosses;

/* The residual stream: rows of one width that pass through the blocks, and what all blocks share to
 * compute them: attention, ranks and scratch memory. The text of a model is a Stream. */
typedef struct {
    const ModelConfig *config; /* the model's configuration; with tensor ranks, own_config */
    /* configuration with this rank's numbers of heads and MLP width; NULL without tensor ranks */
    ModelConfig *own_config;
    Recipe recipe;
    float lora_scale; /* factor of the adapters' products */
    /* there is no backward pass: no activations are saved, and `work` is empty */
    bool forward_only;
    /* true: a matrix of a block is trained; false: only adapters are trained */
    bool trains_matrices;

    /* sizes */
    int L, N; /* L: number of blocks; N: number of this rank's rows of a micro-batch */
    /* rows in linear layers and attention: N times the number of tensor ranks; N during
     * generation */
    int rows;
    /* rows of an MLP tile in blocks whose MLP is recomputed; equal to `rows`: no tiles */
    int tile;
    int T;                     /* number of tokens of a sequence */
    int context, context_rank; /* number of context ranks, and this rank's number among them */
    /* number of tensor ranks, and this rank's number among them */
    int tensor_ranks, tensor_rank;
    Transfer *exchanges; /* [NUM_EXCHANGES]; NULL without tensor ranks */
    int P;               /* number of possible positions of a token: T, or more with caches */
    int last;            /* with caches: the row of the last token */

    /* attention */
    /* settings that all blocks share. B: sequences of a micro-batch; T: length of this rank's part
     * of a sequence */
    Attention attn;
    bool documents; /* attention stays inside documents */
    /* documents of whole sequences. With context ranks, without the documents that skip the
     * exchange */
    Documents docs;
    /* with context ranks: documents of this rank's part, without exchanged documents. count 0:
     * there are none */
    Documents own_docs;
    ContextExchange exchange;
    /* device memory. doc_start: (B*T + 1); own_doc_start: (B*T/c + 1) */
    int *doc_start, *own_doc_start;
    int *host_doc_start;        /* (B*T + 1) host memory */
    int *host_part;             /* (tN) host memory for context_part */
    float *rope[NUM_ROTATIONS]; /* (P, D/2, 2) cosine and sine; NULL: no block uses the table */

    /* activations of the stream's blocks in the first set (Model.sets). The activations of each
     * further set begin `apart` after those of the previous set */
    Acts *blocks;
    int apart;
    BackwardScratch work;
    /* (C, F) the matrix `down` of the current block, whose columns are divided by the factors of
     * swiglu_operand's columns */
    Tensor down_folded;
    RouterLosses router;
} Stream;

/* Device memory for the saved activations of one block at a time. */
typedef struct {
    Transfer leave, fetch;
    /* leaves: the last content is being copied to the host. comes: the next content is being copied
     * back. In both cases, the compute queue has not waited for the copy yet */
    bool leaves, comes;
} Slot;

typedef struct BlockPass BlockPass;

/* Saved activations that are on the host while other blocks compute (offload.h). */
typedef struct {
    int saves; /* number of saves (offload.h): blocks times micro-batches in flight */
    int slots; /* number of slots on the device; equal to `saves`: all saves stay on the device */
    /* if there are fewer slots than saves. at: offset of the slots in the arena; bytes: size of a
     * slot */
    size_t at, bytes;
    int leaving;       /* number of saves that leave for the host */
    size_t host_bytes; /* size of the pinned host memory for these saves */
    char *host;        /* address of this host memory */
    Slot *slot;        /* [slots] */
    /* [passes] all passes of the current micro-batches; NULL: no activations are saved, or none
     * move */
    BlockPass *pass;
    int passes, next; /* next: index of the next pass */
} Offload;

/* A message to a neighbouring stage (stages.h). */
typedef struct {
    /* stream: the residual stream, or its gradient. amax: amax of the gradient, or a tensor without
     * data */
    Tensor stream, amax;
    Transfer message;
} Outgoing;

/* Features of the images of a batch, on the host, for whole sequences. */
typedef struct {
    /* row[i]: pointer to the Cv values of token i; NULL: token i is no image token. row NULL: the
     * batch has no images */
    const void *const *row;
    DType dtype; /* format of the Cv values: F32 or BF16 */
} ImageRows;

/* Buffers of models with images (projector.h). */
typedef struct {
    int rows; /* number of rows of features of the micro-batch, with padding */
    Tensor x; /* (N, Cv) features */
    int *at;  /* (N) the token of each row; -1: padding */
    /* (N, C) shared buffers. h: input of GELU; act: output of GELU; y: output of the projector, in
     * backward its gradient */
    Tensor h, act, y;
    void *host_x; /* (N, Cv) host memory */
    int *host_at; /* (N) host memory */
} ImageBuffers;

/* Sums over preference pairs (block/preference.c). DIFFERENCE, SQUARE: sum of policy - reference of
 * both sides, and of its square. */
typedef enum {
    PAIR_COUNT,
    PAIR_LABELS, /* labels of chosen sides */
    PAIR_LOSS,
    PAIR_NLL, /* cross entropy of chosen sides */
    PAIR_CHOSEN_REWARD,
    PAIR_REJECTED_REWARD,
    PAIR_ACCURACY,
    PAIR_CHOSEN_LOGPS,
    PAIR_REJECTED_LOGPS,
    PAIR_DIFFERENCE,
    PAIR_SQUARE,
    NUM_PAIR_SUMS
} PairSum;

/* Sums over the labels of a policy's documents; the last is a maximum. */
typedef enum {
    POLICY_LABELS,
    POLICY_LOSS, /* with the weights of the denominator */
    POLICY_CLIPPED_LOW,
    POLICY_CLIPPED_HIGH,
    POLICY_RATIO,
    POLICY_IMPORTANCE,
    POLICY_ENTROPY,
    POLICY_KL_OLD,
    POLICY_KL_REFERENCE,
    POLICY_LARGEST_RATIO,
    NUM_POLICY_SUMS
} PolicySum;

/* Stored values of a batch whose labels have weights: host memory (B, T), in the order of the
 * tokens. */
typedef struct {
    /* for each target: with a preference.loss the log-probability under the reference model (not
     * read if the loss has none), with a policy.loss POLICY_VALUES numbers (policy.h) */
    const float *values;
    double sft_scale; /* sft_weight x pairs / chosen labels of the global batch */
    bool given;       /* the batch has pairs, or documents of a policy */
} WeighedRows;

/* Labels of the current micro-batch whose gradients have weights, which need the log-probabilities
 * of all labels first. */
typedef struct {
    float
        *weight; /* (N) device memory: factors of the labels' gradients. NULL: the model has none */
    float *host; /* (3, N) host memory: losses, entropies (of a policy), weights */
    /* (B, T) host memory, of the whole micro-batch. targets NULL: the labels have no weights */
    const int *targets;
    const uint8_t *begins;
    const float *values;
    double sft_scale;
} WeighedLabels;

/* Soft labels of a batch: a word for each target (B, T), and all entries, both in a mapped file
 * (distill.h). words NULL: none. */
typedef struct {
    const uint64_t *words;
    const uint8_t *entries;
} SoftRows;

/* Soft labels of the current micro-batch or, if the run scores, the columns that it chooses. */
typedef struct {
    int k; /* columns of a token; 0: no memory */
    /* device memory: (N, k), (N, k), (N). If the run scores, `probability` has log-probabilities */
    int *column;
    float *probability, *tail;
    float *host; /* (N, 2 k + 1) host memory */
    Distillation loss;
    bool given; /* the micro-batch has soft labels */
    bool chooses;
    EntryChoice choice;
    uint64_t seed; /* of the next draws */
} SoftBuffers;

/* Device memory in bytes, by purpose. */
typedef struct {
    /* blocks: saved activations of all blocks. work: buffers that blocks and head share. cache:
     * keys and values of all blocks */
    size_t units, blocks, work, head, cache, total;
} PlanBytes;

typedef struct Model {
    Stream text;

    /* [units] activations of the current micro-batch. A unit that is not a block has only attn_res,
     * from which it reads the stream */
    Acts *unit_acts;
    Acts *acts; /* unit_acts from the first block on */
    /* [num_sets][units]: unit_acts points to one of these sets. With n micro-batches of a chunk in
     * flight (pipeline.h), micro-batch i has set i % n */
    Acts *sets;
    int num_sets;
    Offload offload;
    ImageBuffers image;
    ImageRows images; /* images of the next batch: see model_use_images */
    WeighedLabels weighed;
    WeighedRows weighed_rows; /* of the next batch: see model_use_weights */
    Preference preference;
    double pair_sums[NUM_PAIR_SUMS]; /* since model_zero_losses */
    Policy policy;
    double policy_sums[NUM_POLICY_SUMS];
    SoftBuffers soft;
    SoftRows soft_rows; /* soft labels of the next batch: see model_use_soft_labels */
    Outgoing outgoing[NUM_NEIGHBOURS];

    /* the head */
    float temperature;  /* divides the logits of a loss */
    float *final_stats; /* (N, 2) mean and rstd of the last block's output */
    Tensor final_h;     /* (N, C) operand of the head's GEMM */
    Tensor logits;      /* (chunk, V); the logits of all N rows never exist together */
    /* (chunk, V) gradient of the logits in format.head, if this is FP8. Its transpose overwrites
     * the logits */
    Tensor dlogits;
    /* E4M3 operands of the head's backward, if dlogits exists. head_h: (chunk, C). head_w: (V, C),
     * only the transpose. In dlogits, head_h and head_w, chunk and V are padded (fp8_padded) */
    Tensor head_h, head_w;
    bool has_head; /* this rank's stage has the head, which computes the losses */

    /* the batch and its losses */
    int *targets;         /* (N) device memory */
    TokenAt *sorted;      /* (N) the tokens in the order that the embedding's backward needs */
    TokenAt *host_sorted; /* (N) host memory */
    float *losses;        /* (2, N) cross entropy, and z-loss or divergence, per token */
    float *sums;          /* [2] their sums since model_zero_losses */

    /* an earlier micro-batch of this step has set scale_amax of the operands */
    bool in_step;
    bool scales_reused; /* the current micro-batch reuses these scales */

    /* NULL, or a function that forward calls after each unit except the head. w: the unit's
     * weights; NULL: another stage has the unit, and its output has just arrived. If `observed`,
     * the plan keeps shared buffers intact until this call */
    void (*observe)(void *observer, int unit, const UnitTensors *w);
    void *observer;
    bool observed;

    /* memory */
    PlanBytes bytes;
    /* scale_amax of all FP8 operands: num_sets x amax_bytes bytes */
    float *amaxes;
    /* amax_at [units + 1]: offset of a unit's values in the values of a set */
    size_t amax_bytes, *amax_at;
    /* buffers that all blocks and the head share, with their offsets in shared_memory */
    OverlaidBuffer shared[NUM_BUFFERS];
    void *shared_memory; /* shared_bytes bytes; a part of `memory` */
    size_t shared_bytes;
    /* maximum number of bytes of shared buffers that are live at the same time */
    size_t shared_least;
    void *memory; /* the arena: all device memory above */
} Model;

static inline Acts *stream_acts(const Stream *s, int set, int layer)
{
    return &s->blocks[set * s->apart + layer];
}

/* The number of parts into which tensor parallelism divides the tokens between linear layers: the
 * number of tensor ranks; 1 during generation, because each rank then has all tokens. */
static inline int row_parts(const Stream *s)
{
    return s->tensor_ranks == 1 ? 1 : s->rows / s->N;
}

/* Rows of the MLP's buffers (gate, up, SwiGLU and their gradients) in a block with this `keep`: the
 * rows of a tile, or all rows. */
static inline int mlp_rows(const Stream *s, Keep keep)
{
    return keep_recomputes(keep) ? s->tile : s->rows;
}

/* Number of rows of gate, up, SwiGLU and their gradients: one per token or, with experts, the rows
 * of assignments of these tokens. */
static inline int hidden_rows(int tokens, int experts, int top_k)
{
    return experts > 0 ? routing_rows(tokens, experts, top_k) : tokens;
}
