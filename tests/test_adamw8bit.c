/* 8-bit AdamW against bitsandbytes (tests/golden/adamw8bit, scripts/golden_adamw8bit.py): maps,
 * codes, steps.
 *
 * Codes and scales are the same bits on both back ends. On the CPU, weights equal those of the
 * reference bit for bit. The CUDA back end uses the hardware's root and reciprocal. u = 2^-24. */
#include "kernels/dynamic8.h"
#include "kernels/fp8.h"
#include "kernels/values.h"
#include "model/checkpoint/safetensors.h"
#include "tests/test.h"
#include "tests/golden.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };
static const Format SIGNED = { DYNAMIC8, DYNAMIC8_GROUP }, UNSIGNED = { UDYNAMIC8, DYNAMIC8_GROUP };
enum { GROUP = DYNAMIC8_GROUP };

/* ---- reference results ----------------------------------------------------------------------- */

static SafeFile *open_golden(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "tests/golden/adamw8bit/%s.safetensors", name);
    return safetensors_open(path);
}

/* Returns the data of a tensor; *rows: its first dimension. */
static void *read_golden(const SafeFile *f, const char *name, int *rows)
{
    const SafeTensor *t = safetensors_find(f, name);
    assert_non_null(t);
    void *data = keep(t->end - t->begin);
    safetensors_read(f, data, t, 0, t->end - t->begin);
    if (rows)
        *rows = (int)t->shape[0];
    return data;
}

typedef struct {
    AdamW a; /* without bias corrections */
    int steps, n;
    const float *w, *absmax[2]; /* (1 + steps, n), (steps, n/256) of m and v */
    const uint8_t *codes[2];    /* (steps, n) */
    const uint16_t *grad;       /* (steps, n), BF16 */
} Run;

static Run read_run(const char *name)
{
    SafeFile *f = open_golden(name);
    const float *s = read_golden(f, "settings", NULL);
    const AdamW a = { .lr = s[0],
                      .beta1 = s[1],
                      .beta2 = s[2],
                      .eps = s[3],
                      .weight_decay = s[4],
                      .grad_scale = s[5],
                      .seed = 42 };
    Run r = { .a = a, .steps = (int)s[6] };
    r.w = read_golden(f, "w", NULL);
    r.grad = read_golden(f, "grad", NULL);
    r.codes[0] = read_golden(f, "m", NULL), r.codes[1] = read_golden(f, "v", NULL);
    r.absmax[0] = read_golden(f, "m.absmax", NULL), r.absmax[1] = read_golden(f, "v.absmax", NULL);
    r.n = (int)safetensors_find(f, "m")->shape[1];
    safetensors_close(f);
    return r;
}

static AdamW settings_of(const Run *r, int step)
{
    AdamW a = r->a;
    a.correction1 = (float)(1 - pow(a.beta1, step + 1));
    a.correction2 = (float)(1 - pow(a.beta2, step + 1));
    return a;
}

/* Returns moment i before `step`; before the first step it is zero. */
static void restore_moment(Tensor t, const Run *r, int i, int step)
{
    char *bytes = keep(tensor_bytes(t));
    if (step > 0) {
        memcpy(bytes, r->codes[i] + (step - 1) * r->n, (size_t)r->n);
        memcpy(bytes + r->n, r->absmax[i] + (step - 1) * (r->n / GROUP),
               (size_t)(r->n / GROUP) * sizeof(float));
    }
    tensor_restore(t, bytes);
}

static Tensor gradient_of(const Run *r, int step, Format f)
{
    Tensor t = make(f, 1, r->n);
    float *x = keep((size_t)r->n * sizeof *x);
    for (int i = 0; i < r->n; i++)
        x[i] = bf16_decode(r->grad[step * r->n + i]);
    put(t, x);
    return t;
}

/* ---- maps and codes -------------------------------------------------------------------------- */

TEST(test_maps)
{
    SafeFile *f = open_golden("codes");
    check_same_bytes("signed map", dynamic8_map(DYNAMIC8), read_golden(f, "map.signed", NULL),
                     GROUP * sizeof(float));
    check_same_bytes("unsigned map", dynamic8_map(UDYNAMIC8), read_golden(f, "map.unsigned", NULL),
                     GROUP * sizeof(float));
    safetensors_close(f);
    release();
}

static void check_format(const char *text, bool is_one, Format f)
{
    Format g = F;
    assert_int_equal(format_parse(&g, text), is_one);
    if (is_one) {
        assert_true(format_equal(g, f));
        assert_string_equal(format_name(g), text);
    }
}

TEST(test_formats)
{
    check_format("dynamic8/256", true, SIGNED);
    check_format("udynamic8/256", true, UNSIGNED);
    check_format("dynamic8", false, F);
    check_format("dynamic8/128", false, F);
    check_format("udynamic8/256+", false, F);
    Arena a = { 0 };
    Tensor t = tensor_alloc(&a, SIGNED, 3, 2 * GROUP), row = tensor_rows(t, 2, 1);
    assert_int_equal(tensor_bytes(t), 3 * (2 * GROUP + 2 * sizeof(float)));
    assert_int_equal((char *)row.scale - (char *)t.scale, 4 * sizeof(float));
    assert_true(format_has_scales(SIGNED) && format_has_scales((Format){ E4M3, 0 }) &&
                !format_has_scales(H));
    assert_true(!format_is_fp8(SIGNED) && !format_is_fp8(UNSIGNED) && format_is_dynamic8(UNSIGNED));
}

/* Makes a tensor in host memory. */
static Tensor host_tensor(Format f, int n)
{
    return (Tensor){ .data = keep((size_t)n),
                     .scale = keep((size_t)(n / GROUP) * sizeof(float)),
                     .format = f,
                     .rows = 1,
                     .cols = n };
}

/* Compares with bitsandbytes on the CPU, which rounds small negative numbers to 0, and has no 0 in
 * the unsigned map. */
static void check_bnb(const SafeFile *f, const float *x, const Tensor *t)
{
    int plain;
    const uint8_t *expected[2] = { read_golden(f, "bnb.signed", &plain),
                                   read_golden(f, "bnb.unsigned", NULL) };
    check_same_bytes("absmax", t[0].scale, read_golden(f, "bnb.absmax", NULL),
                     (size_t)plain * sizeof(float));
    for (int i = 0; i < plain * GROUP; i++) {
        const uint8_t m = ((uint8_t *)t[0].data)[i], v = ((uint8_t *)t[1].data)[i];
        if (m != expected[0][i] && !(m == 126 && expected[0][i] == 127 && signbit(x[i])))
            fail_msg("signed code %d of %g is %d, in bitsandbytes %d", i, x[i], m, expected[0][i]);
        if (v != expected[1][i] && !(v == 0 && expected[1][i] == 1))
            fail_msg("unsigned code %d of %g is %d, in bitsandbytes %d", i, x[i], v,
                     expected[1][i]);
    }
}

TEST(test_codes)
{
    int groups;
    SafeFile *f = open_golden("codes");
    float *x = read_golden(f, "x", &groups);
    const size_t n = (size_t)groups * GROUP;
    float *size = keep(n * sizeof *size), *back = keep(n * sizeof *back);
    Tensor t[2] = { host_tensor(SIGNED, (int)n), host_tensor(UNSIGNED, (int)n) };
    for (size_t i = 0; i < n; i++)
        size[i] = fabsf(x[i]);
    tensor_store(t[0], 0, x, n);
    tensor_store(t[1], 0, size, n);
    check_same_bytes("signed codes", t[0].data, read_golden(f, "signed", NULL), n);
    check_same_bytes("unsigned codes", t[1].data, read_golden(f, "unsigned", NULL), n);
    check_bnb(f, x, t);
    for (int k = 0; k < 2; k++) {
        tensor_load(back, t[k], GROUP, GROUP);
        for (size_t i = 0; i < GROUP; i++)
            assert_true(back[i] ==
                        dynamic8_map(t[k].format.dtype)[((uint8_t *)t[k].data)[GROUP + i]] *
                            ((float *)t[k].scale)[1]);
    }
    safetensors_close(f);
    release();
}

static void check_rank(uint32_t bits, const uint32_t *steps, DType d)
{
    const uint32_t rank = (bits + steps[(bits >> 16) - DYNAMIC8_FIRST]) >> 16 & 0xff;
    const uint32_t code = dynamic8_encode(float_from_bits(bits), d);
    if (rank + (d == DYNAMIC8 ? 127 : 0) != code)
        fail_msg("the table gives rank %u to %a, whose code is %u", rank, float_from_bits(bits),
                 code);
}

/* Compares the table with the search at critical points: both ends of each entry, each value, and
 * the midpoint of each two values. Also checks that four ranks become four codes at once. */
TEST(test_table)
{
    static uint32_t steps[DYNAMIC8_STEPS];
    for (DType d = DYNAMIC8; d <= UDYNAMIC8; d++) {
        const float *map = dynamic8_map(d);
        dynamic8_steps(steps, d);
        for (uint32_t i = 0; i < DYNAMIC8_STEPS; i++)
            check_rank((DYNAMIC8_FIRST + i) << 16, steps, d),
                check_rank(((DYNAMIC8_FIRST + i) << 16) + 0xffff, steps, d);
        for (int c = d == DYNAMIC8 ? 128 : 1; c < 256; c++)
            for (int k = -1; k <= 1; k++) {
                uint32_t value, middle;
                const float between = (map[c - 1] + map[c]) / 2;
                memcpy(&value, &map[c], sizeof value), memcpy(&middle, &between, sizeof middle);
                check_rank(value + (uint32_t)k, steps, d),
                    check_rank(middle + (uint32_t)k, steps, d);
            }
    }
    for (uint32_t r = 0; r <= 128; r++) {
        const uint32_t below = r == 0 ? 1 : r,
                       codes = dynamic8_codes(r | below << 8 | r << 16 | below << 24, 0xff00ff00);
        const uint32_t up = 127 + r, down = below == 128 ? 0 : 127 - below;
        assert_int_equal(codes, up | down << 8 | up << 16 | down << 24);
    }
}

/* ---- codes of a step ------------------------------------------------------------------------- */

static Tensor make_zeros(Format f, int n)
{
    Tensor t = make(f, 1, n);
    tensor_restore(t, keep(tensor_bytes(t)));
    return t;
}

/* With beta1 = beta2 = 0 and zero moments (code 0, scale 0; m is -0), the new m is g with the sign
 * of its zeros, and the new v is g^2. */
static Tensor check_encoding(const char *name, const float *g, size_t n)
{
    const AdamW a = { .eps = 1, .correction1 = 1, .correction2 = 1, .grad_scale = 1 };
    Tensor w = make_filled(F, 1, (int)n, 1, -1, 1), grad = make(F, 1, (int)n);
    Tensor m = make_zeros(SIGNED, (int)n), v = make_zeros(UNSIGNED, (int)n);
    Tensor t[2] = { host_tensor(SIGNED, (int)n), host_tensor(UNSIGNED, (int)n) },
           moment[2] = { m, v };
    float *square = keep(n * sizeof *square);
    put(grad, g);
    for (size_t i = 0; i < n; i++)
        square[i] = g[i] * g[i];
    tensor_store(t[0], 0, g, n);
    tensor_store(t[1], 0, square, n);
    adamw8bit(w, m, v, grad, a, 0);
    for (int i = 0; i < 2; i++) {
        char text[64];
        const char *bytes = tensor_snapshot(moment[i]);
        snprintf(text, sizeof text, "8bit/%s-%c", name, "mv"[i]);
        check_same_bytes(text, bytes, t[i].data, n);
        check_same_bytes(text, bytes + n, t[i].scale, n / GROUP * sizeof(float));
        golden_check(text, moment[i], NULL);
    }
    return m;
}

/* Encodes the difficult groups as m, and as v. About half of the v are squares of floats; the
 * others are close to squares. */
TEST(test_encoding)
{
    int groups;
    SafeFile *f = open_golden("codes");
    float *x = read_golden(f, "x", &groups);
    const size_t n = (size_t)groups * GROUP;
    check_encoding("as-m", x, n);
    for (size_t i = 0; i < n; i++)
        x[i] = sqrtf(fabsf(x[i]));
    check_encoding("as-v", x, n);
    /* groups of zeros, groups of -0, and groups with scales below 2^-126, whose squares are 0 */
    for (size_t i = 0; i < n; i++)
        x[i] = i / GROUP % 3 == 0   ? 0
               : i / GROUP % 3 == 1 ? ldexpf(uniform(5, i, -1, 1), -130)
                                    : -0.0f;
    const uint8_t *codes = tensor_snapshot(check_encoding("zeros", x, n));
    for (size_t i = 0; i < n; i++)
        assert_int_equal(codes[i], signbit(x[i]) ? 126 : 127);
    safetensors_close(f);
    release();
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Errors of the weight as in adamw8bit.cu: the quotient has an error of 9 u, w of 3 u, and the
 * rates, products of three constants, of 3 u. bnb: the operations have another order, which doubles
 * the error. */
static void check_weights(const char *name, Tensor w, const float *before, const float *after,
                          bool bnb)
{
    double *ref = keep((size_t)w.cols * sizeof *ref), *bound = keep((size_t)w.cols * sizeof *bound);
    for (int i = 0; i < w.cols; i++) {
        ref[i] = after[i];
        bound[i] = (bnb ? 2 : 1) * U24 * (12 * fabs(after[i] - before[i]) + 6 * fabs(before[i]));
    }
    check_close(name, w, ref, bound);
    golden_check(name, w, bound);
}

/* Runs one step of the reference, from the state after its previous step. */
static void reference_step(const Run *r, int s, Format grad_format)
{
    Tensor w = make(F, 1, r->n), m = make(SIGNED, 1, r->n), v = make(UNSIGNED, 1, r->n),
           moment[2] = { m, v };
    Tensor grad = gradient_of(r, s, grad_format);
    const float *before = r->w + s * r->n, *after = before + r->n;
    put(w, before);
    restore_moment(m, r, 0, s);
    restore_moment(v, r, 1, s);
    TWICE(adamw8bit(w, m, v, grad, settings_of(r, s), 768), w, m, v);
    char text[64];
    snprintf(text, sizeof text, "8bit/step%d-%s-w", s, format_name(grad_format));
    check_weights(text, w, before, after, false);
    if (on_cpu())
        check_same_bytes(text, tensor_snapshot(w), after, (size_t)r->n * sizeof *after);
    for (int i = 0; i < 2; i++) {
        const char *bytes = tensor_snapshot(moment[i]);
        snprintf(text, sizeof text, "8bit/step%d-%s-%c", s, format_name(grad_format), "mv"[i]);
        check_same_bytes(text, bytes, r->codes[i] + s * r->n, (size_t)r->n);
        check_same_bytes(text, bytes + r->n, r->absmax[i] + s * (r->n / GROUP),
                         (size_t)(r->n / GROUP) * sizeof(float));
        golden_check(text, moment[i], NULL);
    }
}

/* Some gradients are infinite or NaN: these elements lose their moments and keep their weights. */
TEST(test_steps)
{
    const Run r = read_run("steps");
    for (int s = 0; s < r.steps; s++) {
        reference_step(&r, s, F);
        reference_step(&r, s, H);
    }
    release();
}

/* The weights of the first step in BF16, rounded with the random bits of their element numbers. A
 * weight differs by at most one BF16 value, and only if its F32 value differs. */
TEST(test_rounding)
{
    const Run r = read_run("steps");
    const uint64_t first = 1 << 20;
    Tensor w = make(H, 1, r.n), m = make_zeros(SIGNED, r.n), v = make_zeros(UNSIGNED, r.n);
    uint16_t *expected = keep((size_t)r.n * sizeof *expected);
    double *ref = keep((size_t)r.n * sizeof *ref), *bound = keep((size_t)r.n * sizeof *bound);
    put(w, r.w);
    TWICE(adamw8bit(w, m, v, gradient_of(&r, 0, H), settings_of(&r, 0), first), w, m, v);
    for (int i = 0; i < r.n; i++) {
        expected[i] = bf16_round_stochastic(r.w[r.n + i], random_16(r.a.seed, first + (uint64_t)i));
        ref[i] = r.w[r.n + i];
        bound[i] = 0x1p-8 * fabs(ref[i]) + 32 * U24;
    }
    check_close("8bit/bf16-w", w, ref, bound);
    golden_check("8bit/bf16-w", w, bound);
    const uint16_t *codes = tensor_snapshot(w);
    int others = 0;
    for (int i = 0; i < r.n; i++)
        others += codes[i] != expected[i];
    /* an error of 4 u changes the rounding with probability 2^-14 */
    assert_true(others <= (on_cpu() ? 0 : 8));
    release();
}

/* The new code lies between the codes of the smallest and the largest allowed x = map[code] absmax.
 * The old moments are equal. m has an error of 4 u of its two terms, v of 6 u, absmax the same as
 * its moment, and x another 4 u. */
static void check_near(const char *name, Tensor t, const Run *r, int i, int s)
{
    const uint8_t *codes = tensor_snapshot(t), *old = r->codes[i] + (s - 1) * r->n,
                  *expected = r->codes[i] + s * r->n;
    const float *absmax = (const float *)(codes + r->n), *ref = r->absmax[i] + s * (r->n / GROUP);
    const float *map = dynamic8_map(t.format.dtype);
    for (int k = 0; k < r->n; k++) {
        const int g = k / GROUP;
        const double before =
            map[s ? old[k] : 0] * (double)(s ? r->absmax[i][(s - 1) * (r->n / GROUP) + g] : 0);
        const double grad = bf16_decode(r->grad[s * r->n + k]), beta = i ? r->a.beta2 : r->a.beta1;
        const double x = beta * before + (1 - beta) * (i ? grad * grad : grad), off = 16 * U24;
        const double size = beta * fabs(before) + (1 - beta) * (i ? grad * grad : fabs(grad));
        const uint8_t least = dynamic8_encode((float)((x - off * size) / ref[g]), t.format.dtype);
        const uint8_t most = dynamic8_encode((float)((x + off * size) / ref[g]), t.format.dtype);
        if (!(fabs(absmax[g] - ref[g]) <= off * ref[g]))
            fail_msg("%s, group %d: maximum %.9g, expected %.9g", name, g, absmax[g], ref[g]);
        if (codes[k] < least || codes[k] > most)
            fail_msg("%s[%d]: code %d, expected %d .. %d", name, k, codes[k], least, most);
        if (codes[k] != expected[k] && least == most && !(codes[k] == 126 && expected[k] == 127))
            fail_msg("%s[%d]: code %d, in bitsandbytes %d, which no rounding explains", name, k,
                     codes[k], expected[k]);
    }
}

/* Compares with the steps of bitsandbytes itself, each from the state that bitsandbytes has before
 * the step: all codes, except of small negative m. */
TEST(test_bnb_steps)
{
    const Run r = read_run("bnb");
    for (int s = 0; s < r.steps; s++) {
        Tensor w = make(F, 1, r.n), m = make(SIGNED, 1, r.n), v = make(UNSIGNED, 1, r.n);
        char text[64];
        put(w, r.w + s * r.n);
        restore_moment(m, &r, 0, s);
        restore_moment(v, &r, 1, s);
        adamw8bit(w, m, v, gradient_of(&r, s, F), settings_of(&r, s), 0);
        snprintf(text, sizeof text, "8bit/bnb%d", s);
        check_weights(text, w, r.w + s * r.n, r.w + (s + 1) * r.n, true);
        check_near(text, m, &r, 0, s);
        check_near(text, v, &r, 1, s);
    }
    release();
}

/* ---- sizes, values that are not finite, errors ----------------------------------------------- */

static const AdamW usual = { .lr = 0.01f,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .eps = 1e-8f,
                             .weight_decay = 0.1f,
                             .correction1 = 0.19f,
                             .correction2 = 0.0975f,
                             .grad_scale = 0.5f,
                             .seed = 42 };

/* Makes a state with random codes, and scales around `size`. */
static Tensor make_state(Format f, int n, uint64_t seed, float size)
{
    Tensor t = make(f, 1, n);
    uint8_t *bytes = keep(tensor_bytes(t));
    for (int i = 0; i < n; i++)
        bytes[i] = (uint8_t)random_bits(seed, (uint64_t)i);
    for (int g = 0; g < n / GROUP; g++) {
        const float absmax = size * uniform(seed + 1, (size_t)g, 0.1f, 1);
        memcpy(bytes + n + g * (int)sizeof absmax, &absmax, sizeof absmax);
    }
    tensor_restore(t, bytes);
    return t;
}

/* Sizes that are not multiples of a thread block's size. The last is so large that every warp of a
 * large GPU has several groups. All codes occur. */
TEST(test_sizes)
{
    static const int groups[] = { 1, 13, 7001 };
    for (int k = 0; k < 3; k++) {
        const int n = groups[k] * GROUP;
        Tensor w = make_filled(H, 1, n, 1, -1, 1), grad = make_filled(H, 1, n, 4, -1e-2f, 1e-2f);
        Tensor m = make_state(SIGNED, n, 2, 1e-2f), v = make_state(UNSIGNED, n, 3, 1e-4f),
               t[3] = { w, m, v };
        const double *W = values(w);
        double *bound = keep((size_t)n * sizeof *bound);
        TWICE(adamw8bit(w, m, v, grad, usual, 768), w, m, v);
        for (int i = 0; i < n; i++)
            bound[i] = 0x1p-8 * fabs(W[i]) + 0x1p-8;
        for (int i = 0; i < 3; i++) {
            char text[64];
            snprintf(text, sizeof text, "8bit/%d-groups-%c", groups[k], "wmv"[i]);
            golden_check(text, t[i], i ? NULL : bound);
        }
        release();
    }
}

/* Groups whose gradients are all NaN, all infinite, or too large to square, and scales that are not
 * finite. Codes and scales equal those of the CPU. release() finds writes outside of the
 * tensors. */
TEST(test_not_finite)
{
    enum { N = 6 * GROUP };
    float *g = keep(N * sizeof *g);
    for (int i = 0; i < N; i++)
        g[i] = i < GROUP       ? NAN
               : i < 2 * GROUP ? INFINITY
               : i < 3 * GROUP ? 1e30f
               : i % 5         ? uniform(7, (size_t)i, -1, 1)
                               : -INFINITY;
    Tensor w = make_filled(F, 1, N, 1, -1, 1), grad = make(F, 1, N),
           m = make_state(SIGNED, N, 2, 1e-2f);
    Tensor v = make_state(UNSIGNED, N, 3, 1e-4f);
    const float *before = tensor_snapshot(w);
    uint8_t *bytes = tensor_snapshot(m);
    float *scale = (float *)(bytes + N);
    scale[4] = INFINITY, scale[5] = NAN;
    tensor_restore(m, bytes);
    put(grad, g);
    TWICE(adamw8bit(w, m, v, grad, usual, 768), w, m, v);
    const float *after = tensor_snapshot(w);
    for (int i = 0; i < N; i++)
        if (!isfinite(g[i]))
            assert_true(after[i] == before[i]);
    check_same_bytes("weights without gradients", after, before, 2 * GROUP * sizeof *after);
    bytes = tensor_snapshot(m);
    for (int i = 0; i < 2 * GROUP; i++)
        assert_int_equal(bytes[i], 127);
    golden_check("8bit/not-finite-m", m, NULL);
    golden_check("8bit/not-finite-v", v, NULL);
    release();
}

TEST(test_errors)
{
    Tensor w = make(F, 1, GROUP), half = make(F, 1, GROUP / 2), m = make_zeros(SIGNED, GROUP),
           v = make_zeros(UNSIGNED, GROUP);
    Tensor wide = make(F, 1, 2 * GROUP), odd = m, none = m;
    odd.cols = GROUP / 2, none.scale = NULL;
    DIES("adamw8bit: m is udynamic8/256; expected dynamic8/256", adamw8bit(w, v, v, w, usual, 0));
    DIES("adamw8bit: v is dynamic8/256; expected udynamic8/256", adamw8bit(w, m, m, w, usual, 0));
    DIES("adamw8bit: v is f32", adamw8bit(w, m, w, w, usual, 0));
    DIES("adamw8bit: m is (1, 256); expected (1, 512)", adamw8bit(wide, m, v, wide, usual, 0));
    DIES("adamw8bit: m is dynamic8/256 of (1, 128)", adamw8bit(half, odd, v, half, usual, 0));
    DIES("adamw8bit: m is dynamic8/256 without scales", adamw8bit(w, none, v, w, usual, 0));
    DIES("adamw8bit: w is dynamic8/256", adamw8bit(m, m, v, w, usual, 0));
    DIES("adamw: m is dynamic8/256", adamw(w, m, w, w, usual, 0));
    odd = m, odd.format.group = 128;
    DIES("m is dynamic8/128; expected groups of 256 for the dynamic maps",
         adamw8bit(w, odd, v, w, usual, 0));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
