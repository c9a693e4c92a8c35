/* A recipe sets the Format of each kind of tensor, and what backward recomputes. It is data: model
 * code never asks which recipe runs; an ablation is one more row. */
#pragma once
#include "kernels/kernels.h"

/* What forward saves for backward. */
typedef enum {
    KEEP_ALL, /* every tensor that backward reads */
    /* norm outputs and silu(gate)*up are recomputed from norm inputs, gate and up */
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

/* How long the scale of an FP8 activation or gradient is valid. (Not of weights, and not of dy.) */
typedef enum {
    PER_MICROBATCH, /* one micro-batch: its amax is computed before encoding */
    /* one step: later micro-batches are encoded with headroom over the first one's amax; see
     * scale_is_reused */
    PER_STEP
} ScalesPer;

/* How the FP8 input of `down`, SwiGLU's output, is scaled. */
typedef enum {
    DOWN_TENSOR, /* with one scale */
    /* with one scale, and a factor for each column with outliers: swiglu_forward in kernels.h */
    DOWN_CHANNEL
} DownScales;

typedef struct {
    const char *name;
    Format residual;         /* residual stream, and all tensors without a column of their own */
    Format saved_norm_input; /* norm inputs kept for backward */
    Format saved_qkv;        /* q, k, v kept for backward */
    Format saved_attention;  /* attention output kept for backward */
    Format saved_mlp;        /* gate and up kept for backward */
    Format operand;          /* GEMM operands: activations and weights */
    Format gradient;         /* GEMM operands: gradients */
    /* the logits' gradient: FP8: both GEMMs of the head's backward are FP8, else in the stream's
     * format */
    Format head;
    Keep keep;
    ForwardSource forward;
    FastAccumulation fast;
    ScalesPer scales;
    Format master;           /* weights that the optimizer updates */
    Format grads;            /* accumulated weight gradients */
    Format moment1, moment2; /* AdamW's m and v, unless the optimizer has its own formats */
    Format frozen;           /* frozen weights, which have no other copy */
    DownScales down_scales;
    /* blocks with KEEP_BLOCK in place of `keep`: n > 0: the first of every n blocks; -n: all
     * others; 0: none */
    int recompute;
} Recipe;

extern const Recipe recipes[];                /* ends with name == NULL */
const Recipe *recipe_find(const char *name);  /* NULL if there is none */
Keep recipe_keep(const Recipe *r, int block); /* what forward of this block saves */
/* whether backward reruns the forward of any block */
bool recipe_recomputes(const Recipe *r);
/* The format in which a run without training stores all weights. If operands have the stream's
 * format it is that format. Else it is the format of master weights, from which forward encodes
 * operands. Forward then gives the same results as in training. */
Format recipe_forward_weights(const Recipe *r);
bool recipe_is_changed(const Recipe *r); /* differs from the row of its name */
/* prints the recipe on stdout, without the moments, which not every optimizer reads */
void recipe_print(const Recipe *r);
