/* FP8 operands within ranges (scale_is_reused), for every operation that writes one, without and
 * with the transpose.
 *
 * If h is a power of two, a range of max|y| / h gives the bits of a measured scale, because max|y|
 * just fits. A range that is one ulp smaller is exceeded, and gives the result of the range max|y|.
 * On CUDA each of these is a separate code path. Its codes are also compared with the CPU's record;
 * they may be neighbours if y is not exact. */
#include "tests/test.h"
#include "tests/fp8.h"

static const Format H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 }, E16 = { E4M3, 16 };
static const Norm rms = { RMS_NORM, 1e-5f }, layer = { LAYER_NORM, 1e-5f };

/* Inputs of shapes (N,C), (N,2F), (N,F) and (N,S). stats0: for the backward of a norm. act has a
 * scale. x, up, dout and down are GEMM operands with few mantissa bits. product and dproduct are
 * products of an adapter, to be added to wide and to dact. */
static struct {
    Tensor stream, saved, wide, gate_up, dact, dy, w, stats, stats0, act, x, up, dout, down;
    Attention a;
    LoraProduct product, dproduct;
} in;

static bool scales_reused;

static void run_quantize(Tensor y)
{
    quantize(y, in.stream);
}
static void run_norm(Tensor y)
{
    norm_forward(y, in.saved, in.stats.data, in.stream, in.w, NONE, rms, FROM_SAVED);
}
static void run_norm_exact(Tensor y)
{
    norm_forward(y, in.saved, in.stats.data, in.stream, in.w, NONE, rms, FROM_EXACT);
}
static void run_norm_dense(Tensor y)
{
    norm_forward(y, in.stream, in.stats.data, in.stream, in.w, NONE, rms, FROM_SAVED);
}
static void run_norm_layer(Tensor y)
{
    norm_forward(y, in.saved, in.stats.data, in.stream, in.w, NONE, layer, FROM_EXACT);
}
static void run_norm_back(Tensor y)
{
    norm_backward(y, NULL, NONE, in.dy, in.saved, in.stats0.data, in.w, rms, false);
}
static void run_swiglu(Tensor y)
{
    swiglu_forward(y, in.gate_up, in.wide, NO_PRODUCT, FROM_SAVED);
}
static void run_swiglu_exact(Tensor y)
{
    swiglu_forward(y, in.gate_up, in.wide, NO_PRODUCT, FROM_EXACT);
}
static void run_swiglu_dense(Tensor y)
{
    swiglu_forward(y, in.wide, in.wide, NO_PRODUCT, FROM_SAVED);
}
static void run_swiglu_back(Tensor y)
{
    swiglu_backward(y, NONE, in.dact, NO_PRODUCT, in.gate_up);
}
static void run_swiglu_recompute(Tensor y)
{
    swiglu_backward(y, columns_of(in.act), in.dact, NO_PRODUCT, in.gate_up);
}

/* The operation may write wide. */
static void run_matmul_swiglu(Tensor y)
{
    const void *wide = tensor_snapshot(in.wide);
    matmul_swiglu(y, in.gate_up, in.wide, in.x, in.up);
    tensor_restore(in.wide, wide);
}

/* The operation may write dact. */
static void run_matmul_dx_swiglu(Tensor y)
{
    const void *dact = tensor_snapshot(in.dact);
    matmul_dx_swiglu(y, columns_of(in.act), in.dact, in.dout, in.down, in.gate_up);
    tensor_restore(in.dact, dact);
}

/* These operations may overwrite their input x. */
static void run_swiglu_added(Tensor y)
{
    const void *wide = tensor_snapshot(in.wide);
    swiglu_forward(y, in.gate_up, in.wide, in.product, FROM_SAVED);
    tensor_restore(in.wide, wide);
}

static void run_swiglu_exact_added(Tensor y)
{
    const void *wide = tensor_snapshot(in.wide);
    swiglu_forward(y, in.gate_up, in.wide, in.product, FROM_EXACT);
    tensor_restore(in.wide, wide);
}

static void run_swiglu_dense_added(Tensor y)
{
    const void *wide = tensor_snapshot(in.wide);
    swiglu_forward(y, in.wide, in.wide, in.product, FROM_SAVED);
    tensor_restore(in.wide, wide);
}

static void run_swiglu_back_added(Tensor y)
{
    const void *dact = tensor_snapshot(in.dact);
    swiglu_backward(y, NONE, in.dact, in.dproduct, in.gate_up);
    tensor_restore(in.dact, dact);
}

/* The operation may overwrite dy. */
static void run_rope(Tensor y)
{
    const void *dy = tensor_snapshot(in.dy);
    rope_backward(y, NONE, NONE, in.dy, in.stream, NULL, NONE, NONE, in.a);
    tensor_restore(in.dy, dy);
}

static void run_rope_clip(Tensor y)
{
    in.a.clip = 0.5f;
    run_rope(y);
    in.a.clip = 0;
}

/* C, F: number of columns of y, in these units. norm: y depends on statistics that another pass may
 * round differently. */
typedef struct {
    const char *name;
    void (*run)(Tensor y);
    bool gradient, norm;
    int C, F;
} Op;
// clang-format off
static const Op ops[] = {
    { "quantize", run_quantize, false, false, 1, 0 },         { "quantize-e5m2", run_quantize, true, false, 1, 0 },
    { "norm", run_norm, false, true, 1, 0 },                  { "norm-exact", run_norm_exact, false, true, 1, 0 },
    { "norm-dense", run_norm_dense, false, true, 1, 0 },      { "norm-layer", run_norm_layer, false, true, 1, 0 },
    { "norm-backward", run_norm_back, true, false, 1, 0 },
    { "swiglu", run_swiglu, false, false, 0, 1 },             { "swiglu-exact", run_swiglu_exact, false, false, 0, 1 },
    { "swiglu-dense", run_swiglu_dense, false, false, 0, 1 }, { "swiglu-backward", run_swiglu_back, true, false, 0, 2 },
    { "swiglu-recompute", run_swiglu_recompute, true, false, 0, 2 },  { "matmul-swiglu", run_matmul_swiglu, false, false, 0, 1 },
    { "matmul-dx-swiglu", run_matmul_dx_swiglu, true, false, 0, 2 },
    { "added-swiglu", run_swiglu_added, false, false, 0, 1 }, { "added-exact", run_swiglu_exact_added, false, false, 0, 1 },
    { "added-dense", run_swiglu_dense_added, false, false, 0, 1 }, { "added-backward", run_swiglu_back_added, true, false, 0, 2 },
    { "rope", run_rope, true, false, 1, 0 },                  { "rope-clip", run_rope_clip, true, false, 1, 0 },
};
// clang-format on
enum { OPS = sizeof ops / sizeof ops[0] };

/* [q|k|v] has C columns: two query heads, one of keys and values, of this width. */
typedef struct {
    int N, width, F;
} Shape;
static const Shape shapes[] = { { 16, 16, 48 }, { 96, 64, 176 }, { 160, 128, 384 } };
enum { SHAPES = sizeof shapes / sizeof shapes[0], LARGE = 4 };

/* Elements of very different sizes. */
static Tensor make_spread(int rows, int cols, uint64_t seed, float size)
{
    Tensor t = make(H, rows, cols);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++)
        x[i] = size * ldexpf(uniform(seed, i, -1, 1), -(int)(random_bits(seed + 100, i) % 12));
    put(t, x);
    return t;
}

static void make_inputs(const Shape *s, float size)
{
    const int N = s->N, C = 4 * s->width, T = N / 2;
    in.stream = make_spread(N, C, 1, size);
    in.saved = make(E16, N, C);
    in.wide = make_spread(N, 2 * s->F, 2, size);
    in.gate_up = make(E16, N, 2 * s->F);
    in.dact = make_spread(N, s->F, 3, size);
    in.dy = make_spread(N, C, 4, size);
    in.w = make_filled(H, 1, C, 5, 0.5f, 1.5f);
    in.stats = make_f32(N, 2);
    in.stats0 = make_f32(N, 2);
    in.act = make_operand(E4, N, s->F);
    in.x = make_round(E4, N, C, 10, size);
    in.x.fast = true;
    in.up = make_round(E4, 2 * s->F, C, 11, 0.125f);
    in.dout = make_round(E5, N, C, 12, size);
    in.down = make_round(E4, C, s->F, 13, 0.125f);
    Tensor table = make_f32(T, s->width);
    float *angles = keep(tensor_numel(table) * sizeof *angles);
    for (size_t i = 0; i < tensor_numel(table); i++)
        angles[i] = (float)(i % 2 ? sin(0.1 * (double)i) : cos(0.1 * (double)(i + 1)));
    put(table, angles);
    in.a = (Attention){
        .B = 2, .T = T, .H = 2, .K = 1, .D = s->width, .norm = rms, .rope = table.data
    };
    LoraMatrix m = { .w = make_filled(H, 2 * s->F, 16, 7, -0.1f, 0.1f),
                     .is_b = true,
                     .num_projections = 2 };
    m.projection[0].width = m.projection[1].first = m.projection[1].width = s->F;
    in.product = (LoraProduct){ make_filled(H, N, 32, 6, -size, size), m };
    m = (LoraMatrix){ .w = make_filled(H, 16, s->F, 9, -0.1f, 0.1f), .num_projections = 1 };
    in.dproduct = (LoraProduct){ make_filled(H, N, 16, 8, -size, size), m };
    quantize(in.saved, in.stream);
    quantize(in.gate_up, in.wide);
    swiglu_forward(in.act, in.gate_up, in.wide, NO_PRODUCT, FROM_SAVED);
    norm_forward(make(H, N, C), in.saved, in.stats0.data, in.stream, in.w, NONE, rms, FROM_SAVED);
}

static float scale_amax_of(Tensor y)
{
    float x;
    device_get(&x, y.scale_amax, sizeof x);
    return x;
}

/* Returns the codes and the scale of the operation's y with this range. */
static void *run_scale_reused(const Op *op, Tensor y, float range)
{
    device_put(y.scale_amax, &range, sizeof range);
    scales_reused = true;
    op->run(y);
    scales_reused = false;
    return tensor_snapshot(y);
}

static void *run_measured(const Op *op, Tensor y)
{
    op->run(y);
    return tensor_snapshot(y);
}

/* Both operations round y, to codes of its two scales. */
static void check_near(const char *label, Tensor y, const void *roomy, const void *measured,
                       double smallest)
{
    const double *a = decode(y, roomy), *b = decode(y, measured), u = unit_roundoff(y.format);
    for (size_t i = 0; i < tensor_numel(y); i++)
        if (!(fabs(a[i] - b[i]) <= u * (fabs(a[i]) + fabs(b[i])) + smallest))
            fail_msg("%s: element %zu is %.9g within the range, %.9g as measured", label, i, a[i],
                     b[i]);
}

/* Compares with the CPU's results: codes may be neighbours. Sums of a row and CUDA's fast functions
 * have errors below (C + 64) u of the largest value, with cancelled terms; test_fp8_operations has
 * the bounds of each operation. */
static void check_record(const char *label, const Op *op, Tensor y, double smallest)
{
    double *bound = keep(tensor_numel(y) * sizeof *bound);
    for (size_t i = 0; i < tensor_numel(y); i++)
        bound[i] = smallest / 2 + (y.cols + 64) * U24 * scale_amax_of(y);
    golden_check(label, y, strncmp(op->name, "quantize", 8) == 0 ? NULL : bound);
}

static void check_op(const Op *op, const Shape *s, bool transposed)
{
    const Format f = op->gradient ? E5 : E4;
    const float h = op->gradient ? 8 : 2, top = op->gradient ? 57344 : 448;
    Tensor y = transposed ? make_operand(f, s->N, 4 * s->width * op->C + s->F * op->F)
                          : make(f, s->N, 4 * s->width * op->C + s->F * op->F);
    const size_t bytes = tensor_bytes(y) - 12; /* a scale is 4 of 16 */
    char label[96];
    snprintf(label, sizeof label, "range/%s/%dx%d%s", op->name, y.rows, y.cols,
             transposed ? "-t" : "");
    const void *without = run_measured(op, y);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    const void *measured = run_measured(op, y);
    const float amax = scale_amax_of(y), scale = operand_scale(y);
    check_same_bytes(label, measured, without, bytes);
    assert_true(amax > 0 && scale == amax / top);

    const void *roomy = run_scale_reused(op, y, 2 * amax);
    const double smallest = fp8_table(f.dtype)[1] * operand_scale(y);
    assert_true(operand_scale(y) == 2 * h * scale && scale_amax_of(y) == 2 * amax);
    check_near(label, y, roomy, measured, smallest);
    if (!op->norm) {
        check_same_bytes(label, run_scale_reused(op, y, amax / h), measured, bytes);
        assert_true(scale_amax_of(y) == amax / h);
    }
    /* two sums of squares differ */
    const float off = op->norm ? (float)(y.cols + 16) * (float)U24 : 0;
    const float too_small[] = { nextafterf(amax / h, 0) * (1 - off), amax / 1000, 0 };
    const void *expected = run_scale_reused(op, y, amax);
    for (int i = 0; i < 3; i++) {
        const void *again = run_scale_reused(op, y, too_small[i]);
        const float found = scale_amax_of(y);
        assert_true(fabsf(found - amax) <= off * amax && operand_scale(y) == h * (found / top));
        if (!op->norm)
            check_same_bytes(label, again, expected, bytes);
        /* as in the recomputation of a block */
        check_same_bytes(label, run_scale_reused(op, y, found), again, bytes);
        assert_true(scale_amax_of(y) == found);
    }
    if (transposed)
        check_transposed(label, y);
    /* test_lora_added has the record and bounds of these operations */
    if (strncmp(op->name, "added", 5) != 0)
        check_record(label, op, y, smallest);
}

TEST(test_operations)
{
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < OPS; i++)
            for (int transposed = 0; transposed < 2; transposed++) {
                make_inputs(&shapes[s], 8);
                check_op(&ops[i], &shapes[s], transposed);
                release();
            }
}

/* Norms that recompute y with its scale give the same codes. */
static void norm_recompute_case(const Op *op, bool transposed)
{
    Tensor y = make_operand(E4, in.stream.rows, in.stream.cols),
           again = make_operand(E4, y.rows, y.cols);
    const Tensor x = op->run == run_norm ? in.saved : in.stream;
    if (!transposed)
        y.data_t = again.data_t = NULL;
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    again.scale = y.scale;
    for (int room = 0; room < 2; room++) {
        const void *expected = run_scale_reused(op, y, room ? 64 : 0);
        norm_recompute(again, x, in.stats.data, in.w);
        check_same_bytes(op->name, tensor_snapshot(again), expected, tensor_bytes(y) - 12);
    }
}

TEST(test_norm_recompute)
{
    for (int i = 0; i < OPS; i++)
        for (int s = 0; ops[i].norm && s < SHAPES; s++) {
            make_inputs(&shapes[s], 8);
            norm_recompute_case(&ops[i], false);
            norm_recompute_case(&ops[i], true);
            release();
        }
}

/* After zeros, the range of the next micro-batch is 0. Zeros do not exceed it. */
TEST(test_zeros)
{
    for (int i = 0; i < OPS; i++) {
        const Op *op = &ops[i];
        make_inputs(&shapes[1], 0);
        Tensor y = make_operand(op->gradient ? E5 : E4, in.stream.rows,
                                in.stream.cols * op->C + in.dact.cols * op->F);
        y.scale_amax = guarded(sizeof(float));
        y.scale_reused = &scales_reused;
        run_measured(op, y);
        assert_true(scale_amax_of(y) == 0);
        const float smallest = operand_scale(y), h = op->gradient ? 8 : 2;
        const uint8_t *codes = run_scale_reused(op, y, 0);
        assert_true(scale_amax_of(y) == 0 && operand_scale(y) == h * smallest);
        for (size_t j = 0; j < tensor_numel(y); j++)
            assert_int_equal(codes[j] & 0x7f, 0);
        release();
    }
}

/* An infinite value exceeds every finite range. A NaN exceeds no range. */
TEST(test_not_finite)
{
    static const struct {
        uint16_t bits;
        bool exceeds;
    } special[] = { { 0x7f80, true }, { 0xff80, true }, { 0x7fc0, false } };
    for (int i = 0; i < 3; i++)
        for (int transposed = 0; transposed < 2; transposed++) {
            make_inputs(&shapes[1], 8);
            device_put((uint16_t *)in.stream.data + 1000, &special[i].bits, sizeof special[i].bits);
            Tensor y = transposed ? make_operand(E4, in.stream.rows, in.stream.cols)
                                  : make(E4, in.stream.rows, in.stream.cols);
            y.scale_amax = guarded(sizeof(float));
            y.scale_reused = &scales_reused;
            const uint8_t *measured = run_measured(&ops[0], y);
            const float amax = scale_amax_of(y);
            assert_true(isinf(amax) == special[i].exceeds);
            const uint8_t *kept_codes =
                run_scale_reused(&ops[0], y, special[i].exceeds ? 1e30f : amax);
            assert_true(scale_amax_of(y) == amax);
            if (special[i].exceeds)
                check_same_bytes("infinite", kept_codes, measured, tensor_bytes(y) - 12);
            else
                assert_int_equal(kept_codes[1000] & 0x7f, 0x7f);
            release();
        }
}

/* More tiles than blocks in the re-encoding launch; the last tiles are partial. */
TEST(test_large)
{
    Tensor x = make_spread(1040, 4112, 1, 8);
    in.stream = x;
    for (int transposed = 0; transposed < 2; transposed++) {
        Tensor y = transposed ? make_operand(E4, x.rows, x.cols) : make(E4, x.rows, x.cols);
        y.scale_amax = guarded(sizeof(float));
        y.scale_reused = &scales_reused;
        run_measured(&ops[0], y);
        const float amax = scale_amax_of(y);
        const void *expected = run_scale_reused(&ops[0], y, amax);
        check_same_bytes("large", run_scale_reused(&ops[0], y, amax / LARGE), expected,
                         tensor_bytes(y) - 12);
    }
    release();
}

/* More tiles than multiprocessors, and sums of many stages. With the transpose, GEMM and SwiGLU run
 * separately. */
TEST(test_large_matmul)
{
    const Shape s = { 2320, 324, 1024 };
    const Op op = { "matmul-swiglu", run_matmul_swiglu, false, false, 0, 1 };
    make_inputs(&s, 8);
    const size_t codes = (size_t)s.N * (size_t)s.F;
    Tensor y = make_operand(E4, s.N, s.F);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    run_measured(&op, y);
    const float amax = scale_amax_of(y),
                ranges[] = { amax, amax / 2, nextafterf(amax / 2, 0), amax / LARGE, 0 };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        Tensor rows = make(E4, s.N, s.F), apart = in.gate_up;
        rows.scale_amax = guarded(sizeof(float));
        rows.scale_reused = &scales_reused;
        const void *expected = run_scale_reused(&op, y, ranges[i]);
        in.gate_up = make(E16, s.N, 2 * s.F);
        check_same_bytes("codes", run_scale_reused(&op, rows, ranges[i]), expected, codes);
        check_same_bytes("saved", tensor_snapshot(in.gate_up), tensor_snapshot(apart),
                         tensor_bytes(apart));
        assert_true(operand_scale(rows) == operand_scale(y) &&
                    scale_amax_of(rows) == scale_amax_of(y));
    }
    release();
}

/* The gradient, computed by one kernel. Without the transpose, GEMM and SwiGLU run separately. */
TEST(test_large_matmul_dx)
{
    const Shape s = { 1040, 1028, 1024 };
    const Op op = { "matmul-dx-swiglu", run_matmul_dx_swiglu, true, false, 0, 2 };
    make_inputs(&s, 8);
    const size_t codes = (size_t)s.N * 2 * (size_t)s.F;
    Tensor y = make_operand(E5, s.N, 2 * s.F), rows = make(E5, s.N, 2 * s.F), act = in.act;
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    rows.scale_amax = guarded(sizeof(float));
    rows.scale_reused = &scales_reused;
    run_measured(&op, y);
    const float amax = scale_amax_of(y),
                ranges[] = { amax, amax / 8, nextafterf(amax / 8, 0), amax / LARGE / 8, 0 };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        const void *expected = run_scale_reused(&op, rows, ranges[i]);
        in.act = make_operand(E4, s.N, s.F);
        device_copy(in.act.scale, act.scale, sizeof(float));
        check_same_bytes("codes", run_scale_reused(&op, y, ranges[i]), expected, codes);
        check_transposed("transposed", y);
        in.act.data = act.data; /* not written */
        check_same_bytes("act", tensor_snapshot(in.act), tensor_snapshot(act),
                         tensor_bytes(act) - 12);
        assert_true(operand_scale(rows) == operand_scale(y) &&
                    scale_amax_of(rows) == scale_amax_of(y));
        in.act = act;
    }
    release();
}

/* The range has the same meaning if max|x| is known, or if the halves of quantize are called
 * separately. */
TEST(test_halves)
{
    make_inputs(&shapes[1], 8);
    Tensor y = make_operand(E4, in.stream.rows, in.stream.cols),
           other = make_operand(E4, y.rows, y.cols), amax = make_f32(1, 1);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    other.scale_amax = guarded(sizeof(float));
    other.scale_reused = &scales_reused;
    run_measured(&ops[0], y);
    const float found = scale_amax_of(y), ranges[] = { found, found / 2, found / 3, 0 };
    put(amax, &found);
    for (int i = 0; i < 4; i++) {
        const void *expected = run_scale_reused(&ops[0], y, ranges[i]);
        for (int k = 0; k < 3; k++) {
            device_put(other.scale_amax, &ranges[i], sizeof(float));
            scales_reused = true;
            if (k == 0)
                quantize_with_amax(other, in.stream, amax.data);
            else if (k == 1)
                quantize_scale_from(other, amax.data);
            else
                quantize_scale(other, in.stream);
            quantize_codes(other, in.stream);
            scales_reused = false;
            check_same_bytes("halves", tensor_snapshot(other), expected, tensor_bytes(y) - 12);
            assert_true(scale_amax_of(other) == scale_amax_of(y));
        }
    }
    release();
}

/* CUDA reuses the memory of maxima after a thousand of them. Operations that take two maxima, with
 * large numbers, start at an even slot, or at an odd slot and wrap around. Then operations that
 * take one maximum, with small numbers, use each slot. */
TEST(test_many)
{
    enum { PLACES = 1024 };
    make_inputs(&shapes[0], 8);
    in.dact = make_spread(in.dact.rows, in.dact.cols, 3, 0x1p-10f);
    Tensor y = make(E4, in.stream.rows, in.stream.cols),
           small = make(E5, in.dact.rows, 2 * in.dact.cols);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    run_quantize(y);
    run_swiglu_back(small);
    const float expected = operand_scale(small);
    for (int turn = 0; turn < 2; turn++) {
        scales_reused = true;
        for (int i = 0; i < PLACES / 2; i++)
            run_quantize(y);
        scales_reused = false;
        for (int i = 0; i < PLACES + 1; i++) {
            run_swiglu_back(small);
            if (operand_scale(small) != expected)
                fail_msg("turn %d, operation %d: scale %g, expected %g", turn, i,
                         operand_scale(small), expected);
        }
    }
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
