/* The three GEMMs of a linear layer, by cuBLASLt.
 *
 * cuBLASLt is column-major: a row-major (rows, cols) matrix is its (cols, rows) matrix. So each
 * product is written as D (m,n) = op(A) op(B) [+ C] with m = the row length of the output, n = its
 * rows, k = the contraction:
 *
 *                 A                     B                     m   n   k
 *     matmul      w    transposed       x                     O   N   C
 *     matmul_dx   w                     dy                    C   N   O
 *     matmul_dw   x                     dy   transposed       C   O   N
 *
 * multiply_blocks computes blocks of x xT as matmul does, and blocks of xT x as matmul_dw does. One
 * call computes several blocks that are equally far apart.
 *
 * NOTE: FP8 GEMMs take only operands that are contiguous along k: A transposed, B not transposed.
 * So matmul_dx reads w.data_t, and matmul_dw reads x.data_t and dy.data_t. Scales must be 16-byte
 * aligned, or the call fails although the heuristic accepted it. k must be a multiple of 16, and m
 * a multiple of 8. All this is measured on compute capability 9.0. According to the documentation
 * of cublasLtMatmul (CUDA 13), this layout is the only one on 8.9, 9.0 and 12.x, and one of several
 * on 10.x. All of these GPUs support E4M3 x E4M3 and E4M3 x E5M2, in either order, into BF16 or
 * F32. Only 8.9 and 9.0 have short accumulators; elsewhere this option has no effect. NOTE: the
 * epilogue adds a bias to the sum in F32, before the sum is rounded. A bias has D's format. For FP8
 * operands with an F32 output, cuBLASLt supports biases only in BF16. In this case D is first
 * filled with the bias, and the GEMM adds the product to D. NOTE: if C is in BF16 and has the
 * memory of D, cuBLASLt rounds the product to BF16, adds C, and rounds the sum. Otherwise it rounds
 * only the sum (measured with 13.1 on compute capability 9.0, FP8 and BF16 operands, 2 to 32,768
 * rows: 29 % of the sums differ if both terms have the same size).
 *
 * Choice of algorithm. The heuristic's first suggestion is up to 20 % slower than the best of the
 * first eight. So for large GEMMs these eight are timed once, on the real operands. Times are not
 * reproducible, but results must be: the bits are the same in every run, on every rank, after every
 * resume. So split-K is excluded, unless no other algorithm exists (suggest). The heuristic's first
 * suggestion, which depends only on shape and library, defines the bits. Only algorithms with
 * identical output compete; if the GEMM accumulates, the rounding of the sums must be identical
 * too. Tiles of another shape sum over k in the same order, so most suggestions pass. Timing then
 * affects only the speed. Rank 0 stores the choice for later runs (autotune.h). Later runs look for
 * this choice among their suggestions.
 *
 * A GPU that has been busy for a while lowers its clock to stay within its power limit, which slows
 * some algorithms more than others. So the candidates alternate, each for some milliseconds. Times
 * measured while the GPU warms up do not count. */
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/runtime/autotune.h"
#include "kernels/runtime/comm.h"

enum { CANDIDATES = 8, MAX_TRIALS = 3, MOST_RUNS = 256 };
/* Maximum times of a candidate's round, of the choice for one GEMM, and of all choices of a run.
 * Every candidate gets at least two rounds. */
static const double ROUND_MS = 8, CHOICE_MS = 200, ALL_CHOICES_MS = 3000;
/* Candidates slower than the fastest by this factor in the first round are dropped. */
static const double HOPELESS = 1.05;
static const char *const autotune_file = "gemms.txt";
static const size_t WORKSPACE_BYTES = (size_t)64 << 20;
static const size_t SAMPLE_BYTES = (size_t)1 << 20, SAMPLE_SLICES = 4;
/* GEMMs with fewer FLOPs (some 20 us) are not timed, because the launch time dominates. */
static const double TUNE_FLOPS = 1e10;

typedef enum { FORWARD, DX, DW, SYMMETRIC } Kind;
static const char *const kind_name[] = { "matmul", "matmul_dx", "matmul_dw", "matmul_symmetric" };

/* The key of a choice. The key is zeroed before it is filled, because memcmp compares whole
 * keys. */
typedef struct {
    Kind kind;
    int m, n, k;
    int trans_a, trans_b;
    DType a, b, d;
    int add; /* 1 if the GEMM reads C */
    int bias;
    /* 1 if products of FP8 operands are added with the tensor cores' 14 fraction bits, without
     * regular promotion to F32 */
    int fast;
    int align;                      /* common alignment of all matrices in bytes, up to 256 */
    int ld_a, ld_b, ld_d;           /* elements from the start of a column to the next column */
    int64_t count, step_ab, step_d; /* products per call; elements from one matrix to the next */
} Shape;

typedef struct {
    const void *a, *b;
    const void *scale_a, *scale_b; /* one float each; NULL if operands are not FP8 */
    const void *c;                 /* is added to the product; may be d; NULL: nothing is added */
    const void *bias;              /* (m), is added to each column of d; NULL: no bias */
    void *d;
    /* c is d and counts as 0: d is overwritten, by the algorithm for accumulation */
    bool empty;
    bool fast;            /* FP8 operands: short accumulators are allowed */
    const float *factors; /* d = factors[0] a b + factors[1] c; NULL: both are 1 */
} Operands;

typedef struct {
    Shape shape;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d; /* C has D's layout */
    cublasLtMatmulAlgo_t algo;
    int trials_left; /* 0 if the algorithm is chosen */
} Gemm;

static struct {
    cublasLtHandle_t handle;
    Gemm *gemm;
    int count;
    char *choices;   /* choices from earlier runs */
    double spent_ms; /* time spent on choices */
} cache;

/* ---- descriptors ----------------------------------------------------------------------------- */

#define LT_CHECK(call) lt_check((call), #call)

static void lt_check(cublasStatus_t status, const char *call)
{
    if (status != CUBLAS_STATUS_SUCCESS)
        die_fault("%s: %s", call, cublasLtGetStatusString(status));
}

static cudaDataType_t cuda_type(DType d)
{
    static const cudaDataType_t type[] = {
        [F32] = CUDA_R_32F,
        [BF16] = CUDA_R_16BF,
        [E4M3] = CUDA_R_8F_E4M3,
        [E5M2] = CUDA_R_8F_E5M2,
    };
    return type[d];
}

static const char *dtype_name(DType d)
{
    return format_name((Format){ d, 0 });
}

static _Noreturn void die_shape(const Shape *s, const char *reason)
{
    die("%s: cuBLASLt has no GEMM with m=%d n=%d k=%d, operands %s and %s, result %s%s, aligned to "
        "%d bytes (%s)",
        kind_name[s->kind], s->m, s->n, s->k, dtype_name(s->a), dtype_name(s->b), dtype_name(s->d),
        s->add    ? " added to"
        : s->bias ? " with a bias"
                  : "",
        s->align, reason);
}

static void set(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t attribute,
                const void *value, size_t bytes)
{
    LT_CHECK(cublasLtMatmulDescSetAttribute(op, attribute, value, bytes));
}

static void set_vectors(const Gemm *g, const Operands *o)
{
    if (o->bias)
        set(g->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias);
    if (!o->scale_a)
        return;
    set(g->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &o->scale_a, sizeof o->scale_a);
    set(g->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &o->scale_b, sizeof o->scale_b);
}

static cublasLtMatrixLayout_t layout(DType type, int rows, int cols, int ld, int64_t count,
                                     int64_t step)
{
    cublasLtMatrixLayout_t l;
    LT_CHECK(cublasLtMatrixLayoutCreate(&l, cuda_type(type), (uint64_t)rows, (uint64_t)cols, ld));
    const int32_t products = (int32_t)count;
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &products,
                                              sizeof products));
    LT_CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                                              sizeof step));
    return l;
}

static void describe(Gemm *g, const Shape *s, const Operands *o)
{
    const int m = s->m, n = s->n, k = s->k;
    cublasOperation_t a = s->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                      b = s->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    *g = (Gemm){ .shape = *s };
    /* COMPUTE_32F with F32 operands is true F32; TF32 is a different compute type */
    LT_CHECK(cublasLtMatmulDescCreate(&g->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(g->op, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a);
    set(g->op, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b);
    if (o->scale_a) {
        int8_t fast = (int8_t)s->fast;
        set(g->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    }
    if (o->bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        const int32_t type = cuda_type(s->d);
        set(g->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        set(g->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
    }
    set_vectors(g, o);
    g->a = s->trans_a ? layout(s->a, k, m, s->ld_a, s->count, s->step_ab)
                      : layout(s->a, m, k, s->ld_a, s->count, s->step_ab);
    g->b = s->trans_b ? layout(s->b, n, k, s->ld_b, s->count, s->step_ab)
                      : layout(s->b, k, n, s->ld_b, s->count, s->step_ab);
    g->d = layout(s->d, m, n, s->ld_d, s->count, s->step_d);
}

/* Gets up to CANDIDATES suggestions, the best guess first. Returns their number. reduction: allowed
 * reduction schemes of split-K. */
static int ask(cublasLtMatmulHeuristicResult_t *found, cublasStatus_t *status, const Gemm *g,
               uint32_t reduction)
{
    const uint32_t align = (uint32_t)g->shape.align;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t bytes;
    } want[] = {
        { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES, sizeof WORKSPACE_BYTES },
        { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align, sizeof align },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align, sizeof align },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align, sizeof align },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align, sizeof align },
    };
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, want[i].name, want[i].value,
                                                      want[i].bytes));
    int count = 0, usable = 0;
    *status = cublasLtMatmulAlgoGetHeuristic(cache.handle, g->op, g->a, g->b, g->d, g->d,
                                             preference, CANDIDATES, found, &count);
    LT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    for (int i = 0; i < count && *status == CUBLAS_STATUS_SUCCESS; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS)
            found[usable++] = found[i];
    return usable;
}

/* NOTE: for FP8 operands with few outputs and long sums, as in backward of a small model's head,
 * cuBLASLt suggests only split-K. With COMPUTE_TYPE a second kernel adds the parts in F32, in a
 * fixed order. */
static int suggest(cublasLtMatmulHeuristicResult_t *found, const Gemm *g)
{
    cublasStatus_t status;
    int usable = ask(found, &status, g, CUBLASLT_REDUCTION_SCHEME_NONE);
    if (usable == 0)
        usable = ask(found, &status, g, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    if (usable == 0)
        die_shape(&g->shape, status == CUBLAS_STATUS_SUCCESS ? "no suggestion"
                                                             : cublasLtGetStatusString(status));
    return usable;
}

/* d = a b + beta c. If o has factors, a b is multiplied by the first one. */
static cublasStatus_t launch_scaled(const Gemm *g, const cublasLtMatmulAlgo_t *algo,
                                    const Operands *o, float beta)
{
    const float one = 1;
    return cublasLtMatmul(cache.handle, g->op, o->factors ? &o->factors[0] : &one, o->a, g->a, o->b,
                          g->b, &beta, o->c ? o->c : o->d, g->d, o->d, g->d, algo,
                          device_scratch(WORKSPACE_BYTES, SCRATCH_GEMM), WORKSPACE_BYTES,
                          device_stream());
}

static cublasStatus_t launch(const Gemm *g, const cublasLtMatmulAlgo_t *algo, const Operands *o)
{
    return launch_scaled(g, algo, o, o->factors ? o->factors[1] : o->c ? 1 : 0);
}

/* ---- choice of algorithm --------------------------------------------------------------------- */

/* Returns the bytes from the start of the output's first element to the end of its last element. */
static size_t output_bytes(const Shape *s)
{
    return ((size_t)(s->count - 1) * (size_t)s->step_d + (size_t)(s->n - 1) * (size_t)s->ld_d +
            (size_t)s->m) *
           dtype_size(s->d);
}

/* Runs the whole GEMM by this algorithm and reads slices of the result. Returns false if the
 * algorithm does not run. If the GEMM accumulates in d, d first gets a value to add to, because d
 * is empty in a first micro-batch. This value is 1.37 times the product of the reference algorithm.
 * With a factor of 1 the sample would not test rounding. */
static bool sample(uint32_t *slices, const Gemm *g, const cublasLtMatmulAlgo_t *algo,
                   const Operands *o)
{
    const size_t slice = SAMPLE_BYTES / SAMPLE_SLICES;
    const size_t step = (output_bytes(&g->shape) - slice) / (SAMPLE_SLICES - 1) / 16 * 16;
    const bool in_place = o->c == o->d;
    if (in_place && (launch_scaled(g, &g->algo, o, 0) != CUBLAS_STATUS_SUCCESS ||
                     launch_scaled(g, &g->algo, o, 0.37f) != CUBLAS_STATUS_SUCCESS))
        return false;
    if (launch(g, algo, o) != CUBLAS_STATUS_SUCCESS)
        return false;
    for (size_t i = 0; i < SAMPLE_SLICES; i++)
        backend_device_get((char *)slices + i * slice, (char *)o->d + i * step, slice);
    return true;
}

/* Returns false if the sample proves nothing: zeros, NaNs or constants agree for all algorithms. */
static bool is_telling(const uint32_t *slices)
{
    const size_t n = SAMPLE_BYTES / sizeof *slices;
    size_t changes = 0;
    for (size_t i = 1; i < n; i++)
        changes += slices[i] != slices[i - 1];
    return changes > n / 2;
}

/* Returns the milliseconds that `runs` runs take. */
static double time_runs(const Gemm *g, const cublasLtMatmulAlgo_t *algo, const Operands *o,
                        int runs)
{
    static DeviceMark *from, *to;
    from = device_mark(from);
    for (int i = 0; i < runs; i++)
        LT_CHECK(launch(g, algo, o));
    to = device_mark(to);
    return device_elapsed(from, to);
}

/* Returns the index of the fastest of these algorithms. */
static int race(const Gemm *g, const cublasLtMatmulAlgo_t *algo, int count, const Operands *o)
{
    double first[CANDIDATES], total[CANDIDATES] = { 0 }, spent = 0, fastest = INFINITY;
    int best = 0;
    if (count == 1)
        return 0;
    const double once = time_runs(g, &algo[0], o, 1), left = ALL_CHOICES_MS - cache.spent_ms;
    const double limit = left < CHOICE_MS ? left : CHOICE_MS;
    const int runs = once * MOST_RUNS < ROUND_MS ? MOST_RUNS
                     : once < ROUND_MS           ? (int)(ROUND_MS / once)
                                                 : 1;
    for (int round = 0; round < 2 || spent < limit; round++)
        for (int i = 0; i < count; i++) {
            if (round > 0 && first[i] > HOPELESS * fastest)
                continue;
            const double ms = time_runs(g, &algo[i], o, runs);
            spent += ms;
            if (round > 0)
                total[i] += ms;
            else if ((first[i] = ms) < fastest)
                fastest = ms;
        }
    for (int i = 0; i < count; i++)
        if (total[i] > 0 && (total[best] == 0 || total[i] < total[best]))
            best = i;
    cache.spent_ms += spent + once;
    return best;
}

/* Sets g->algo to the fastest suggestion whose bits equal the bits of the first suggestion. Returns
 * false if the data of `o` do not distinguish algorithms. Overwrites d. */
static bool choose(Gemm *g, const Operands *o)
{
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    cublasLtMatmulAlgo_t algo[CANDIDATES];
    int count = suggest(found, g), same = 0;
    uint32_t *first = xmalloc(SAMPLE_BYTES), *other = xmalloc(SAMPLE_BYTES);
    g->algo = found[0].algo;
    const bool tells = sample(first, g, &found[0].algo, o) && is_telling(first);
    for (int i = 0; i < count && tells; i++)
        if (sample(other, g, &found[i].algo, o) && memcmp(first, other, SAMPLE_BYTES) == 0)
            algo[same++] = found[i].algo;
    if (same > 0)
        g->algo = algo[race(g, algo, same, o)];
    free(first);
    free(other);
    return tells;
}

/* Writes the key of a stored choice. The key includes the GPU and the version of the library. */
static void choice_key(char key[256], const Shape *s)
{
    char blocks[64] = "";
    if (s->kind == SYMMETRIC)
        snprintf(blocks, sizeof blocks, ", %d blocks in rows of %d", (int)s->count, s->ld_d);
    snprintf(
        key, 256,
        "%s (%d) cuBLASLt %zu, %s m %d n %d k %d %c%c, %s %s to %s, add %d%s fast %d align %d%s",
        device_name(), device_sm_count(), cublasLtGetVersion(), kind_name[s->kind], s->m, s->n,
        s->k, s->trans_a ? 't' : 'n', s->trans_b ? 't' : 'n', dtype_name(s->a), dtype_name(s->b),
        dtype_name(s->d), s->add, s->bias ? " bias" : "", s->fast, s->align, blocks);
}

/* Chooses the algorithm. Trials write into d, and they accumulate even if d is empty. If d holds a
 * sum, the sum is saved meanwhile in host memory, because device memory may be short. */
static void tune(Gemm *g, const Operands *o)
{
    const size_t bytes = output_bytes(&g->shape);
    char key[256];
    void *sum = o->c == o->d && !o->empty ? xmalloc(bytes) : NULL;
    if (sum)
        backend_device_get(sum, o->d, bytes);
    const bool chosen = choose(g, o);
    if (sum)
        backend_device_put(o->d, sum, bytes);
    free(sum);
    g->trials_left = chosen ? 0 : g->trials_left - 1;
    choice_key(key, &g->shape);
    if (chosen && comm_rank() == 0)
        autotune_add(autotune_file, key, &g->algo, sizeof g->algo);
}

/* Uses the choice of an earlier run if cuBLASLt still suggests it. */
static bool choose_stored(Gemm *g, const cublasLtMatmulHeuristicResult_t *found, int count)
{
    char key[256];
    cublasLtMatmulAlgo_t algo;
    if (!cache.choices)
        cache.choices = autotune_read(autotune_file);
    choice_key(key, &g->shape);
    if (!autotune_find(cache.choices, key, &algo, sizeof algo))
        return false;
    for (int i = 0; i < count; i++)
        if (memcmp(&found[i].algo, &algo, sizeof algo) == 0) {
            g->algo = algo;
            return true;
        }
    return false;
}

/* ---- the GEMM -------------------------------------------------------------------------------- */

static Gemm *find(const Shape *s, const Operands *o)
{
    for (int i = 0; i < cache.count; i++)
        if (memcmp(&cache.gemm[i].shape, s, sizeof *s) == 0)
            return &cache.gemm[i];

    if (!cache.handle)
        LT_CHECK(cublasLtCreate(&cache.handle));
    cache.gemm = xrealloc(cache.gemm, sizeof *cache.gemm * (size_t)(cache.count + 1));
    Gemm *g = &cache.gemm[cache.count++];
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    describe(g, s, o);
    const int count = suggest(found, g);
    g->algo = found[0].algo;
    bool large = 2.0 * s->m * s->n * s->k * (double)s->count >= TUNE_FLOPS &&
                 output_bytes(s) >= 2 * SAMPLE_BYTES;
    g->trials_left = large && !choose_stored(g, found, count) ? MAX_TRIALS : 0;
    return g;
}

static int alignment(const Operands *o)
{
    uintptr_t bits = (uintptr_t)o->a | (uintptr_t)o->b | (uintptr_t)o->c | (uintptr_t)o->d |
                     (uintptr_t)o->bias | 256;
    return (int)(bits & -bits);
}

/* On entry s has the kind, sizes, distances and transpositions. All other fields are 0. */
static void run_shape(Shape *s, DType a, DType b, DType d, Operands o)
{
    s->a = a, s->b = b, s->d = d;
    s->fast = o.scale_a && o.fast;
    s->add = o.c != NULL, s->bias = o.bias != NULL, s->align = alignment(&o);
    CHECK(s->m > 0 && s->n > 0 && s->k > 0, "%s of m=%d n=%d k=%d", kind_name[s->kind], s->m, s->n,
          s->k);
    Gemm *g = find(s, &o);
    set_vectors(g, &o);
    if (g->trials_left > 0)
        tune(g, &o);
    cublasStatus_t status = o.empty ? launch_scaled(g, &g->algo, &o, 0) : launch(g, &g->algo, &o);
    if (status != CUBLAS_STATUS_SUCCESS)
        die_shape(s, cublasLtGetStatusString(status));
}

/* Runs one product of contiguous matrices. */
static void run(Kind kind, int m, int n, int k, bool trans_a, bool trans_b, DType a, DType b,
                DType d, Operands o)
{
    Shape s;
    memset(&s, 0, sizeof s);
    s.kind = kind, s.m = m, s.n = n, s.k = k, s.trans_a = trans_a, s.trans_b = trans_b;
    s.ld_a = trans_a ? k : m, s.ld_b = trans_b ? n : k, s.ld_d = m, s.count = 1;
    run_shape(&s, a, b, d, o);
}

static void check_fp8(Kind kind, int m, int k, const char *width, const char *contraction)
{
    if (m % 8 || k % 16)
        die("%s in FP8: %s = %d must be a multiple of 8 and %s = %d a multiple of 16 on this GPU; "
            "pad the dimension, "
            "or choose a recipe with bf16 operands (--format.head=bf16: only for the head)",
            kind_name[kind], width, m, contraction, k);
}

void backend_matmul(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const int N = x.rows, C = x.cols, O = w.rows;
    const bool fp8 = check_matmul(y, x, w, add);
    bool bias = is_bias(add, y);
    if (fp8)
        check_fp8(FORWARD, O, C, "outputs", "inputs");
    if (matmul_row(y, x, w, add))
        return;
    if (bias && fp8 && y.format.dtype == F32) {
        fill_rows(y, add);
        add = y;
        bias = false;
    }
    run(FORWARD, O, N, C, true, false, w.format.dtype, x.format.dtype, y.format.dtype,
        (Operands){ .a = w.data,
                    .b = x.data,
                    .scale_a = w.scale,
                    .scale_b = x.scale,
                    .c = bias ? NULL : add.data,
                    .bias = bias ? add.data : NULL,
                    .d = y.data,
                    .fast = x.fast });
}

void backend_matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate)
{
    const int N = dy.rows, O = w.rows, C = w.cols;
    const bool fp8 = check_matmul_dx(dx, dy, w, accumulate);
    if (fp8)
        check_fp8(DX, C, O, "inputs", "outputs");
    run(DX, C, N, O, fp8, false, w.format.dtype, dy.format.dtype, dx.format.dtype,
        (Operands){ .a = fp8 ? w.data_t : w.data,
                    .b = dy.data,
                    .scale_a = w.scale,
                    .scale_b = dy.scale,
                    .c = accumulate ? dx.data : NULL,
                    .d = dx.data,
                    .fast = dy.fast });
}

void backend_matmul_scaled(Tensor y, Tensor x, Tensor w, float alpha, Tensor add, float beta)
{
    const float factors[2] = { alpha, beta };
    check_matmul_scaled(y, x, w, add);
    run(DX, w.cols, x.rows, x.cols, false, false, w.format.dtype, x.format.dtype, y.format.dtype,
        (Operands){ .a = w.data, .b = x.data, .c = add.data, .d = y.data, .factors = factors });
}

void multiply_blocks(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta,
                     SquareBlocks b)
{
    const float factors[2] = { alpha, beta };
    const int64_t next = columns ? 1 : x.cols, at = (int64_t)b.row * y.cols + b.col;
    const uint16_t *from = x.data, *sum = add.data;
    Shape s;
    memset(&s, 0, sizeof s);
    s.kind = SYMMETRIC, s.m = s.n = b.size, s.k = columns ? x.rows : x.cols, s.trans_a = !columns,
    s.trans_b = columns;
    s.ld_a = s.ld_b = x.cols, s.ld_d = y.cols;
    s.count = b.count, s.step_ab = b.step * next, s.step_d = b.step * (y.cols + INT64_C(1));
    run_shape(&s, BF16, BF16, BF16,
              (Operands){ .a = from + b.col * next,
                          .b = from + b.row * next,
                          .c = sum ? sum + at : NULL,
                          .d = (uint16_t *)y.data + at,
                          .factors = factors });
}

void backend_matmul_dw(Tensor dw, Tensor dy, Tensor x)
{
    const int N = dy.rows, O = dy.cols, C = x.cols;
    if (!dw.data)
        return;
    const bool fp8 = check_matmul_dw(dw, dy, x);
    if (fp8)
        check_fp8(DW, C, N, "inputs", "tokens");
    if (x.channel && !dw.empty)
        channels_multiply(dw, x.channel);
    run(DW, C, O, N, fp8, !fp8, x.format.dtype, dy.format.dtype, dw.format.dtype,
        (Operands){ .a = fp8 ? x.data_t : x.data,
                    .b = fp8 ? dy.data_t : dy.data,
                    .scale_a = x.scale,
                    .scale_b = dy.scale,
                    .c = dw.data,
                    .d = dw.data,
                    .empty = dw.empty,
                    .fast = dy.fast });
    if (x.channel)
        channels_divide(dw, x.channel);
}
