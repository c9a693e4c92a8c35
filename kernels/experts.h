/* Operations of an MLP of experts: the router, and SwiGLU MLPs, each of which computes the tokens
 * that the router sends to it. kernels.h has the rules that hold for these operations, too.
 *
 * N tokens, C model width, E experts, k experts per token, F width of an expert. An assignment is a
 * pair of a token and one of its experts. Tensors "of assignments" have R rows: the assignments of
 * expert 0 in the order of their tokens, then those of expert 1, and so on. The rows of each expert
 * begin at a multiple of EXPERT_ROWS; the rows between are padding. No token is dropped. Memory is
 * sized by N*k, not by expert, because trained routers may give one expert ten times the mean.
 *
 * The matrices of all experts are one tensor w (E*O, C): the rows e*O .. e*O + O-1 belong to expert
 * e. If w is FP8, each expert's matrix has its own scale, SCALE_FLOATS floats apart, and its own
 * transposed codes: (C, O) at data_t + e*O*C. */
#pragma once
#include "kernels/kernels.h"

enum { EXPERT_ROWS = 128 }; /* rows of a tile of the grouped GEMMs on GPUs */

/* Which experts compute which tokens. The arrays are in device memory; route fills them. */
typedef struct {
    int tokens, experts, top_k; /* N, E, k */
    int *expert;                /* (N,k) a token's experts, the most probable first */
    float *weight;              /* (N,k) their weights */
    int *row;                   /* (N,k) the row of each assignment */
    int *assignment;            /* (R) the assignment n*k + j of each row; -1: padding */
    int *first;                 /* (E+1) the first row of each expert; R or less at the end */
} Routing;

/* R: the largest number of rows that N*k assignments can take, with padding. */
static inline int routing_rows(int tokens, int experts, int top_k)
{
    const int assignments = tokens * top_k, used = assignments < experts ? assignments : experts;
    return (assignments + used * (EXPERT_ROWS - 1)) / EXPERT_ROWS * EXPERT_ROWS;
}

/* ---- router ---------------------------------------------------------------------------------- */

/* p = softmax of a row of logits (N,E), in F32. A token's experts are the k with the largest
 * logits or, with a bias (E), with the largest p + bias, in F32; among equal values, the lower
 * index wins. weight = p of these experts, divided by their sum if `normalize`. Fills all arrays of
 * r [transformers, OlmoeTopKRouter, Qwen3MoeTopKRouter; the bias: OLMo-core, MoERouter.score_bias].
 * Entries of `assignment` from first[E] on become -1. logits is F32. bias may be NULL. */
void route(Routing r, Tensor logits, const float *bias, bool normalize);

/* Statistics of `groups` equal groups of consecutive tokens; stats is (groups, 2E + 2) F32. For
 * each group: the number of assignments of each expert, the sum of each expert's p, the sum of z^2,
 * and the sum of the entropies -sum_e p log p, with z = log sum exp of the logits. Counts are exact
 * below 2^24. */
static inline int router_stats_width(int experts)
{
    return 2 * experts + 2;
}
void router_stats(Tensor stats, Tensor logits, Routing r);

/* sums (1, 2E + 3) += the sums over all groups of the columns of stats and, in the last column,
 * factor * sum over groups and experts of count * (sum of p). */
void router_sum(Tensor sums, Tensor stats, int experts, float factor);

/* dlogits = the gradient with respect to the logits of
 *     sum over assignments of dweight[row] weight
 *     + balance * sum over groups and experts of count[g][e] * (sum of p[n][e] over n in group g)
 *     + z * sum over tokens of z^2,
 * where `count` is the first E columns of `counts` (groups, 2E + 2), and is a constant [Switch
 * Transformers: Fedus et al. 2021, arXiv 2101.03961, eq. 4; ST-MoE: Zoph et al. 2022, arXiv
 * 2202.08906, eq. 5]. dweight is (R). dlogits (N,E) is F32 or BF16. counts may be absent if balance
 * is 0. */
void route_backward(Tensor dlogits, const float *dweight, Tensor logits, Routing r, bool normalize,
                    Tensor counts, float balance, float z);

/* ---- rows ------------------------------------------------------------------------------------ */

/* y = the rows of x (N,C) for the assignments; padding rows up to first[E] become 0, and rows from
 * there on are undefined. y (R,C) is F32, BF16, or FP8 with one scale, which follows from max|x| as
 * in quantize_with_amax. */
void experts_gather(Tensor y, Tensor x, const float *amax, Routing r);
/* The same, but an FP8 y keeps its scale. Its data or data_t may be NULL; a NULL copy is not
 * written. */
void experts_gather_again(Tensor y, Tensor x, Routing r);

/* y[n] = [add[n] +] sum over j of x[row[n][j]], summed in F32 in the order of j, then add. y and
 * add are (N,C), x is (R,C). F32 or BF16. add may be y, or absent. */
void experts_sum(Tensor y, Tensor x, Tensor add, Routing r);

/* ---- grouped GEMMs --------------------------------------------------------------------------- */

/* As matmul, matmul_dx and matmul_dw, for the rows and the matrix of each expert. Rows of y and dx
 * from first[E] on are not written. The padding rows of y and dx become 0. experts_matmul_dw reads
 * padding rows up to first[E], which must be 0. If dw is empty, the gradient of an expert without
 * rows becomes 0. */
/* y  = x wT       (R,O) (R,C) (E*O,C) */
void experts_matmul(Tensor y, Tensor x, Tensor w, Routing r);
/* dx = dy w       (R,C) (R,O) (E*O,C) */
void experts_matmul_dx(Tensor dx, Tensor dy, Tensor w, Routing r);
/* dw += dyT x     (E*O,C) (R,O) (R,C); nothing if dw is absent */
void experts_matmul_dw(Tensor dw, Tensor dy, Tensor x, Routing r);

/* ---- adapters -------------------------------------------------------------------------------- */

/* As lora_narrow, lora_widen and lora_dw, for the rows and the adapter of each expert. The matrices
 * of all experts are one tensor m.w: A is (E*r, C), and B has the rows of all parts of expert 0,
 * then those of expert 1, and so on. Rows from first[E] on are not written. Padding rows of x and xa
 * must be 0. If dm.w is empty, the gradient of an expert without rows becomes 0. */
void experts_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale, Routing r);
/* y += xa wT */
void experts_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Routing r);
void experts_lora_dw(LoraMatrix dm, Tensor xa, Tensor x, Routing r);

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

/* gate_up = wide, in gate_up's format (in place if gate_up is the memory of wide). act = weight *
 * silu(gate) * up of gate_up as stored or, with FROM_EXACT, of wide. act (R,F) is what the expert's
 * last matrix multiplies: so a token's output is the plain sum of its experts' outputs, and the
 * gradient of a weight needs no output of an expert. Rows of gate_up and wide (R,2F) are [gate |
 * up]. Padding rows are 0 up to first[E]; from there on nothing is read or written, but for the
 * scales of groups. */
void experts_swiglu(Tensor act, Tensor gate_up, Tensor wide, Routing r, ForwardSource from);

/* experts_matmul(wide, x, w), then experts_swiglu(act, gate_up, wide, FROM_EXACT). If one kernel
 * does both, wide is not written. x is (R,C), w (E*2F,C). */
void experts_matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w, Routing r);

/* From dact (R,F), the gradient of act: dgate_up (R,2F), and dweight[row] = sum over f of dact *
 * silu(gate) * up, in F32. act, unless it is absent, is recomputed. An FP8 act keeps its scale, and
 * its data or data_t may be NULL; a NULL copy is not written. dgate_up may be the memory of gate_up
 * and act that of dact, as in swiglu_backward. */
void experts_swiglu_backward(Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                             Tensor gate_up, Routing r);

/* experts_matmul_dx(dact, dy, w), then experts_swiglu_backward. If one kernel does both, dact is
 * not written. dy is (R,C), w (E*C,F). */
void experts_matmul_dx_swiglu(Tensor dgate_up, Tensor act, float *dweight, Tensor dact, Tensor dy,
                              Tensor w, Tensor gate_up, Routing r);
