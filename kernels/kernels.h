/* Every operation that the model needs. kernels/cpu/ is the specification, kernels/cuda/ is the
 * fast implementation. A row of operation_list.h says what memory an operation reads and writes.
 *
 *   - Outputs come first, then inputs, then sizes.
 *   - Inputs and outputs may have any Format. The arithmetic is F32; on the CPU it is also F64.
 *   - "+=" marks outputs that accumulate. If such a tensor is `empty`, all of it is overwritten, as
 *     if it had held zeros.
 *   - Shapes and formats are checked on entry. A combination that a back end lacks is an error that
 *     names this combination.
 *   - Arrays of integers and floats are in device memory. No operation waits for the device.
 *   - If an FP8 output has no data_t, only data is written, with the same codes and scale.
 *
 *   N = B*T tokens, C = model width, D = head width, H = query heads, K = key/value heads, F = MLP
 *   width, V = rows of the embedding (the vocabulary, padded), O = outputs of a linear layer. */
#pragma once
#include "kernels/tensor.h"

/* Which values an operation uses after it has saved a tensor, if saving rounds the tensor to
 * FP8. */
typedef enum {
    FROM_SAVED, /* the rounded values, so that forward and backward use the same values [COAT] */
    /* the values before rounding, so that forward is exact and only backward uses rounded values */
    FROM_EXACT
} ForwardSource;

/* ---- formats --------------------------------------------------------------------------------- */

/* y = x in y's format. If x and y are the same memory, nothing happens. For FP8, S = max|x| /
 * max(format) per group or tensor, and code = round to nearest even of x (1/S), both in F32,
 * saturating [COAT eq. 1]. y.data_t is written too unless it is NULL. */
void quantize(Tensor y, Tensor x);

/* As quantize, but max|x| may be known already as *amax, a float in device memory. amax NULL:
 * max|x| is not known. Groups always find their own maxima. */
void quantize_with_amax(Tensor y, Tensor x, const float *amax);

/* First half of quantize for an FP8 y of group 0: sets the scale from max|x|. quantize_scale
 * measures max|x|; quantize_scale_from gets it as *amax. */
void quantize_scale(Tensor y, Tensor x);
void quantize_scale_from(Tensor y, const float *amax);
/* Second half: writes codes and transposed codes with y's scale. y.data or y.data_t may be NULL; a
 * NULL copy is not written. y may have more rows than x, because FP8 GEMMs of GPUs need multiples
 * of 16; these rows become 0. */
void quantize_codes(Tensor y, Tensor x);
/* As quantize_scale and quantize_codes, for `items` equal matrices at once, one below the other
 * (tensor_item): y and x have the same shape, and the scale of y is not reused. */
void quantize_item_scales(Tensor y, Tensor x, int items);
void quantize_item_codes(Tensor y, Tensor x, int items);
/* Both halves in one call, for a y whose scale is reused (scale_is_reused). */
void quantize_in_range(Tensor y, Tensor x);

/* Returns *y.scale_reused, which decides how operations find the scale of an FP8 output y that has
 * a scale_amax. If *y.scale_reused is false, S = max|y| / max(format), as without a scale_amax, and
 * *y.scale_amax is set to max|y|. If *y.scale_reused is true, S = h * *y.scale_amax / max(format),
 * so y is encoded while max|y| is measured. If max|y| exceeds h * *y.scale_amax, *y.scale_amax is
 * set to max|y|, S follows by this formula, and y is encoded again. h is 2 for E4M3 and 8 for E5M2.
 * Both are powers of two, which keep all digits of the codes and cost the smallest binade (E4M3) or
 * the smallest three (E5M2). Any max|y| > 0 exceeds a scale_amax of 0. */
bool scale_is_reused(Tensor y);

/* For an FP8 operand x that has data: y = x in F32 or BF16, and x.data_t is set from x.data. */
void expand_operand(Tensor y, Tensor x);

/* Returns true if FP8 groups of this size are supported. The CPU supports any size; CUDA supports
 * 16 for activations and 128 for moments. */
bool knows_group(int group, bool moment);

/* w[i] = std * z, where z is normal with |z| <= cutoff (0: no cutoff). z depends only on (seed,
 * first + i). */
void init_normal(Tensor w, float std, float cutoff, uint64_t seed, uint64_t first);
void init_constant(Tensor w, float value);

/* ---- embedding ------------------------------------------------------------------------------- */

/* A token and its position in the batch. */
typedef struct {
    int token, position;
} TokenAt;

/* On the host: sorts the N tokens, each in [0, V), by token and then by position. */
void sort_tokens(TokenAt *sorted, const int *tokens, int N, int V);

/* On the host: finds the documents in B sequences of T tokens. A document begins at the start of
 * each sequence and where `begins` (B,T) is not 0. begins NULL: each sequence is one document.
 * start gets the first token of each document, and then B*T; it has up to B*T + 1 entries. *longest
 * gets the number of tokens of the longest document. Returns the number of documents. */
int document_starts(int *start, int *longest, const uint8_t *begins, int B, int T);

/* For each of the N pairs (token, position) in `sorted`, in their order. Forward: y[position] =
 * w[token]. Backward: dw[token] += dy[position]. y and dy are (N,C); w and dw are (V,C). */
void embedding_forward(Tensor y, const TokenAt *sorted, Tensor w);
void embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy);

/* ---- rows of images -------------------------------------------------------------------------- */

/* y = gelu(x) = x (1 + erf(x / sqrt 2)) / 2 [Hendrycks & Gimpel 2016, arXiv 1606.08415]. Both have
 * the same shape, and are F32 or BF16. */
void gelu_forward(Tensor y, Tensor x);
/* dx = dy gelu'(x). All have the same shape, and are F32 or BF16. dx may be dy. */
void gelu_backward(Tensor dx, Tensor dy, Tensor x);

/* Both functions move rows between x (R,C) and y (N,C), for every row i of x with at[i] >= 0. Each
 * row of y occurs at most once in `at`. F32 or BF16.
 *   place_rows   y[at[i]] = x[i]
 *   take_rows    x[i] = y[at[i]], y[at[i]] = 0; the other rows of x become 0 */
void place_rows(Tensor y, const int *at, Tensor x);
void take_rows(Tensor x, const int *at, Tensor y);

/* ---- normalization --------------------------------------------------------------------------- */

typedef enum { RMS_NORM, LAYER_NORM } NormKind;
typedef struct {
    NormKind kind;
    float eps;
} Norm;

/* x = stream, in x's format (nothing happens if x and stream are the same memory). Let z be x as
 * stored or, with FROM_EXACT, the stream. Row n has mean stats[2n] (0 for RMS_NORM) and rstd
 * stats[2n+1] = 1/sqrt(mean((z-mean)^2) + eps). y = (z - mean) rstd w [+ residual]. x, stream, y
 * and residual are (N,C); w is (1,C). If w is absent, w = 1. residual may be absent. */
void norm_forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                  Norm norm, ForwardSource from);

/* Recomputes y, without residual, from x and from the stats of norm_forward. An FP8 y keeps its
 * scale. Its data or data_t may be NULL; a NULL copy is not written. */
void norm_recompute(Tensor y, Tensor x, const float *stats, Tensor w);

/* dx = [dx +] the gradient of y with respect to x; dw += the gradient with respect to w, unless dw
 * is absent. With g = dy w and xh = (x - mean) rstd: dx = rstd (g - mean(g) [LAYER_NORM only] - xh
 * mean(g xh)), dw = sum over n of dy xh. dx may be dy if dx does not accumulate. *amax, a float in
 * device memory, is set to max|dx| of all dx as stored. amax may be NULL, and must be NULL for an
 * FP8 dx. */
void norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats,
                   Tensor w, Norm norm, bool accumulate);

/* ---- linear ---------------------------------------------------------------------------------- */

/* If the first input of an FP8 GEMM (x of matmul, dy of the other two) is `fast`, the GEMM may add
 * in the tensor cores' short accumulators. Short accumulators make the GEMM 8 % faster, with a
 * relative error of 1e-3 instead of 1e-4 (H200). Only rounding depends on `fast`; the CPU sums in
 * F32 in both cases.
 *
 * FP8 operands have one scale and are read along the summed dimension: matmul reads data, matmul_dx
 * reads w.data_t, and matmul_dw reads both data_t. If x has factors x.channel, w in matmul has the
 * inverse factors (fold_channels), and matmul_dw divides dw by the factors. No other operand has
 * factors. add may be y, or the bias of the layer (O,1), which is added to every row of y. A
 * product that accumulates in place into BF16 may be rounded before the addition and again after
 * it. matmul_db reads `data` of an FP8 dy. */
/* y  = x wT [+ add]   (N,O) (N,C) (O,C) (N,O) */
void matmul(Tensor y, Tensor x, Tensor w, Tensor add);
/* dx = [dx +] dy w    (N,C) (N,O) (O,C) */
void matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate);
/* dw += dyT x         (O,C) (N,O) (N,C); nothing if dw is absent */
void matmul_dw(Tensor dw, Tensor dy, Tensor x);
/* db += dyT 1         (O,1) (N,O);       nothing if db is absent */
void matmul_db(Tensor db, Tensor dy);

/* y is the w of a matmul whose x has factors `channel`: w with column c divided by channel[c], in
 * w's format, E4M3 or E5M2. With least = min(channel), a power of two, y.scale = w.scale / least
 * and code = round(w's code * least / channel[c]). So columns with the least factor keep their
 * codes, and other columns lose digits only in the smallest binades. Only `data` is read and
 * written. y and w are (O,C). */
void fold_channels(Tensor y, Tensor w, const float *channel);

/* ---- adapters -------------------------------------------------------------------------------- */

/* An adapter matrix between a wide tensor (N,C) and a low-rank tensor xa (N, P*r). A is (P*r, C):
 * every row applies to all columns. B consists of P parts, one below the other, with r columns.
 * Part i has `width` rows and maps columns i*r .. i*r + r-1 of xa to columns first .. first +
 * width - 1 of the wide tensor. So one call serves q, k and v, or two of them. F32 or BF16. */
enum { LORA_PROJECTIONS = 3 };
typedef struct {
    Tensor w;
    bool is_b;
    int num_projections; /* P; 1 for A, whose P*r rows are one projection */
    struct {
        int first, width;
    } projection[LORA_PROJECTIONS]; /* the parts of B; unused for A */
} LoraMatrix;

/* Let w(c,j) be the element of m for column c of the wide tensor and column j of xa, or 0 if m has
 * no such element:
 *   lora_narrow  xa   = scale * x w        xa[n,j]   = scale * sum over c of x[n,c] w(c,j)
 *   lora_widen   y    = xa wT [+ add]      y[n,c]    = sum over j of xa[n,j] w(c,j) [+ add[n,c]]
 *   lora_dw      dm  += xaT x              dw(c,j)  += sum over n of xa[n,j] x[n,c]     (nothing if dm.w is absent)
 * x (N,C) is F32, BF16, or E4M3 or E5M2 with one scale and without data_t. xa, y and add are F32 or
 * BF16; y may be add. Columns of x outside m's projections are not read. Columns of y outside m's
 * parts become add or 0. Sums are in F32, always in the same order. */
void lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale);
void lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add);
void lora_dw(LoraMatrix dm, Tensor xa, Tensor x);

/* An adapter's output, xa wT of m (see lora_widen). An operation adds this output to its input x,
 * the output of a GEMM. This saves a pass over memory. If xa has no data, nothing is added. x must
 * be F32 or BF16. The operation may change x: a back end may write the sum to x, in the format of
 * x, and continue from the rounded sum, or keep the sum in F32. */
typedef struct {
    Tensor xa;
    LoraMatrix m;
} LoraProduct;

/* ---- attention ------------------------------------------------------------------------------- */

typedef struct {
    int B, T, H, K, D;
    float scale;          /* factor of the scores: 1/sqrt(D) */
    float clip;           /* q, k, v are first clamped to [-clip, clip]; 0: no clamp */
    Norm norm;            /* QK-norm, if rope_forward gets weights for it */
    const float *rope;    /* (T, D/2, 2) cosine and sine, perhaps times a factor */
    int window;           /* keys that a query sees, including its own; 0: no limit */
    void *scratch;        /* attention may overwrite this device memory; NULL: it uses its own */
    size_t scratch_bytes; /* size of `scratch` */
} Attention;

/* Documents packed in the batch. Document i is tokens start[i] .. start[i+1]-1 of N. No document
 * crosses a sequence. */
typedef struct {
    int count;             /* number of documents; 0: each of the B sequences is one document */
    int longest;           /* tokens of the longest document */
    const int *start;      /* (count + 1), device memory */
    const int *host_start; /* copy of `start` in host memory, read before a call returns */
    /* (count), host memory: true for documents to leave out; NULL: none is left out */
    const bool *left_out;
} Documents;

/* From the projection to the input of attention. saved = x [+ product], in saved's format (in place
 * if saved is the memory of x). y = rope(norm(clamp(saved))) or, with FROM_EXACT, rope(norm(clamp(x
 * [+ product]))). v is only clamped. Rows of x and y are [q (H*D) | k (K*D) | v (K*D)]. rope
 * rotates the pair (a, b) = elements (i, i + D/2) of a head at position t by angle(t,i). y may be
 * x; if saved is x too, it finally contains y.
 *
 * QK-norm has three cases. If qnorm is (1,H*D) and knorm is (1,K*D), they are weights that norm q
 * and k over their full widths [OLMo 2], and stats (N,2) gets the rstd of q and of k. If both are
 * (1,D), each head is normed separately, with weights shared by all heads of q or of k [Qwen3], and
 * stats (N,H+K) gets the rstd of each head of q, then of k. If both are absent, there is no norm,
 * and stats is NULL. */
void rope_forward(Tensor y, Tensor saved, float *stats, Tensor x, LoraProduct product, Tensor qnorm,
                  Tensor knorm, Attention a, ForwardSource from);

/* Computes dx from dy. dx and dy may be the same memory; if not, dy is overwritten. dqnorm and
 * dknorm accumulate, in the shapes of qnorm and knorm, unless they are absent. x is what
 * rope_forward saved; it is read only if there is a clip or a norm. A clamped element has gradient
 * 0. An element equal to the limit counts as not clamped. */
void rope_backward(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x, const float *stats,
                   Tensor qnorm, Tensor knorm, Attention a);

/* Causal softmax attention inside each document. Token t sees the tokens u <= t of its document;
 * with a window, t - window < u <= t. A window of T or more gives the same bits as no window. Head
 * h reads key/value head h / (H/K). y is (N, H*D), qkv is (N, (H+2K)D). lse is (B,H,T); with
 * documents it has any layout of N*H floats that attention_backward of the same back end reads.
 * Rows of left-out documents are not written. After each document that is not left out, the next
 * ROWS_AFTER_DOCUMENT rows must be finite in qkv and dy, because tiles read them. This also holds
 * for rows of a left-out document. */
enum { ROWS_AFTER_DOCUMENT = 128 };
void attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs);
void attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a,
                        Documents docs);

/* heads_split orders columns by rank, for comm_exchange. Row r N + n of y (ranks * N, W / ranks)
 * has the columns of row n of x (N, W) that belong to the heads of rank r. Rows of x are [q | k |
 * v], or only q. heads.H and heads.K are the numbers of heads of one rank. heads_join is the
 * inverse. If x has fewer key heads than there are ranks, consecutive ranks get copies of the same
 * head, and heads_join adds the copies in F32, in the order of ranks. F32 or BF16. */
void heads_split(Tensor y, Tensor x, Attention heads);
void heads_join(Tensor x, Tensor y, Attention heads);

/* Keys and values (P, K*D) of one sequence in one block, as attention reads them. The first
 * `length` rows are in use. */
typedef struct {
    Tensor k, v;
    int length;
} KvCache;

/* Attention of the next T tokens of one sequence (a.B == 1), which see earlier tokens through the
 * cache. The operation first stores the k and v of these tokens in rows length .. length + T - 1 of
 * the cache's P rows. qkv (T, (H+2K)*D), y (T, H*D) and the cache have the same format, F32 or
 * BF16. */
void attention_cached(Tensor y, Tensor qkv, KvCache cache, Attention a);

/* ---- MLP ------------------------------------------------------------------------------------- */

/* Constants of the column factors explained below, as exponents of 2. */
enum {
    /* how much larger than the median column's maximum a column's maximum may be without a
     * factor */
    CHANNEL_EXCESS = 6,
    CHANNEL_MOST = 63 /* the largest k */
};

/* gate_up = wide [+ product], in gate_up's format (in place if gate_up is the memory of wide).
 * act = silu(gate) * up of gate_up as stored or, with FROM_EXACT, of wide [+ product]. act is
 * (N,F). Rows of gate_up and wide (N,2F) are [gate | up].
 *
 * An act with `channel` is multiplied by these column factors before its range is measured and it
 * is encoded. Unless *act.scale_reused, the factors are first chosen from act: channel[c] = 2^-k,
 * k = max(0, e[c] - median - 6), at most 63, with e[c] = floor(log2(max|column c|)). median is the
 * smallest number that at least half of the e[c] of nonzero columns do not exceed. A column whose
 * maximum is 128 times the median's or more gets a factor. A column whose maximum is less than 64
 * times the median's gets no factor. Between these limits the rounding to powers of two decides.
 * Usually no column gets a factor, and codes are the same as without factors. DIFFERS:
 * Smooth-SwiGLU [Fishman et al. 2024, arXiv 2409.12517] has a factor for every column, from its
 * maximum, and folds it into the weight before the weight is rounded to FP8. */
void swiglu_forward(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product,
                    ForwardSource from);

/* matmul(wide, x, w), then swiglu_forward(act, gate_up, wide, {0}, FROM_EXACT). If one kernel does
 * both, wide is not written. x is (N,C), w (2F,C), act (N,F), gate_up and wide (N,2F). */
void matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w);

/* Computes dgate_up from dact [+ product]. dgate_up may be the memory of gate_up, unless dgate_up
 * has a scale_amax; in FP8, dgate_up.data may be gate_up.data. act, unless it is absent, is
 * recomputed. An FP8 act keeps its scale and factors, and its data or data_t may be NULL; a NULL
 * copy is not written. act may be the memory of dact. */
void swiglu_backward(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product, Tensor gate_up);

/* matmul_dx(dact, dy, w, false), then swiglu_backward(dgate_up, act, dact, {0}, gate_up). If one
 * kernel does both, dact is not written. So dgate_up and act must not be the memory of dy. dy is
 * (N,C), w (C,F), dact and act (N,F), dgate_up and gate_up (N,2F). */
void matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
                      Tensor gate_up);

/* ---- loss ------------------------------------------------------------------------------------ */

/* For each row n of logits (N, V), over the first `vocab` columns of x = logits / temperature: z =
 * log sum exp x, loss[n] = z - x[target[n]] and zloss[n] = z^2. Both losses are 0 where target[n] < 0 (masked). If
 * `backward`, the logits then become scale * weight[n] * d(loss + z_weight * zloss)/d(logits). This
 * gradient is 0 in masked rows and in columns from `vocab` on. weight NULL: all weights are 1. */
void cross_entropy(Tensor logits, float *loss, float *zloss, const int *target, const float *weight,
                   int vocab, float temperature, float scale, float z_weight, bool backward);

/* As cross_entropy, but the gradient is written in FP8 to the data of `gradient`. Its scale follows
 * from amax; larger values saturate. If `gradient` has more rows or columns than the logits, the
 * additional elements become 0. The logits do not change. */
void cross_entropy_codes(Tensor gradient, float amax, Tensor logits, float *loss, float *zloss,
                         const int *target, const float *weight, int vocab, float temperature,
                         float scale, float z_weight);

/* Soft labels of N rows: the probabilities of up to k columns, and of all other columns together. */
typedef struct {
    int k;                    /* at most MOST_SOFT */
    const int *column;        /* (N, k); -1: unused */
    const float *probability; /* (N, k), above 0 */
    const float *tail;        /* (N) */
} SoftLabels;
enum { MOST_SOFT = 512 };

/* loss of a row: ce * (cross entropy of the target) + kl * temperature^2 * divergence */
typedef struct {
    bool reverse;      /* the divergence is KL(model || labels); false: KL(labels || model) */
    float temperature; /* divides the logits in the divergence */
    float kl, ce;
} Distillation;

/* For each row n of logits (N, V), over the first `vocab` columns: loss[n] is the cross entropy of
 * target[n], and divergence[n] compares softmax(logits / temperature) with the soft labels, as
 * distributions over the labels' columns and one more outcome, any other column. A tail below
 * LEAST_TAIL counts as 0; with d.reverse it counts as LEAST_TAIL. Without soft labels (all columns
 * unused) the divergence is 0; where target[n] < 0 (masked) both results are 0. gradient: absent;
 * or `logits` themselves, which become scale * d(loss of the row)/d(logits); or FP8 codes as in
 * cross_entropy_codes, whose scale follows from amax. */
void distill(Tensor gradient, float amax, Tensor logits, float *loss, float *divergence,
             const int *target, SoftLabels labels, Distillation d, int vocab, float scale);
#define LEAST_TAIL 1e-7f

/* The following operations use p = softmax(logits / temperature) over the first `vocab` columns of
 * each row with target[n] >= 0. */
/* entropy[n] = -sum p log p; 0 in masked rows */
void row_entropy(float *entropy, Tensor logits, const int *target, int vocab, float temperature);
/* Chooses k columns of each row, at most MOST_SOFT, as column (N, k), with their log p as logp (N,
 * k). Masked rows get columns -1. top_columns takes the k largest logits: first those above the
 * k-th largest, then the first of those that equal it, both in the order of columns. draw_columns
 * draws k times from p, with replacement, in ascending order: each is the column at which the sum of
 * p passes one of k numbers in [0, 1), random_unit(seed, n k + i). */
void top_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                 float temperature, int k);
void draw_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                  float temperature, int k, uint64_t seed);

/* ---- reductions and the optimizer ------------------------------------------------------------ */

/* Reductions have a fixed order, which gives the same bits in every run. */

void sum_values(float *out, const float *x, size_t n); /* *out += sum of x */
/* *out += sum of x^2; not finite if any element of x is not finite */
void sum_squares(float *out, Tensor x);

/* *found = 1 if x holds a value that is not finite or, if `negative` (not for DYNAMIC8), a value
 * below 0. Else *found does not change. Scales are checked too: a scale is invalid if it is below
 * 0, or if it makes the format's largest number infinite or NaN. */
void find_not_finite(int *found, Tensor x, bool negative);

/* y += x, where each sum is rounded once. x and y have the same shape, and are F32 or BF16. x += y
 * would give the same bits. */
void accumulate(Tensor y, Tensor x);

/* mean += share (w - mean), in F32. With share 1, mean = w. Both have the same shape; mean is F32,
 * w is F32 or BF16. Calls with shares 1, 1/2, ... 1/n give the mean of n tensors. */
void average_weights(Tensor mean, Tensor w, float share);

/* Positions of the elements of a column slice: `width` consecutive columns of each row of a matrix
 * that has `skip` further columns. Element 0 is in column `start` of the slice. In the matrix,
 * element i comes i + (start + i) / width * skip elements after element 0. width 0: there is no
 * slice, and element i comes i elements after element 0. */
typedef struct {
    unsigned width, start;
    uint64_t skip;
} Numbering;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; /* 1 - beta1^t, 1 - beta2^t */
    float grad_scale;               /* factor of the gradient, for gradient clipping */
    /* seed of stochastic rounding; different in each run and step */
    uint64_t seed;
    Numbering numbering; /* positions of these elements, for stochastic rounding */
} AdamW;

/* g = grad_scale grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
 * w -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay w).  [Loshchilov & Hutter 2019, alg. 2]
 * All tensors are (1,n): consecutive elements of a flat unit. The first element has number `first`
 * in the model. A BF16 w is rounded stochastically, with random bits that depend only on (seed, the
 * element's number). This number is first + i unless `numbering` says otherwise. */
void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);

/* AdamW with 8-bit moments, m of dynamic8/256 and v of udynamic8/256, as bitsandbytes' CUDA kernel
 * computes it [Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes 0.50,
 * kOptimizerStatic8bit2StateBlockwise]. kernels/dynamic8.h explains the codes.
 *     g = grad_scale grad; v = b2 v + (1-b2) g^2; m = b1 m + (1-b1) g;
 *     w = (w - lr sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps)) (1 - lr weight_decay),
 * with m and v before they are encoded. Where grad is not finite, m = v = 0 and w does not change.
 * All tensors are (1,n), with n a multiple of 256; the last group is padded with zeros, which stay
 * 0. `first` and the rounding of a BF16 w are as in adamw. DIFFERS: bitsandbytes rounds a BF16 w to
 * nearest, before and after the decay, and its quotients are approximations. */
void adamw8bit(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first);

/* ---- Muon ------------------------------------------------------------------------------------ */

/* Muon as torch.optim.Muon computes it [Jordan et al. 2024, kellerjordan.github.io/posts/muon]. */

/* g = grad_scale grad; m = momentum m + (1 - momentum) g. u = (1 - momentum) g + momentum m if
 * nesterov, else u = m, with m before it is encoded. All tensors are (1,n). m is F32, BF16, or FP8
 * in groups that divide n; u is BF16; grad is F32 or BF16. */
void muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                   float grad_scale);

/* y = x / max(sqrt(*squares), eps), in BF16. The divisor is in BF16, as in torch. y may be x.
 * *squares, in device memory, is the sum_squares of x. */
void muon_normalize(Tensor y, Tensor x, const float *squares, float eps);

/* y = alpha x w + beta add, in BF16 with sums in F32. y and add are (N,C), x (N,O), w (O,C). y must
 * not be x, w or add. */
void matmul_scaled(Tensor y, Tensor x, Tensor w, float alpha, Tensor add, float beta);

/* y = alpha x xT + beta add, or y = alpha xT x + beta add if `columns`, in BF16 with sums in F32. y
 * and add are (R,R); x is (R,C) or (C,R). add is symmetric, or absent. y must not be x or add. On a
 * GPU, if symmetric_in_blocks, only 5/8 of the products are computed, and the other elements are
 * copies. */
static inline bool symmetric_in_blocks(int rows)
{
    return rows >= 4096 && rows % 256 == 0;
}
void matmul_symmetric(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta);

/* w = keep w - rate x. All tensors are (1,n); x is BF16. `first` and the rounding of a BF16 w are
 * as in adamw; seed is the AdamW's seed. */
void muon_apply(Tensor w, Tensor x, float keep, float rate, uint64_t seed, uint64_t first);
