/* Times Muon's operations at the shapes of Llama-2-7B: bench_muon. Symmetric products are computed
 * whole and in blocks. The rows have the columns of bench_kernels.c; the FLOPs of a symmetric
 * product are those of the whole product. On a CPU the shapes are smaller. */
#include "tests/bench_tensors.h"

/* Prints the milliseconds of five iterations with whole products, and with symmetric products. */
typedef struct {
    double whole, symmetric;
} Iterations;

static Iterations bench_products(int rows, int cols)
{
    const bool tall = rows > cols;
    const int side = tall ? cols : rows;
    const double gram_flops = 2.0 * side * rows * cols, square_flops = 2.0 * side * side * side;
    Tensor x = make_normal(BF16_, rows, cols, 0.01f), y = make(BF16_, rows, cols),
           gram = make(BF16_, side, side);
    Tensor factor = make(BF16_, side, side);
    Iterations ms = { 0 };
    gram.empty = true;
    printf("(%d, %d)\n", rows, cols);
    if (tall)
        TIME_FLOPS("  A, whole", gram_flops, matmul_dw(gram, x, x));
    else
        TIME_FLOPS("  A, whole", gram_flops, matmul(gram, x, x, NONE));
    ms.whole += 5 * last_ms;
    TIME_FLOPS("  A, symmetric", gram_flops, matmul_symmetric(gram, x, tall, 1, NONE, 0));
    ms.symmetric += 5 * last_ms;
    TIME_FLOPS("  b A + c A A, whole", square_flops,
               matmul_scaled(factor, gram, gram, 2.0315f, gram, -4.775f));
    ms.whole += 5 * last_ms;
    TIME_FLOPS("  b A + c A A, symmetric", square_flops,
               matmul_symmetric(factor, gram, false, 2.0315f, gram, -4.775f));
    ms.symmetric += 5 * last_ms;
    TIME_FLOPS("  a X + B X", gram_flops,
               matmul_scaled(y, tall ? x : factor, tall ? factor : x, 1, x, 3.4445f));
    ms.whole += 5 * last_ms;
    ms.symmetric += 5 * last_ms;
    printf("  five iterations                          %9.3f ms whole, %.3f ms symmetric (%.3f "
           "times)\n",
           ms.whole, ms.symmetric, ms.symmetric / ms.whole);
    release();
    return ms;
}

static void bench_elements(int n)
{
    const Format moment = format_of_moment((Format){ E4M3, 128, true });
    Tensor u = make_normal(BF16_, 1, n, 1), m = make(moment, 1, n),
           w = make_normal(BF16_, 1, n, 0.02f), y = make(BF16_, 1, n);
    Tensor grad = make_normal(BF16_, 1, n, 1e-3f), squares = make(F32_, 1, 1);
    muon_momentum(u, m, grad, 0.95f, true, 1);
    TIME_BYTES("device copy", 4.0 * n, device_copy(y.data, u.data, tensor_bytes(u)));
    TIME_BYTES("muon_momentum, expanded E4M3", 6.0 * n, muon_momentum(u, m, grad, 0.95f, true, 1));
    TIME_BYTES("sum_squares", 2.0 * n, sum_squares(squares.data, u));
    TIME_BYTES("muon_normalize", 4.0 * n, muon_normalize(y, u, squares.data, 1e-7f));
    TIME_BYTES("muon_apply, bf16 weights", 6.0 * n, muon_apply(w, y, 0.999f, 1e-4f, 1, 0));
    release();
}

int main(void)
{
    device_init(0);
    const bool cpu = strcmp(device_name(), "cpu") == 0;
    const int width = cpu ? 256 : 4096, mlp = cpu ? 704 : 11008, layers = 32;
    const Iterations square = bench_products(width, width), wide = bench_products(width, mlp),
                     tall = bench_products(mlp, width);
    bench_elements(4 * width * width + 3 * width * mlp);
    printf("Newton-Schulz of %d blocks: %.3f s whole, %.3f s symmetric\n", layers,
           1e-3 * layers * (4 * square.whole + wide.whole + 2 * tall.whole),
           1e-3 * layers * (4 * square.symmetric + wide.symmetric + 2 * tall.symmetric));
    return 0;
}
