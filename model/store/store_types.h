/* The types of the store: each rank's slices of weights, gradients and optimizer states; buffers
 * for gathered weights and for gradients that are not reduced yet; and the list of copies between
 * them. */
#pragma once
#include "kernels/runtime/mesh.h"
#include "kernels/runtime/transfer.h"
#include "model/shape/architecture.h"
#include "model/shape/optimizer_table.h"
#include "model/shape/pipeline.h"

/* Elements [first, first + count) of a region. (count) and (n) are shapes of tensor_flat: a unit
 * may have more than 2^31. */
typedef struct {
    size_t first, count;
    /* (count): master weights, or frozen weights; QUANTIZED: bytes of codes or of NF4 groups */
    Tensor stored;
    /* (count): from which operands are gathered or made. It is `stored`; or, if master weights are
     * on the host, their operands, which the update encodes */
    Tensor gather_input;
} Slice;

/* This rank's part of one unit. */
typedef struct {
    Slice slice[NUM_REGIONS];
    /* (count) of TRAINED. grad.empty: no micro-batch of this step has written it yet. A state may
     * cover only a part of the slice: shard_state */
    Tensor grad, state[MAX_STATES];
    /* elements of TRAINED before that part, and after it */
    size_t before[MAX_STATES], after[MAX_STATES];
} Shard;

/* The steps from a stored weight to the operand of a GEMM. Before GATHER, each rank works on its
 * own slice. */
typedef enum {
    NO_STEP,
    VIEW,       /* no copy: the GEMM reads what is stored */
    CAST_SLICE, /* the slice is rounded to its place in the unit's buffer */
    /* the slice is rounded to its place in store->replicated, 0 elsewhere: the sum over ranks is
     * the whole */
    REPLICATE,
    /* the slice, on the host, is rounded to `gather_input` when it has changed */
    ENCODE,
    FETCH,      /* the slice is copied from the host to its place in the unit's buffer */
    GATHER,     /* an all-gather of the region */
    CAST,       /* the whole is rounded: FP8 codes, transposed codes or both in one pass */
    TRANSPOSE,  /* FP8 codes are transposed */
    DEQUANTIZE, /* as CAST, from NF4 */
    NUM_STEPS
} Step;

/* The purpose of a step. Forward reads W of an FP8 weight, backward W^T; other formats have one
 * copy for both. */
typedef enum { FOR_FORWARD = 1, FOR_BACKWARD = 2, AS_STORED = 4, AT_UPDATE = 8, AT_LOAD = 16 } Use;

/* A step: `to` = `from`. What is made for both passes has to.data for forward and to.data_t for
 * backward. */
typedef struct {
    Step step;
    int uses;
    const Param *param;
    Tensor from, to;
} Copy;

/* How long the content of a unit's buffer is valid: until another unit uses the buffer; until the
 * next update; for the whole run. */
typedef enum { UNTIL_REUSE, UNTIL_UPDATE, FOR_GOOD } Lifetime;

/* A gathered unit's memory: (n) in its compute format, n the largest unit that it serves. */
typedef struct {
    /* data_t: transposed FP8 operands. It may be the memory of data, which then holds either rows
     * or transposes */
    Tensor elements;
    /* elements.data exists; elements.data_t exists; both are the same memory */
    bool has_rows, has_transposes, rotates;
    /* the transposes are made from the rows, so the two are not the same memory */
    bool transposes_rows;
    /* the gathered region QUANTIZED as stored, where that is not what computes */
    void *raw;
    size_t raw_bytes;
    /* the unit whose weights it holds now, -1: none; and for which uses (enum Use) */
    int unit, has;
    Transfer gather;
} WeightBuffer;

/* A unit's gradients before they are summed over the shard group. */
typedef struct {
    Tensor elements; /* (n) in the recipe's format of gradients */
    int unit;        /* whose gradients it holds now; -1: none */
    Transfer reduce;
} GradBuffer;

/* How the stored weights of a unit become operands. Gathering, updating and the memory plan read
 * it. */
typedef struct {
    const Step **way; /* [num_params] the steps of each parameter, up to NO_STEP */
    Copy *copy;       /* [num_copies] in this order */
    /* made: the uses that copies serve; others read what was gathered or stored */
    int num_copies, made;
    /* at: where each region begins in the unit's buffer; numel: elements of all regions there */
    size_t at[NUM_REGIONS], numel;
    Lifetime lifetime;
    WeightBuffer *weights; /* NULL: the stored weights are the weights */
    GradBuffer *grads;     /* NULL: gradients are added to the shard's */
} UnitPlan;

/* What can be on the host: frozen weights of layers; the optimizer's states; master weights of
 * layers that compute in a smaller format. */
typedef enum { HOST_FROZEN, HOST_MOMENTS, HOST_MASTER, NUM_HOSTED } Hosted;

/* How many updates and snapshots are in the optimizer's states. Counts start at 0, as the states
 * do, and are saved, loaded and dropped with them. */
typedef struct {
    /* in the moments: t of AdamW's bias correction. A step whose loss or gradient is not finite, or
     * that `spikes` skips, makes none */
    long updates;
    struct {
        long last, every, count;
    } average; /* snapshots in the average, by these settings */
} StateCounts;

typedef struct {
    /* the units */
    int num_units;
    HfTensor *tensor; /* [num_tensors] of all units, as files have them */
    int num_tensors;
    UnitLayout *shape;         /* [num_units] */
    Shard *shard;              /* [num_units] */
    UnitPlan *plan;            /* [num_units] */
    UnitTensors *unit, *dunit; /* [num_units] weights in compute format, and gradients */
    /* [num_buffers]: those that units share, then one per unit */
    WeightBuffer *weight_buffer;
    GradBuffer *grad_buffer; /* [num_buffers] */

    /* tensors of all units together */
    /* (1, 4 per FP8 operand): the scales of operands, 16 bytes apart; trained operands come first
     * */
    Tensor scales;
    int trained_scales; /* columns of `scales` in front of those */
    /* (1, 4 per matrix of the blocks) of region QUANTIZED: of FP8 operands and of stored E4M3 */
    Tensor quantized_scales;
    /* (1, n): the other parameters of blocks with FP8 operands, norm weights and adapters: whole on
     * each rank */
    Tensor replicated;
    /* device memory: sum of the squares of this rank's gradients; between steps a flag of checks
     * that read all shards */
    float *square_sum;

    /* how they are stored */
    Recipe recipe;
    const Optimizer *optimizer; /* the optimizer whose states the shards hold */
    StateCounts counts;         /* counts of these states */
    BaseFormat base_format;     /* how the region QUANTIZED is stored */
    bool plain_nf4;             /* NF4 is stored without double quantization (params.h) */
    bool tied;

    /* this rank's part, and when ranks exchange */
    /* this rank's stage: only its units have shards, copies and buffers here */
    Pipeline pipe;
    /* the first unit of all stages with a trained parameter: backward ends there */
    int first_trained;
    int shards, rank; /* ranks of a shard group, and this one's rank in it */
    /* number of tensor ranks; and this rank's number among them */
    int tensor_ranks, tensor_rank;
    bool sum_once; /* gradients are summed over ranks once per step */

    /* memory */
    /* memory is allocated; before that, the functions of fsdp.h return views and move nothing */
    bool placed;
    /* weights of units 0 .. resident - 1 are gathered, or rounded, once per step */
    int resident;
    bool forward_only;       /* no transposed copies */
    Arena gathered;          /* memory of the weight buffers, if shards > 1 */
    int on_host[NUM_HOSTED]; /* units 0 .. n - 1, as far as they have it */
    Arena host;              /* pinned memory of all that is on the host */
    /* weights are gathered, or fetched from the host, on a queue of their own, ahead of their use
     * */
    bool overlaps;
    /* memory that the optimizer's step may use: at least UPDATE_BUFFERS times update_bucket_bytes,
     * or muon_bytes */
    void *staging;
    size_t update_bucket_bytes, staging_bytes;
    DeviceMark *updated;
    Transfer *reduced; /* the latest reduction of gradients; NULL: there is none yet */
} ParamStore;

/* The rank for which a plan is made, and what predict/memory.c has chosen. */
typedef struct {
    int shards, rank; /* number of ranks of a shard group; this rank's number in it */
    /* gradients are summed over them once per step, not with every micro-batch */
    bool sum_once;
    /* units whose weights stay once they are gathered or rounded: 0 .. resident - 1 */
    int resident;
    /* units 0 .. n - 1 have these on the host, as far as they can */
    int on_host[NUM_HOSTED];
    /* for saved activations (offload.h); 0: each block has memory of its own */
    int slots;
    /* tokens of a tile of the MLP, read by model_plan; 0: all tokens are one */
    int tile;
    /* number of tensor ranks, 0: as 1; and this rank's number among them */
    int tensor_ranks, tensor_rank;
    Pipeline pipe; /* stages 0: there is one */
} ShardChoice;

/* States on the host come to the device bucket by bucket for the optimizer, in one of three
 * buffers. */
enum { UPDATE_BUFFERS = 3 };

/* The first NUM_ROTATING buffers are used by several units, one after the other. Then each unit has
 * a buffer of its own. */
enum { NUM_ROTATING = 4 };

static inline int num_buffers(const ParamStore *store)
{
    return NUM_ROTATING + store->num_units;
}
