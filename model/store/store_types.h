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
 * may have more than 2^31 elements. */
typedef struct {
    size_t first, count;
    /* (count) master weights or frozen weights; in region QUANTIZED, bytes of codes or of NF4
     * groups */
    Tensor stored;
    /* (count) the tensor from which operands are gathered or computed: `stored`; or, if master
     * weights are on the host, their operands, which the update encodes */
    Tensor gather_input;
} Slice;

/* This rank's slices of one unit. */
typedef struct {
    Slice slice[NUM_REGIONS];
    /* (count) in TRAINED. grad.empty: no micro-batch of this step has written it yet. A state may
     * cover only a part of the slice: see shard_state */
    Tensor grad, state[MAX_STATES];
    /* number of elements of this rank's slice of TRAINED before the part that has state k, and
     * after this part */
    size_t before[MAX_STATES], after[MAX_STATES];
} Shard;

/* The steps from a stored weight to the operand of a GEMM. Before GATHER, each rank works on its
 * own slice. */
typedef enum {
    NO_STEP,
    VIEW,       /* no copy: the GEMM reads the stored weight */
    CAST_SLICE, /* each rank rounds its slice to its place in the unit's buffer */
    /* each rank rounds its slice to its place in store->replicated, which is 0 elsewhere: the sum
     * over ranks is the whole weight */
    REPLICATE,
    /* the slice on the host is rounded to `gather_input`, if the slice has changed */
    ENCODE,
    FETCH,  /* the slice is copied from the host to its place in the unit's buffer */
    GATHER, /* an all-gather of the region */
    /* the whole weight is rounded: to FP8 codes, transposed codes, or both in one pass */
    CAST,
    TRANSPOSE,  /* FP8 codes are transposed */
    DEQUANTIZE, /* as CAST, from NF4 */
    NUM_STEPS
} Step;

/* The purpose of a step. Forward reads W of an FP8 weight, and backward reads W^T. Other formats
 * have one copy for both. */
typedef enum { FOR_FORWARD = 1, FOR_BACKWARD = 2, AS_STORED = 4, AT_UPDATE = 8, AT_LOAD = 16 } Use;

/* A step: `to` = `from`. If the step serves both passes, to.data is for forward and to.data_t for
 * backward. */
typedef struct {
    Step step;
    int uses;
    const Param *param;
    int items; /* number of items in `from` and `to`; `param` is the first item */
    Tensor from, to;
} Copy;

/* How long the content of a unit's buffer is valid. */
typedef enum {
    UNTIL_REUSE,  /* until another unit uses the buffer */
    UNTIL_UPDATE, /* until the next update */
    FOR_GOOD      /* for the whole run */
} Lifetime;

/* Memory for gathered units. */
typedef struct {
    /* (n) in the computing format, where n is the size of the largest unit. data_t has transposed
     * FP8 operands. It may be the same memory as data, which then holds either rows or
     * transposes */
    Tensor elements;
    /* has_rows: elements.data exists. has_transposes: elements.data_t exists. rotates:
     * elements.data and elements.data_t are the same memory */
    bool has_rows, has_transposes, rotates;
    /* transposes are computed from rows, so rows and transposes have separate memory */
    bool transposes_rows;
    /* the gathered region QUANTIZED in its stored format, if another format computes */
    void *raw;
    size_t raw_bytes;
    /* unit: the unit whose weights are in the buffer now; -1: none. has: their uses (enum Use) */
    int unit, has;
    Transfer gather;
} WeightBuffer;

/* A unit's gradients before they are summed over the shard group. */
typedef struct {
    Tensor elements; /* (n) in the recipe's format of gradients */
    int unit;        /* the unit whose gradients are in the buffer now; -1: none */
    Transfer reduce;
} GradBuffer;

/* The steps from the stored weights of a unit to operands. Gathers, updates and the memory plan use
 * this list. */
typedef struct {
    const Step **way; /* [num_params] the steps of each parameter, ending with NO_STEP */
    Copy *copy;       /* [num_copies] the copies, in the order of execution */
    /* made: the uses for which copies exist. Other uses read gathered or stored weights */
    int num_copies, made;
    /* at: offset of each region in the unit's buffer. numel: number of elements of all regions */
    size_t at[NUM_REGIONS], numel;
    Lifetime lifetime;
    WeightBuffer *weights; /* NULL: GEMMs read the stored weights */
    GradBuffer *grads;     /* NULL: gradients are added to the shard's gradients */
} UnitPlan;

/* Data that can be on the host. */
typedef enum {
    HOST_FROZEN,  /* frozen weights of layers */
    HOST_MOMENTS, /* the optimizer's states */
    HOST_MASTER,  /* master weights of layers whose computing format is smaller */
    NUM_HOSTED
} Hosted;

/* Number of updates and of snapshots in the optimizer's states. The counts start at 0, and are
 * saved, loaded and dropped with the states. */
typedef struct {
    /* updates in the moments: t of AdamW's bias correction. A step whose loss or gradient is not
     * finite, or that `spikes` skips, makes no update */
    long updates;
    struct {
        long last, every, count;
    } average;   /* number of snapshots in the average, and the settings of the average */
    long raised; /* WIRE_FP8_LM: log2 of mu, in steps of 1 / GRAD_WIRE_STEPS (grad_wire.h) */
} StateCounts;

typedef struct {
    /* units */
    int num_units;
    HfTensor *tensor; /* [num_tensors] tensors of all units, as in files */
    int num_tensors;
    UnitLayout *shape;         /* [num_units] */
    Shard *shard;              /* [num_units] */
    UnitPlan *plan;            /* [num_units] */
    UnitTensors *unit, *dunit; /* [num_units] weights in compute format, and gradients */
    /* [num_buffers] first the buffers that units share, then one per unit */
    WeightBuffer *weight_buffer;
    GradBuffer *grad_buffer; /* [num_buffers] */

    /* tensors of all units together */
    /* (1, 4 per FP8 operand) scales of operands, 16 bytes apart; trained operands come first */
    Tensor scales;
    int trained_scales; /* columns of `scales` that belong to trained operands */
    /* (1, 4 per matrix of the blocks) scales of region QUANTIZED: of FP8 operands and of stored
     * E4M3 */
    Tensor quantized_scales;
    /* (1, n) norm weights and adapters of blocks with FP8 operands: all that are not operands. Each
     * rank has all n elements */
    Tensor replicated;
    /* device memory: sum of the squares of this rank's gradients. Between steps, checks that read
     * all shards use it as a flag */
    float *square_sum;

    /* formats */
    Recipe recipe;
    const Optimizer *optimizer; /* the optimizer whose states the shards hold */
    StateCounts counts;         /* counts of updates and snapshots in these states */
    BaseFormat base_format;     /* format of the region QUANTIZED */
    bool plain_nf4;             /* NF4 is stored without double quantization (params.h) */
    bool tied;

    /* this rank's position, and when ranks exchange data */
    /* this rank's stage: only its units have shards, copies and buffers on this rank */
    Pipeline pipe;
    /* the first unit of the whole model with a trained parameter: backward ends there */
    int first_trained;
    int shards, rank; /* size of a shard group, and this rank's number in it */
    /* number of tensor ranks, and this rank's number among them */
    int tensor_ranks, tensor_rank;
    bool sum_once; /* gradients are summed over ranks once per step */
    int replicas;  /* number of copies of a stage */
    Wire wire;     /* how ranks send gradients of matrices (grad_wire.h); WIRE_NONE: they do not */

    /* memory */
    /* whether memory is allocated. false: the functions of fsdp.h return views and move no data */
    bool placed;
    /* weights of units 0 .. resident - 1 are gathered, or rounded, once per step */
    int resident;
    bool forward_only; /* the run makes no transposed copies */
    Arena gathered;    /* memory of the weight buffers, if shards > 1 */
    /* memory for a unit's gradients as codes: messages to other ranks, and from them */
    Arena exchange;
    void *sent, *received;
    /* WIRE_FP8_LM: (1, 4 per matrix of a unit) scales, and the number of values that were cut in this
     * step, in device memory; and the number of all values that were encoded */
    Tensor wire_scales;
    uint64_t *wire_cut;
    double wire_sent;
    /* [Hosted] n: units 0 .. n - 1 have these data on the host, if they have such data */
    int on_host[NUM_HOSTED];
    Arena host; /* pinned memory for all data on the host */
    /* a separate queue gathers weights, or fetches them from the host, before they are used */
    bool overlaps;
    /* memory that the optimizer's step may use: at least UPDATE_BUFFERS times update_bucket_bytes,
     * or muon_bytes */
    void *staging;
    size_t update_bucket_bytes, staging_bytes;
    DeviceMark *updated;
    Transfer *reduced; /* the latest reduction of gradients; NULL: there is none yet */
} ParamStore;

/* The rank that is planned, and the choices of predict/memory.c. */
typedef struct {
    int shards, rank; /* size of a shard group, and this rank's number in it */
    /* gradients are summed over ranks once per step, not after every micro-batch */
    bool sum_once;
    /* units 0 .. resident - 1 keep their weights once these are gathered or rounded */
    int resident;
    /* [Hosted] n: units 0 .. n - 1 have these data on the host, as far as possible */
    int on_host[NUM_HOSTED];
    /* number of slots for saved activations (offload.h); 0: each block has its own memory */
    int slots;
    /* number of tokens of an MLP tile, for model_plan; 0: one tile has all tokens */
    int tile;
    /* number of tensor ranks (0 means 1), and this rank's number among them */
    int tensor_ranks, tensor_rank;
    int replicas;  /* number of copies of a stage (0 means 1) */
    Pipeline pipe; /* stages 0 means one stage */
} ShardChoice;

/* The optimizer copies offloaded states to the device in buckets, into one of three buffers. */
enum { UPDATE_BUFFERS = 3 };

/* Several units use the first NUM_ROTATING buffers, one after the other. The following buffers
 * belong to one unit each. */
enum { NUM_ROTATING = 4 };

static inline int num_buffers(const ParamStore *store)
{
    return NUM_ROTATING + store->num_units;
}
