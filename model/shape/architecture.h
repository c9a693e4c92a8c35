/* The architectures: one row per class of Hugging Face's transformers. A row describes what the
 * class computes, the names of its tensors, and how these tensors divide our parameters.
 * model/formats/hf.c reads and writes the config.json of each class. */
#pragma once
#include "model/shape/params.h"

/* A parameter (params.h), and the names of its projections, or one name for the whole parameter. In
 * blocks, names follow "<blocks>.<l>.". For a parameter with several items, %d is the item's
 * number: "mlp.experts.%d.down_proj.weight". */
typedef struct {
    const char *param, *projection[MAX_PROJECTIONS];
} TensorNames;

/* A key of config.json that only some classes have, or whose default depends on the class. */
typedef struct {
    const char *key;
    double default_value;
} ClassKey;

/* Which blocks may have a sliding window. */
typedef enum {
    NO_WINDOW,
    SAME_WINDOW,    /* all blocks or none */
    WINDOW_BY_LAYER /* any blocks */
} Windows;

typedef struct Architecture {
    const char *class, *model_type; /* for example "LlamaForCausalLM", "llama" */
    const char *family;             /* for messages, for example "Llama" */

    NormKind norm;
    bool norm_affine; /* norms have weights */
    float norm_eps;   /* eps of norms that is built into the class; 0: config.json has it */
    bool norm_after;  /* norms apply to the branches' outputs, not to their inputs */
    bool qkv_bias;    /* q, k and v have biases */
    QkNorm qk_norm;
    bool clip;         /* q, k and v may be clamped */
    bool experts;      /* blocks have experts instead of one MLP */
    bool dense_blocks; /* some blocks may have one MLP */
    bool tying;        /* the head may share the embedding's matrix */
    bool heads_divide; /* n_heads must divide d_model, even if head_dim is given */
    Windows windows;
    /* the class can be the text model of a LlavaForConditionalGeneration */
    bool images;
    bool no_rope;        /* every n-th block may have no rotary embedding */
    unsigned rope_types; /* bit 1 << RopeType for each supported type */
    /* the class that replaces this one if config.json has a list of layer_types, as in transformers
     * 5 */
    const char *with_layer_types;
    /* rotary frequencies of blocks with a sliding window are not scaled */
    bool full_attn_scaled_only;

    const char *blocks;         /* prefix of the blocks' tensors, for example "model.layers" */
    const TensorNames *tensors; /* ends with param NULL */
    const ClassKey *keys;       /* ends with key NULL; NULL: none */
} Architecture;

/* Adds an architecture; the caller keeps it. Dies if the class exists already. Not thread-safe. */
void architecture_add(const Architecture *a);

/* The row of a class; NULL: there is none. */
const Architecture *architecture_find(const char *class);
/* The row of a model_type; NULL: there is none. */
const Architecture *architecture_of_type(const char *model_type);

/* All classes, separated by ", ". The caller frees it. */
char *architecture_names(void);

/* The row that can compute the model `c`: c->architecture if this class can, else the first that
 * can. Dies if no class can; the message lists the settings of `c` that would have to change. */
const Architecture *architecture_of(const ModelConfig *c);
/* `file`: position for the message */
const Architecture *architecture_choose(const ModelConfig *c, const char *file);

/* The settings of `c` that must change so that `a` can compute it, separated by ", "; "" if `a` can
 * compute it. The caller frees the text. */
char *architecture_differences(const Architecture *a, const ModelConfig *c);

/* The row of the key in a->keys; NULL: none. */
const ClassKey *architecture_key(const Architecture *a, const char *key);

/* A tensor of a Hugging Face folder: `rows` x `cols` consecutive elements of a parameter, beginning
 * at its element `first`. */
enum { HF_NAME = 112 };
typedef struct {
    char name[HF_NAME];
    int unit, param; /* index into UnitLayout.param */
    size_t first, rows, cols;
    bool adapter; /* the tensor is stored in an adapter's file, in PEFT's format */
    /* the tensor is trained with adapters and stored in their file, under the name that
     * hf_adapter_name returns */
    bool with_adapter;
    bool vector;  /* the tensor is one-dimensional: shape (cols), rows = 1 */
    bool operand; /* Param.is_operand */
    /* the tensor and the previous one in the list are one parameter here: both are trained, or both
     * are frozen */
    bool joined;
    /* > rows for the embedding and the head: a file may include padding rows */
    size_t max_rows;
} HfTensor;

/* The tensors of a unit, or of all units, in order; the caller frees them. */
HfTensor *hf_tensors(const ModelConfig *c, const UnitLayout *shape, int unit, int *count);
HfTensor *hf_tensors_of(const ModelConfig *c, int *count);

/* The prefix of the names of the text model's tensors: "language_model." in a model with images,
 * else "". */
const char *hf_prefix(const ModelConfig *c);

/* Converts the name of a tensor or module in files to its name in transformers' module tree. The
 * two names differ in a model with images: model.language_model.layers.0 and
 * language_model.model.layers.0 [transformers 4.52 and later]. */
void hf_tree_name(char to[HF_NAME], const char *name);

/* Writes the name that a PEFT file gives to the adapter of tensor `name`. matrix: "lora_A" or
 * "lora_B"; NULL: the name of a tensor that is stored whole. All names begin with
 * "base_model.model.". */
void hf_adapter_name(char to[HF_NAME], const char *name, const char *matrix);

/* The index of the tensor's first element in the parameter's current region. */
static inline size_t hf_first(const UnitLayout *shape, const HfTensor *t)
{
    return shape->param[t->param].offset + t->first;
}
