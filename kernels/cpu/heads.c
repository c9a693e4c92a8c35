/* Columns of heads, exchanged to ranks. */
#include <string.h>

#include "kernels/cpu/cpu.h"

/* Between rows of all heads, x, and rows of each rank's heads, y. */
static void exchange(Tensor y, Tensor x, Attention heads, bool join)
{
    const int ranks = y.rows / x.rows, sections = x.cols > ranks * heads.H * heads.D ? 3 : 1;
    const size_t size = dtype_size(x.format.dtype), N = (size_t)x.rows, part = (size_t)y.cols * size;
    const size_t bytes[] = { (size_t)(heads.H * heads.D) * size, (size_t)(heads.K * heads.D) * size,
                             (size_t)(heads.K * heads.D) * size };
    for (size_t n = 0; n < N; n++)
        for (size_t r = 0; r < (size_t)ranks; r++) {
            char *own = (char *)y.data + (r * N + n) * part, *row = (char *)x.data + n * part * (size_t)ranks;
            for (int i = 0; i < sections; own += bytes[i], row += bytes[i++] * (size_t)ranks)
                memcpy(join ? row + r * bytes[i] : own, join ? own : row + r * bytes[i], bytes[i]);
        }
}

void backend_heads_split(Tensor y, Tensor x, Attention heads)
{
    check_exchange(OPERATION, y, x, heads);
    exchange(y, x, heads, false);
}

void backend_heads_join(Tensor x, Tensor y, Attention heads)
{
    check_exchange(OPERATION, y, x, heads);
    exchange(y, x, heads, true);
}
