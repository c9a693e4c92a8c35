/* Times the collectives between the ranks of a host: mpirun -n 2 bench_comm. Each collective runs
 * in plain memory and in memory of comm_alloc, alone and next to a GEMM. The GEMM is in E4M3, on a
 * CPU in BF16 and smaller. A row shows the largest time of all ranks. */
#include "tests/bench_tensors.h"

#include "kernels/backend.h"
#include "kernels/runtime/comm.h"

/* bytes: size of the data of all ranks; y = x w^T: the GEMM */
typedef struct {
    char *memory;
    size_t bytes;
    Tensor y, x, w;
} Bench;

static void gather(const Bench *b)
{
    const size_t part = b->bytes / (size_t)comm_size();
    comm_all_gather(b->memory, b->memory + part * (size_t)comm_rank(), part, RANKS_TENSOR);
}

static void sum(const Bench *b)
{
    const int n = (int)(b->bytes / sizeof(uint16_t)), part = n / comm_size();
    char *const own = b->memory + sizeof(uint16_t) * (size_t)part * (size_t)comm_rank();
    comm_reduce_scatter(tensor_at(own, BF16_, 1, part), tensor_at(b->memory, BF16_, 1, n),
                        RANKS_TENSOR);
}

/* Each rank sends part r to rank r, from the first half of `memory` to the second half. */
static void exchange(const Bench *b)
{
    enum { WIDTH = 1024 };
    const int rows = (int)(b->bytes / WIDTH / sizeof(uint16_t)), part = rows / comm_size();
    RowRange piece[64];
    for (int r = 0; r < comm_size(); r++)
        piece[r] = (RowRange){ r * part, part };
    comm_exchange(tensor_at(b->memory + b->bytes, BF16_, rows, WIDTH), piece,
                  tensor_at(b->memory, BF16_, rows, WIDTH), piece, 1, RANKS_CONTEXT);
}

static void nothing(const Bench *b)
{
    (void)b;
}

static double milliseconds(void (*run)(const Bench *), const Bench *b, bool multiplies)
{
    static DeviceMark *ready, *done;
    for (int i = -WARM_UP; i < RUNS; i++) {
        if (i >= 0)
            marks[i] = device_mark(marks[i]);
        ready = device_follow(QUEUE_TENSOR, ready);
        run(b);
        done = device_mark(done);
        device_queue(QUEUE_COMPUTE);
        if (multiplies)
            matmul(b->y, b->x, b->w, NONE);
        device_wait(done);
    }
    marks[RUNS] = device_mark(marks[RUNS]);
    double ms = median_ms();
    comm_max(&ms, 1);
    return ms;
}

static void bench(const char *name, void (*run)(const Bench *), Bench *b)
{
    static const char *const memories[] = { "plain", "comm_alloc" };
    for (int i = 0; i < 2; i++) {
        b->memory = i == 0 ? device_alloc(2 * b->bytes) : comm_alloc(2 * b->bytes, FOR_ACTIVATIONS);
        const double own = milliseconds(run, b, false), product = milliseconds(nothing, b, true),
                     both = milliseconds(run, b, true);
        const double sent = (double)b->bytes * (comm_size() - 1) / comm_size();
        if (comm_rank() == 0)
            printf("%-16s %-12s %8.3f ms %6.0f GB/s; the product %8.3f ms, with both %8.3f ms, "
                   "%+.3f\n",
                   name, memories[i], own, 1e-6 * sent / own, product, both, both - product);
        device_sync();
        if (i == 0)
            device_free(b->memory);
        else
            comm_free(b->memory);
    }
}

static void use_mesh(Mesh m)
{
    comm_device_finish();
    comm_set_mesh(m);
    comm_init();
}

int main(int argc, char **argv)
{
    comm_start(&argc, &argv);
    device_init(comm_local_rank());
    comm_init();
    const bool cpu = strcmp(device_name(), "cpu") == 0;
    const int rows = cpu ? 256 : 32768, width = cpu ? 128 : 4096, W = comm_size();
    const Format f = cpu ? BF16_ : E4M3_;
    Bench b = { .y = make(BF16_, rows, width),
                .x = make(f, rows, width),
                .w = make(f, width, width) };
    quantize(b.x, make_normal(BF16_, rows, width, 1));
    quantize(b.w, make_normal(BF16_, width, width, 1));
    milliseconds(nothing, &b, true); /* chooses the algorithm of the GEMM, and warms up the GPU */
    if (comm_rank() == 0)
        printf("%d ranks, %s; the product: (%d, %d) x (%d, %d)\n", W, device_name(), rows, width,
               width, width);
    for (int i = 0; i < 2; i++) {
        b.bytes = (size_t)rows * (size_t)width * (i + 1);
        if (comm_rank() == 0)
            printf("%.0f MiB in %d parts\n", (double)b.bytes / (1 << 20), W);
        use_mesh(mesh_of_tensor(W, 1, 1, 1, W));
        bench("all-gather", gather, &b);
        bench("reduce-scatter", sum, &b);
        use_mesh(mesh_of_context(W, W, W));
        bench("exchange", exchange, &b);
    }
    release();
    comm_finish();
    return 0;
}
