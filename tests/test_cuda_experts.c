/* Grouped GEMMs of experts on GPUs, alone and fused with SwiGLU, at sizes at which a thread block
 * has several tiles. */
#include "tests/test.h"
#include "tests/expert_tensors.h"

#include "kernels/cuda/cuda.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 },
                    GROUPS = { E4M3, 16 };

/* Experts 1 and 4 have no rows. The tiles of a pair of blocks often belong to different experts. */
static const Case large = { "large", 2500, 7, 3, SOME_EMPTY, 768, 512, false };

static void check_same(const char *what, Tensor t, Tensor expected, const Routed *g)
{
    check_same_rows(what, t, expected, g);
    check_not_written(what, t, g);
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* Every kernel with short accumulators adds 32 terms at a time, in order. So the bits equal those
 * of a separate GEMM of each expert. */
TEST(test_each_matrix)
{
    const Case *c = &large;
    const int C = c->C, O = c->F;
    const Routed g = routed(c);
    double *W;
    Tensor x = make_assigned(E4, &g, C, 1, -1, 1), w = make_matrices(E4, c->E, O, C, 2, &W),
           dy = make_assigned(E5, &g, O, 30, -1, 1);
    Tensor y[2], dx[2];
    x.fast = dy.fast = true;
    for (int i = 0; i < 2; i++)
        y[i] = make(H, g.rows, O), dx[i] = make(H, g.rows, C);
    TWICE(experts_matmul(y[0], only_rows(x), only_rows(w), g.device), y[0]);
    TWICE(experts_matmul_dx(dx[0], only_rows(dy), only_columns(w), g.device), dx[0]);
    for (int e = 0; e < c->E; e++) {
        const int first = g.host.first[e], rows = g.host.first[e + 1] - first;
        const Tensor own = expert_matrix(w, e, c->E);
        if (rows == 0)
            continue;
        matmul(tensor_rows(y[1], first, rows), tensor_rows(x, first, rows), own, NONE);
        matmul_dx(tensor_rows(dx[1], first, rows), tensor_rows(dy, first, rows), own, false);
    }
    check_same("experts_matmul", y[0], y[1], &g);
    check_same("experts_matmul_dx", dx[0], dx[1], &g);
    release();
}

/* The kernel that adds to F32 has other tiles, but the same order of terms. */
TEST(test_each_gradient)
{
    const Case *c = &large;
    const Routed g = routed(c);
    Tensor x = make_assigned(E4, &g, c->C, 1, -1, 1), dy = make_assigned(E5, &g, c->F, 30, -1, 1);
    Tensor exact = make(F, c->E * c->F, c->C), rounded = make(H, c->E * c->F, c->C),
           dw = make(H, c->E * c->F, c->C);
    dy.fast = exact.empty = dw.empty = true;
    TWICE(experts_matmul_dw(exact, only_columns(dy), only_columns(x), g.device), exact);
    TWICE(experts_matmul_dw(dw, only_columns(dy), only_columns(x), g.device), dw);
    quantize(rounded, exact);
    check_same_bytes("dw", tensor_snapshot(dw), tensor_snapshot(rounded), tensor_bytes(dw));
    release();
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

static bool scales_reused;

static Tensor with_range(Tensor t)
{
    t.scale_amax = guarded(sizeof(float));
    t.scale_reused = &scales_reused;
    return t;
}

/* The fused kernel gives the bits of the two separate operations. It does not write `wide`. */
static void swiglu_case(bool exceeds)
{
    const Case *c = &large;
    const int C = c->C, O = 2 * c->F;
    const Routed g = routed(c);
    double *W;
    Tensor x = make_assigned(E4, &g, C, 1, -1, 1), w = make_matrices(E4, c->E, O, C, 2, &W);
    Tensor wide = make(H, g.rows, O), other = make(H, g.rows, O), saved[2], act[2];
    const float unknown = 0;
    for (int i = 0; i < 2; i++)
        saved[i] = make(GROUPS, g.rows, O), act[i] = with_range(make(E4, g.rows, c->F));
    x.fast = true;
    const void *before = tensor_snapshot(other);
    experts_matmul(wide, x, w, g.device);
    experts_swiglu(act[0], saved[0], wide, g.device, FROM_EXACT);
    if (exceeds)
        device_put(act[0].scale_amax, &unknown, sizeof unknown);
    device_copy(act[1].scale_amax, act[0].scale_amax, sizeof(float));
    scales_reused = true;
    experts_swiglu(act[0], saved[0], wide, g.device, FROM_EXACT);
    experts_matmul_swiglu(act[1], saved[1], other, x, w, g.device);
    scales_reused = false;
    check_same("act", act[1], act[0], &g);
    check_same("saved", saved[1], saved[0], &g);
    if (runs_on_hopper())
        check_same_bytes("wide", tensor_snapshot(other), before, tensor_bytes(other));
    release();
}

TEST(test_swiglu)
{
    swiglu_case(false);
    swiglu_case(true);
}

/* dweight is a sum of F terms, in two different orders. Padding rows have no dweight. */
static void check_dweight(const float *a, const float *b, Tensor dact, Tensor gate_up,
                          const Routed *g)
{
    const int width = dact.cols;
    const double *d = values(dact), *x = values(gate_up);
    for (int row = 0; row < g->used; row++) {
        double sum = 0;
        for (int f = 0; f < width; f++) {
            const double gate = x[row * 2 * width + f], up = x[row * 2 * width + width + f];
            sum += fabs(d[row * width + f] * gate / (1 + exp(-gate)) * up);
        }
        if (!(fabs((double)a[row] - b[row]) <= 2 * width * U24 * sum))
            fail_msg("dweight of row %d is %g, expected %g", row, a[row], b[row]);
    }
}

/* For the input gradient of the last layer: a sum has fewer stages than the epilogue has parts. */
static void dx_swiglu_case(bool with_act, bool exceeds)
{
    const Case *c = &large;
    const int C = c->C, width = c->F;
    const Routed g = routed(c);
    double *W;
    Tensor dy = make_assigned(E5, &g, C, 1, -1, 1), w = make_matrices(E4, c->E, C, width, 2, &W),
           saved = make_assigned(GROUPS, &g, 2 * width, 3, -2, 2);
    Tensor dact = make(H, g.rows, width), other = make(H, g.rows, width), gradient[2], act[2],
           dweight[2];
    const float scale = 0.0123f, unknown = 0;
    for (int i = 0; i < 2; i++) {
        gradient[i] = with_range(make_operand(E5, g.rows, 2 * width));
        act[i] = make_operand(E4, g.rows, width);
        dweight[i] = make_f32(1, g.rows);
        device_put(act[i].scale, &scale, sizeof scale);
    }
    dy.fast = true;
    const void *before = tensor_snapshot(other);
    experts_matmul_dx(dact, dy, w, g.device);
    experts_swiglu_backward(gradient[0], columns_of(act[0]), dweight[0].data, dact, saved,
                            g.device);
    if (exceeds)
        device_put(gradient[0].scale_amax, &unknown, sizeof unknown);
    device_copy(gradient[1].scale_amax, gradient[0].scale_amax, sizeof(float));
    scales_reused = true;
    experts_swiglu_backward(gradient[0], columns_of(act[0]), dweight[0].data, dact, saved,
                            g.device);
    experts_matmul_dx_swiglu(gradient[1], with_act ? columns_of(act[1]) : NONE, dweight[1].data,
                             other, dy, w, saved, g.device);
    scales_reused = false;
    check_same("gradient", gradient[1], gradient[0], &g);
    if (with_act)
        check_same("act", act[1], act[0], &g);
    check_dweight(tensor_snapshot(dweight[1]), tensor_snapshot(dweight[0]), dact, saved, &g);
    if (runs_on_hopper())
        check_same_bytes("dact", tensor_snapshot(other), before, tensor_bytes(other));
    release();
}

TEST(test_dx_swiglu)
{
    for (int i = 0; i < 4; i++)
        dx_swiglu_case(i % 2, i / 2);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
