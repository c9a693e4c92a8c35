/* Compares the three products of adapters with a double reference. A comment derives each bound.
 * Cases: A and B, ranges with gaps, every format of the wide tensor, ranks and shapes that fill no
 * tile. Columns outside of the ranges hold NaN and must not be read. */
#include "tests/test.h"
#include "tests/lora_shapes.h"

static const Format BF16_ = { BF16, 0 }, E4M3_ = { E4M3, 0 };

// clang-format off
static const Formats formats[] = {
    { "f32",            { F32 },  { F32 },  { F32 },  { F32 } },  { "bf16", { BF16 }, { BF16 }, { BF16 }, { BF16 } },
    { "bf16-f32-grads", { BF16 }, { BF16 }, { BF16 }, { F32 } },  { "e4m3", { E4M3 }, { BF16 }, { BF16 }, { BF16 } },
    { "e5m2",           { E5M2 }, { BF16 }, { BF16 }, { F32 } },  { "e4m3-f32", { E4M3 }, { F32 }, { F32 }, { F32 } },
};
// clang-format on

static const Shape shapes[] = {
    /* the largest that fits in a block's shared memory; then a larger one */
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
    { 40, 80, 768, false, 1, { { 0, 80 } } },
    { 9, 32, 800, false, 1, { { 0, 32 } } },
};
enum { FORMATS = sizeof formats / sizeof formats[0], SHAPES = sizeof shapes / sizeof shapes[0] };

static bool belongs(const Shape *s, int c)
{
    bool some = false;
    for (int j = 0; j < s->parts * s->rank; j++)
        some |= place(s, c, j) >= 0;
    return some;
}

/* Values of different sizes, so that FP8 needs its scale; NaN in columns outside of the ranges. */
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

static void check_narrow(const Formats *f, const Shape *s, LoraMatrix m, Tensor x)
{
    const float scale = 0.75f;
    Tensor xa = make(f->dense, s->N, s->parts * s->rank);
    Sums sums = start_sums(tensor_numel(xa), NULL, s->C);
    TWICE(lora_narrow(xa, x, m, scale), xa);
    add_products(&sums, 0, s, values(x), NULL, values(m.w), scale);
    check("lora_narrow", f, s, xa, sums.ref, sums.bound);
}

static void check_widen(const Formats *f, const Shape *s, LoraMatrix m, Tensor xa)
{
    Tensor y = make(f->dense, s->N, s->C), add = make_filled(f->dense, s->N, s->C, 5, -4, 4);
    const double *before = values(add);
    Sums sums = start_sums(tensor_numel(y), NULL, s->rank);
    TWICE(lora_widen(y, xa, m, NONE), y);
    add_products(&sums, 1, s, NULL, values(xa), values(m.w), 1);
    check("lora_widen", f, s, y, sums.ref, sums.bound);

    sums = start_sums(tensor_numel(y), before, s->rank);
    add_products(&sums, 1, s, NULL, values(xa), values(m.w), 1);
    TWICE(lora_widen(y, xa, m, add), y);
    check("lora_widen-add", f, s, y, sums.ref, sums.bound);
    TWICE(lora_widen(add, xa, m, add), add);
    check_same_bytes("lora_widen in place", tensor_snapshot(add), tensor_snapshot(y),
                     tensor_bytes(y));
    const double *after = values(y);
    for (size_t i = 0; i < tensor_numel(y); i++)
        if (!belongs(s, (int)(i % (size_t)s->C)) && after[i] != before[i])
            fail_msg("y[%zu] is %g in a column of no part, %g in add", i, after[i], before[i]);
}

static void check_dw(const Formats *f, const Shape *s, Tensor xa, Tensor x)
{
    LoraMatrix dm = make_matrix(s, f->dw, 6);
    Sums sums = start_sums(tensor_numel(dm.w), values(dm.w), s->N);
    TWICE(lora_dw(dm, xa, x), dm.w);
    add_products(&sums, 2, s, values(x), values(xa), NULL, 1);
    check("lora_dw", f, s, dm.w, sums.ref, sums.bound);
    EMPTY_IS_ZEROS(dm.w, lora_dw(dm, xa, x));
    lora_dw((LoraMatrix){ .is_b = dm.is_b, .num_projections = dm.num_projections }, xa,
            x); /* skipped */
}

TEST(test_products)
{
    for (int f = 0; f < FORMATS; f++)
        for (int i = 0; i < SHAPES; i++) {
            const Formats *format = &formats[f];
            const Shape *s = &shapes[i];
            LoraMatrix m = make_matrix(s, format->w, 1);
            Tensor xa = make_filled(format->dense, s->N, s->parts * s->rank, 2, -1, 1),
                   x = make_wide(s, format->x);
            check_narrow(format, s, m, x);
            check_widen(format, s, m, xa);
            check_dw(format, s, xa, x);
            release();
        }
}

/* Rows of x and tokens of xa must not be mixed up: with one-hot inputs every product is one
 * number. */
TEST(test_one_hot)
{
    const Shape *s = &shapes[3];
    const int P = s->parts * s->rank;
    LoraMatrix m = make_matrix(s, BF16_, 1);
    const double *w = values(m.w);
    Tensor x = make(BF16_, s->N, s->C), xa = make(BF16_, s->N, P);
    float *v = keep(tensor_numel(x) * sizeof *v);
    for (int n = 0; n < s->N; n++)
        v[n * s->C + 7 * n % s->C] = 1;
    put(x, v);
    lora_narrow(xa, x, m, 2);
    const double *found = values(xa);
    for (int n = 0; n < s->N; n++)
        for (int j = 0; j < P; j++) {
            const int at = place(s, 7 * n % s->C, j);
            const double expected = at >= 0 ? 2 * w[at] : 0;
            if (found[n * P + j] != expected)
                fail_msg("xa[%d,%d] is %g, expected %g", n, j, found[n * P + j], expected);
        }
    release();
}

TEST(test_errors)
{
    const Shape *s = &shapes[4];
    const int P = s->parts * s->rank;
    const LoraMatrix m = make_matrix(s, BF16_, 1);
    LoraMatrix overlapping = m, short_w = m, many = m;
    overlapping.projection[1].first = 271;
    short_w.w.rows--;
    many.num_projections = 4;
    const LoraMatrix a = { .w = make(BF16_, P, s->C), .num_projections = 2 };
    Tensor x = make_filled(BF16_, s->N, s->C, 2, -1, 1), xa = make_filled(BF16_, s->N, P, 3, -1, 1),
           y = make(E4M3_, s->N, s->C);
    Tensor groups = make((Format){ E4M3, 16 }, s->N, s->C), narrower = xa,
           f8 = make(E4M3_, s->N, P), at_x = xa, at_m = xa;
    narrower.cols--;
    at_x.data = x.data;
    at_m.data = m.w.data;
    DIES("part 1 begins at column 271", lora_narrow(xa, x, overlapping, 1));
    DIES("B is (399, 16); expected (400, 16)", lora_widen(x, xa, short_w, NONE));
    DIES("a B of 4 parts", lora_dw(many, xa, x));
    DIES("an A of 2 parts", lora_narrow(xa, x, a, 1));
    DIES("xa is (130, 31); expected (130, 32)", lora_dw(m, narrower, x));
    DIES("x is e4m3/16; expected f32, bf16 or FP8 with one scale", lora_narrow(xa, groups, m, 1));
    DIES("xa is e4m3; expected f32 or bf16", lora_narrow(f8, x, m, 1));
    DIES("y is e4m3; expected f32 or bf16", lora_widen(y, xa, m, NONE));
    DIES("add is e4m3; expected f32 or bf16", lora_widen(x, xa, m, y));
    DIES("there is no x", lora_dw(m, xa, (Tensor){ .rows = s->N, .cols = s->C, .format = BF16_ }));
    DIES("lora_narrow: xa has the memory of an input", lora_narrow(at_x, x, m, 1));
    DIES("lora_widen: y has the memory of an input", lora_widen(x, at_x, m, NONE));
    DIES("lora_dw: dm has the memory of an input", lora_dw(m, at_m, x));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
