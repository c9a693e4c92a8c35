/* Compares the SwiGLU of experts, alone and together with a grouped GEMM, with double precision. */
#include "tests/test.h"
#include "tests/expert_tensors.h"

static const Format H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 }, E16 = { E4M3, 16 };

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

/* Results and error bounds: act (R,F), dgate_up (R,2F), dweight (R). */
typedef struct {
    double *act, *ba, *d, *bd, *dweight, *bw;
} Swiglu;

/* Relative error of s = 1/(1+e^-g), as in test_fp8_operations. */
static double sigmoid_error(double g, double s)
{
    return ((1 - s) * (2 + 1.173 * fabs(g)) * 2 + 4 + 1) * U24;
}

/* Computes the rows of experts. bx, bdact: errors of gate_up and dact, or NULL; dact may be NULL.
 * The derivatives of act are u s t, at most 1.1 |u|, for gate, and g s for up. t = 1 + g (1-s) has
 * an error of |g| (s E + 3 u (1-s)) and u of its terms. Each other product has an error of u. If
 * e^-g overflows F32, s is 0 instead of less than 1e-38. */
static Swiglu swiglu_reference(const double *gate_up, const double *bx, const double *dact,
                               const double *bdact, int width, const Routed *g)
{
    const size_t n = (size_t)g->rows * (size_t)width;
    Swiglu r = { doubles(n),
                 doubles(n),
                 doubles(2 * n),
                 doubles(2 * n),
                 doubles((size_t)g->rows),
                 doubles((size_t)g->rows) };
    for (size_t i = 0; i < n; i++) {
        const size_t row = i / (size_t)width, gate = i + row * (size_t)width,
                     up = gate + (size_t)width;
        if ((int)row >= g->used || g->host.assignment[row] < 0)
            continue;
        const double weight = g->host.weight[g->host.assignment[row]], x = gate_up[gate],
                     u = gate_up[up], s = 1 / (1 + exp(-x)), E = sigmoid_error(x, s),
                     ex = bx ? bx[gate] : 0, eu = bx ? bx[up] : 0;
        r.act[i] = weight * x * s * u;
        r.ba[i] = fabs(r.act[i]) * (E + 5 * U24) + 1e-36 +
                  weight * (1.1 * ex * (fabs(u) + eu) + fabs(x * s) * eu) * (1 + 0x1p-10);
        if (!dact)
            continue;
        const double D = dact[i], eD = bdact ? bdact[i] : 0, size = fabs(D) + eD, W = weight,
                     t = 1 + x * (1 - s),
                     bt = fabs(x) * (s * E + 3 * U24 * (1 - s)) + U24 * (1 + fabs(t));
        r.d[gate] = D * W * u * s * t;
        r.bd[gate] =
            W * fabs(u) * s * (size * (fabs(t) * (E + 6 * U24) + bt * (1 + E)) + eD * fabs(t)) +
            1e-36;
        r.d[up] = D * W * x * s;
        r.bd[up] = W * fabs(x * s) * (size * (E + 5 * U24) + eD) + 1e-36;
        r.dweight[row] += D * x * s * u;
        r.bw[row] += fabs(x * s * u) * (size * (E + (width + 5) * U24) + eD) + 1e-36;
    }
    return r;
}

/* The saved values equal those of quantize. */
static void check_gate_up(Tensor gate_up, Tensor wide, const Routed *g)
{
    Tensor expected = make(gate_up.format, g->used, gate_up.cols);
    quantize(expected, in_use(wide, g));
    check_same_bytes("saved", tensor_snapshot(in_use(gate_up, g)), tensor_snapshot(expected),
                     tensor_bytes(expected));
    check_not_written("saved", gate_up, g);
}

/* The dweight of assignments; padding has none. */
static void check_dweight(const char *what, Tensor dweight, const Swiglu *r, const Routed *g)
{
    const size_t n = (size_t)(g->host.tokens * g->host.top_k);
    float *found = keep((size_t)g->rows * sizeof *found), *sorted = keep(n * sizeof *sorted);
    double *ref = doubles(n), *bound = doubles(n);
    Tensor t = make_f32(1, (int)n);
    device_get(found, dweight.data, (size_t)g->rows * sizeof *found);
    for (size_t i = 0; i < n; i++) {
        const int row = g->host.row[i];
        sorted[i] = found[row], ref[i] = r->dweight[row], bound[i] = r->bw[row];
    }
    put(t, sorted);
    check_close(what, t, ref, bound);
    golden_check(what, t, bound);
}

typedef struct {
    Tensor act, gate_up, wide, dact, d, recomputed, dweight;
} Mlp;

static Mlp make_mlp(const Formats *f, const Case *c, const Routed *g)
{
    const int width = c->F;
    Mlp m = { .act = make_either(f->operand, g->rows, width),
              .wide = make_assigned(f->stream, g, 2 * width, 1, -3, 3),
              .dact = make_assigned(f->stream, g, width, 2, -1, 1),
              .d = make_either(f->gradient, g->rows, 2 * width),
              .recomputed = make_either(f->operand, g->rows, width),
              .dweight = make_f32(1, g->rows) };
    m.gate_up = f->saved.group ? make(f->saved, g->rows, 2 * width) : m.wide;
    m.recomputed.scale = m.act.scale;
    return m;
}

static void forward_case(const Formats *f, const Case *c, const Routed *g, ForwardSource from)
{
    Mlp m = make_mlp(f, c, g);
    Tensor rows = make(f->operand, g->rows, c->F);
    TWICE(experts_swiglu(m.act, m.gate_up, m.wide, g->device, from), m.act, m.gate_up);
    if (m.gate_up.data != m.wide.data)
        check_gate_up(m.gate_up, m.wide, g);
    const Swiglu r = swiglu_reference(values(from == FROM_EXACT ? m.wide : m.gate_up), NULL, NULL,
                                      NULL, c->F, g);
    check_output(name("experts_swiglu", f, c, from == FROM_EXACT ? "-exact" : ""), m.act, g, r.act,
                 r.ba);
    experts_swiglu(rows, m.gate_up, m.wide, g->device, from);
    check_same_rows("without data_t", rows, only_rows(m.act), g);
    if (m.gate_up.data != m.wide.data || f->saved.dtype != BF16)
        return;
    m.gate_up = make(f->saved, g->rows, 2 * c->F);
    experts_swiglu(rows, m.gate_up, m.wide, g->device, from);
    check_same_rows("saved in other memory", rows, only_rows(m.act), g);
    check_gate_up(m.gate_up, m.wide, g);
}

/* Computes the gradient without act, with one copy of act, and in place of its inputs. */
static void backward_variants(const Formats *f, const Mlp *m, const Routed *g)
{
    const int width = m->act.cols;
    Tensor d = make_either(f->gradient, g->rows, 2 * width),
           rows = make(f->gradient, g->rows, 2 * width), halves = m->recomputed,
           dweight = make_f32(1, g->rows);
    TWICE(experts_swiglu_backward(d, NONE, dweight.data, m->dact, m->gate_up, g->device), d,
          dweight);
    check_same_rows("without act", d, m->d, g);
    if (is_operand(f->operand)) {
        halves.data = guarded(tensor_numel(halves)), halves.data_t = guarded(tensor_numel(halves));
        const void *before = tensor_snapshot(halves);
        experts_swiglu_backward(rows, columns_of(halves), dweight.data, m->dact, m->gate_up,
                                g->device);
        check_same_rows("without data_t", rows, only_rows(m->d), g);
        check_same_bytes("rows of act", tensor_snapshot(halves), before, tensor_numel(halves));
        experts_swiglu_backward(rows, only_rows(halves), dweight.data, m->dact, m->gate_up,
                                g->device);
        check_same_rows("act in two halves", halves, m->recomputed, g);
    }
    Tensor over = d;
    if (f->saved.group) /* codes that overwrite codes */
        over.data = m->gate_up.data;
    else if (format_equal(f->saved, f->gradient))
        over = m->gate_up;
    const bool over_dact = format_equal(f->operand, m->dact.format);
    const Tensor act = over_dact ? m->dact : m->recomputed;
    experts_swiglu_backward(over, act, dweight.data, m->dact, m->gate_up, g->device);
    check_same_rows("over gate_up", over, m->d, g);
    check_same_rows("act over dact", act, m->recomputed, g);
}

static void backward_case(const Formats *f, const Case *c, const Routed *g)
{
    Mlp m = make_mlp(f, c, g);
    experts_swiglu(m.act, m.gate_up, m.wide, g->device, FROM_SAVED);
    poison(m.gate_up, g);
    const Swiglu r = swiglu_reference(values(m.gate_up), NULL, values(m.dact), NULL, c->F, g);
    TWICE(experts_swiglu_backward(m.d, m.recomputed, m.dweight.data, m.dact, m.gate_up, g->device),
          m.d, m.recomputed, m.dweight);
    check_output(name("experts_swiglu_backward", f, c, ""), m.d, g, r.d, r.bd);
    check_dweight(name("experts_dweight", f, c, ""), m.dweight, &r, g);
    check_same_rows("act again", m.recomputed, m.act, g);
    check_not_written("act again", m.recomputed, g);
    backward_variants(f, &m, g);
}

static void swiglu_case(const Formats *f, const Case *c, const Routed *g)
{
    forward_case(f, c, g, FROM_SAVED);
    if (f->saved.group)
        forward_case(f, c, g, FROM_EXACT);
    backward_case(f, c, g);
}

TEST(test_swiglu)
{
    for_all(swiglu_case);
}

/* ---- with a GEMM ----------------------------------------------------------------------------- */

/* wide and dact are rounded to their formats, except if one kernel computes both operations. */
static void add_rounding(double *bound, const double *ref, Format stream, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bound[i] += unit_roundoff(stream) * (fabs(ref[i]) + bound[i]);
}

/* gate_up in E4M3 groups has relative errors of 2^-4. If the largest value of a group has a code of
 * 224 or more, it also has absolute errors of half the smallest code: below 2^-17 of this value. */
static void check_saved_groups(const char *what, Tensor t, const double *ref, const double *bound)
{
    const double *x = values(t);
    const size_t group = (size_t)t.format.group;
    for (size_t i = 0; i < tensor_numel(t); i++) {
        double most = 0;
        for (size_t j = i / group * group; j < (i / group + 1) * group; j++)
            most = fmax(most, fabs(ref[j]) + bound[j]);
        const double limit = bound[i] + (fabs(ref[i]) + bound[i]) * 0x1p-4 + most * 0x1p-17 * 1.01;
        if (!(fabs(x[i] - ref[i]) <= limit))
            fail_msg("%s[%zu]: %.9g, expected %.9g +- %.3g", what, i, x[i], ref[i], limit);
    }
}

static void matmul_swiglu_case(const Formats *f, const Case *c, const Routed *g)
{
    const int C = c->C, width = c->F, O = 2 * width;
    const size_t n = (size_t)g->rows * (size_t)O;
    double *W, *ref = doubles(n), *bound = doubles(n);
    Mlp m = make_mlp(f, c, g);
    Tensor x = make_assigned(f->operand, g, C, 5, -1, 1),
           w = make_matrices(f->weight, c->E, O, C, 6, &W), wide = make(f->stream, g->rows, O),
           act = make_either(f->operand, g->rows, width),
           saved = f->saved.group ? make(f->saved, g->rows, O) : wide;
    x.fast = f->fast;
    m.gate_up = make(f->saved, g->rows, O); /* separate memory, so that wide stays as it was */
    TWICE(experts_matmul_swiglu(m.act, m.gate_up, wide, only_rows(x), only_rows(w), g->device),
          m.act, m.gate_up);
    grouped(ref, bound, values(x), W, C, O, f, g);
    add_rounding(bound, ref, f->stream, n);
    const Swiglu r = swiglu_reference(ref, bound, NULL, NULL, width, g);
    check_output(name("experts_matmul_swiglu", f, c, ""), m.act, g, r.act, r.ba);
    check_not_written("saved", m.gate_up, g);
    if (f->saved.group)
        check_saved_groups("saved", in_use(m.gate_up, g), ref, bound);
    else
        check_close("saved", in_use(m.gate_up, g), ref, bound);
    TWICE(experts_matmul_swiglu(act, saved, wide, only_rows(x), only_rows(w), g->device), act,
          saved);
    check_same_rows("gate_up over wide", act, m.act, g);
    check_same_rows("gate_up over wide", saved, m.gate_up, g);
}

static void matmul_dx_swiglu_case(const Formats *f, const Case *c, const Routed *g)
{
    const int C = c->C, width = c->F;
    const size_t n = (size_t)g->rows * (size_t)width;
    double *W, *ref = doubles(n), *bound = doubles(n);
    Mlp m = make_mlp(f, c, g);
    Tensor dy = make_assigned(f->gradient, g, C, 5, -1, 1), dact = make(f->stream, g->rows, width),
           w = make_matrices(f->weight, c->E, C, width, 6, &W);
    dy.fast = f->fast;
    experts_swiglu(m.act, m.gate_up, m.wide, g->device, FROM_SAVED);
    poison(m.gate_up, g);
    TWICE(experts_matmul_dx_swiglu(m.d, m.recomputed, m.dweight.data, dact, only_rows(dy),
                                   only_columns(w), m.gate_up, g->device),
          m.d, m.recomputed, m.dweight);
    grouped_dx(ref, bound, values(dy), W, width, C, f, g);
    add_rounding(bound, ref, f->stream, n);
    const Swiglu r = swiglu_reference(values(m.gate_up), NULL, ref, bound, width, g);
    check_output(name("experts_matmul_dx_swiglu", f, c, ""), m.d, g, r.d, r.bd);
    check_dweight(name("experts_matmul_dweight", f, c, ""), m.dweight, &r, g);
    check_same_rows("act again", m.recomputed, m.act, g);
}

TEST(test_with_matmul)
{
    for_all(matmul_swiglu_case);
    for_all(matmul_dx_swiglu_case);
}

/* ---- reused scales --------------------------------------------------------------------------- */

/* Inputs of the operations below. Each operation writes an FP8 tensor with the rows in use. */
static struct {
    Routed g;
    Tensor x, stream, up, down, wide, gate_up, dact, dy, dweight, act, amax;
} in;
static bool scales_reused;

static void run_gather(Tensor y)
{
    experts_gather(y, in.stream, NULL, in.g.device);
}
static void run_gather_amax(Tensor y)
{
    experts_gather(y, in.stream, in.amax.data, in.g.device);
}
static void run_swiglu(Tensor y)
{
    experts_swiglu(y, in.gate_up, in.wide, in.g.device, FROM_SAVED);
}
static void run_swiglu_exact(Tensor y)
{
    experts_swiglu(y, in.gate_up, in.wide, in.g.device, FROM_EXACT);
}
static void run_matmul_swiglu(Tensor y)
{
    experts_matmul_swiglu(y, in.gate_up, make(H, in.g.rows, in.wide.cols), in.x, in.up,
                          in.g.device);
}
static void run_backward(Tensor y)
{
    experts_swiglu_backward(y, NONE, in.dweight.data, in.dact, in.gate_up, in.g.device);
}
static void run_backward_again(Tensor y)
{
    experts_swiglu_backward(y, columns_of(in.act), in.dweight.data, in.dact, in.gate_up,
                            in.g.device);
}
static void run_matmul_dx_swiglu(Tensor y)
{
    experts_matmul_dx_swiglu(y, columns_of(in.act), in.dweight.data,
                             make(H, in.g.rows, in.act.cols), in.dy, only_columns(in.down),
                             in.gate_up, in.g.device);
}

/* width: number of columns of y, in units of C or of F. */
typedef struct {
    const char *name;
    void (*run)(Tensor y);
    bool gradient;
    int C, F;
} Op;
static const Op ops[] = {
    { "gather", run_gather, false, 1, 0 },
    { "gather-amax", run_gather_amax, true, 1, 0 },
    { "gather-gradient", run_gather, true, 1, 0 },
    { "swiglu", run_swiglu, false, 0, 1 },
    { "swiglu-exact", run_swiglu_exact, false, 0, 1 },
    { "matmul-swiglu", run_matmul_swiglu, false, 0, 1 },
    { "backward", run_backward, true, 0, 2 },
    { "backward-again", run_backward_again, true, 0, 2 },
    { "matmul-dx-swiglu", run_matmul_dx_swiglu, true, 0, 2 },
};
enum { OPS = sizeof ops / sizeof ops[0] };

static void make_inputs(const Case *c)
{
    const int C = c->C, width = c->F;
    in.g = routed(c);
    in.stream = make_uneven(c->N, C, 1, -1, 1);
    in.amax = make_f32(1, 1);
    put(in.amax, &(float){ amax_of(in.stream) });
    in.x = make_round_assigned(E4, &in.g, C, 2);
    in.dy = make_round_assigned(E5, &in.g, C, 3);
    in.up = make_round_matrices(E4, c->E, 2 * width, C, 4);
    in.down = make_round_matrices(E4, c->E, C, width, 40);
    in.x.fast = in.dy.fast = true;
    in.wide = make_assigned(H, &in.g, 2 * width, 80, -3, 3);
    in.dact = make_assigned(H, &in.g, width, 81, -1, 1);
    in.gate_up = make(E16, in.g.rows, 2 * width);
    in.act = make_operand(E4, in.g.rows, width);
    in.dweight = make_f32(1, in.g.rows);
    experts_swiglu(in.act, in.gate_up, in.wide, in.g.device, FROM_SAVED);
    poison(in.gate_up, &in.g);
}

static float scale_amax_of(Tensor y)
{
    float x;
    device_get(&x, y.scale_amax, sizeof x);
    return x;
}

static uint8_t *run_in_range(const Op *op, Tensor y, float range, size_t *bytes)
{
    device_put(y.scale_amax, &range, sizeof range);
    scales_reused = true;
    op->run(y);
    scales_reused = false;
    return used_bytes(y, &in.g, bytes);
}

/* As in test_fp8_ranges: a range of max|y| / h gives the bits of a measured scale, because max|y|
 * just fits. If the range is exceeded, the result is that of the range max|y|. */
static void reuse_case(const Op *op, const Case *c, bool transposed)
{
    const Format f = op->gradient ? E5 : E4;
    const float h = op->gradient ? 8 : 2, top = op->gradient ? 57344 : 448;
    Tensor y = make_either(f, in.g.rows, op->C * c->C + op->F * c->F);
    if (!transposed)
        y.data_t = NULL;
    size_t n;
    op->run(y);
    const uint8_t *without = used_bytes(y, &in.g, &n);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    op->run(y);
    const float amax = scale_amax_of(y), scale = operand_scale(y);
    check_same_bytes(op->name, used_bytes(y, &in.g, &n), without, n);
    assert_true(amax > 0 && scale == amax / top);

    check_same_bytes(op->name, run_in_range(op, y, amax / h, &n), without, n);
    assert_true(scale_amax_of(y) == amax / h);
    const uint8_t *expected = run_in_range(op, y, amax, &n);
    assert_true(operand_scale(y) == h * scale && scale_amax_of(y) == amax);
    const float too_small[] = { nextafterf(amax / h, 0), amax / 1000, 0 };
    for (int i = 0; i < 3; i++) {
        check_same_bytes(op->name, run_in_range(op, y, too_small[i], &n), expected, n);
        assert_true(scale_amax_of(y) == amax);
    }
    check_used_transposed(op->name, y, &in.g);
    if (!op->C) /* gather does not define other rows */
        check_not_written(op->name, y, &in.g);
}

/* Within the range, codes have the values of the measured codes, except for the smallest. */
static void range_codes(const Op *op, const Case *c)
{
    const Format f = op->gradient ? E5 : E4;
    Tensor y = make_either(f, in.g.rows, op->C * c->C + op->F * c->F), rows = in_use(y, &in.g);
    op->run(y);
    const double *measured = values(rows), u = unit_roundoff(f);
    y.scale_amax = guarded(sizeof(float));
    y.scale_reused = &scales_reused;
    size_t n;
    op->run(y);
    run_in_range(op, y, scale_amax_of(y), &n);
    const double *found = values(rows), smallest = fp8_table(f.dtype)[1] * operand_scale(y);
    for (size_t i = 0; i < tensor_numel(rows); i++)
        if (!(fabs(found[i] - measured[i]) <= u * (fabs(found[i]) + fabs(measured[i])) + smallest))
            fail_msg("%s: element %zu is %.9g in a range, %.9g as measured", op->name, i, found[i],
                     measured[i]);
}

TEST(test_reused_scales)
{
    for (int i = 0; i < CASES; i++)
        for (int j = 0; !cases[i].odd && j < OPS; j++) {
            make_inputs(&cases[i]);
            reuse_case(&ops[j], &cases[i], false);
            reuse_case(&ops[j], &cases[i], true);
            range_codes(&ops[j], &cases[i]);
            release();
        }
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
