/* The architectures: a row per class of Hugging Face's transformers, which describes what the class
 * computes, and the names of its tensors and how they divide our parameters. model/formats/hf.c
 * reads and writes its config.json. */
#pragma once
#include "model/shape/params.h"

/* A parameter (params.h), and the names of its projections, or a single name for the whole. In
 * blocks they follow "<blocks>.<l>.". Where it has items, %d is the item's number:
 * "mlp.experts.%d.down_proj.weight". */
typedef struct {
    const char *param, *projection[MAX_PROJECTIONS];
} TensorNames;

/* A key of config.json that not all classes have, or with its own default in this class. */
typedef struct {
    const char *key;
    double default_value;
} ClassKey;

/* blocks with a sliding window: none; all or none; any blocks */
typedef enum { NO_WINDOW, SAME_WINDOW, WINDOW_BY_LAYER } Windows;

typedef struct Architecture {
    const char *class, *model_type; /* "LlamaForCausalLM", "llama" */
    const char *family;             /* "Llama", for messages */

    NormKind norm;
    bool norm_affine; /* norms have weights */
    float norm_eps;   /* built into the class; 0: from config.json */
    bool norm_after;  /* norms of the branches' outputs, not inputs */
    bool qkv_bias;    /* q, k and v have biases */
    QkNorm qk_norm;
    bool clip;         /* q, k and v may be clamped */
    bool tying;        /* the head may be the embedding */
    bool heads_divide; /* n_heads must divide d_model, whatever head_dim is */
    Windows windows;
    /* it may be the text model of a LlavaForConditionalGeneration */
    bool images;
    bool no_rope;        /* every n-th block may have no rotary embedding */
    unsigned rope_types; /* bit 1 << RopeType for each supported type */
    /* the class if config.json has a list of layer_types, as in transformers 5 */
    const char *with_layer_types;
    /* blocks with a sliding window keep their rotary frequencies */
    bool full_attn_scaled_only;

    const char *blocks;         /* "model.layers" */
    const TensorNames *tensors; /* ends with param NULL */
    const ClassKey *keys;       /* ends with key NULL; NULL: none */
} Architecture;

/* Adds an architecture, owned by the caller. Dies if the class exists already. Not thread-safe. */
void architecture_add(const Architecture *a);

/* The row of a class, or of a model_type; NULL: there is none. */
const Architecture *architecture_find(const char *class);
const Architecture *architecture_of_type(const char *model_type);

/* All classes, separated by ", ". The caller frees it. */
char *architecture_names(void);

/* The row that can compute the model `c`: c->architecture if it can, else the first. Dies if none
 * can, listing the settings of `c` that would have to change. */
const Architecture *architecture_of(const ModelConfig *c);
/* `file`: place for the message */
const Architecture *architecture_choose(const ModelConfig *c, const char *file);

/* The settings of `c` that must change so that `a` can compute it, separated by ", "; "" if it can.
 * The caller frees the text. */
char *architecture_differences(const Architecture *a, const ModelConfig *c);

/* The key in a->keys, or NULL. */
const ClassKey *architecture_key(const Architecture *a, const char *key);

/* A tensor of a Hugging Face folder: `rows` x `cols` consecutive elements of a parameter, from its
 * `first` on. */
enum { HF_NAME = 112 };
typedef struct {
    char name[HF_NAME];
    int unit, param; /* index into UnitLayout.param */
    size_t first, rows, cols;
    bool adapter; /* stored in an adapter's file, in PEFT's format */
    /* trained with adapters and stored in their file, under the name that hf_adapter_name gives */
    bool with_adapter;
    bool vector; /* one-dimensional: (cols), rows = 1 */
    /* here one parameter together with the previous tensor of the list: both are trained, or both
     * are frozen */
    bool joined;
    /* > rows for the embedding and the head: a file may include the padding rows */
    size_t max_rows;
} HfTensor;

/* Of a unit, or of all units, in order; the caller frees them. */
HfTensor *hf_tensors(const ModelConfig *c, const UnitLayout *shape, int unit, int *count);
HfTensor *hf_tensors_of(const ModelConfig *c, int *count);

/* The prefix of the names of the text model's tensors: "language_model." in a model with images,
 * else "". */
const char *hf_prefix(const ModelConfig *c);

/* The name in transformers' module tree of a tensor or module that has `name` in files. They differ
 * in a model with images: model.language_model.layers.0 and language_model.model.layers.0
 * [transformers 4.52 and later]. */
void hf_tree_name(char to[HF_NAME], const char *name);

/* The name that a PEFT file gives to the adapter of tensor `name`. matrix: "lora_A" or "lora_B";
 * NULL: the name of the tensor itself. All begin with "base_model.model.". */
void hf_adapter_name(char to[HF_NAME], const char *name, const char *matrix);

/* The tensor's first element in the current region of its parameter. */
static inline size_t hf_first(const UnitLayout *shape, const HfTensor *t)
{
    return shape->param[t->param].offset + t->first;
}
