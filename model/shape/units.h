/* A model is a sequence of units: the embedding, the projector if it has images, the blocks, the
 * head. A unit is gathered and sharded as a whole. In forward, a unit reads the residual stream and
 * writes the stream for the next unit; in backward, it reads and writes the stream's gradient. A
 * row of the table in kinds.c defines each kind of unit.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of
 * width D; S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W
 * ranks. */
#pragma once
#include "kernels/tensor.h"
#include "model/shape/config.h"

/* All parameters of all kinds of units: each has a field here and a row in its kind. A kind that a
 * program adds may overlay `tensor` with other names. Parameters that a unit lacks, and their
 * gradients, have data == NULL. */
enum { NUM_PARAMS = 21 };
typedef union {
    struct {
        Tensor embed; /* (V, C)  embedding; also the head's matrix if tied */
        /* (1, C)  blocks: norm of attention's input; OLMo-2: of attention's output */
        Tensor attn_norm;
        Tensor qkv;      /* (S, C) */
        Tensor qkv_bias; /* (S, 1)  Qwen2 */
        Tensor qnorm;    /* (1, H*D); Qwen3: (1, D), the same for each head */
        Tensor knorm;    /* (1, K*D); Qwen3: (1, D) */
        Tensor out;      /* (C, H*D) */
        Tensor mlp_norm; /* (1, C)  norm of the MLP's input; OLMo-2: of the MLP's output */
        Tensor router;   /* (E, C) with experts */
        /* (2F, C) rows of gate, then rows of up; with experts (E*2F, C) */
        Tensor gate_up;
        Tensor down; /* (C, F); with experts (E*C, F) */
        Tensor norm; /* (1, C)  head: final norm */
        Tensor head; /* (V, C) */
        /* adapters, r = lora.rank. Adapters of qkv and gate_up have rows only for the projections
         * in lora.target_modules, in the order q, k, v and gate, up */
        Tensor qkv_a;     /* (3 r, C) */
        Tensor qkv_b;     /* (S, r) */
        Tensor out_a;     /* (r, H*D) */
        Tensor out_b;     /* (C, r) */
        Tensor gate_up_a; /* (2 r, C) */
        Tensor gate_up_b; /* (2F, r) */
        Tensor down_a;    /* (r, F) */
        Tensor down_b;    /* (C, r) */
    };
    struct {
        /* of the projector (projector.h): (C, Cv), (C, 1), (C, C), (C, 1) */
        Tensor image_in, image_in_bias, image_out, image_out_bias;
    };
    Tensor tensor[NUM_PARAMS];
} UnitTensors;

/* The linear layers of a block. Projections with the same input are one matrix. */
typedef enum { LINEAR_QKV, LINEAR_OUT, LINEAR_GATE_UP, LINEAR_DOWN, NUM_LINEARS } Linear;

/* How a parameter is cut among ranks that compute a layer together. SPLIT_ROWS: by rows, which are
 * the layer's outputs. SPLIT_COLUMNS: by columns, which are the layer's inputs. SPLIT_NONE: not at
 * all, because each rank needs the whole parameter [Megatron-LM: Shoeybi et al. 2019, arXiv
 * 1909.08053, sec. 3]. */
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS } Split;

typedef enum {
    ALWAYS,
    WITH_NORM_WEIGHTS,
    WITH_QKV_BIAS,
    WITH_QK_NORM,
    WITH_EXPERTS,
    UNTIED,
    ADAPTED,
    WITH_PROJECTOR_BIAS,
    WITH_PROJECTOR_OUT,
    WITH_PROJECTOR_OUT_BIAS
} Condition;
typedef enum {
    SIZE_ONE,
    SIZE_MODEL,
    SIZE_Q,
    SIZE_Q_NORM,
    SIZE_K_NORM,
    SIZE_MLP,
    SIZE_EXPERTS,
    SIZE_VOCABULARY,
    SIZE_LORA_RANK,
    SIZE_FEATURE,
    /* all outputs of those projections (q, k, v or gate, up) of the linear layer that the parameter
     * has */
    SIZE_OUTPUTS,
    SIZE_LORA_RANKS /* lora.rank times the number of these projections */
} Size;
typedef enum {
    ONES,
    ZEROS,
    STD_EMBEDDING,
    STD_IN,
    STD_ATTENTION_OUT,
    STD_MLP_OUT,
    STD_HEAD,
    STD_ADAPTER
} Init;

/* A parameter of the units of a kind; rows are in the order of the units' flat buffer. With a
 * count, the parameter has several items of this shape, such as the experts of a layer; each item
 * has its own scale and its own tensors in files. In UnitTensors, items are consecutive rows of one
 * tensor. */
typedef struct {
    const char *name;
    size_t offset; /* offset in UnitTensors */
    Size rows, cols;
    Split split;
    Init init;
    Condition condition;
    Linear linear; /* the layer of the matrix, the bias or the adapter */
    /* number of items in the unit with this unit_number; NULL: one */
    int (*count)(const ModelConfig *c, int number);
    /* a matrix of a layer that is no operand of the recipe: it has the stream's format */
    bool in_stream_format;
} ParamRow;

struct Model;
struct Planner;

/* A unit's position in a backward pass. */
typedef struct {
    /* needs_dx: an earlier unit is trained. after_layer: on this rank, a layer of the same kind has
     * just run its backward. before_layer: such a layer is next */
    bool needs_dx, after_layer, before_layer;
} BackwardStep;

typedef struct UnitKind {
    const char *name; /* name in messages and traces */
    /* number of consecutive units of this kind in a model; NULL: all layers that belong to no other
     * kind */
    int (*count)(const ModelConfig *c);
    /* the kind's matrices are operands of the recipe. Units of this kind alternate between two
     * buffers for weights, and their saved activations can be offloaded to the host */
    bool is_layer;
    /* maps an image's features to the stream. The tensors of such a unit are outside the text
     * model's prefix in files; the unit may have its own learning rate, and may be trained together
     * with adapters */
    bool is_projector;
    const ParamRow *params;
    int num_params;

    /* Places the unit's buffers in m->unit_acts[u]; the unit reads the stream from attn_res. NULL:
     * the unit reads no stream. */
    void (*plan)(struct Planner *p, struct Model *m, int u);

    /* Computes unit_acts[u + 1].attn_res from the stream in unit_acts[u].attn_res. */
    void (*forward)(struct Model *m, const UnitTensors *w, int u);

    /* Returns the uses for which backward needs the unit's weights. NULL: backward needs no
     * weights. */
    int (*backward_uses)(const struct Model *m, int u);
    /* Replaces, in m->text.work.dres, the gradient of the unit's output by the gradient of its
     * input, unless step.needs_dx is false. */
    void (*backward)(struct Model *m, const UnitTensors *w, UnitTensors *dw, int u,
                     BackwardStep step);
} UnitKind;

/* The first unit, the embedding, reads no stream; the last, the head, writes none. */
static inline bool unit_reads_stream(const UnitKind *k)
{
    return k->plan != NULL;
}

static inline bool unit_writes_stream(const UnitKind *k)
{
    return k->forward != NULL;
}

/* The last unit is the head, which has no `forward` and no `backward`: logits exist only between
 * forward and backward, so head.h computes both at once. */
const UnitKind *unit_kind(const ModelConfig *c, int unit);
/* the unit's number among the units of its kind; for a layer, among all layers */
int unit_number(const ModelConfig *c, int unit);
/* all units of the model */
int unit_count(const ModelConfig *c);
int unit_of_layer(const ModelConfig *c, int layer);
/* the unit with the head's matrix: the head, or the embedding if both are tied */
int unit_of_head_matrix(const ModelConfig *c);

/* Writes and returns what messages call the unit: "the embedding", "block 3", "the head". */
enum { UNIT_NAME = 32 };
const char *unit_name(const ModelConfig *c, int unit, char text[UNIT_NAME]);

/* Registers the kind *k, which must stay in memory. at: its index in the order of kinds in a model;
 * later kinds move up by one. The first kind is the embedding, the last is the head. kinds.c
 * registers the kinds of every program before main. Dies if there are too many kinds. */
void unit_kind_add(const UnitKind *k, int at);
