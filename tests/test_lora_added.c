/* Compares operations that add an adapter's product to their input with a double reference, on CUDA
 * also with the CPU's record: saved tensors and outputs. A comment derives each bound. */
#include "tests/test.h"
#include "tests/lora_shapes.h"

static const Format BF16_ = { BF16, 0 };

/* x: format of the GEMM output; groups: saved separately in groups, else in place; exact: the
 * output is computed from the sums, not from saved values; turned: an FP8 output has its
 * transpose. */
typedef struct {
    const char *name;
    Format x, out;
    bool groups, exact, turned;
} AddCase;

/* The sums and their error bounds: in F32 before rounding; as the operation uses them; as they are
 * saved. */
typedef struct {
    double *x, *exact, *used, *saved;
} Added;

/* A back end may write the sum over x: one rounding. A group's largest value is at least 240 S,
 * within 2^-7, and values below 2^-6 S are 2^-9 S apart. */
static Added add_reference(const AddCase *k, const Shape *s, Tensor x, Tensor xa, LoraMatrix b)
{
    const size_t n = tensor_numel(x), C = (size_t)s->C;
    Sums sums = start_sums(n, values(x), s->rank);
    Added a = { .x = sums.ref,
                .exact = sums.bound,
                .used = keep(n * sizeof(double)),
                .saved = keep(n * sizeof(double)) };
    add_products(&sums, 1, s, NULL, values(xa), values(b.w), 1);
    for (size_t i = 0; i < n; i++)
        a.used[i] = a.exact[i] + unit_roundoff(k->x) * (fabs(a.x[i]) + a.exact[i]);
    for (size_t i = 0; i < n; i++) {
        double largest = 0;
        for (size_t j = i / 16 * 16; k->groups && j < i / 16 * 16 + 16 && j < i / C * C + C; j++)
            largest = fmax(largest, fabs(a.x[j]) + a.used[j]);
        a.saved[i] = !k->groups ? a.used[i]
                                : a.used[i] + 0x1p-4 * (fabs(a.x[i]) + a.used[i]) +
                                      0x1p-10 * 1.01 * largest / 240;
    }
    return a;
}

/* Checks saved values, in place or separate. */
static void check_saved(const AddCase *k, const Shape *s, const char *op, Tensor saved,
                        const Added *a)
{
    Formats f = { .name = k->name };
    const double *bound = a->exact;
    if (k->groups) {
        double *wider = keep(tensor_numel(saved) * sizeof *wider);
        /* check_close adds it */
        for (size_t i = 0; i < tensor_numel(saved); i++)
            wider[i] = a->saved[i] - 0x1p-4 * (fabs(a->x[i]) + a->used[i]);
        bound = wider;
    }
    check(op, &f, s, saved, a->x, bound);
}

static Tensor make_place(const AddCase *k, Tensor x)
{
    return k->groups ? make((Format){ E4M3, 16 }, x.rows, x.cols) : x;
}

// clang-format off
static const AddCase add_cases[] = {
    { "f32", { F32 }, { F32 }, false, false, false },   { "bf16", { BF16 }, { BF16 }, false, false, false },
    { "fp8", { BF16 }, { E4M3 }, false, false, true },  { "groups", { BF16 }, { E4M3 }, true, true, false },
    { "groups-turned", { BF16 }, { E4M3 }, true, true, true }, { "groups-saved", { BF16 }, { E4M3 }, true, false, false },
};
// clang-format on

/* C: twice the width of act. The product is for both halves or for one; ranks fill no product, or
 * exceed shared memory; more than 512 tokens. */
// clang-format off
static const Shape swiglu_shapes[] = {
    { 16, 64, 16, true, 2, { { 0, 32 }, { 32, 32 } } },        { 96, 544, 16, true, 2, { { 0, 272 }, { 272, 272 } } },
    { 48, 352, 6, true, 1, { { 176, 176 } } },                 { 528, 160, 20, true, 1, { { 0, 80 } } },
    { 32, 672, 256, true, 2, { { 0, 336 }, { 336, 336 } } },
};
// clang-format on

/* ref: silu(gate) * up. bound: its error bound, which uses that silu' lies between -0.1 and 1.1.
 * off: error bounds of x, or NULL. E is twice the sigmoid_error of test_fp8_operations.c, because
 * the gate has an error of its own. */
static void swiglu_reference(double *ref, double *bound, const Shape *s, const double *x,
                             const double *off)
{
    const int F = s->C / 2;
    for (int i = 0; i < s->N * F; i++) {
        const int gate = i / F * s->C + i % F, up = gate + F;
        const double g = x[gate], u = x[up], s1 = 1 / (1 + exp(-g)), eg = off ? off[gate] : 0,
                     eu = off ? off[up] : 0;
        const double E = 2 * ((1 - s1) * (2 + 1.173 * fabs(g)) * 2 + 5) * U24;
        ref[i] = g * s1 * u;
        bound[i] = 1.1 * eg * (fabs(u) + eu) + fabs(g * s1) * eu;
        bound[i] += (E + 4 * U24) * (fabs(ref[i]) + bound[i]) + 1e-36;
    }
}

static void check_act(const AddCase *k, const Shape *s, Tensor act, Tensor saved, const Added *a)
{
    Formats f = { .name = k->name };
    double *ref = keep(tensor_numel(act) * sizeof *ref),
           *bound = keep(tensor_numel(act) * sizeof *bound);
    const bool from_saved = !k->exact || !k->groups, fp8 = format_is_fp8(act.format);
    swiglu_reference(ref, bound, s, from_saved ? values(saved) : a->x, from_saved ? NULL : a->used);
    name("swiglu_added", &f, s);
    if (fp8)
        check_operand(label, act, ref, bound);
    else
        check_close(label, act, ref, bound);
    if (act.data_t)
        check_transposed(label, act);
    /* the CPU may have saved the neighbouring code */
    swiglu_reference(ref, bound, s, a->x, from_saved ? a->saved : a->used);
    if (fp8)
        golden_operand(label, act, ref, bound);
    else
        golden_check(label, act, bound);
}

static void swiglu_added_case(const AddCase *k, const Shape *s)
{
    const LoraProduct product = { make_filled(k->x, s->N, s->parts * s->rank, 2, -1, 1),
                                  make_matrix(s, k->x, 1) };
    Tensor wide = make_filled(k->x, s->N, s->C, 3, -2, 2), saved = make_place(k, wide);
    Tensor act = k->turned ? make_operand(k->out, s->N, s->C / 2) : make(k->out, s->N, s->C / 2);
    const Added a = add_reference(k, s, wide, product.xa, product.m);
    if (k->exact)
        TWICE(swiglu_forward(act, saved, wide, product, FROM_EXACT), act, saved, wide);
    else
        TWICE(swiglu_forward(act, saved, wide, product, FROM_SAVED), act, saved, wide);
    check_saved(k, s, "swiglu_added_saved", saved, &a);
    check_act(k, s, act, saved, &a);
    release();
}

TEST(test_swiglu_added)
{
    for (size_t k = 0; k < sizeof add_cases / sizeof add_cases[0]; k++)
        for (size_t s = 0; s < sizeof swiglu_shapes / sizeof swiglu_shapes[0]; s++)
            swiglu_added_case(&add_cases[k], &swiglu_shapes[s]);
}

/* ---- SwiGLU's backward: x is dact, out dgate_up; groups: of gate_up; exact: also writes act -- */

static const AddCase backward_cases[] = {
    { "f32", { F32 }, { F32 }, false, false, false },
    { "bf16", { BF16 }, { BF16 }, false, false, false },
    { "fp8", { BF16 }, { E5M2 }, false, false, false },
    { "groups", { BF16 }, { E5M2 }, true, false, false },
    { "groups-act", { BF16 }, { E5M2 }, true, true, false },
    { "groups-turned", { BF16 }, { E5M2 }, true, true, true },
    { "bf16-act", { BF16 }, { BF16 }, false, true, false },
};
static const Shape backward_shapes[] = {
    { 16, 64, 16, false, 1, { { 0, 64 } } },
    { 96, 544, 16, false, 1, { { 0, 544 } } },
    { 272, 80, 6, false, 1, { { 0, 80 } } },
    { 32, 336, 200, false, 1, { { 0, 336 } } },
};

/* t = 1 + g (1 - s) and the other factors as in test_fp8_operations.c, with a gradient d that has
 * its own error. */
static void backward_reference(double *ref, double *bound, double *act, double *act_bound,
                               const Shape *s, const double *x, const Added *a)
{
    for (int i = 0; i < s->N * s->C; i++) {
        const int gate = i / s->C * 2 * s->C + i % s->C, up = gate + s->C;
        const double g = x[gate], u = x[up], s1 = 1 / (1 + exp(-g)), d = a->x[i], off = a->used[i],
                     most = fabs(d) + off;
        const double E = ((1 - s1) * (2 + 1.173 * fabs(g)) * 2 + 5) * U24;
        const double t = 1 + g * (1 - s1),
                     bt = fabs(g) * (s1 * E + 3 * U24 * (1 - s1)) + U24 * (1 + fabs(t));
        ref[gate] = d * u * s1 * t;
        bound[gate] = off * fabs(u * s1 * t) +
                      most * fabs(u) * s1 * (fabs(t) * (E + 5 * U24) + bt * (1 + E)) + 1e-36;
        ref[up] = d * g * s1;
        bound[up] = off * fabs(g * s1) + most * fabs(g * s1) * (E + 4 * U24) + 1e-36;
        act[i] = g * s1 * u;
        act_bound[i] = fabs(act[i]) * (E + 4 * U24) + 1e-36;
    }
}

static void check_result(const AddCase *k, const Shape *s, const char *op, Tensor t,
                         const double *ref, const double *bound)
{
    const Formats f = { .name = k->name };
    if (!format_is_fp8(t.format)) {
        check(op, &f, s, t, ref, bound);
        return;
    }
    check_operand(name(op, &f, s), t, ref, bound);
    if (t.data_t)
        check_transposed(label, t);
    golden_operand(label, t, ref, bound);
}

static void backward_added_case(const AddCase *k, const Shape *s)
{
    const size_t n = (size_t)s->N * (size_t)s->C;
    const LoraProduct product = { make_filled(k->x, s->N, s->rank, 2, -1, 1),
                                  make_matrix(s, k->x, 1) };
    Tensor dact = make_filled(k->x, s->N, s->C, 3, -2, 2),
           plain = make_filled(k->x, s->N, 2 * s->C, 4, -4, 4), gate_up = plain;
    Tensor dgate_up =
        k->turned ? make_operand(k->out, s->N, 2 * s->C) : make(k->out, s->N, 2 * s->C);
    const Format act_format = format_is_fp8(k->out) ? (Format){ E4M3 } : k->out;
    Tensor act = k->exact ? make(act_format, s->N, s->C) : NONE;
    double *ref = keep(2 * n * sizeof *ref), *bound = keep(2 * n * sizeof *bound);
    double *act_ref = keep(n * sizeof *act_ref), *act_bound = keep(n * sizeof *act_bound), most = 0;
    if (k->groups)
        quantize(gate_up = make((Format){ E4M3, 16 }, s->N, 2 * s->C), plain);
    const Added a = add_reference(k, s, dact, product.xa, product.m);
    backward_reference(ref, bound, act_ref, act_bound, s, values(gate_up), &a);
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs(act_ref[i]));
    if (act.scale)
        device_put(act.scale, &(float){ (float)(most / 448) }, sizeof(float));
    TWICE(swiglu_backward(dgate_up, act, dact, product, gate_up), dgate_up, act, dact);
    check_result(k, s, "swiglu_backward_added", dgate_up, ref, bound);
    if (k->exact) {
        check_result(k, s, "swiglu_backward_added_act", act, act_ref, act_bound);
        const void *expected = tensor_snapshot(dgate_up);
        fill(dact, 3, -2, 2);
        swiglu_backward(dgate_up, NONE, dact, product, gate_up);
        check_same_bytes("without act", tensor_snapshot(dgate_up), expected,
                         tensor_bytes(dgate_up));
    }
    if (k->groups || !format_is_fp8(k->out)) {
        const void *expected = tensor_snapshot(dgate_up);
        dgate_up.data = gate_up.data;
        fill(dact, 3, -2, 2);
        swiglu_backward(dgate_up, act, dact, product, gate_up);
        check_same_bytes("in place", tensor_snapshot(dgate_up), expected, tensor_bytes(dgate_up));
    }
    release();
}

TEST(test_backward_added)
{
    for (size_t k = 0; k < sizeof backward_cases / sizeof backward_cases[0]; k++)
        for (size_t s = 0; s < sizeof backward_shapes / sizeof backward_shapes[0]; s++)
            backward_added_case(&backward_cases[k], &backward_shapes[s]);
}

/* ---- the rotation ---------------------------------------------------------------------------- */

/* With a clip, y is not x. The CUDA back end has a single pass for heads of 64 and 128. */
typedef struct {
    const char *name;
    int heads, kv_heads, width;
    float clip;
    Shape s;
} RopeShape;
static const RopeShape rope_shapes[] = {
    { "64", 2, 1, 64, 0, { 48, 256, 16, true, 3, { { 0, 128 }, { 128, 64 }, { 192, 64 } } } },
    { "128-qv", 3, 1, 128, 0, { 272, 640, 16, true, 2, { { 0, 384 }, { 512, 128 } } } },
    { "128-k-clip", 2, 2, 128, 1.5f, { 32, 768, 6, true, 1, { { 256, 256 } } } },
    { "256", 1, 1, 256, 0, { 16, 768, 200, true, 3, { { 0, 256 }, { 256, 256 }, { 512, 256 } } } },
    { "32", 2, 1, 32, 0, { 32, 128, 16, true, 3, { { 0, 64 }, { 64, 32 }, { 96, 32 } } } },
    { "64-part", 2, 1, 64, 0, { 16, 256, 16, true, 1, { { 32, 128 } } } },
};
static const AddCase rope_cases[] = {
    { "f32", { F32 }, { F32 }, false, false, false },
    { "bf16", { BF16 }, { BF16 }, false, false, false },
    { "groups", { BF16 }, { BF16 }, true, true, false },
    { "groups-saved", { BF16 }, { BF16 }, true, false, false },
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
    return (Attention){ .B = 2,
                        .T = T,
                        .H = r->heads,
                        .K = r->kv_heads,
                        .D = D,
                        .clip = r->clip,
                        .norm = { RMS_NORM, 1e-5f },
                        .rope = table.data };
}

/* Two products and a sum round. off: error of x; NULL: 0. */
static void rope_reference(double *ref, double *bound, const RopeShape *r, const double *x,
                           const double *off, const float *angles)
{
    const int S = r->s.C, D = r->width, turned = (r->heads + r->kv_heads) * D;
    for (int i = 0; i < r->s.N * S; i++)
        ref[i] = r->clip > 0 ? fmax(fmin(x[i], r->clip), -r->clip) : x[i],
        bound[i] = off ? off[i] : 0;
    for (int i = 0; i < r->s.N * S; i++) {
        const int half = i % S % D, at = i / S % (r->s.N / 2) * D + 2 * half, other = i + D / 2;
        if (i % S >= turned || half >= D / 2)
            continue;
        const double c = angles[at], s = angles[at + 1], u = ref[i], v = ref[other], bu = bound[i],
                     bv = bound[other];
        ref[i] = u * c - v * s, ref[other] = u * s + v * c;
        bound[i] = fabs(c) * bu + fabs(s) * bv + 3 * U24 * (fabs(u * c) + fabs(v * s));
        bound[other] = fabs(s) * bu + fabs(c) * bv + 3 * U24 * (fabs(u * s) + fabs(v * c));
    }
}

static void rope_added_case(const AddCase *k, const RopeShape *r)
{
    const Shape *s = &r->s;
    const Formats f = { .name = k->name };
    const LoraProduct product = { make_filled(k->x, s->N, s->parts * s->rank, 2, -1, 1),
                                  make_matrix(s, k->x, 1) };
    Tensor x = make_filled(k->x, s->N, s->C, 3, -2, 2), saved = make_place(k, x),
           y = r->clip > 0 ? make(k->x, s->N, s->C) : x;
    float *angles;
    const Attention a = rope_attention(r, &angles);
    const Added sums = add_reference(k, s, x, product.xa, product.m);
    double *ref = keep(tensor_numel(x) * sizeof *ref),
           *bound = keep(tensor_numel(x) * sizeof *bound);
    if (k->exact)
        TWICE(rope_forward(y, saved, NULL, x, product, NONE, NONE, a, FROM_EXACT), y, saved, x);
    else
        TWICE(rope_forward(y, saved, NULL, x, product, NONE, NONE, a, FROM_SAVED), y, saved, x);
    if (saved.data != y.data)
        check_saved(k, s, "rope_added_saved", saved, &sums);
    const bool from_saved = !k->exact && saved.data != y.data;
    rope_reference(ref, bound, r, from_saved ? values(saved) : sums.x,
                   from_saved ? NULL : sums.used, angles);
    check_close(name("rope_added", &f, s), y, ref, bound);
    rope_reference(ref, bound, r, sums.x, from_saved ? sums.saved : sums.used, angles);
    golden_check(label, y, bound);
    release();
}

/* Saving and rotating in one pass equals saving and then rotating. The same holds for adding, if
 * there are norms. */
TEST(test_rope_apart)
{
    for (size_t i = 0; i < sizeof rope_shapes / sizeof rope_shapes[0]; i++) {
        const RopeShape *r = &rope_shapes[i];
        const Shape *s = &r->s;
        float *angles;
        const Attention a = rope_attention(r, &angles);
        Tensor x = make_filled(BF16_, s->N, s->C, 3, -2, 2), y = make(BF16_, s->N, s->C),
               z = make(BF16_, s->N, s->C);
        Tensor saved = make((Format){ E4M3, 16 }, s->N, s->C),
               expected = make(saved.format, s->N, s->C);
        Tensor w = make_filled(BF16_, 1, r->width, 4, 0.5f, 1.5f),
               stats = make_f32(s->N, r->heads + r->kv_heads);
        const LoraProduct product = { make_filled(BF16_, s->N, s->parts * s->rank, 2, -1, 1),
                                      make_matrix(s, BF16_, 1) };
        quantize(expected, x);
        rope_forward(z, x, NULL, x, NO_PRODUCT, NONE, NONE, a, FROM_SAVED);
        TWICE(rope_forward(y, saved, NULL, x, NO_PRODUCT, NONE, NONE, a, FROM_EXACT), y, saved);
        check_same_bytes(r->name, tensor_snapshot(saved), tensor_snapshot(expected),
                         tensor_bytes(saved));
        check_same_bytes(r->name, tensor_snapshot(y), tensor_snapshot(z), tensor_bytes(y));
        rope_forward(x, saved, NULL, x, NO_PRODUCT, NONE, NONE, a, FROM_EXACT);
        check_same_bytes("in place", tensor_snapshot(x), tensor_snapshot(z), tensor_bytes(z));
        fill(x, 3, -2, 2);
        lora_widen(y, product.xa, product.m, x);
        quantize(expected, y);
        rope_forward(z, expected, stats.data, y, NO_PRODUCT, w, w, a, FROM_EXACT);
        rope_forward(x, saved, stats.data, x, product, w, w, a, FROM_EXACT);
        check_same_bytes("with norms", tensor_snapshot(x), tensor_snapshot(z), tensor_bytes(z));
        check_same_bytes("with norms", tensor_snapshot(saved), tensor_snapshot(expected),
                         tensor_bytes(saved));
        release();
    }
}

TEST(test_rope_added)
{
    for (size_t k = 0; k < sizeof rope_cases / sizeof rope_cases[0]; k++)
        for (size_t r = 0; r < sizeof rope_shapes / sizeof rope_shapes[0]; r++)
            rope_added_case(&rope_cases[k], &rope_shapes[r]);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
