/* The three products of adapters against a double reference, within bounds derived next to them: both kinds of narrow matrix,
 * parts with gaps, every format of the wide tensor, ranks and shapes that fill no tile. Columns outside the parts hold NaN,
 * which nothing may read. And the operations that add such a product to what they read. */
#include "tests/fp8.h"

static const Format BF16_ = { BF16, 0 }, E4M3_ = { E4M3, 0 };

/* Of x, of low and y and add, of the matrix, of its gradient. */
typedef struct { const char *name; Format x, dense, w, dw; } Formats;
static const Formats formats[] = {
    { "f32",            { F32 },  { F32 },  { F32 },  { F32 } },  { "bf16", { BF16 }, { BF16 }, { BF16 }, { BF16 } },
    { "bf16-f32-grads", { BF16 }, { BF16 }, { BF16 }, { F32 } },  { "e4m3", { E4M3 }, { BF16 }, { BF16 }, { BF16 } },
    { "e5m2",           { E5M2 }, { BF16 }, { BF16 }, { F32 } },  { "e4m3-f32", { E4M3 }, { F32 }, { F32 }, { F32 } },
};

typedef struct { int N, C, rank; bool is_b; int parts; struct { int first, width; } part[LOW_RANK_PARTS]; } Shape;
static const Shape shapes[] = {
    { 1, 16, 1, false, 1, { { 0, 16 } } },
    { 5, 24, 3, false, 1, { { 0, 24 } } },
    { 5, 24, 3, true, 2, { { 1, 7 }, { 11, 9 } } },
    { 70, 208, 16, true, 3, { { 16, 64 }, { 96, 48 }, { 160, 32 } } },
    { 130, 400, 16, true, 2, { { 0, 272 }, { 272, 128 } } },
    { 300, 528, 48, false, 1, { { 0, 528 } } },
    { 1100, 144, 64, true, 1, { { 0, 144 } } },
    { 67, 1040, 80, false, 1, { { 0, 1040 } } },
    { 33, 600, 70, true, 3, { { 0, 200 }, { 200, 200 }, { 400, 200 } } },
    { 40, 96, 256, true, 3, { { 0, 32 }, { 32, 32 }, { 64, 32 } } },
    { 40, 80, 768, false, 1, { { 0, 80 } } },           /* all that a block's shared memory holds; then more */
    { 9, 32, 800, false, 1, { { 0, 32 } } },
};
enum { FORMATS = sizeof formats / sizeof formats[0], SHAPES = sizeof shapes / sizeof shapes[0] };

static char label[96];
static const char *name(const char *op, const Formats *f, const Shape *s)
{
    snprintf(label, sizeof label, "%s/%s/%dx%d-%d%s%d", op, f->name, s->N, s->C, s->rank, s->is_b ? "b" : "a", s->parts);
    return label;
}

static void check(const char *op, const Formats *f, const Shape *s, Tensor t, const double *ref, const double *bound)
{
    check_close(name(op, f, s), t, ref, bound);
    golden_check(label, t, bound);
}

static LowRank make_matrix(const Shape *s, Format f, uint64_t seed)
{
    LowRank m = { .is_b = s->is_b, .num_parts = s->parts };
    int rows = 0;
    for (int i = 0; i < s->parts; i++) {
        m.part[i].first = s->part[i].first, m.part[i].width = s->part[i].width;
        rows += s->part[i].width;
    }
    m.w = s->is_b ? make_filled(f, rows, s->rank, seed, -1, 1) : make_filled(f, s->rank, s->C, seed, -1, 1);
    return m;
}

/* Where the matrix has what columns c and j share; -1: nothing. */
static int place(const Shape *s, int c, int j)
{
    if (!s->is_b)
        return j * s->C + c;
    for (int i = 0, row = 0; i < s->parts; row += s->part[i++].width)
        if (c >= s->part[i].first && c < s->part[i].first + s->part[i].width && j / s->rank == i)
            return (row + c - s->part[i].first) * s->rank + j % s->rank;
    return -1;
}

static bool belongs(const Shape *s, int c)
{
    bool some = false;
    for (int j = 0; j < s->parts * s->rank; j++)
        some |= place(s, c, j) >= 0;
    return some;
}

/* Uneven, so that FP8 needs its scale; NaN in the columns that belong to no part. */
static Tensor make_wide(const Shape *s, Format f)
{
    Tensor x = make(f, s->N, s->C), source = make_f32(s->N, s->C);
    float *v = keep(tensor_numel(x) * sizeof *v);
    for (size_t i = 0; i < tensor_numel(x); i++)
        v[i] = belongs(s, (int)(i % (size_t)s->C)) ? uniform(3, i, -3, 5) : NAN;
    put(source, v);
    quantize(x, source);
    return x;
}

/* Element i of a result: a sum of `terms` products in F32, each at most 1 u off by its factors' decoding, in any order; a factor
 * of 2 covers tensor cores, which cut where the others round. */
typedef struct { double *ref, *bound; int terms; } Sums;

static Sums start_sums(size_t n, const double *start, int terms)
{
    Sums s = { keep(n * sizeof *s.ref), keep(n * sizeof *s.bound), terms };
    for (size_t i = 0; start && i < n; i++)
        s.ref[i] = start[i], s.bound[i] = 2 * (terms + 4) * U24 * fabs(start[i]);
    return s;
}

static void add_product(Sums *s, int i, double a, double b)
{
    s->ref[i] += a * b;
    s->bound[i] += 2 * (s->terms + 4) * U24 * fabs(a * b);
}

/* which: 0: low = scale x w; 1: y += low wT; 2: dm += lowT x */
static void add_products(Sums *sums, int which, const Shape *s, const double *x, const double *low, const double *w, double scale)
{
    const int P = s->parts * s->rank;
    for (int c = 0; c < s->C; c++)
        for (int j = 0; j < P; j++) {
            const int at = place(s, c, j);
            for (int n = 0; n < s->N && at >= 0; n++)
                if (which == 0)
                    add_product(sums, n * P + j, scale * x[n * s->C + c], w[at]);
                else if (which == 1)
                    add_product(sums, n * s->C + c, low[n * P + j], w[at]);
                else
                    add_product(sums, at, low[n * P + j], x[n * s->C + c]);
        }
}

static void check_narrow(const Formats *f, const Shape *s, LowRank m, Tensor x)
{
    const float scale = 0.75f;
    Tensor low = make(f->dense, s->N, s->parts * s->rank);
    Sums sums = start_sums(tensor_numel(low), NULL, s->C);
    TWICE(lora_narrow(low, x, m, scale), low);
    add_products(&sums, 0, s, values(x), NULL, values(m.w), scale);
    check("lora_narrow", f, s, low, sums.ref, sums.bound);
}

static void check_widen(const Formats *f, const Shape *s, LowRank m, Tensor low)
{
    Tensor y = make(f->dense, s->N, s->C), add = make_filled(f->dense, s->N, s->C, 5, -4, 4);
    const double *before = values(add);
    Sums sums = start_sums(tensor_numel(y), NULL, s->rank);
    TWICE(lora_widen(y, low, m, NONE), y);
    add_products(&sums, 1, s, NULL, values(low), values(m.w), 1);
    check("lora_widen", f, s, y, sums.ref, sums.bound);

    sums = start_sums(tensor_numel(y), before, s->rank);
    add_products(&sums, 1, s, NULL, values(low), values(m.w), 1);
    TWICE(lora_widen(y, low, m, add), y);
    check("lora_widen-add", f, s, y, sums.ref, sums.bound);
    TWICE(lora_widen(add, low, m, add), add);
    check_same_bytes("lora_widen in place", tensor_snapshot(add), tensor_snapshot(y), tensor_bytes(y));
    const double *after = values(y);
    for (size_t i = 0; i < tensor_numel(y); i++)
        if (!belongs(s, (int)(i % (size_t)s->C)) && after[i] != before[i])
            fail_msg("y[%zu] is %g in a column of no part, %g in add", i, after[i], before[i]);
}

static void check_dw(const Formats *f, const Shape *s, Tensor low, Tensor x)
{
    LowRank dm = make_matrix(s, f->dw, 6);
    Sums sums = start_sums(tensor_numel(dm.w), values(dm.w), s->N);
    TWICE(lora_dw(dm, low, x), dm.w);
    add_products(&sums, 2, s, values(x), values(low), NULL, 1);
    check("lora_dw", f, s, dm.w, sums.ref, sums.bound);
    lora_dw((LowRank){ .is_b = dm.is_b, .num_parts = dm.num_parts }, low, x);       /* not wanted */
}

static void test_products(void **state)
{
    (void)state;
    for (int f = 0; f < FORMATS; f++)
        for (int i = 0; i < SHAPES; i++) {
            const Formats *format = &formats[f];
            const Shape *s = &shapes[i];
            LowRank m = make_matrix(s, format->w, 1);
            Tensor low = make_filled(format->dense, s->N, s->parts * s->rank, 2, -1, 1), x = make_wide(s, format->x);
            check_narrow(format, s, m, x);
            check_widen(format, s, m, low);
            check_dw(format, s, low, x);
            release();
        }
}

/* No row of x, and no token of low, may be taken for another's: of one-hot inputs every product is one number. */
static void test_one_hot(void **state)
{
    (void)state;
    const Shape *s = &shapes[3];
    const int P = s->parts * s->rank;
    LowRank m = make_matrix(s, BF16_, 1);
    const double *w = values(m.w);
    Tensor x = make(BF16_, s->N, s->C), low = make(BF16_, s->N, P);
    float *v = keep(tensor_numel(x) * sizeof *v);
    for (int n = 0; n < s->N; n++)
        v[n * s->C + 7 * n % s->C] = 1;
    put(x, v);
    lora_narrow(low, x, m, 2);
    const double *found = values(low);
    for (int n = 0; n < s->N; n++)
        for (int j = 0; j < P; j++) {
            const int at = place(s, 7 * n % s->C, j);
            const double expected = at >= 0 ? 2 * w[at] : 0;
            if (found[n * P + j] != expected)
                fail_msg("low[%d,%d] is %g, expected %g", n, j, found[n * P + j], expected);
        }
    release();
}

/* ---- operations that add a product to what they read --------------------------------------------------------- */

/* x: of what a GEMM wrote; saved apart from it in groups, or in its place; exact: the output is of the sums, not of what was saved;
 * turned: an FP8 output has its transpose. */
typedef struct { const char *name; Format x, out; bool groups, exact, turned; } AddCase;

/* The sums, and how far off they may be: in F32, before they are rounded; as an operation goes on with them; as saved. */
typedef struct { double *x, *exact, *used, *saved; } Added;

/* A back end may write the sum over x: one rounding. A group's largest value is 448 S at most, with S rounded up to 8 bits, and
 * values below 2^-6 S lie 2^-9 S apart. */
static Added add_reference(const AddCase *k, const Shape *s, Tensor x, Tensor low, LowRank b)
{
    const size_t n = tensor_numel(x), C = (size_t)s->C;
    Sums sums = start_sums(n, values(x), s->rank);
    Added a = { .x = sums.ref, .exact = sums.bound, .used = keep(n * sizeof(double)), .saved = keep(n * sizeof(double)) };
    add_products(&sums, 1, s, NULL, values(low), values(b.w), 1);
    for (size_t i = 0; i < n; i++)
        a.used[i] = a.exact[i] + unit_roundoff(k->x) * (fabs(a.x[i]) + a.exact[i]);
    for (size_t i = 0; i < n; i++) {
        double largest = 0;
        for (size_t j = i / 16 * 16; k->groups && j < i / 16 * 16 + 16 && j < i / C * C + C; j++)
            largest = fmax(largest, fabs(a.x[j]) + a.used[j]);
        a.saved[i] = !k->groups ? a.used[i] : a.used[i] + 0x1p-4 * (fabs(a.x[i]) + a.used[i]) + 0x1p-10 * 1.01 * largest / 448;
    }
    return a;
}

/* saved, in its place or apart. */
static void check_saved(const AddCase *k, const Shape *s, const char *op, Tensor saved, const Added *a)
{
    Formats f = { .name = k->name };
    const double *bound = a->exact;
    if (k->groups) {
        double *wider = keep(tensor_numel(saved) * sizeof *wider);
        for (size_t i = 0; i < tensor_numel(saved); i++)
            wider[i] = a->saved[i] - 0x1p-4 * (fabs(a->x[i]) + a->used[i]);         /* which check_close adds */
        bound = wider;
    }
    check(op, &f, s, saved, a->x, bound);
}

static Tensor make_place(const AddCase *k, Tensor x)
{
    return k->groups ? make((Format){ E4M3, 16 }, x.rows, x.cols) : x;
}

static const AddCase add_cases[] = {
    { "f32", { F32 }, { F32 }, false, false, false },   { "bf16", { BF16 }, { BF16 }, false, false, false },
    { "fp8", { BF16 }, { E4M3 }, false, false, true },  { "groups", { BF16 }, { E4M3 }, true, true, false },
    { "groups-turned", { BF16 }, { E4M3 }, true, true, true }, { "groups-saved", { BF16 }, { E4M3 }, true, false, false },
};

/* C: twice the width of act. Both halves, one, ranks that fill no product, and of which shared memory holds a part; more than 512
 * tokens. */
static const Shape swiglu_shapes[] = {
    { 16, 64, 16, true, 2, { { 0, 32 }, { 32, 32 } } },        { 96, 544, 16, true, 2, { { 0, 272 }, { 272, 272 } } },
    { 48, 352, 6, true, 1, { { 176, 176 } } },                 { 528, 160, 20, true, 1, { { 0, 80 } } },
    { 32, 672, 256, true, 2, { { 0, 336 }, { 336, 336 } } },
};

/* silu' lies between -0.1 and 1.1. The sigmoid's error E: sigmoid_error of test_fp8_operations.c, of a gate that is itself off. */
static void swiglu_reference(double *ref, double *bound, const Shape *s, const double *x, const double *off)
{
    const int F = s->C / 2;
    for (int i = 0; i < s->N * F; i++) {
        const int gate = i / F * s->C + i % F, up = gate + F;
        const double g = x[gate], u = x[up], s1 = 1 / (1 + exp(-g)), eg = off ? off[gate] : 0, eu = off ? off[up] : 0;
        const double E = 2 * ((1 - s1) * (2 + 1.173 * fabs(g)) * 2 + 5) * U24;
        ref[i] = g * s1 * u;
        bound[i] = 1.1 * eg * (fabs(u) + eu) + fabs(g * s1) * eu;
        bound[i] += (E + 4 * U24) * (fabs(ref[i]) + bound[i]) + 1e-36;
    }
}

static void check_act(const AddCase *k, const Shape *s, Tensor act, Tensor saved, const Added *a)
{
    Formats f = { .name = k->name };
    double *ref = keep(tensor_numel(act) * sizeof *ref), *bound = keep(tensor_numel(act) * sizeof *bound);
    const bool from_saved = !k->exact || !k->groups, fp8 = format_is_fp8(act.format);
    swiglu_reference(ref, bound, s, from_saved ? values(saved) : a->x, from_saved ? NULL : a->used);
    name("swiglu_added", &f, s);
    if (fp8)
        check_operand(label, act, ref, bound);
    else
        check_close(label, act, ref, bound);
    if (act.data_t)
        check_transposed(label, act);
    swiglu_reference(ref, bound, s, a->x, from_saved ? a->saved : a->used);         /* the CPU may have saved its neighbour */
    if (fp8)
        golden_operand(label, act, ref, bound);
    else
        golden_check(label, act, bound);
}

static void swiglu_added_case(const AddCase *k, const Shape *s)
{
    const LowProduct product = { make_filled(k->x, s->N, s->parts * s->rank, 2, -1, 1), make_matrix(s, k->x, 1) };
    Tensor wide = make_filled(k->x, s->N, s->C, 3, -2, 2), saved = make_place(k, wide);
    Tensor act = k->turned ? make_operand(k->out, s->N, s->C / 2) : make(k->out, s->N, s->C / 2);
    const Added a = add_reference(k, s, wide, product.low, product.b);
    if (k->exact)
        TWICE(swiglu_forward_exact(act, saved, wide, product), act, saved, wide);
    else
        TWICE(swiglu_forward(act, saved, wide, product), act, saved, wide);
    check_saved(k, s, "swiglu_added_saved", saved, &a);
    check_act(k, s, act, saved, &a);
    release();
}

static void test_swiglu_added(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof add_cases / sizeof add_cases[0]; k++)
        for (size_t s = 0; s < sizeof swiglu_shapes / sizeof swiglu_shapes[0]; s++)
            swiglu_added_case(&add_cases[k], &swiglu_shapes[s]);
}

/* clip: then y is not x. Heads of 64 and 128 are those of the CUDA back end's one pass. */
typedef struct { const char *name; int heads, kv_heads, width; float clip; Shape s; } RopeShape;
static const RopeShape rope_shapes[] = {
    { "64", 2, 1, 64, 0, { 48, 256, 16, true, 3, { { 0, 128 }, { 128, 64 }, { 192, 64 } } } },
    { "128-qv", 3, 1, 128, 0, { 272, 640, 16, true, 2, { { 0, 384 }, { 512, 128 } } } },
    { "128-k-clip", 2, 2, 128, 1.5f, { 32, 768, 6, true, 1, { { 256, 256 } } } },
    { "256", 1, 1, 256, 0, { 16, 768, 200, true, 3, { { 0, 256 }, { 256, 256 }, { 512, 256 } } } },
    { "32", 2, 1, 32, 0, { 32, 128, 16, true, 3, { { 0, 64 }, { 64, 32 }, { 96, 32 } } } },
    { "64-part", 2, 1, 64, 0, { 16, 256, 16, true, 1, { { 32, 128 } } } },
};
static const AddCase rope_cases[] = {
    { "f32", { F32 }, { F32 }, false, false, false },   { "bf16", { BF16 }, { BF16 }, false, false, false },
    { "groups", { BF16 }, { BF16 }, true, true, false }, { "groups-saved", { BF16 }, { BF16 }, true, false, false },
};

static Attention rope_attention(const RopeShape *r, float **angles)
{
    const int T = r->s.N / 2, D = r->width;
    Tensor table = make_f32(T, D);
    *angles = keep(tensor_numel(table) * sizeof **angles);
    for (int i = 0; i < T * D / 2; i++) {
        const double angle = i / (D / 2) * pow(100, -2.0 * (i % (D / 2)) / D);
        (*angles)[2 * i] = (float)cos(angle), (*angles)[2 * i + 1] = (float)sin(angle);
    }
    put(table, *angles);
    return (Attention){ .B = 2, .T = T, .H = r->heads, .K = r->kv_heads, .D = D, .clip = r->clip, .norm = { RMS_NORM, 1e-5f },
                        .rope = table.data };
}

/* Two products and a sum round. off: what x may err; NULL: nothing. */
static void rope_reference(double *ref, double *bound, const RopeShape *r, const double *x, const double *off, const float *angles)
{
    const int S = r->s.C, D = r->width, turned = (r->heads + r->kv_heads) * D;
    for (int i = 0; i < r->s.N * S; i++)
        ref[i] = r->clip > 0 ? fmax(fmin(x[i], r->clip), -r->clip) : x[i], bound[i] = off ? off[i] : 0;
    for (int i = 0; i < r->s.N * S; i++) {
        const int half = i % S % D, at = i / S % (r->s.N / 2) * D + 2 * half, other = i + D / 2;
        if (i % S >= turned || half >= D / 2)
            continue;
        const double c = angles[at], s = angles[at + 1], u = ref[i], v = ref[other], bu = bound[i], bv = bound[other];
        ref[i] = u * c - v * s, ref[other] = u * s + v * c;
        bound[i] = fabs(c) * bu + fabs(s) * bv + 3 * U24 * (fabs(u * c) + fabs(v * s));
        bound[other] = fabs(s) * bu + fabs(c) * bv + 3 * U24 * (fabs(u * s) + fabs(v * c));
    }
}

static void rope_added_case(const AddCase *k, const RopeShape *r)
{
    const Shape *s = &r->s;
    const Formats f = { .name = k->name };
    const LowProduct product = { make_filled(k->x, s->N, s->parts * s->rank, 2, -1, 1), make_matrix(s, k->x, 1) };
    Tensor x = make_filled(k->x, s->N, s->C, 3, -2, 2), saved = make_place(k, x), y = r->clip > 0 ? make(k->x, s->N, s->C) : x;
    float *angles;
    const Attention a = rope_attention(r, &angles);
    const Added sums = add_reference(k, s, x, product.low, product.b);
    double *ref = keep(tensor_numel(x) * sizeof *ref), *bound = keep(tensor_numel(x) * sizeof *bound);
    if (k->exact)
        TWICE(rope_forward_exact(y, saved, NULL, x, product, NONE, NONE, a), y, saved, x);
    else
        TWICE(rope_forward(y, saved, NULL, x, product, NONE, NONE, a), y, saved, x);
    if (saved.data != y.data)
        check_saved(k, s, "rope_added_saved", saved, &sums);
    const bool from_saved = !k->exact && saved.data != y.data;
    rope_reference(ref, bound, r, from_saved ? values(saved) : sums.x, from_saved ? NULL : sums.used, angles);
    check_close(name("rope_added", &f, s), y, ref, bound);
    rope_reference(ref, bound, r, sums.x, from_saved ? sums.saved : sums.used, angles);
    golden_check(label, y, bound);
    release();
}

/* Saving and turning in one go is both, one behind the other; so is adding where there are norms. */
static void test_rope_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rope_shapes / sizeof rope_shapes[0]; i++) {
        const RopeShape *r = &rope_shapes[i];
        const Shape *s = &r->s;
        float *angles;
        const Attention a = rope_attention(r, &angles);
        Tensor x = make_filled(BF16_, s->N, s->C, 3, -2, 2), y = make(BF16_, s->N, s->C), z = make(BF16_, s->N, s->C);
        Tensor saved = make((Format){ E4M3, 16 }, s->N, s->C), expected = make(saved.format, s->N, s->C);
        Tensor w = make_filled(BF16_, 1, r->width, 4, 0.5f, 1.5f), stats = make_f32(s->N, r->heads + r->kv_heads);
        const LowProduct product = { make_filled(BF16_, s->N, s->parts * s->rank, 2, -1, 1), make_matrix(s, BF16_, 1) };
        quantize(expected, x);
        rope_forward(z, x, NULL, x, NO_PRODUCT, NONE, NONE, a);
        TWICE(rope_forward_exact(y, saved, NULL, x, NO_PRODUCT, NONE, NONE, a), y, saved);
        check_same_bytes(r->name, tensor_snapshot(saved), tensor_snapshot(expected), tensor_bytes(saved));
        check_same_bytes(r->name, tensor_snapshot(y), tensor_snapshot(z), tensor_bytes(y));
        rope_forward_exact(x, saved, NULL, x, NO_PRODUCT, NONE, NONE, a);
        check_same_bytes("in place", tensor_snapshot(x), tensor_snapshot(z), tensor_bytes(z));
        fill(x, 3, -2, 2);
        lora_widen(y, product.low, product.b, x);
        quantize(expected, y);
        rope_forward_exact(z, expected, stats.data, y, NO_PRODUCT, w, w, a);
        rope_forward_exact(x, saved, stats.data, x, product, w, w, a);
        check_same_bytes("with norms", tensor_snapshot(x), tensor_snapshot(z), tensor_bytes(z));
        check_same_bytes("with norms", tensor_snapshot(saved), tensor_snapshot(expected), tensor_bytes(saved));
        release();
    }
}

static void test_rope_added(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof rope_cases / sizeof rope_cases[0]; k++)
        for (size_t r = 0; r < sizeof rope_shapes / sizeof rope_shapes[0]; r++)
            rope_added_case(&rope_cases[k], &rope_shapes[r]);
}

static void test_errors(void **state)
{
    (void)state;
    const Shape *s = &shapes[4];
    const int P = s->parts * s->rank;
    const LowRank m = make_matrix(s, BF16_, 1);
    LowRank overlapping = m, short_w = m, many = m;
    overlapping.part[1].first = 271;
    short_w.w.rows--;
    many.num_parts = 4;
    const LowRank a = { .w = make(BF16_, P, s->C), .num_parts = 2 };
    Tensor x = make_filled(BF16_, s->N, s->C, 2, -1, 1), low = make_filled(BF16_, s->N, P, 3, -1, 1), y = make(E4M3_, s->N, s->C);
    Tensor groups = make((Format){ E4M3, 16 }, s->N, s->C), narrower = low, f8 = make(E4M3_, s->N, P);
    narrower.cols--;
    DIES("part 1 has columns from 271 on", lora_narrow(low, x, overlapping, 1));
    DIES("B is (399, 16); expected (400, 16)", lora_widen(x, low, short_w, NONE));
    DIES("a B of 4 parts", lora_dw(many, low, x));
    DIES("an A of 2 parts", lora_narrow(low, x, a, 1));
    DIES("the low tensor is (130, 31); expected (130, 32)", lora_dw(m, narrower, x));
    DIES("x is e4m3/16; expected f32, bf16 or FP8 with one scale", lora_narrow(low, groups, m, 1));
    DIES("low tensor is e4m3; expected f32 or bf16", lora_narrow(f8, x, m, 1));
    DIES("y is e4m3; expected f32 or bf16", lora_widen(y, low, m, NONE));
    DIES("add is e4m3; expected f32 or bf16", lora_widen(x, low, m, y));
    DIES("there is no x", lora_dw(m, low, (Tensor){ .rows = s->N, .cols = s->C, .format = BF16_ }));
    release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),  cmocka_unit_test(test_one_hot),   cmocka_unit_test(test_swiglu_added),
        cmocka_unit_test(test_rope_added), cmocka_unit_test(test_rope_apart), cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, start_device, NULL);
}
