/* Every operation that the model needs. kernels/cpu/ is the specification, kernels/cuda/ is fast. A
 * row of operation_list.h says what memory an operation reads and writes.
 *
 *   - Outputs come first, then inputs, then sizes.
 *   - Inputs and outputs may have any Format. Arithmetic in between is F32, on the CPU also F64.
 *   - "+=" marks outputs that accumulate. If such a tensor is `empty`, all of it is overwritten, as
 *     if it had held zeros.
 *   - Shapes and formats are checked on entry. A combination that a back end lacks is an error that
 *     names it.
 *   - Arrays of integers and floats are device memory. Nothing here waits for the device.
 *   - If an FP8 output has no data_t, only data is written, with the same codes and scale.
 *
 *   N = B*T tokens, C = model width, D = head width, H = query heads, K = key/value heads, F = MLP
 *   width, V = rows of the embedding (the vocabulary, padded), O = outputs of a linear layer. */
#pragma once
#include "kernels/tensor.h"

/* Which values an operation uses after it saved a tensor, if saving rounds it to FP8. */
typedef enum {
    FROM_SAVED, /* the rounded values, so that forward and backward see the same ones [COAT] */
    /* the values before rounding: forward is exact, only backward sees rounded values */
    FROM_EXACT
} ForwardSource;

/* ---- formats --------------------------------------------------------------------------------- */

/* y = x in y's format. If both are the same memory, nothing happens. FP8: S = max|x| / max(format)
 * per group or tensor, code = round to nearest even of x (1/S), both in F32, saturating [COAT eq.
 * 1]; writes y.data_t too unless it is NULL. */
void quantize(Tensor y, Tensor x);

/* The same if max|x| may be known already: *amax, a float of device memory; NULL: not known. Groups
 * always find their own. */
void quantize_with_amax(Tensor y, Tensor x, const float *amax);

/* The two halves of quantize for an FP8 y of group 0: the scale from max|x|, which is measured or
 * given; then codes and transposed codes with y's scale. In quantize_codes y.data or y.data_t may
 * be NULL: not written; y may have more rows than x, which become 0, since FP8 GEMMs of GPUs need
 * multiples of 16. quantize_in_range does both at once if scale_is_reused. */
void quantize_scale(Tensor y, Tensor x);
void quantize_scale_from(Tensor y, const float *amax);
void quantize_codes(Tensor y, Tensor x);
void quantize_in_range(Tensor y, Tensor x);

/* How operations find the scale of an FP8 output y that has a scale_amax. *y.scale_reused false: as
 * without one, S = max|y| / max(format); *y.scale_amax = max|y|. *y.scale_reused true: S = h *
 * *y.scale_amax / max(format), so y is encoded while max|y| is measured. If max|y| exceeds h *
 * *y.scale_amax, *y.scale_amax = max|y|, S follows by this formula, and y is encoded again. h is 2
 * for E4M3, 8 for E5M2: powers of two, which keep all digits of the codes and cost the smallest
 * binade (E4M3) or three (E5M2). Any max|y| > 0 exceeds a scale_amax of 0. */
bool scale_is_reused(Tensor y);

/* y = x, F32 or BF16, and x.data_t from x.data, for an FP8 operand x that has data. */
void expand_operand(Tensor y, Tensor x);

/* Whether FP8 groups of this size are supported: on the CPU any, with CUDA 16 for activations and
 * 128 for moments. */
bool knows_group(int group, bool moment);

/* w[i] = std * z, z normal, |z| <= cutoff (0: no cutoff); a function of (seed, first + i) only. */
void init_normal(Tensor w, float std, float cutoff, uint64_t seed, uint64_t first);
void init_constant(Tensor w, float value);

/* ---- embedding ------------------------------------------------------------------------------- */

/* A token and its position in the batch. */
typedef struct {
    int token, position;
} TokenAt;

/* On the host: sorts the N tokens, each in [0, V), by token, then by position. */
void sort_tokens(TokenAt *sorted, const int *tokens, int N, int V);

/* On the host: the documents in B sequences of T tokens. A document begins at the start of each
 * sequence and where `begins` (B,T) is not 0; begins may be NULL. start (up to B*T + 1 entries)
 * gets the first token of each document and B*T, *longest the tokens of the longest document.
 * Returns the number of documents. */
int document_starts(int *start, int *longest, const uint8_t *begins, int B, int T);

/* For every (token, position) of N: y[position] = w[token], dw[token] += dy[position], in this
 * order. y, dy (N,C); w, dw (V,C) */
void embedding_forward(Tensor y, const TokenAt *sorted, Tensor w);
void embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy);

/* ---- rows of images -------------------------------------------------------------------------- */

/* y = gelu(x) = x (1 + erf(x / sqrt 2)) / 2 [Hendrycks & Gimpel 2016, arXiv 1606.08415]; dx = dy
 * gelu'(x). All have one shape; dx may be dy. F32 or BF16. */
void gelu_forward(Tensor y, Tensor x);
void gelu_backward(Tensor dx, Tensor dy, Tensor x);

/* For every row i of x (R,C) with at[i] >= 0, a row of y (N,C), each row of y at most once:
 *   place_rows   y[at[i]] = x[i]
 *   take_rows    x[i] = y[at[i]], y[at[i]] = 0; the other rows of x become 0        F32 or BF16 */
void place_rows(Tensor y, const int *at, Tensor x);
void take_rows(Tensor x, const int *at, Tensor y);

/* ---- normalization --------------------------------------------------------------------------- */

typedef enum { RMS_NORM, LAYER_NORM } NormKind;
typedef struct {
    NormKind kind;
    float eps;
} Norm;

/* x = stream, in x's format (nothing if it is the same memory). With z = x as stored or,
 * FROM_EXACT, the stream: row n has mean stats[2n] (0 for RMS_NORM) and rstd stats[2n+1] =
 * 1/sqrt(mean((z-mean)^2) + eps); y = (z - mean) rstd w [+ residual]. x, stream, y, residual (N,C);
 * w (1,C), or no tensor for w = 1; residual may be no tensor. */
void norm_forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                  Norm norm, ForwardSource from);

/* Recomputes y from x and stats of norm_forward, without residual. An FP8 y keeps its scale, and
 * y.data or y.data_t may be NULL: not written. */
void norm_recompute(Tensor y, Tensor x, const float *stats, Tensor w);

/* dx = [dx +] the gradient of y with respect to x; dw += (no tensor: skipped). With g = dy w, xh =
 * (x - mean) rstd: dx = rstd (g - mean(g) [LAYER_NORM only] - xh mean(g xh)), dw = sum over n of dy
 * xh. dx may be dy if not accumulating. *amax, a float of device memory, is set to max|dx| of all
 * dx as stored; NULL: skipped, always so for an FP8 dx. */
void norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats,
                   Tensor w, Norm norm, bool accumulate);

/* ---- linear ---------------------------------------------------------------------------------- */

/* FP8 GEMMs whose first input (x of matmul, dy of the others) is `fast` may add in the tensor
 * cores' short accumulators: 8 % faster, with a relative error of 1e-3 instead of 1e-4 (H200). Only
 * rounding depends on it; the CPU sums in F32 either way.
 *
 * FP8 operands have one scale and are read along the summed dimension: matmul reads data, matmul_dx
 * w.data_t, matmul_dw both data_t. Factors x.channel: in matmul w has the inverse ones
 * (fold_channels), in matmul_dw they are divided out of dw; no other operand has any. add may be y,
 * or the bias of the layer, (O,1), which every row of y gets. A product that accumulates in place
 * into BF16 may be rounded before the addition and again after it. matmul_db reads the rows of an
 * FP8 dy. */
/* y  = x wT [+ add]   (N,O) (N,C) (O,C) (N,O) */
void matmul(Tensor y, Tensor x, Tensor w, Tensor add);
/* dx = [dx +] dy w    (N,C) (N,O) (O,C) */
void matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate);
/* dw += dyT x         (O,C) (N,O) (N,C); no dw: nothing */
void matmul_dw(Tensor dw, Tensor dy, Tensor x);
/* db += dyT 1         (O,1) (N,O);       no db: nothing */
void matmul_db(Tensor db, Tensor dy);

/* w of a matmul whose x has factors `channel`: y = w with column c divided by channel[c], E4M3 or
 * E5M2 as w. With least = min(channel), a power of two: y.scale = w.scale / least, code = round(w's
 * code * least / channel[c]). So columns of the least factor keep their codes, and others lose
 * digits only in the smallest binades. Only data is read and written. y (O,C), w (O,C) */
void fold_channels(Tensor y, Tensor w, const float *channel);

/* ---- adapters -------------------------------------------------------------------------------- */

/* An adapter matrix between a wide tensor (N,C) and a low-rank one (N, P*r). A (P*r, C): every row
 * applies to all columns. B: the rows (r) of P projections, one after the other. Projection i has
 * `width` rows; it maps columns i*r .. i*r + r-1 of xa to columns first .. first + width - 1 of the
 * wide one. So one call serves q, k and v, or two of them. F32 or BF16. */
enum { LORA_PROJECTIONS = 3 };
typedef struct {
    Tensor w;
    bool is_b;
    int num_projections; /* P; 1 for A, whose P*r rows are one projection */
    struct {
        int first, width;
    } projection[LORA_PROJECTIONS]; /* of B; unused for A */
} LoraMatrix;

/* Let w(c,j) be the element of m for column c of the wide tensor and column j of xa, 0 if there is
 * none:
 *   lora_narrow  xa   = scale * x w        xa[n,j]   = scale * sum over c of x[n,c] w(c,j)
 *   lora_widen   y    = xa wT [+ add]      y[n,c]    = sum over j of xa[n,j] w(c,j) [+ add[n,c]]
 *   lora_dw      dm  += xaT x              dw(c,j)  += sum over n of xa[n,j] x[n,c]     (no tensor dm.w: nothing)
 * x (N,C) in F32, BF16, or E4M3 or E5M2 with one scale, without data_t; xa, y, add in F32 or
 * BF16; y may be add. Columns of x outside m's projections are not read, those of y become add or
 * 0. Sums are in F32, always in the same order. */
void lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale);
void lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add);
void lora_dw(LoraMatrix dm, Tensor xa, Tensor x);

/* An adapter's output, xa wT of m (see lora_widen), that an operation adds to its input x, a GEMM's
 * output. This saves a pass over memory. If xa has no data, nothing is added. x must be F32 or
 * BF16. The operation may change x: a back end may write the sum to x, in its format, and continue
 * from there, or keep the sum in F32. */
typedef struct {
    Tensor xa;
    LoraMatrix m;
} LoraProduct;

/* ---- attention ------------------------------------------------------------------------------- */

typedef struct {
    int B, T, H, K, D;
    float scale;       /* factor of the scores: 1/sqrt(D) */
    float clip;        /* q, k, v are first clamped to [-clip, clip]; 0: no */
    Norm norm;         /* QK-norm, if rope_forward gets weights for it */
    const float *rope; /* (T, D/2, 2) cosine and sine, perhaps times a factor */
    int window;        /* keys that a query sees, its own included; 0: no limit */
    void *scratch;     /* device memory that attention may overwrite; NULL: it allocates its own */
    size_t scratch_bytes; /* its size */
} Attention;

/* Documents packed in the batch: document i is tokens start[i] .. start[i+1]-1 of N; none crosses a
 * sequence. */
typedef struct {
    int count;             /* 0: each of the B sequences is one document */
    int longest;           /* tokens of the longest document */
    const int *start;      /* (count + 1), device memory */
    const int *host_start; /* the same in host memory, read before a call returns */
    /* (count) in host memory: whether to leave a document out; NULL: none is left out */
    const bool *left_out;
} Documents;

/* From projection to attention input: saved = x [+ product], in saved's format (in place if it is
 * the memory of x); y = rope(norm(clamp(saved))), or FROM_EXACT of x [+ product] itself; v is only
 * clamped. Rows of x and y are [q (H*D) | k (K*D) | v (K*D)]. rope turns (a, b) = elements (i, i +
 * D/2) of a head at position t by angle(t,i). y may be x; if saved is x too, it ends as y. The
 * norms' weights: qnorm (1,H*D), knorm (1,K*D) norm q and k over their full widths [OLMo 2], stats
 * (N,2): rstd of q and of k. Both (1,D): each head separately, with weights shared by all heads of
 * q or of k [Qwen3], stats (N,H+K): rstd of each head of q, then of k. No tensors: no norm, stats
 * NULL. */
void rope_forward(Tensor y, Tensor saved, float *stats, Tensor x, LoraProduct product, Tensor qnorm,
                  Tensor knorm, Attention a, ForwardSource from);

/* dx from dy. Both may be the same memory; if not, dy is overwritten. dqnorm, dknorm += (shapes as
 * qnorm, knorm; no tensor: skipped). x: what rope_forward saved; read only with a clip or a norm. A
 * clamped element has gradient 0; one equal to the limit counts as not clamped. */
void rope_backward(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x, const float *stats,
                   Tensor qnorm, Tensor knorm, Attention a);

/* Causal softmax attention inside each document: token t sees its tokens u <= t, with a window
 * those of t - window < u <= t. A window of T or more gives the same bits as none. Head h reads
 * key/value head h / (H/K). y (N, H*D), qkv (N, (H+2K)D); lse (B,H,T) or, with documents, any
 * layout of N*H floats that attention_backward of the same back end reads back. Rows of left-out
 * documents are not written; the first ROWS_AFTER_DOCUMENT after another's must be finite in qkv,
 * dy: tiles read them. */
enum { ROWS_AFTER_DOCUMENT = 128 };
void attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs);
void attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a,
                        Documents docs);

/* heads_split orders columns by rank, for comm_exchange: row r N + n of y (ranks * N, W / ranks) is
 * row n of x (N, W), but only the columns of rank r's heads. Rows of x are [q | k | v], or only q.
 * heads.H and heads.K are the numbers of heads of one rank. heads_join is the inverse. If x has
 * fewer key heads than there are ranks, consecutive ranks get copies of the same head, and
 * heads_join adds the copies in F32, in the order of ranks. F32 or BF16. */
void heads_split(Tensor y, Tensor x, Attention heads);
void heads_join(Tensor x, Tensor y, Attention heads);

/* Keys and values (P, K*D) of the first `length` tokens of one sequence in a block, as attention
 * reads them. */
typedef struct {
    Tensor k, v;
    int length;
} KvCache;

/* Attention of the next T tokens of one sequence (a.B == 1), which see earlier tokens through the
 * cache. First stores their k and v in rows length .. length + T - 1 of the cache's P. qkv (T,
 * (H+2K)*D), y (T, H*D) and the cache have one format, F32 or BF16. */
void attention_cached(Tensor y, Tensor qkv, KvCache cache, Attention a);

/* ---- MLP ------------------------------------------------------------------------------------- */

/* Limits of the column factors explained below, as exponents of 2: how much larger than the median
 * column's a maximum may be without a factor; the largest k. */
enum { CHANNEL_EXCESS = 6, CHANNEL_MOST = 63 };

/* gate_up = wide [+ product], in gate_up's format (in place if it is the memory of wide); act =
 * silu(gate) * up of gate_up as stored, or FROM_EXACT of wide [+ product]. act (N,F); rows of
 * gate_up and wide (N,2F) are [gate | up].
 *
 * An act with `channel` is multiplied by these factors, column by column, before its range is
 * measured and it is encoded. Unless *act.scale_reused they are first chosen from act: channel[c] =
 * 2^-k, k = max(0, e[c] - median - 6), at most 63, with e[c] = floor(log2(max|column c|)). median:
 * the least that half of the e[c] of all columns that are not 0 do not exceed. So a column gets a
 * factor if its maximum is 128 times the median's or more, none below 64 times, since both are
 * rounded down to powers of two; usually none does, and codes are those without factors. DIFFERS:
 * Smooth-SwiGLU [Fishman et al. 2024, arXiv 2409.12517] has a factor for every column, from its
 * maximum, and folds it into the weight before that is rounded to FP8. */
void swiglu_forward(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product,
                    ForwardSource from);

/* matmul(wide, x, w), then swiglu_forward(act, gate_up, wide, {0}, FROM_EXACT). If one kernel does
 * both, wide is not written. x (N,C), w (2F,C), act (N,F), gate_up and wide (N,2F). */
void matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w);

/* dgate_up from dact [+ product]. It may be the memory of gate_up, unless dgate_up has a
 * scale_amax; in FP8, dgate_up.data that of gate_up.data. act, unless it is no tensor, is
 * recomputed: an FP8 act keeps its scale and factors, and its data or data_t may be NULL: not
 * written. act may be the memory of dact. */
void swiglu_backward(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product, Tensor gate_up);

/* matmul_dx(dact, dy, w, false), then swiglu_backward(dgate_up, act, dact, {0}, gate_up). If one
 * kernel does both, dact is not written; so dgate_up and act must not be the memory of dy. dy
 * (N,C), w (C,F), dact and act (N,F), dgate_up and gate_up (N,2F). */
void matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
                      Tensor gate_up);

/* ---- loss ------------------------------------------------------------------------------------ */

/* For each row n of logits (N, V), over the first `vocab` columns: z = log sum exp; loss[n] = z -
 * logits[target[n]] and zloss[n] = z^2; both 0 where target[n] < 0 (masked). Then, if `backward`,
 * the logits become scale * d(loss + z_weight * zloss)/d(logits): 0 in masked rows and in the
 * columns from `vocab` on. */
void cross_entropy(Tensor logits, float *loss, float *zloss, const int *target, int vocab,
                   float scale, float z_weight, bool backward);

/* The same, but the gradient goes to data of an FP8 operand whose scale follows from amax; larger
 * values saturate. The gradient may have more rows and columns than the logits: these become 0. The
 * logits are not changed. */
void cross_entropy_codes(Tensor gradient, float amax, Tensor logits, float *loss, float *zloss,
                         const int *target, int vocab, float scale, float z_weight);

/* ---- reductions and the optimizer; always in the same order, hence the same bits ------------- */

void sum_values(float *out, const float *x, size_t n); /* *out += sum of x */
/* *out += sum of x^2; not finite if an x is not */
void sum_squares(float *out, Tensor x);

/* *found = 1 if x holds a value that is not finite or, if `negative`, a value below 0 (not for
 * DYNAMIC8); else unchanged. Scales are checked as codes are: a scale below 0, or one that makes
 * the format's largest number infinite or NaN, counts. */
void find_not_finite(int *found, Tensor x, bool negative);

/* y += x, each sum rounded once. Both have one shape; F32 or BF16. The same bits as x += y. */
void accumulate(Tensor y, Tensor x);

/* mean += share (w - mean), in F32; share 1: mean = w. Both have one shape; mean is F32, w F32 or
 * BF16. With shares 1, 1/2, ... 1/n it is the mean of n tensors. */
void average_weights(Tensor mean, Tensor w, float share);

/* Positions of elements that are `width` columns of each row of a matrix; element 0 is in the
 * column `start` of these. skip: number of columns of the matrix that are left out. In the matrix,
 * element i comes i + (start + i) / width * skip elements after element 0. width 0: i elements
 * after. */
typedef struct {
    unsigned width, start;
    uint64_t skip;
} Numbering;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; /* 1 - beta1^t, 1 - beta2^t */
    float grad_scale;               /* the gradient is multiplied by it: clipping */
    /* seed of stochastic rounding; different in each run and step */
    uint64_t seed;
    Numbering numbering; /* positions of these elements, for stochastic rounding */
} AdamW;

/* g = grad_scale grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
 * w -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay w).  [Loshchilov & Hutter 2019, alg. 2]
 * All (1,n): consecutive elements of a flat unit; the first has number `first` in the model. A BF16
 * w is rounded stochastically, with random bits that depend only on (seed, the element's number),
 * which is first + i unless `numbering` says otherwise. */
void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);

/* AdamW with 8-bit moments, m of dynamic8/256 and v of udynamic8/256, as bitsandbytes' CUDA kernel
 * computes it [Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes 0.50,
 * kOptimizerStatic8bit2StateBlockwise]; codes: kernels/dynamic8.h. g = grad_scale grad; v = b2 v +
 * (1-b2) g^2; m = b1 m + (1-b1) g; w = (w - lr sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps)) (1 - lr
 * weight_decay), with m and v before they are encoded. Where grad is not finite, m = v = 0 and w
 * stays. All (1,n), n a multiple of 256; the last group is padded with zeros, which stay 0. first
 * and a BF16 w as in adamw. DIFFERS: bitsandbytes rounds a BF16 w to nearest, before and after the
 * decay; its quotients are approximations. */
void adamw8bit(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);

/* ---- Muon, as torch.optim.Muon computes it [Jordan et al. 2024,
 * kellerjordan.github.io/posts/muon] */

/* m = momentum m + (1 - momentum) g, g = grad_scale grad; u = (1 - momentum) g + momentum m if
 * nesterov, else m; both with m before it is encoded. All (1,n): m F32, BF16, or FP8 in groups that
 * divide n; u BF16; grad F32 or BF16. */
void muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                   float grad_scale);

/* y = x / max(sqrt(*squares), eps), BF16, with a divisor in BF16 as torch has it; y may be x.
 * squares: of device memory, the sum that sum_squares made of x. */
void muon_normalize(Tensor y, Tensor x, const float *squares, float eps);

/* y = alpha x w + beta add, in BF16 with sums in F32: y, add (N,C), x (N,O), w (O,C). y is no other
 * tensor of the three. */
void matmul_scaled(Tensor y, Tensor x, Tensor w, float alpha, Tensor add, float beta);

/* y = alpha x xT + beta add, or alpha xT x + beta add if `columns`, in BF16 with sums in F32: y,
 * add (R,R), x (R,C) or (C,R). add is symmetric, or does not exist. y is neither. On a GPU,
 * symmetric_in_blocks says where only 5/8 of the products are computed, and the other elements are
 * copies. */
static inline bool symmetric_in_blocks(int rows)
{
    return rows >= 4096 && rows % 256 == 0;
}
void matmul_symmetric(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta);

/* w = keep w - rate x. All (1,n), x BF16. first and a BF16 w as in adamw, with the seed of its
 * AdamW. */
void muon_apply(Tensor w, Tensor x, float keep, float rate, uint64_t seed, uint64_t first);
