/* Compares cross entropy whose gradient is an FP8 operand with a double reference, on CUDA also
 * with the CPU's record. */
#include "tests/test.h"
#include "tests/fp8.h"
#include "tests/loss.h"

/* One row; rows that end inside a warp's packs; rows longer than the threads of the CUDA back end
 * hold (8 packs by 1024 threads); gradients (rows, cols) that are larger than the logits, with and
 * without whole packs in a row. */
static const struct {
    int N, V, rows, cols;
} shapes[] = {
    { 1, 64, 1, 64 },     { 96, 272, 96, 272 }, { 3, 66000, 3, 66000 },  { 5, 37, 16, 48 },
    { 33, 264, 48, 272 }, { 16, 91, 16, 96 },   { 3, 65537, 16, 65552 }, { 2, 40, 5, 128 },
};
static const Format inputs[] = { { BF16, 0 }, { F32, 0 } },
                    outputs[] = { { E4M3, 0 }, { E5M2, 0 } };
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* Every fourth row is masked. */
static int *make_targets(int *target, int N, int vocab)
{
    for (int i = 0; i < N; i++)
        target[i] = i % 4 == 2 ? -1 : (int)(random_bits(8, (uint64_t)i) % (uint64_t)vocab);
    return put_ints(target, (size_t)N);
}

static void check_loss(const char *name, Tensor t, const double *ref, const double *bound)
{
    check_close(name, t, ref, bound);
    golden_check(name, t, bound);
}

/* Copies (N, V) into (rows, cols), padded with 0. */
static double *widen(const double *x, int shape)
{
    const int V = shapes[shape].V, cols = shapes[shape].cols;
    double *y = keep(sizeof *y * (size_t)shapes[shape].rows * (size_t)cols);
    for (int n = 0; n < shapes[shape].rows; n++)
        for (int c = 0; c < cols; c++)
            y[(size_t)n * (size_t)cols + (size_t)c] =
                n < shapes[shape].N && c < V ? x[(size_t)n * (size_t)V + (size_t)c] : 0;
    return y;
}

/* amax: larger than every gradient, or so small that the largest gradients saturate. Gradients of
 * masked rows and of columns beyond the vocabulary are 0, with a bound of 0. */
static void codes_case(int shape, Format input, Format output, bool saturates)
{
    const int N = shapes[shape].N, V = shapes[shape].V, rows = shapes[shape].rows,
              cols = shapes[shape].cols, vocab = V - 3;
    const float temperature = N % 2 ? 0.7f : 1, scale = 0.125f, z_weight = 1e-2f,
                amax = (saturates ? scale / 16 : 1.5f * scale) / temperature;
    char name[96], part[128];
    snprintf(name, sizeof name, "cross_entropy_codes/%dx%d/%s-%s%s", N, V, format_name(input),
             format_name(output), saturates ? "-saturated" : "");
    Tensor logits = make_filled(input, N, V, 1, -9, 9), loss = make_f32(1, N),
           zloss = make_f32(1, N), t = make(output, rows, cols);
    int *target = keep(sizeof *target * (size_t)N), *targets = make_targets(target, N, vocab);
    Tensor weight = make_f32(1, N);
    float *factor = keep(sizeof *factor * (size_t)N);
    for (int n = 0; n < N; n++)
        factor[n] = n % 2 ? -0.5f : 1; /* exact factors of gradients and bounds */
    put(weight, factor);
    const void *untouched = tensor_snapshot(logits);
    Loss l = loss_reference(values(logits), target, N, vocab, V, temperature, scale, z_weight);
    for (int i = 0; i < N * V; i++) {
        l.grad[i] *= factor[i / V];
        l.grad_bound[i] *= fabsf(factor[i / V]);
    }
    l.grad = widen(l.grad, shape);
    l.grad_bound = widen(l.grad_bound, shape);
    TWICE(cross_entropy_codes(t, amax, logits, loss.data, zloss.data, targets, weight.data, vocab,
                              temperature, scale, z_weight),
          t, loss, zloss);
    snprintf(part, sizeof part, "%s-loss", name);
    check_loss(part, loss, l.loss, l.loss_bound);
    snprintf(part, sizeof part, "%s-zloss", name);
    check_loss(part, zloss, l.zloss, l.zloss_bound);
    assert_true(operand_scale(t) == amax / (float)fp8_table(output.dtype)[fp8_last(output.dtype)]);
    check_codes(name, t, l.grad, l.grad_bound);
    const double smallest = fp8_table(output.dtype)[1] * operand_scale(t);
    for (size_t i = 0; i < tensor_numel(t); i++)
        l.grad_bound[i] += l.grad_bound[i] > 0 ? smallest / 2 : 0;
    golden_check(name, t, l.grad_bound);
    check_same_bytes("logits", tensor_snapshot(logits), untouched, tensor_bytes(logits));
    release();
}

TEST(test_codes)
{
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 8; i++)
            codes_case(s, inputs[i / 4], outputs[i / 2 % 2], i % 2);
}

TEST(test_errors)
{
    const Format f = { BF16, 0 };
    Tensor logits = make(f, 2, 32), plain = make(f, 2, 32),
           groups = make((Format){ E4M3, 16 }, 2, 32), t = make(outputs[0], 2, 32);
    Tensor narrow = make(outputs[0], 2, 16), loss = make_f32(2, 2);
    int *targets = put_ints((int[]){ 1, -1 }, 2);
    float *out = loss.data;
    DIES("the gradient is bf16",
         cross_entropy_codes(plain, 1, logits, out, out + 2, targets, NULL, 32, 1, 1, 0));
    DIES("the gradient is e4m3/16",
         cross_entropy_codes(groups, 1, logits, out, out + 2, targets, NULL, 32, 1, 1, 0));
    DIES("gradient is (2, 16); the logits are (2, 32)",
         cross_entropy_codes(narrow, 1, logits, out, out + 2, targets, NULL, 32, 1, 1, 0));
    DIES("vocabulary of 33",
         cross_entropy_codes(t, 1, logits, out, out + 2, targets, NULL, 33, 1, 1, 0));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
