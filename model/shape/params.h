/* The parameters of a model, unit by unit, and the position of each in its unit's flat buffer.
 *
 * Dimensions: B sequences of T tokens, N = B*T; C model width; H query heads, K key/value heads of
 * width D; S = (H+2K)*D width of [q|k|v]; F MLP width; V rows of the embedding; L blocks; W
 * ranks. */
#pragma once
#include "kernels/nf4_map.h"
#include "model/shape/units.h"

/* A unit's flat buffer has regions, each laid out and sharded separately. */
typedef enum {
    TRAINED, /* trained weights */
    /* weights without gradients and optimizer states, in the recipe's format for frozen weights */
    FROZEN,
    /* frozen matrices in the format of lora.base: E4M3 codes, or whole groups of NF4. The elements
     * of this region are bytes */
    QUANTIZED,
    NUM_REGIONS
} Region;

/* Rows of a parameter that are one tensor in files: q, k or v of qkv; gate or up; all rows, or the
 * rows of existing ids. */
enum { MAX_PROJECTIONS = LORA_PROJECTIONS };
typedef struct {
    int first, rows;
    /* index of the part among the tensors of the linear layer; 0 for other parameters */
    int tensor;
} Projection;

/* A parameter, or one item of a parameter with several items, and its position in the unit. The
 * items of a parameter are consecutive. Functions on single parameters take single items. */
typedef struct {
    const char *name; /* field of UnitTensors, for example "qkv" */
    int id;           /* index into UnitTensors.tensor */
    int item, items;  /* index of the item, and number of items; 0 and 1 if the parameter has one */
    int rows, cols;   /* shape of the item */
    Split split;
    int num_projections;
    Projection projection[MAX_PROJECTIONS]; /* parts from top to bottom; padding follows */
    Region region;
    size_t offset; /* first element in the region */
    size_t stored; /* number of stored elements */
    /* offset in the region's gathered computing format; a multiple of PARAM_ALIGN */
    size_t gathered_at;
    /* offset in the unit, independent of what is frozen: seeds random numbers */
    size_t number;
    size_t quantized_scale; /* region QUANTIZED: index into ParamStore.quantized_scales */
    bool is_norm, is_embedding;
    /* norm weights or a bias: no weight decay, one-dimensional in files */
    bool is_vector;
    bool is_adapter, is_b; /* is_adapter: A or B of the layer `linear`; is_b: B */
    Linear linear;         /* the layer of a block's matrix or adapter */
    /* a block's matrix: an operand in the recipe's format. Other parameters have the stream's
     * format */
    bool is_operand;
    bool has_padding; /* rows from vocab_size on are padding and stay 0 */
    float init_std;   /* 0: initial values are ones (norms) or zeros (biases, B of adapters) */
    /* number of tensor ranks among which `split` cuts the parameter; rows, cols and projection then
     * describe this rank's slice. 1: the parameter is whole */
    int tensor_ranks, tensor_rank;
} Param;
/* Parameters begin at multiples of this number of elements, so they have whole optimizer groups of
 * 128 or 256 and are 256-byte aligned in any format. */
enum { PARAM_ALIGN = 256 };

static inline size_t param_numel(const Param *p)
{
    return (size_t)p->rows * (size_t)p->cols;
}

/* n rounded up to a multiple of PARAM_ALIGN. */
static inline size_t param_align(size_t n)
{
    return (n + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

typedef struct {
    const struct UnitKind *kind;
    int number; /* number by unit_number */
    int num_params;
    Param *param; /* [num_params] */
    /* sizes of the regions with padding: multiples of W * PARAM_ALIGN or, for NF4, of W groups */
    size_t numel[NUM_REGIONS];
    /* sizes in the computing format, without padding for W */
    size_t computing[NUM_REGIONS];
    size_t first; /* number of the unit's first element in the model */
    /* in the region TRAINED, the matrices of layers (with tensor ranks: that are cut) come first */
    bool matrices_first;
    size_t matrices; /* number of elements of these matrices; 0 if matrices_first is false */
    /* number of tensor ranks that compute the unit together; 1: each of them computes the whole
     * unit */
    int tensor_ranks;
    /* region TRAINED: number of elements of the parameters that are cut among tensor ranks. These
     * parameters come first; every tensor rank has a copy of all others */
    size_t cut;
    const ModelConfig *config;
} UnitLayout;

/* Lists the parameters of a unit, all of them trained, and lays them out for `world` ranks. The
 * caller sets .first and frees .param. */
void unit_shape(UnitLayout *u, const ModelConfig *c, int unit, int world);

/* Frees `count` units of unit_shape, which are in malloc'ed memory. */
void units_free(UnitLayout *u, int count);

/* The number of elements that compute one token. An expert counts with the share of tokens that it
 * computes: experts per token / experts. */
double param_active(const UnitLayout *u, const Param *p);

/* All items of the parameter whose first item is p, as one matrix without projections. */
Param param_stack(const Param *p);
/* The view of one item in the tensor of all items: its rows, with its own scale and transposed
 * codes. */
Tensor param_tensor(const UnitTensors *t, const Param *p);

/* The parameter's class in the order of a region, 0 to PARAM_CLASSES - 1. With tensor ranks,
 * parameters that are cut come before all others; then, if u->matrices_first, matrices do. */
enum { PARAM_CLASSES = 4 };
int param_class(const UnitLayout *u, const Param *p);

/* Lays out the regions again after changes of Param.region. */
void unit_lay_out(UnitLayout *u, int world);

/* Dies if a matrix of this unit has more elements than an int can count, because the matrix may be
 * read as one row. All tensor ranks read a matrix of region QUANTIZED whole. A unit may have any
 * number of elements. Also dies if the size of items is not a multiple of PARAM_ALIGN, because items
 * must be consecutive. */
void unit_check_size(const UnitLayout *u, int unit);

/* Cuts the unit's parameters by their `split` among `ranks` tensor ranks, of which this one is
 * number `rank`, and lays out the regions for `world` shards. The parts of all ranks must have
 * equal sizes. */
void unit_cut(UnitLayout *u, int ranks, int rank, int world);

/* The parameter without tensor ranks: its whole rows, columns and parts. */
Param param_whole(const Param *p);

/* Sets *whole to the index, in the whole parameter, of element i of this tensor rank's slice.
 * Returns how many elements from there on are consecutive in the slice and in the whole
 * parameter. */
size_t param_run(const Param *p, size_t i, size_t *whole);

/* Number of elements of all parameters without adapters, which is the same on all ranks and in all
 * runs: the distance between the `first` of two units. */
size_t unit_numbers(const UnitLayout *u);

/* Whether NF4 is stored without double quantization: with tensor ranks, the 256 blocks with one
 * second scale may be on several ranks. */
bool unit_plain_nf4(const UnitLayout *u);
/* A matrix in NF4 whose groups, plain or not (nf4_map.h), are at `groups`. */
Nf4 param_nf4(const Param *p, const void *groups, bool plain);
/* The number of groups of this matrix. */
size_t param_nf4_groups(const Param *p);

/* Returns which projections of a linear layer of block `layer` have an adapter, and their columns
 * in the layer's output. The weights are not set. num_projections 0: there is no adapter. */
LoraMatrix adapter_projections(const ModelConfig *c, int layer, Linear linear);
