/* Times attention_mma.cu, the attention kernels that run on every GPU: bench_cuda_attention. The
 * rows have the columns of bench_kernels.c. */
#include "kernels/cuda/attention.h"
#include "tests/bench_attention.h"

int main(void)
{
    static const Model models[] = {
        { "heads of 128", 2, 8192, 4096, 32, 32, 128 },
        { "heads of 128, shared keys", 2, 8192, 4096, 32, 8, 128 },
        { "heads of 128", 8, 2048, 4096, 32, 32, 128 },
        { "heads of 64", 2, 8192, 2048, 32, 32, 64 },
        { "heads of 96", 2, 8192, 3072, 32, 32, 96 },
        { "heads of 256", 2, 8192, 2048, 16, 16, 256 },
    };
    device_init(0);
    attention.forward = attention_mma_forward;
    attention.backward = attention_mma_backward;
    for (int i = 0; i < 6; i++) {
        printf("%d x %d tokens, %d %s\n", models[i].B, models[i].T, models[i].H, models[i].name);
        bench_attention(&models[i], 0, 0);
    }
    printf("window and documents\n");
    bench_attention(&sliding, sliding.T / 2, 0);
    bench_documents(&models[0], 4, 4096);
    return 0;
}
