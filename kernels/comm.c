/* Ranks and host values over MPI, for both back ends. What concerns device memory is in kernels/cpu or kernels/cuda.
 * MPI's default error handler ends all ranks with a message, so return values need no checks. */
#include "kernels/comm.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "model/error.h"

static int rank = 0, size = 1, local_rank = 0, local_size = 1;

void comm_start(int *argc, char ***argv)
{
    MPI_Comm host;
    int provided;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);    /* other threads read files, but call no MPI */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local_rank);
    MPI_Comm_size(host, &local_size);
    MPI_Comm_free(&host);
}

void comm_finish(void)
{
    comm_device_finish();
    MPI_Finalize();
}

int comm_rank(void)
{
    return rank;
}

int comm_size(void)
{
    return size;
}

int comm_local_rank(void)
{
    return local_rank;
}

int comm_local_size(void)
{
    return local_size;
}

void comm_barrier(void)
{
    if (size > 1)
        MPI_Barrier(MPI_COMM_WORLD);
}

void comm_broadcast(void *data, size_t bytes, int root)
{
    const size_t most = 1 << 30;        /* MPI counts in int */
    if (size == 1)
        return;
    for (size_t at = 0; at < bytes; at += most)
        MPI_Bcast((char *)data + at, (int)(bytes - at < most ? bytes - at : most), MPI_BYTE, root, MPI_COMM_WORLD);
}

/* Every rank adds in the order of ranks: MPI_Allreduce does not promise the same bits everywhere. */
void comm_sum(double *x, int n)
{
    if (size == 1)
        return;
    double *all = xmalloc(sizeof *all * (size_t)size * (size_t)n);
    MPI_Allgather(x, n, MPI_DOUBLE, all, n, MPI_DOUBLE, MPI_COMM_WORLD);
    memset(x, 0, sizeof *x * (size_t)n);
    for (int r = 0; r < size; r++)
        for (int i = 0; i < n; i++)
            x[i] += all[(size_t)r * (size_t)n + (size_t)i];
    free(all);
}

void comm_max(double *x, int n)
{
    if (size > 1)
        MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}
