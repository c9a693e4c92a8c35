/* Collectives on device tensors, through MPI.
 *
 * For a sum, each rank receives its slice from all ranks, adds in F32 in the order of the ranks,
 * and rounds once. An all-reduce then gathers the slices. So all ranks get the same bits, and every
 * run repeats these bits. MPI_Allreduce guarantees neither. Data are sent in chunks, so buffers
 * have a bounded size. */
#include "kernels/collectives.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/runtime/comm_mpi.h"
#include "kernels/runtime/device.h"

enum { SLICE = 1 << 18 }; /* elements that a rank reduces per chunk */

static struct {
    void *received; /* (W, SLICE) elements of the tensor's format */
    /* (W, SLICE) one chunk of every rank's slice. In the tensor, the offsets of these chunks may
     * exceed MPI's int */
    void *slices;
    float *sum; /* (SLICE) */
    /* (W) number of elements of each rank's slice, and the offset of the slice in the tensor */
    int *count, *at;
    int *received_count, *received_at; /* (W) counts and offsets in `received` */
} buffer;

/* A copy of a message that MPI is sending. */
typedef struct Message {
    MPI_Request request;
    struct Message *next;
    char bytes[];
} Message;
static Message *sent;

/* Frees the messages that have arrived. With `all`, waits for all messages first. */
static void free_sent(bool all)
{
    for (Message **at = &sent; *at;) {
        Message *s = *at;
        int done = all;
        if (all)
            MPI_Wait(&s->request, MPI_STATUS_IGNORE);
        else
            MPI_Test(&s->request, &done, MPI_STATUS_IGNORE);
        if (done) {
            *at = s->next;
            free(s);
        } else
            at = &s->next;
    }
}

static void finish(void)
{
    free_sent(true);
    free(buffer.received);
    free(buffer.slices);
    free(buffer.sum);
    free(buffer.count);
    free(buffer.at);
    free(buffer.received_count);
    free(buffer.received_at);
}

/* This file does not check MPI's return values, because MPI ends the program on errors. */
void comm_init(void)
{
    size_t W = (size_t)comm_size();
    buffer.received = xmalloc(W * SLICE * sizeof(float));
    buffer.slices = xmalloc(W * SLICE * sizeof(float));
    buffer.sum = xmalloc(SLICE * sizeof(float));
    buffer.count = xmalloc(W * sizeof(int));
    buffer.at = xmalloc(W * sizeof(int));
    buffer.received_count = xmalloc(W * sizeof(int));
    buffer.received_at = xmalloc(W * sizeof(int));
    comm_set_device(finish, NULL);
}

void *comm_alloc(size_t bytes, MemoryUse use)
{
    check_comm_alloc(OPERATION, bytes, use);
    return device_alloc(bytes);
}

void comm_free(void *p)
{
    device_free(p);
}

static MPI_Datatype mpi_type(Format f)
{
    return f.dtype == F32 ? MPI_FLOAT : MPI_UINT16_T;
}

/* buffer.sum = the sum over ranks of this rank's slice of x. buffer.count and buffer.at describe
 * the slices. Returns the number of elements of the slice. */
static int sum_slice(Tensor x, Ranks g)
{
    const int W = comm_group_size(g), n = buffer.count[comm_group_rank(g)];
    const MPI_Datatype type = mpi_type(x.format);
    for (int r = 0; r < W; r++) {
        buffer.received_count[r] = n;
        buffer.received_at[r] = r * n;
    }
    MPI_Alltoallv(x.data, buffer.count, buffer.at, type, buffer.received, buffer.received_count,
                  buffer.received_at, type, comm_mpi(g));
    Tensor received = tensor_at(buffer.received, x.format, W, n);
    for (int i = 0; i < n; i++)
        buffer.sum[i] = 0;
    float *values = cpu_scratch(0, SLICE);
    for (int r = 0; r < W; r++) {
        tensor_load(values, received, (size_t)r * (size_t)n, (size_t)n);
        for (int i = 0; i < n; i++)
            buffer.sum[i] += values[i];
    }
    return n;
}

/* Sums `range`, consecutive elements of the tensor, over the ranks of g. `range` has at most W *
 * SLICE elements. */
static void all_reduce_range(Tensor range, Ranks g)
{
    const int W = comm_group_size(g), own = comm_group_rank(g), slice = (range.cols + W - 1) / W;
    for (int r = 0; r < W; r++) {
        int left = range.cols - r * slice;
        buffer.count[r] = left < 0 ? 0 : left < slice ? left : slice;
        buffer.at[r] = left < 0 ? 0 : r * slice;
    }
    int n = sum_slice(range, g);
    tensor_store(range, (size_t)buffer.at[own], buffer.sum, (size_t)n);
    MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, range.data, buffer.count, buffer.at,
                   mpi_type(range.format), comm_mpi(g));
}

void backend_comm_all_reduce(Tensor x, Ranks g)
{
    CHECK_PLAIN(x);
    if (comm_group_size(g) == 1)
        return;
    CHECK(buffer.received, "call comm_init first");
    comm_count(SENT_SUMS, tensor_bytes(x), g);
    const size_t numel = tensor_numel(x), chunk = (size_t)comm_group_size(g) * SLICE,
                 bytes = dtype_size(x.format.dtype);
    for (size_t first = 0; first < numel; first += chunk) {
        size_t n = numel - first < chunk ? numel - first : chunk;
        all_reduce_range(tensor_at((char *)x.data + first * bytes, x.format, 1, (int)n), g);
    }
}

void backend_comm_all_reduce_max(Tensor x, Ranks g)
{
    CHECK(x.format.dtype == F32, "comm_all_reduce_max: x is %s; expected f32",
          format_name(x.format));
    comm_count(SENT_SUMS, tensor_bytes(x), g);
    if (comm_group_size(g) > 1)
        MPI_Allreduce(MPI_IN_PLACE, x.data, (int)tensor_numel(x), MPI_FLOAT, MPI_MAX, comm_mpi(g));
}

void backend_comm_reduce_scatter(Tensor part, Tensor whole, Ranks g)
{
    const int W = comm_group_size(g);
    CHECK_PLAIN(whole);
    const size_t numel = tensor_numel(part), size = dtype_size(part.format.dtype);
    CHECK(tensor_numel(whole) == (size_t)W * numel && format_equal(whole.format, part.format),
          "%zu elements for %d ranks with %zu", tensor_numel(whole), W, numel);
    comm_count(SENT_SCATTERED_SUMS, tensor_bytes(part), g);
    if (W == 1) {
        if (part.data != whole.data)
            backend_device_copy(part.data, whole.data, tensor_bytes(part));
        return;
    }
    CHECK(buffer.received, "call comm_init first");
    for (size_t first = 0; first < numel; first += SLICE) {
        const size_t n = numel - first < SLICE ? numel - first : SLICE;
        for (int r = 0; r < W; r++) {
            buffer.count[r] = (int)n;
            buffer.at[r] = r * (int)n;
            memcpy((char *)buffer.slices + (size_t)r * n * size,
                   (const char *)whole.data + ((size_t)r * numel + first) * size, n * size);
        }
        sum_slice(tensor_at(buffer.slices, whole.format, W, (int)n), g);
        tensor_store(part, first, buffer.sum, n);
    }
}

/* Makes an MPI type of `bytes` bytes, because MPI counts elements in int. The type consists of
 * blocks. The size of a block is the largest power of two that divides `bytes`. */
static MPI_Datatype type_of_bytes(size_t bytes)
{
    const size_t most = 1 << 30, power = bytes ? bytes & (~bytes + 1) : 1,
                 unit = power < most ? power : most;
    MPI_Datatype part, whole;
    CHECK(bytes / unit <= INT_MAX,
          "%zu bytes are not a multiple of a power of two that MPI could count", bytes);
    MPI_Type_contiguous((int)unit, MPI_BYTE, &part);
    MPI_Type_contiguous((int)(bytes / unit), part, &whole);
    MPI_Type_commit(&whole);
    MPI_Type_free(&part);
    return whole;
}

void backend_comm_exchange(Tensor y, const RowRange *received, Tensor x, const RowRange *sent_rows,
                           int items, Ranks g)
{
    const int W = comm_group_size(g);
    const size_t bytes = check_rows(OPERATION, y, received, x, sent_rows, items, g);
    MPI_Datatype row = type_of_bytes(bytes);
    size_t rows = 0;
    CHECK(buffer.received, "call comm_init first");
    for (int i = 0; i < items; i++) {
        for (int r = 0; r < W; r++) {
            const RowRange from = sent_rows[r * items + i], to = received[r * items + i];
            rows += r == comm_group_rank(g) ? 0 : (size_t)from.count;
            buffer.count[r] = from.count;
            buffer.at[r] = from.first;
            buffer.received_count[r] = to.count;
            buffer.received_at[r] = to.first;
        }
        MPI_Alltoallv(x.data, buffer.count, buffer.at, row, y.data, buffer.received_count,
                      buffer.received_at, row, comm_mpi(g));
    }
    comm_count(comm_sent_as(g), rows * bytes, g);
    MPI_Type_free(&row);
}

/* Returns the rank of a neighbour in RANKS_PIPELINE. */
static int stage_of(Neighbour n)
{
    const int stages = comm_group_size(RANKS_PIPELINE), own = comm_group_rank(RANKS_PIPELINE);
    return (own + (n == NEXT_STAGE ? 1 : stages - 1)) % stages;
}

/* NOTE: this back end runs all queues in program order, so a send must never wait. */
void backend_comm_send(Tensor x, Neighbour to)
{
    CHECK_PLAIN(x);
    const size_t bytes = tensor_bytes(x);
    MPI_Datatype message = type_of_bytes(bytes);
    Message *s = xmalloc(sizeof *s + bytes);
    comm_count(SENT_MESSAGES, bytes, RANKS_PIPELINE);
    free_sent(false);
    memcpy(s->bytes, x.data, bytes);
    s->next = sent;
    sent = s;
    MPI_Isend(s->bytes, 1, message, stage_of(to), (int)to, comm_mpi(RANKS_PIPELINE), &s->request);
    MPI_Type_free(&message); /* takes effect when the message is sent */
}

/* The tag is the direction as the sender sees it. With two stages both neighbours are the same
 * rank, and only the tag distinguishes them. */
void backend_comm_receive(Tensor x, Neighbour from)
{
    CHECK_PLAIN(x);
    MPI_Datatype message = type_of_bytes(tensor_bytes(x));
    MPI_Recv(x.data, 1, message, stage_of(from), from == NEXT_STAGE ? PREVIOUS_STAGE : NEXT_STAGE,
             comm_mpi(RANKS_PIPELINE), MPI_STATUS_IGNORE);
    MPI_Type_free(&message);
}

void backend_comm_all_gather(void *whole, const void *part, size_t bytes, Ranks g)
{
    const size_t most = 1 << 28; /* MPI counts in int */
    const int W = comm_group_size(g);
    char *own = (char *)whole + bytes * (size_t)comm_group_rank(g);
    comm_count(SENT_GATHERS, bytes, g);
    if (own != part)
        backend_device_copy(own, part, bytes);
    if (bytes <= most) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, whole, (int)bytes, MPI_BYTE, comm_mpi(g));
        return;
    }
    for (int r = 0; r < W; r++)
        for (size_t at = 0; at < bytes; at += most)
            MPI_Bcast((char *)whole + (size_t)r * bytes + at,
                      (int)(bytes - at < most ? bytes - at : most), MPI_BYTE, r, comm_mpi(g));
}
