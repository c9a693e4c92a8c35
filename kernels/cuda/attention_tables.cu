/* Tables of documents as cuDNN wants them: lengths, and where each document begins in each buffer, in elements.
 *
 * A launch covers `per_launch` documents; those that the last one lacks are empty documents at the end of the batch.
 * Each launch has 5 tables of `width` integers: lengths, then offsets into q (and dq), k (and v, dk, dv), y (and dy)
 * and lse. */
#include "kernels/cuda/attention.h"

__global__ static void tables_kernel(int *tables, const int *start, int count, int per_launch, int width,
                                     AttentionStrides strides)
{
    const int i = threadIdx.x;                      /* 0 .. per_launch: offsets have an end */
    if (i > per_launch)
        return;
    const int document = blockIdx.x * per_launch + i;
    const int first = start[min(document, count)], next = start[min(document + 1, count)];
    int *row = tables + (size_t)blockIdx.x * 5 * width + i;
    if (i < per_launch)
        row[0] = next - first;
    row[width] = first * strides.q;
    row[2 * width] = first * strides.kv;
    row[3 * width] = first * strides.y;
    row[4 * width] = first * strides.lse;
}

void attention_tables(int *tables, Documents docs, int launches, int per_launch, int width, AttentionStrides strides)
{
    const unsigned threads = (unsigned)ceil_div((size_t)per_launch + 1, 32) * 32;
    tables_kernel<<<(unsigned)launches, threads, 0, device_stream()>>>(tables, docs.start, docs.count, per_launch,
                                                                       width, strides);
    LAUNCH_CHECK();
}
