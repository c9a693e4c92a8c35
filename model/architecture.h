/* The architectures: a row per class of Hugging Face's transformers, which says what the class computes and how it names and cuts
 * our parameters. Whatever depends on the architecture asks here; model/config/hf.c reads and writes its config.json. */
#pragma once
#include "model/params.h"

/* A parameter (params.h), and the names of its parts, or the one name of all of it. In blocks they follow "<blocks>.<l>.". */
typedef struct {
    const char *param, *part[MAX_PARTS];
} TensorNames;

/* A key of config.json that not all classes have, or for which this one has a default of its own. */
typedef struct { const char *key; double otherwise; } ClassKey;

typedef enum { NO_WINDOW, SAME_WINDOW, WINDOW_BY_LAYER } Windows;       /* none; the same in all blocks or none; any */

typedef struct Architecture {
    const char *class, *model_type;     /* "LlamaForCausalLM", "llama" */
    const char *family;                 /* "Llama", for people */

    NormKind norm;
    bool     norm_affine;               /* norms have weights */
    float    norm_eps;                  /* built into the class; 0: config.json says */
    bool     norm_after;                /* norms of the branches' outputs, not inputs */
    QkNorm   qk_norm;
    bool     clip;                      /* q, k and v may be clamped */
    bool     tying;                     /* the head may be the embedding */
    bool     heads_divide;              /* n_heads must divide d_model, whatever head_dim is */
    Windows  windows;
    unsigned rope_types;                /* bit 1 << RopeType for each that it knows */
    const char *with_layer_types;       /* the class that a config.json with a list of layer_types means, as in transformers 5 */
    bool     full_attn_scaled_only;     /* blocks with a sliding window keep their rotary frequencies */

    const char        *blocks;          /* "model.layers" */
    const TensorNames *tensors;         /* ends with param NULL */
    ClassKey           keys[12];        /* ends with key NULL */
} Architecture;

/* One more architecture, which stays the caller's. Dies on a class that is there. Not while other threads ask. */
void architecture_add(const Architecture *a);

/* The row of a class, or of a model_type; NULL: there is none. */
const Architecture *architecture_find(const char *class);
const Architecture *architecture_of_type(const char *model_type);

/* All classes, ", " between them. The caller frees it. */
char *architecture_names(void);

/* The row that computes what `c` says: c->architecture if that does, else the first. Dies if none does, with what would have to
 * change in `c`. */
const Architecture *architecture_of(const ModelConfig *c);
const Architecture *architecture_choose(const ModelConfig *c, const char *file);       /* as said in `file`, for the message */

/* What would have to change in `c` for `a` to compute it: settings, ", " between them; "" if it does. The caller frees it. */
char *architecture_differences(const Architecture *a, const ModelConfig *c);

/* The key in a->keys, or NULL. */
const ClassKey *architecture_key(const Architecture *a, const char *key);

/* A tensor of a Hugging Face folder: `rows` x `cols` consecutive elements of a parameter, from its `first` on. */
typedef struct {
    char   name[112];
    int    unit, param;     /* index into UnitShape.param                                                           */
    size_t first, rows, cols;
    bool   adapter;         /* of an adapter's file, in the format of PEFT                                          */
    bool   vector;          /* one-dimensional: (cols), rows = 1                                                    */
    size_t max_rows;        /* > rows for the embedding and the head: such a file holds the padding rows as well    */
} HfTensor;
enum { HF_TENSORS = 25 };   /* at most, per unit */

int       hf_tensors(HfTensor out[HF_TENSORS], const ModelConfig *c, const UnitShape *shape, int unit);        /* their number */
HfTensor *hf_tensors_of(const ModelConfig *c, int *count);     /* of all units, in their order; the caller frees it */

/* Where it begins in the region that its parameter has now. */
static inline size_t hf_first(const UnitShape *shape, const HfTensor *t)
{
    return shape->param[t->param].offset + t->first;
}
