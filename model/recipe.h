/* A recipe says in which Format each kind of tensor is stored, and what backward recomputes. It is data:
 * model code never asks which recipe runs; an ablation is one more row. */
#pragma once
#include "kernels/kernels.h"

/* What forward leaves in memory for backward. */
typedef enum {
    KEEP_ALL,       /* every tensor that backward reads                                                     */
    KEEP_INPUTS,    /* norm outputs and silu(gate)*up are recomputed from norm inputs, gate and up          */
    KEEP_ATTENTION, /* each block's input and attention's output: backward runs the block again without attention */
    KEEP_BLOCK      /* only each block's input: backward runs the block's forward again (activation checkpointing) */
} Keep;

static inline bool keep_recomputes(Keep k)
{
    return k >= KEEP_ATTENTION;
}

/* Which FP8 GEMMs may add with short accumulators (matmul in kernels.h). */
typedef enum { FAST_NONE, FAST_FORWARD, FAST_ALL } FastAccumulation;

/* Over what the scale of an FP8 operand that is no weight holds: h0, h1, act, the attention's output, gradients but dy. */
typedef enum {
    OF_MICROBATCH,  /* a micro-batch: its maximum is found, then it is encoded                              */
    OF_STEP         /* a step: those after its first are encoded with headroom over the first one's maximum;
                       see range_is_kept                                                               */
} ScalesOf;

typedef struct {
    const char *name;
    Format stream;     /* residual stream, and whatever no other column names             */
    Format saved;      /* norm inputs kept for backward                                   */
    Format qkv;        /* q, k, v kept for backward                                       */
    Format att;        /* attention output kept for backward                              */
    Format hidden;     /* gate and up kept for backward                                   */
    Format operand;    /* GEMM operands: activations and weights                          */
    Format gradient;   /* GEMM operands: gradients                                        */
    Format head;       /* the logits' gradient: FP8 makes both GEMMs of the head's backward FP8, else they are the stream's */
    Keep   keep;
    ForwardSource forward;
    FastAccumulation fast;
    ScalesOf scales;
    Format master;     /* weights that the optimizer updates                              */
    Format grads;      /* accumulated weight gradients                                    */
    Format moment1, moment2;   /* AdamW's m and v, where the optimizer leaves it to the recipe */
    Format frozen;     /* weights that are not trained, of which there is one copy        */
    int    recompute;  /* blocks with KEEP_BLOCK instead of `keep`, of every n the first: n; all but the first: -n; 0: none */
} Recipe;

extern const Recipe recipes[];      /* ends with name == NULL */
const Recipe *recipe_find(const char *name);          /* NULL if there is none */
Keep          recipe_keep(const Recipe *r, int block);     /* what forward of this block leaves */
bool          recipe_recomputes(const Recipe *r);          /* whether backward runs the forward of any block again */
/* Where nothing is trained, all weights are frozen. Then in this format: that which computing reads, or that of training if
 * computing rounds them once more. Either way forward gives what it gives in training. */
Format        recipe_forward_weights(const Recipe *r);
void          recipe_print(const Recipe *r);          /* on stdout; not the moments, which the optimizer reads or not */
