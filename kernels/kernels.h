/* Every operation the model needs. Implemented twice: kernels/cpu/ is the specification, kernels/cuda/ the fast one. What memory
 * each reads and writes is a row of operation_list.h.
 *
 *   Outputs first, then inputs, then sizes. An operation reads its inputs and writes its outputs in whatever Format
 *   the tensors carry; arithmetic in between is F32. "+=" marks outputs that accumulate; a tensor among them that is `empty`
 *   is written instead, the whole of it, as if it had held zeros, whatever its memory holds. Shapes and formats are
 *   checked on entry; a combination that a back end does not have is an error that names it. Integer and float
 *   arrays are device memory. Nothing here waits for the device. An FP8 output without data_t gets its rows alone, the same
 *   codes under the same scale.
 *
 *   N = B*T tokens, C = model width, D = head width, H = query heads, K = key/value heads, F = MLP width,
 *   V = rows of the embedding (the vocabulary, padded), O = outputs of a linear layer.
 */
#pragma once
#include "kernels/tensor.h"

/* From which values an operation that saves a tensor goes on, where saving rounds it to FP8. */
typedef enum {
    FROM_SAVED,     /* the rounded ones, so that forward and backward see the same [COAT]                   */
    FROM_EXACT      /* those before rounding: backward's error is forward's no longer                       */
} ForwardSource;

/* ---- formats ---------------------------------------------------------------------------------------------- */

/* y = x in y's format. The same memory: nothing happens. FP8: S = max|x| / max(format) per group or tensor,
 * code = round to nearest even of x (1/S), both in F32, saturating [COAT eq. 1]; writes y.data_t too if there is one. */
void quantize(Tensor y, Tensor x);

/* The same where max|x| may be known already: *amax, a float of device memory; NULL: it is not. A group finds its own. */
void quantize_with_amax(Tensor y, Tensor x, const float *amax);

/* Its two halves for an FP8 y of group 0: the scale from max|x|, which is found or given; then codes and, if there is one,
 * transposed codes with the scale that y has. Here y.data or y.data_t may be NULL: not written; and y may have more rows than x,
 * which become 0: GPUs add FP8 products by sixteens. Both in one go, where range_is_kept. */
void quantize_scale     (Tensor y, Tensor x);
void quantize_scale_from(Tensor y, const float *amax);
void quantize_codes     (Tensor y, Tensor x);
void quantize_in_range  (Tensor y, Tensor x);

/* How operations find the scale of an FP8 output y that has a range. Measured, while *y.range_kept is false: as without a range,
 * S = max|y| / max(format); *y.range = max|y|. Kept, while it is true: S = h * *y.range / max(format), so y is encoded while max|y|
 * is still being found; where that is larger than h * *y.range, *y.range = max|y|, S by this formula, and y is encoded once more.
 * h is 2 for E4M3, 8 for E5M2: as powers of two they leave codes all their digits and cost the smallest binade or three. A range of
 * 0 has no room. */
bool range_is_kept(Tensor y);

/* y = x, F32 or BF16, and x.data_t from x.data: of an FP8 operand of which the rows are there. */
void expand_operand(Tensor y, Tensor x);

/* Whether FP8 with groups of this size is known: on the CPU any, with CUDA 16 for activations and 128 for moments. */
bool knows_group(int group, bool moment);

/* w[i] = std * z, z normal, |z| <= cutoff (0: no cutoff); a function of (seed, first + i) alone. */
void init_normal(Tensor w, float std, float cutoff, uint64_t seed, uint64_t first);
void init_constant(Tensor w, float value);

/* ---- embedding -------------------------------------------------------------------------------------------- */

/* A token and where in the batch it stands. */
typedef struct { int token, position; } TokenAt;

/* On the host: the N tokens, each in [0, V), by token, equal ones by position. */
void sort_tokens(TokenAt *sorted, const int *tokens, int N, int V);

/* On the host: the documents in B sequences of T tokens: one begins at each sequence's start and where `begins` (B,T) is not 0 (NULL:
 * nowhere else). start (up to B*T + 1 entries) gets the first token of each document and B*T, *longest the tokens of the longest;
 * returns their number. */
int document_starts(int *start, int *longest, const uint8_t *begins, int B, int T);

/* For every (token, position) of N: y[position] = w[token], dw[token] += dy[position], in this order. y, dy (N,C); w, dw (V,C) */
void embedding_forward (Tensor y, const TokenAt *sorted, Tensor w);
void embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy);

/* ---- normalization ---------------------------------------------------------------------------------------- */

typedef enum { RMS_NORM, LAYER_NORM } NormKind;
typedef struct { NormKind kind; float eps; } Norm;

/* x = stream, in x's format (the same memory: nothing); stats of x as stored, or of the stream: row n has mean stats[2n] (0 for
 * RMS_NORM) and rstd stats[2n+1] = 1/sqrt(mean((x-mean)^2) + eps); y = (x - mean) rstd w [+ residual], of the same x.
 * x, stream, y, residual (N,C); w (1,C) or no tensor, meaning 1; residual may be no tensor. */
void norm_forward (Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm, ForwardSource from);

/* y again from x and stats as norm_forward left them, without residual; in FP8 with the scale that y has, and y.data or
 * y.data_t may be NULL: not written. */
void norm_again(Tensor y, Tensor x, const float *stats, Tensor w);

/* dx = [dx +] the gradient of y with respect to x; dw += (no tensor: not wanted). With g = dy w, xh = (x - mean) rstd:
 * dx = rstd (g - mean(g) [LAYER_NORM only] - xh mean(g xh)), dw = sum over n of dy xh. dx may be dy if not accumulating.
 * *amax, a float of device memory, becomes max|dx| of all dx as stored, whatever it was; NULL: not wanted, as for an FP8 dx. */
void norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats, Tensor w, Norm norm,
                   bool accumulate);

/* ---- linear ----------------------------------------------------------------------------------------------- */

/* FP8 GEMMs whose first input (x of matmul, dy of the others) is `fast` may add with the tensor cores' short accumulators: 8 %
 * faster, each product 1e-3 instead of 1e-4 off (H200). What this leaves to choice is a back end's rounding; the CPU's is exact
 * either way.
 *
 * FP8 operands have one scale and are read along the sum: matmul reads data, matmul_dx w.data_t, matmul_dw both data_t. add may be
 * y. A product that is added in place to BF16 may be rounded first, then the sum again. */
void matmul   (Tensor y,  Tensor x,  Tensor w, Tensor add);             /* y  = x wT [+ add]   (N,O) (N,C) (O,C) (N,O) */
void matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate);        /* dx = [dx +] dy w    (N,C) (N,O) (O,C)       */
void matmul_dw(Tensor dw, Tensor dy, Tensor x);                         /* dw += dyT x         (O,C) (N,O) (N,C); no dw: nothing */

/* ---- adapters --------------------------------------------------------------------------------------------- */

/* A narrow matrix between a wide tensor (N,C) and a low one (N, P*r): A, (P*r, C), whose every row belongs to all columns; or B,
 * rows of (.., r), whose part i, `width` rows behind those of the parts before it, belongs to the wide tensor's columns from
 * `first` on and to the low one's columns i*r .. i*r + r-1; parts lie one behind the other. So one call serves q, k and v, or two of
 * them. F32 or BF16. */
enum { LOW_RANK_PARTS = 3 };
typedef struct {
    Tensor w;
    bool   is_b;
    int    num_parts;          /* P; of A one, with its P*r rows as rank                     */
    struct { int first, width; } part[LOW_RANK_PARTS];         /* of B: of A not read */
} LowRank;

/* With w(c,j) what column c of the wide tensor and column j of the low one have in common in m, 0 if nothing:
 *   lora_narrow  low  = scale * x w        low[n,j]  = scale * sum over c of x[n,c] w(c,j)
 *   lora_widen   y    = low wT [+ add]     y[n,c]    = sum over j of low[n,j] w(c,j) [+ add[n,c]]
 *   lora_dw      dm  += lowT x             dw(c,j)  += sum over n of low[n,j] x[n,c]     (no tensor dm.w: nothing)
 * x (N,C) in F32, BF16, or rows of E4M3 or E5M2 with one scale, of which data_t is not read; low, y, add in F32 or BF16; y may be
 * add. Columns of x outside m's parts are not read, those of y become add or 0. Sums are in F32 and always in the same order. */
void lora_narrow(Tensor low, Tensor x, LowRank m, float scale);
void lora_widen (Tensor y, Tensor low, LowRank m, Tensor add);
void lora_dw    (LowRank dm, Tensor low, Tensor x);

/* low wT of m, as lora_widen has it, for an operation to add to its input x, which it reads anyway; no tensor low: nothing is
 * added. So a GEMM's output and an adapter's become one without a pass of their own. x must be F32 or BF16, and may be changed: a
 * back end may write the sum to it, in its format, and go on from there, or keep the sum in F32. */
typedef struct { Tensor low; LowRank m; } LowProduct;

/* ---- attention -------------------------------------------------------------------------------------------- */

typedef struct {
    int   B, T, H, K, D;
    float scale;           /* of the scores: 1/sqrt(D)                                  */
    float clip;            /* q, k, v are clamped to [-clip, clip] first; 0: not        */
    Norm  norm;            /* of q and k where weights are given: see rope_forward      */
    const float *rope;     /* (T, D/2, 2) cosine and sine; both may be times a factor   */
    int   window;          /* keys that a query sees, itself included; 0: all before it */
    void *scratch;         /* scratch_bytes of device memory that attention may overwrite while it runs, ... */
    size_t scratch_bytes;  /* ... instead of taking as much of its own; NULL: none      */
} Attention;

/* Documents packed in the batch: document i is tokens start[i] .. start[i+1]-1 of N; none crosses a sequence. */
typedef struct {
    int        count;      /* 0: each of the B sequences is one document                */
    int        longest;    /* tokens of the longest document                            */
    const int *start;      /* (count + 1), device memory                                */
    const int *host_start; /* the same in host memory, read before a call returns       */
} Documents;

/* From projection to attention input: saved = x [+ product], in saved's format (the memory of x: nothing but the product happens);
 * y = rope(norm(clamp(saved))), FROM_EXACT of x [+ product] itself; v is only clamped. Rows of x and y are [q (H*D) | k (K*D) |
 * v (K*D)]. rope turns (a, b) = elements (i, i + D/2) of a head at position t by angle(t,i). y may be x, and with it saved, which
 * then ends as y.
 * The norms' weights: qnorm (1,H*D), knorm (1,K*D) norm q and k over their full widths [OLMo 2], stats (N,2): rstd of q
 * and of k. Both (1,D): each head by itself, with weights that all heads of q or of k share [Qwen3], stats (N,H+K): rstd of
 * each head of q, then of k. No tensors: no norm, stats NULL. */
void rope_forward (Tensor y, Tensor saved, float *stats, Tensor x, LowProduct product, Tensor qnorm, Tensor knorm, Attention a,
                   ForwardSource from);

/* dx from dy; may be the same memory; otherwise dy is overwritten. dqnorm, dknorm += (shapes as qnorm, knorm; no tensor: not
 * wanted). x: what rope_forward saved; read only if there is a clip or a norm (a clamped element has gradient 0; one
 * equal to the limit counts as not clamped). */
void rope_backward(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x, const float *stats,
                   Tensor qnorm, Tensor knorm, Attention a);

/* Causal softmax attention inside each document: token t sees its tokens u <= t, with a window those of t - window < u <= t.
 * A window of T or more is none, to the bit. Head h reads key/value head h / (H/K). y (N, H*D), qkv (N, (H+2K)D);
 * lse (B,H,T) or, with documents, any layout of N*H floats that attention_backward of the same back end reads back. */
void attention_forward (Tensor y, float *lse, Tensor qkv, Attention a, Documents docs);
void attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a, Documents docs);

/* Keys and values (P, K*D) that one sequence has left in a block, as attention reads them: those of its first `length` tokens. */
typedef struct { Tensor k, v; int length; } KvCache;

/* The same of the next T tokens of one sequence (a.B == 1), which see those before them through the cache: first their own k and v
 * are stored behind those, in rows length .. length + T - 1 of P. One format for qkv (T, (H+2K)*D), y (T, H*D) and the cache, F32
 * or BF16. */
void attention_cached(Tensor y, Tensor qkv, KvCache cache, Attention a);

/* ---- MLP -------------------------------------------------------------------------------------------------- */

/* gate_up = wide [+ product], in gate_up's format (the memory of wide: nothing but the product happens); act = silu(gate) * up of
 * gate_up as stored, or of wide [+ product]. act (N,F); rows of gate_up and wide (N,2F) are [gate | up]. */
void swiglu_forward (Tensor act, Tensor gate_up, Tensor wide, LowProduct product, ForwardSource from);

/* What matmul(wide, x, w) and then swiglu_forward(act, gate_up, wide, {0}, FROM_EXACT) do; where one kernel does both, wide is not
 * written.
 * x (N,C), w (2F,C), act (N,F), gate_up and wide (N,2F). */
void matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w);

/* dgate_up from dact [+ product]; may be the memory of gate_up, in FP8 its rows that of the codes, unless dgate_up has a range.
 * act, unless it is no tensor, is written again as in forward: in FP8 with the scale that it has, and its data or data_t may be
 * NULL: not written. It may be the memory of dact. */
void swiglu_backward(Tensor dgate_up, Tensor act, Tensor dact, LowProduct product, Tensor gate_up);

/* What matmul_dx(dact, dy, w, false) and then swiglu_backward(dgate_up, act, dact, {0}, gate_up) do; where one kernel does both, dact
 * is not written, and dgate_up and act must not be the memory of dy. dy (N,C), w (C,F), dact and act (N,F), dgate_up and gate_up
 * (N,2F). */
void matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w, Tensor gate_up);

/* ---- loss ------------------------------------------------------------------------------------------------- */

/* For each row n of logits (n, V), of which the first `vocab` columns count: z = log sum exp; loss[n] = z - logits[target[n]]
 * and zloss[n] = z^2; both 0 where target[n] < 0 (masked). Then, if `backward`, the logits become
 * scale * d(loss + z_weight * zloss)/d(logits): 0 in masked rows and in the columns from `vocab` on. */
void cross_entropy(Tensor logits, float *loss, float *zloss, const int *target, int vocab,
                   float scale, float z_weight, bool backward);

/* The same with the gradient as rows of an FP8 operand with the scale of a largest magnitude known beforehand, amax: what is
 * larger saturates. It may have more rows and columns than the logits: those are 0. The logits stay. */
void cross_entropy_codes(Tensor gradient, float amax, Tensor logits, float *loss, float *zloss, const int *target, int vocab,
                         float scale, float z_weight);

/* ---- reductions and the optimizer; always in the same order, hence the same bits ---------------------------- */

void sum_values (float *out, const float *x, size_t n);                 /* *out += sum of x */
void sum_squares(float *out, Tensor x);                                 /* *out += sum of x^2; not finite if any x is not */

/* *found = 1 if x holds what no weight and no moment may be: a value that is not finite or, if `negative`, one below 0 (not for
 * DYNAMIC8). Else it stays. With scales both codes and scales count: a scale below 0, or with which the format's largest number is
 * not finite, is one of these. */
void find_not_finite(int *found, Tensor x, bool negative);

typedef struct {
    float    lr, beta1, beta2, eps, weight_decay;
    float    correction1, correction2;    /* 1 - beta1^t, 1 - beta2^t                             */
    float    grad_scale;                  /* the gradient is multiplied by it: clipping           */
    uint64_t seed;                        /* of stochastic rounding: a function of run and step   */
} AdamW;

/* g = grad_scale grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
 * w -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay w).  [Loshchilov & Hutter 2019, alg. 2]
 * All (1,n): consecutive elements of a flat unit, whose first has number `first` in the model. A BF16 w is rounded
 * stochastically with random bits that depend on (seed, first + i) alone. */
void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);

/* AdamW with 8-bit moments, m of dynamic8/256 and v of udynamic8/256, as bitsandbytes' CUDA kernel computes it [Dettmers
 * et al. 2022, arXiv 2110.02861; bitsandbytes 0.50, kOptimizerStatic8bit2StateBlockwise]; codes: kernels/dynamic8.h.
 * g = grad_scale grad; v = b2 v + (1-b2) g^2; m = b1 m + (1-b1) g;
 * w = (w - lr sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps)) (1 - lr weight_decay), with m and v before they are encoded.
 * Where grad is not finite, m = v = 0 and w stays. All (1,n), n a multiple of 256: a last group that is not full goes on
 * in padding, which is 0 and stays 0. first and a BF16 w as in adamw.
 * DIFFERS: bitsandbytes rounds a BF16 w to nearest, before and after the decay; its own quotients are approximations. */
void adamw8bit(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);
