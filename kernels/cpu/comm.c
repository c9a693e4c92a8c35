/* Sums of device tensors over ranks, through MPI.
 *
 * Reduce-scatter, then all-gather, a chunk at a time: each rank receives its slice from everybody, adds in the order
 * of ranks in F32, rounds once and hands the result out. So all ranks hold the same bits, and a repetition gives them
 * again, which MPI_Allreduce does not promise; a rank sends and receives 2 (W-1)/W of the tensor's bytes. */
#include "kernels/comm.h"

#include <mpi.h>
#include <stdlib.h>

#include "kernels/cpu/cpu.h"

enum { SLICE = 1 << 18 };       /* elements that a rank reduces per chunk */

static struct {
    void *received;                     /* (W, SLICE) elements of the tensor's format */
    float *sum;                         /* (SLICE) */
    int *count, *at;                    /* (W) elements of each rank's slice, and where in the chunk it begins */
    int *received_count, *received_at;  /* (W) the same in `received` */
} buffer;

void comm_init(void)
{
    size_t W = (size_t)comm_size();
    buffer.received = xmalloc(W * SLICE * sizeof(float));
    buffer.sum = xmalloc(SLICE * sizeof(float));
    buffer.count = xmalloc(W * sizeof(int));
    buffer.at = xmalloc(W * sizeof(int));
    buffer.received_count = xmalloc(W * sizeof(int));
    buffer.received_at = xmalloc(W * sizeof(int));
}

void comm_device_finish(void)
{
    free(buffer.received);
    free(buffer.sum);
    free(buffer.count);
    free(buffer.at);
    free(buffer.received_count);
    free(buffer.received_at);
}

/* `piece`: elements of the tensor, at most W * SLICE, in one row. */
static void reduce_chunk(Tensor piece, MPI_Datatype type)
{
    const int W = comm_size(), own = comm_rank(), slice = (piece.cols + W - 1) / W;
    for (int r = 0; r < W; r++) {
        int left = piece.cols - r * slice;
        buffer.count[r] = left < 0 ? 0 : left < slice ? left : slice;
        buffer.at[r] = left < 0 ? 0 : r * slice;
    }
    const int n = buffer.count[own];
    for (int r = 0; r < W; r++) {
        buffer.received_count[r] = n;
        buffer.received_at[r] = r * n;
    }
    MPI_Alltoallv(piece.data, buffer.count, buffer.at, type,
                  buffer.received, buffer.received_count, buffer.received_at, type, MPI_COMM_WORLD);

    Tensor received = tensor_at(buffer.received, piece.format, W, n);
    for (int i = 0; i < n; i++)
        buffer.sum[i] = 0;
    float *x = scratch(0, SLICE);
    for (int r = 0; r < W; r++) {
        load(x, received, (size_t)r * (size_t)n, (size_t)n);
        for (int i = 0; i < n; i++)
            buffer.sum[i] += x[i];
    }
    store(piece, (size_t)buffer.at[own], buffer.sum, (size_t)n);
    MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, piece.data, buffer.count, buffer.at, type, MPI_COMM_WORLD);
}

void comm_all_reduce(Tensor x)
{
    CHECK_PLAIN(x);
    if (comm_size() == 1)
        return;
    CHECK(buffer.received, "comm_init comes first");
    const size_t numel = tensor_numel(x), chunk = (size_t)comm_size() * SLICE, bytes = dtype_size(x.format.dtype);
    MPI_Datatype type = x.format.dtype == F32 ? MPI_FLOAT : MPI_UINT16_T;
    for (size_t first = 0; first < numel; first += chunk) {
        size_t n = numel - first < chunk ? numel - first : chunk;
        reduce_chunk(tensor_at((char *)x.data + first * bytes, x.format, 1, (int)n), type);
    }
}
