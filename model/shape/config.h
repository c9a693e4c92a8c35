/* The configuration of a run, from the YAML file (OLMo's keys) and from options --a.b=c. It is
 * plain data. The functions of model/config/ fill, check and print it. */
#pragma once
#include <math.h>

#include "model/shape/distill.h"
#include "model/shape/policy.h"
#include "model/shape/preference.h"
#include "model/shape/recipe.h"
#include "kernels/kernels.h"
#include "kernels/wire.h"

typedef enum { INIT_MITCHELL, INIT_NORMAL, INIT_FULL_MEGATRON } InitFn;
typedef enum {
    COSINE_WITH_WARMUP,
    LINEAR_WITH_WARMUP,
    INVERSE_SQRT_WITH_WARMUP,
    CONSTANT,
    CONSTANT_WITH_WARMUP,
    WSD
} ScheduleName;

/* Norm of queries and keys (RMSNorm). */
typedef enum {
    QK_NORM_NONE,
    QK_NORM_WIDTH, /* over their full widths */
    QK_NORM_HEAD   /* over each head */
} QkNorm;

/* Context extension by changes of rotary frequencies (rope_table.c). */
typedef enum { ROPE_DEFAULT, ROPE_LLAMA3, ROPE_YARN, NUM_ROPE_TYPES } RopeType;

enum { MAX_LAYERS = 10000 };
/* Two types of blocks. Block l is of the second type if marked[l % count]. */
typedef struct {
    int count; /* 0: there is no list */
    bool marked[MAX_LAYERS];
} LayerTypes;

/* The matrices of a block that can have an adapter: PEFT's target_modules. */
typedef enum {
    LORA_Q,
    LORA_K,
    LORA_V,
    LORA_O,
    LORA_GATE,
    LORA_UP,
    LORA_DOWN,
    NUM_LORA_MODULES
} LoraModule;

/* Format of the blocks' frozen matrices under adapters. */
typedef enum {
    BASE_AS_FROZEN, /* the format of other frozen weights */
    BASE_E4M3,
    BASE_NF4
} BaseFormat;

/* Adapters: y = x W^T + scale (x A^T) B^T with A (rank, in), B (out, rank) and frozen W [Hu et al.
 * 2021, arXiv 2106.09685, 4.1]. */
typedef struct {
    int rank; /* r of the adapters; 0: no adapters */
    double alpha;
    /* the scale is alpha/sqrt(rank), not alpha/rank */
    bool use_rslora;
    bool target[NUM_LORA_MODULES];
    BaseFormat base;
    /* BASE_NF4 without double quantization (nf4_map.h) */
    bool plain_nf4;
    /* the base is rounded to values of BF16, but stored in F32 */
    bool rounds_base;
    /* folder of the base */
    char *base_path;
    /* the projector of a model with images is trained, too */
    bool projector;
} Lora;

/* The projector, which maps features of images to the stream (projector.h). */
typedef enum {
    PROJECTOR_MLP,   /* two layers with GELU between them */
    PROJECTOR_LINEAR /* one layer */
} Projector;

/* Images in the text: rows of features replace the embeddings of a token. */
typedef struct {
    int token_id; /* the token that stands for a row of an image */
    /* number of rows of an image, which is also its number of tokens */
    int rows;
    /* Cv: number of values of a row; 0: the model reads only text */
    int feature_size;
    Projector projector;
    bool bias; /* the projector's layers have biases */
} ImageConfig;

/* The router's load-balancing loss, with P the mean probability of an expert, f its share of the
 * assignments, E experts, k of them per token: coef * E * sum over experts of f P.
 *   micro_batch  f and P of a block over the micro-batch; the mean over blocks [OLMo-core]
 *   sequence     the same over each sequence
 *   pooled       f and P over all blocks together, times k [transformers,
 *                load_balancing_loss_func] */
typedef enum { BALANCE_NONE, BALANCE_MICRO_BATCH, BALANCE_SEQUENCE, BALANCE_POOLED } BalanceLoss;

/* The experts: MLPs, some of which the router chooses for each token. */
typedef struct {
    int count; /* E: experts of a block; 0: each block has one MLP */
    int top_k; /* k: experts of a token */
    /* the weights of a token's experts are divided by their sum */
    bool normalize;
    BalanceLoss balance;
    double balance_coef, z_coef; /* factors of the router's losses */
    LayerTypes dense;            /* marked: the block has one MLP; no list: all have experts */
    int dense_width;             /* F of these blocks */
    /* with a bias (RouterLosses.bias), how far a step moves it; 0: no bias [OLMo-core,
     * MoERouterConfig.bias_gamma] */
    double bias_gamma;
} Experts;

/* The architecture of a model, with its adapters. */
typedef struct {
    /* C L H K D F (F is half of mlp_hidden_size; with experts, the width of one) */
    int d_model, n_layers, n_heads, n_kv_heads, head_dim, mlp_width;
    int max_sequence_length; /* T */
    /* vocab_size: number of ids. embedding_size: V, the padded number of rows */
    int vocab_size, embedding_size;
    int eos_token_id, pad_token_id; /* -1: none */
    /* kind and eps of all norms */
    Norm norm;
    /* norms have weights (OLMo-1: no weights) */
    bool norm_affine;
    /* OLMo-2: norms apply to branch outputs, not to their inputs */
    bool norm_after;
    /* q, k and v have biases (Qwen2) */
    bool qkv_bias;
    /* OLMo-2: over the full width; Qwen3: over each head */
    QkNorm qk_norm;
    Experts experts;
    bool weight_tying;
    float clip_qkv; /* limit for clamping q, k and v; 0: no clamping */
    /* number of tokens to which a query attends; 0: all up to its own */
    int sliding_window;
    /* marked: the block has the window; no list: all blocks have it, if there is a window */
    LayerTypes layer_types;
    double rope_theta;
    /* every n-th block has no rotary embedding; 0: all blocks have it */
    int no_rope_interval;
    struct {
        RopeType type;
        /* low_freq_factor, high_freq_factor: llama3 */
        double factor, low_freq_factor, high_freq_factor;
        /* for yarn; attention_factor 0: computed from factor */
        double beta_fast, beta_slow, attention_factor;
        int original_length;
        /* blocks with a sliding window keep their frequencies */
        bool full_attn_layers_only;
    } rope_scaling;
    InitFn init_fn;
    /* parameters of the initialization; init_cutoff_factor 0: no cutoff */
    double init_std, init_cutoff_factor;
    Lora lora;
    ImageConfig image;
    /* class for saved checkpoints; NULL: the first class that can compute the model
     * (architecture.h) */
    const struct Architecture *architecture;
} ModelConfig;

/* How documents fill sequences. */
typedef enum {
    PACK_CONCAT,  /* one after the other, cut at the end of a sequence */
    PACK_BEST_FIT /* each document stays whole, in the sequence where it fits best */
} PackingKind;
/* with PACK_BEST_FIT: what happens to documents longer than a sequence */
typedef enum { LONG_TRUNCATE, LONG_SPLIT } LongDocuments;
typedef enum { BOUNDARIES_EOS, BOUNDARIES_METADATA } Boundaries; /* where a document ends */

/* What to do at a step with a spike of loss or gradient norm (spikes.h). */
typedef enum { SPIKES_WARN, SPIKES_SKIP, SPIKES_STOP } OnSpike;

/* A length of training; one of the three members is > 0 (max_duration: 100 | 2e9T | 1ep). */
typedef struct {
    long steps, tokens;
    double epochs;
} Duration;

/* Files of tokens. */
typedef struct {
    char **paths;
    int num_paths;
    char **label_mask_paths;
    int num_label_mask_paths;
    char **image_paths;
    int num_image_paths;
    char *image_features; /* a folder with features; NULL: the data have no images */
    int itemsize;         /* by memmap_dtype: uint16: 2, uint32: 4 */
    PackingKind packing;
    Boundaries boundaries;
} TokenFiles;

/* A source of data.mix. */
typedef struct {
    char *name;       /* unique, part of names of metrics */
    TokenFiles files; /* only paths, masks and images are used */
    /* mixture weight: share of sequences, relative to the sum of all ratios */
    double ratio;
    double max_repetition; /* how often each sequence of the source may be used */
    long tokens;           /* number of the source's tokens in use; 0: all */
} DataSource;

enum { MOST_DOUBLINGS = 16 }; /* maximum number of doublings in batch_size_warmup */
/* MOST_SOURCES: maximum number of sources of data.mix. SOURCE_NAME: bytes of a source's name with
 * its final zero */
enum { MOST_SOURCES = 64, SOURCE_NAME = 64 };

typedef struct {
    char *label; /* "v3-small-c4_en-validation"; unique, part of names of metrics */
    /* for messages: position and label, "x.yaml:9: evaluator 'v3-...'", and how to train without
     * it */
    char *where;
    bool downstream; /* files.paths is one file of questions (data/requests.h) */
    bool pairs;      /* preference pairs */
    TokenFiles files;
} EvalSet;

/* When gradients are summed over a shard group. */
typedef enum {
    SUM_OFTEN,       /* after every micro-batch */
    SUM_ONCE,        /* once per step */
    SUM_ONCE_IF_FITS /* once per step if memory allows, else after every micro-batch */
} GradSum;

/* When the weights of a shard group are gathered. */
typedef enum {
    GATHER_OFTEN, /* for each pass */
    GATHER_ONCE,  /* once per step */
    /* once per step in as many units as memory allows, and for each pass in all other units */
    GATHER_ONCE_IF_FITS
} Gathering;

/* What is offloaded to the host. */
typedef enum {
    HOST_NEVER, /* nothing */
    HOST_AUTO,  /* offload only what does not fit on the device */
    HOST_ALL    /* as much as possible */
} HostUse;

/* The order of passes of pipeline stages (pipeline.h). */
typedef enum {
    PIPELINE_1F1B,
    PIPELINE_INTERLEAVED,
    PIPELINE_ONE, /* one micro-batch after the other */
    NUM_PIPELINE_SCHEDULES
} PipelineSchedule;

/* How ranks divide the model. Pipeline stages have different units (pipeline.h). Within a stage,
 * ranks shard units (fsdp.h). Tensor ranks divide the linear layers of blocks (tensor_ranks.h). */
typedef struct {
    /* number of consecutive ranks, or groups of tensor ranks, that hold one copy of a stage */
    int shard_ranks;
    Gathering gathering; /* on one rank: when stored weights are converted to operands */
    GradSum grad_sum;
    /* number of consecutive ranks that share sequences; it divides shard_ranks. 0 means 1 */
    int context_ranks;
    /* number of consecutive ranks that compute layers together; for the other dimensions, such a
     * group counts as one rank. 0 means 1 */
    int tensor_ranks;
    int pipeline_stages; /* 0 means 1 */
    int pipeline_chunks; /* number of chunks of a stage (pipeline.h). 0 means 1 */
    PipelineSchedule pipeline_schedule;
    /* parallelism.replicate or parallelism.shard sets the number of shards */
    bool by_mesh;
    Wire wire;          /* fsdp.grad_wire (grad_wire.h) */
    int ranks_per_host; /* read only if `wire` is not WIRE_NONE */
} Strategy;

static inline int context_ranks(const Strategy *s)
{
    return s->context_ranks > 1 ? s->context_ranks : 1;
}

/* Whether this number of context ranks divides the model's query heads, and is a divisor or a
 * multiple of the number of key heads. */
static inline bool context_divides(const ModelConfig *m, int ranks)
{
    return m->n_heads % ranks == 0 && (m->n_kv_heads % ranks == 0 || ranks % m->n_kv_heads == 0);
}

static inline int tensor_ranks(const Strategy *s)
{
    return s->tensor_ranks > 1 ? s->tensor_ranks : 1;
}

static inline int pipeline_stages(const Strategy *s)
{
    return s->pipeline_stages > 1 ? s->pipeline_stages : 1;
}

/* Data-parallel degree of `ranks` ranks: how many groups of ranks read different sequences. */
static inline int data_ranks(const Strategy *s, int ranks)
{
    return ranks / (context_ranks(s) * tensor_ranks(s) * pipeline_stages(s));
}

/* Muon's factor of a matrix's learning rate, with the names of torch.optim.Muon. */
typedef enum {
    ADJUST_MATCH_RMS_ADAMW, /* 0.2 sqrt(max(rows, columns)) */
    ADJUST_ORIGINAL         /* sqrt(max(1, rows / columns)) */
} AdjustLr;

typedef struct {
    ModelConfig model;
    Recipe recipe;       /* resolved: the row of the table with its overrides */
    bool grads_by_terms; /* format.grads is not given, and gradient_terms decides it */
    Strategy strategy;
    char **trainable; /* patterns of tensors to train (trainable.h); no pattern: all tensors */
    int num_trainable;
    char *run_name;
    uint64_t seed;
    bool dry_run;      /* print settings, the memory plan and whether it fits, then stop */
    int ranks;         /* dry run: number of ranks to plan for; else 0 */
    int gpus_per_host; /* dry run: number of ranks per host */
    /* dry run: speed of each GPU to other hosts in GB/s (10^9 bytes); 0: unknown */
    double internode_gb_per_s;
    int mesh_auto;        /* dry run: 1: also print the fastest meshes */
    double device_memory; /* GiB per device to plan for; 0: the memory of this device */
    bool eval_only;       /* evaluate, then stop: no training */
    /* without training: shared buffers keep a block's values until its observer has run
     * (buffers.h) */
    bool observed;
    char *score;    /* a folder for log-probabilities; the run then stops. NULL: none */
    char *generate; /* a file of prompts to continue; the run then stops. NULL: none */
    /* the folder with the features of images in these prompts; NULL: none */
    char *generate_features;
    int max_new_tokens;        /* maximum number of tokens of a continuation */
    double temperature, top_p; /* settings of sampling (sampling.h) */
    /* model.eos_token_id is given: it ends a continuation, in addition to the folder's eos
     * tokens */
    bool stops_at_eos;

    struct {
        TokenFiles files;
        /* sources that replace the paths of `files`; all other settings of `files` apply to all
         * sources */
        DataSource *mix;
        int num_mix;
        LongDocuments long_documents;
        /* attention stays inside documents; always true with PACK_BEST_FIT */
        bool generate_doc_lengths;
        bool mask_padding; /* the key generate_attention_mask: padding tokens are not targets */
        uint64_t seed;     /* data.seed if it is given, else seed */
        struct {
            int max_period, min_period, max_count;
        } instance_filter; /* max_count 0: no filter */
    } data;

    int global_train_batch_size; /* sequences per step over all ranks */
    struct {
        int count;
        /* steps, ascending: the batch doubles after each of them. After the last of these steps the
         * batch is global_train_batch_size */
        long step[MOST_DOUBLINGS];
    } batch_warmup;
    struct {
        int min;     /* length of the first sequences, in tokens */
        long steps;  /* number of steps; 0: no warmup */
    } length_warmup; /* sequence length warmup (run/length_warmup.h) */
    /* sequences per forward pass of a rank, or of the ranks that share sequences */
    int device_train_microbatch_size;
    Duration max_duration;
    /* ends the run early without a change of the schedule; all members 0: not given */
    Duration stop_at;
    /* seconds without progress of a rank, after which all ranks end */
    int timeout_seconds;

    struct {
        char *name; /* a row of optimizer_table.h */
        double lr, beta1, beta2, eps, weight_decay;
        double projector_lr; /* learning rate of the projector; 0: lr */
        bool decay_norm_and_bias, decay_embeddings;
        /* this member and the following ones: Muon (model/update/muon_step.h) */
        double momentum, ns_eps;
        int ns_steps;
        bool nesterov, per_head;
        AdjustLr adjust_lr;
    } optimizer;
    struct {
        ScheduleName name;
        bool in_tokens;         /* unit of the t_* members: tokens, or else steps */
        long t_warmup, t_max;   /* t_max 0 means max_duration */
        double warmup_fraction; /* fraction of t_max; 0: t_warmup is used */
        long t_decay;           /* for wsd: length of the final linear decay */
        double alpha_f;         /* final learning rate / lr */
        double warmup_min_lr;   /* lr at step 0; < 0: 0.1 lr, OLMo's default */
        /* end of the warmup of clipping, in the same unit. Before it, max_grad_norm is multiplied
         * by grad_clip_warmup_factor */
        long grad_clip_warmup_steps;
        double grad_clip_warmup_factor;
    } scheduler;
    struct {
        long last, every;
    } average;            /* see run/average.h; 0: no average */
    double max_grad_norm; /* 0: no clipping */
    OnSpike spikes;
    /* auxiliary_loss_multiplier if softmax_auxiliary_loss, else 0 */
    double z_loss;
    Preference preference;
    Distill distill;
    Policy policy;
    int top_k; /* entries of a token's soft labels; 0: --score writes no soft labels */
    EntryChoice choice;

    char *save_folder;
    bool save_overwrite;
    long save_interval; /* in steps; 0: only the checkpoint at the end */
    /* in steps: permanent checkpoints, which are never deleted; 0: none */
    long save_interval_unsharded;
    /* in steps: checkpoints that the next checkpoint replaces; 0: none */
    long save_interval_ephemeral;
    long save_num_checkpoints_to_keep; /* number of checkpoints of save_interval to keep; -1: all */
    /* a tokenizer for the checkpoints: its folder or file; NULL: the tokenizer of load_path */
    char *tokenizer;
    /* a checkpoint or a Hugging Face folder; NULL: none */
    char *load_path;
    bool try_load_latest_save; /* resume from save_folder/latest if it exists */
    /* the folder whose weights are read: the newest checkpoint, or else load_path; NULL: random
     * weights */
    char *load_folder;
    /* load_folder is the newest checkpoint of save_folder */
    bool continues;
    bool restore_dataloader; /* false: the data start over */
    bool reset_optimizer_state, reset_trainer_state;

    long eval_interval; /* in steps; 0: no evaluations */
    bool eval_on_load;
    int device_eval_batch_size;
    long eval_subset_num_batches; /* -1: all batches */
    EvalSet *eval;
    int num_eval;

    struct {
        char *prompts; /* a file of prompts; NULL: no samples */
        long interval; /* in steps */
        int max_new_tokens;
    } samples;

    long console_log_interval; /* in steps */
    /* speed_monitor.window_size: number of steps over which the speed is averaged */
    int speed_window;
    /* steps between quantization statistics in metrics.jsonl; 0: never */
    long quant_stats_interval;
    /* number of steps to trace, from the third step of the run on; 0: none */
    int profile;
    /* see offload.h and param_store.h; frozen: offload.frozen */
    struct {
        HostUse activations, frozen, optimizer, master;
    } offload;
    double loss_temperature; /* divides the logits of the loss; 0: 1 */
    int loss_chunk;          /* number of tokens whose logits exist at once; 0: automatic */
    /* number of tokens whose MLP is computed at once in blocks that recompute it; 0: automatic */
    int tiled_mlp_tokens;

    /* the resolved configuration as YAML; saved with the run */
    char *text;
    char *changes; /* for printing: the settings that differ from the defaults */
} Config;

/* A sum of more terms than this is in F32: a BF16 sum loses terms below 2^-9 of its value. With 512
 * terms the worst tensor loses 5 % of its gradient, with 2048 half of it. */
enum { MOST_BF16_TERMS = 128 };

/* The number of terms in the sum of a gradient on `world` ranks. A rank first sums its
 * micro-batches; then the sums of ranks are added, so the longer of the two sums counts. With 16
 * ranks x 32 micro-batches the error is a third of the error with 512 micro-batches on one rank. */
static inline int gradient_terms(const Config *c, int world)
{
    const int groups = data_ranks(&c->strategy, world),
              own = c->global_train_batch_size / c->device_train_microbatch_size / groups,
              ranks = world / pipeline_stages(&c->strategy);
    return own > ranks ? own : ranks;
}

/* Whether the projector is trained and stored with adapters. */
static inline bool lora_trains_projector(const ModelConfig *c)
{
    return c->lora.rank > 0 && c->lora.projector && c->image.feature_size > 0;
}

/* The factor of an adapter's product; 0 without adapters [rslora: Kalajdzievski 2023, arXiv
 * 2312.03732]. */
static inline double lora_scale(const Lora *l)
{
    return l->rank == 0 ? 0 : l->alpha / (l->use_rslora ? sqrt(l->rank) : l->rank);
}

/* Whether `interval` divides the step; interval 0: never. */
static inline bool is_due(long step, long interval)
{
    return interval > 0 && step % interval == 0;
}

/* Whether the run has no backward passes: then it allocates no gradients, moments and saved
 * activations. */
static inline bool config_forward_only(const Config *c)
{
    return c->eval_only || c->generate || c->score;
}

/* Whether the gradients of labels have weights (WeighedLabels). */
static inline bool config_weighs_labels(const Config *c)
{
    return c->preference.kind != PREFERENCE_NONE || c->policy.kind != POLICY_NONE;
}

/* Whether block l has a sliding window. */
static inline bool layer_slides(const ModelConfig *c, int l)
{
    return c->sliding_window > 0 &&
           (c->layer_types.count == 0 || c->layer_types.marked[l % c->layer_types.count]);
}

/* Number of experts of block l; 0: the block has one MLP. */
static inline int layer_experts(const ModelConfig *c, int l)
{
    const LayerTypes *dense = &c->experts.dense;
    return dense->count > 0 && dense->marked[l % dense->count] ? 0 : c->experts.count;
}

/* F of block l: the width of its MLP, or of each of its experts. */
static inline int layer_mlp_width(const ModelConfig *c, int l)
{
    return c->experts.count > 0 && layer_experts(c, l) == 0 ? c->experts.dense_width : c->mlp_width;
}

/* Whether the rotary frequencies of block l are scaled. */
static inline bool layer_is_scaled(const ModelConfig *c, int l)
{
    return c->rope_scaling.type != ROPE_DEFAULT &&
           !(c->rope_scaling.full_attn_layers_only && layer_slides(c, l));
}

/* The rotary table of block l. */
typedef enum { ROTATION_PLAIN, ROTATION_SCALED, NO_ROTATION, NUM_ROTATIONS } Rotation;
static inline Rotation layer_rotation(const ModelConfig *c, int l)
{
    const bool none = c->no_rope_interval > 0 && (l + 1) % c->no_rope_interval == 0;
    return none ? NO_ROTATION : layer_is_scaled(c, l) ? ROTATION_SCALED : ROTATION_PLAIN;
}
