/* A recipe sets the Format of each kind of tensor, and what backward recomputes. A recipe is data:
 * model code never asks which recipe runs, and an ablation is one more row. */
#pragma once
#include "kernels/kernels.h"

/* What forward saves for backward. */
typedef enum {
    KEEP_ALL, /* every tensor that backward reads */
    /* as KEEP_ALL, but backward recomputes norm outputs and silu(gate)*up from norm inputs, gate
     * and up */
    KEEP_INPUTS,
    /* each block's input and attention's output: backward recomputes the rest of the block */
    KEEP_ATTENTION,
    /* only each block's input: backward reruns the block's forward (gradient checkpointing) */
    KEEP_BLOCK
} Keep;

static inline bool keep_recomputes(Keep k)
{
    return k >= KEEP_ATTENTION;
}

/* Which FP8 GEMMs may use short accumulators (matmul in kernels.h). */
typedef enum { FAST_NONE, FAST_FORWARD, FAST_ALL } FastAccumulation;

/* How long the scale of an FP8 activation or gradient is valid. (Weights and dy are excluded.) */
typedef enum {
    PER_MICROBATCH, /* one micro-batch: its amax is computed before encoding */
    /* one step: later micro-batches are encoded with the amax of the first micro-batch and headroom
     * above it; see scale_is_reused */
    PER_STEP
} ScalesPer;

/* How the output of SwiGLU, the FP8 input of `down`, is scaled. */
typedef enum {
    DOWN_TENSOR, /* with one scale for the tensor */
    /* with one scale, and a factor for each column with outliers: swiglu_forward in kernels.h */
    DOWN_CHANNEL
} DownScales;

typedef struct {
    const char *name;
    Format residual;         /* residual stream, and all tensors without their own column */
    Format saved_norm_input; /* norm inputs that are kept for backward */
    Format saved_qkv;        /* q, k, v that are kept for backward */
    Format saved_attention;  /* attention output that is kept for backward */
    Format saved_mlp;        /* gate and up that are kept for backward */
    Format operand;          /* GEMM operands: activations and weights */
    Format gradient;         /* GEMM operands: gradients */
    /* gradient of the logits. FP8: both GEMMs of the head's backward are FP8; otherwise they have
     * the stream's format */
    Format head;
    Keep keep;
    ForwardSource forward;
    FastAccumulation fast;
    ScalesPer scales;
    Format master;           /* weights that the optimizer updates */
    Format grads;            /* accumulated weight gradients */
    Format moment1, moment2; /* AdamW's m and v, unless the optimizer has its own formats */
    Format frozen;           /* frozen weights, of which no other copy exists */
    DownScales down_scales;
    /* blocks with KEEP_BLOCK instead of `keep`. n > 0: the first of every n blocks; -n: all blocks
     * except these; 0: none */
    int recompute;
} Recipe;

extern const Recipe recipes[];                /* ends with name == NULL */
const Recipe *recipe_find(const char *name);  /* NULL: no recipe has this name */
Keep recipe_keep(const Recipe *r, int block); /* what forward of this block saves */
/* whether backward recomputes the forward pass of a block */
bool recipe_recomputes(const Recipe *r);
/* The format in which a run without training stores all weights: the stream's format if operands
 * have it, otherwise the format of master weights, from which forward encodes operands. So forward
 * gives the same results as in training. */
Format recipe_forward_weights(const Recipe *r);
bool recipe_is_changed(const Recipe *r); /* the recipe differs from the table's row with its name */
/* prints the recipe on stdout, without formats of moments, which only some optimizers read */
void recipe_print(const Recipe *r);
