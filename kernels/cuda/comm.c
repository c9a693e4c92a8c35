/* Collectives on device memory, through NCCL on the stream of the current queue: in order with the kernels before and after.
 *
 * All-gathers have a communicator of their own that uses no SMs: copies by the GPU's copy engines, from memory that
 * comm_alloc registered as a symmetric window. [NCCL 2.28, CTA policy ZERO] Where that is refused they run as ordinary
 * kernels. Sums need SMs. Two communicators also let a gather and a sum be under way at the same time, on two streams.
 * MPI carries NCCL's identifier and nothing else; with one rank NCCL is never started. */
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/watchdog.h"

#define NCCL_CHECK(call) nccl_check((call), #call)

static ncclComm_t all, gather, group[NUM_GROUPS];       /* NULL: a group of one rank */
static ncclWindow_t window;         /* over the memory at `registered`; NULL: none */
static void *registered;
static atomic_bool connected;                           /* the communicators are all there */

static void nccl_check(ncclResult_t status, const char *call)
{
    if (status != ncclSuccess)
        die("%s: %s (%s); NCCL_DEBUG=INFO makes NCCL say more", call, ncclGetErrorString(status), ncclGetLastError(all));
}

static ncclComm_t split(int color, int key, int policy)
{
    ncclComm_t c;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = policy;
    NCCL_CHECK(ncclCommSplit(all, color, key, &c, &config));
    return c;
}

void comm_init(void)
{
    if (comm_size() == 1)
        return;
    /* NVLink multicast (NVLS) depends on the state of the host's fabric and fails late where that is not right; the
     * user who knows it to work can set the variable to 1. */
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id;
    if (comm_rank() == 0)
        NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(&id, sizeof id, 0);
    watchdog_mark_together("connecting the devices by NCCL", -1);
    NCCL_CHECK(ncclCommInitRank(&all, comm_size(), id, comm_rank()));
    const int shards = comm_group_size(RANKS_SHARD), rank = comm_rank();
    group[RANKS_ALL] = all;
    if (shards > 1) {
        gather = split(rank / shards, rank, NCCL_CTA_POLICY_ZERO);
        group[RANKS_SHARD] = split(rank / shards, rank, NCCL_CTA_POLICY_DEFAULT);
    }
    if (comm_group_size(RANKS_REPLICA) > 1)
        group[RANKS_REPLICA] = split(rank % shards, rank, NCCL_CTA_POLICY_DEFAULT);
    connected = true;
}

/* What broke while a collective ran on the GPU: no call of the main thread returns it. */
const char *comm_device_error(void)
{
    static char text[512];
    if (!connected)
        return NULL;
    const ncclComm_t comms[] = { group[RANKS_REPLICA], group[RANKS_SHARD], gather, all };
    for (size_t i = 0; i < sizeof comms / sizeof comms[0]; i++) {
        ncclResult_t error = ncclSuccess;
        if (!comms[i] || (ncclCommGetAsyncError(comms[i], &error) == ncclSuccess
                          && (error == ncclSuccess || error == ncclInProgress)))
            continue;
        snprintf(text, sizeof text, "NCCL met an error on the GPU: %s (%s); NCCL_DEBUG=INFO makes NCCL say more",
                 ncclGetErrorString(error), ncclGetLastError(comms[i]));
        return text;
    }
    return NULL;
}

void comm_device_finish(void)
{
    if (!all)
        return;
    connected = false;
    device_sync();
    ncclComm_t comms[] = { group[RANKS_REPLICA], group[RANKS_SHARD], gather, all };
    for (size_t i = 0; i < sizeof comms / sizeof comms[0]; i++)
        if (comms[i])
            NCCL_CHECK(ncclCommDestroy(comms[i]));
    all = gather = NULL;
    for (Ranks g = RANKS_ALL; g < NUM_GROUPS; g = (Ranks)(g + 1))
        group[g] = NULL;
}

/* A window makes the copy engines usable; where one cannot be had (an older driver, no peer access, a container's limits)
 * gathers are slower, not wrong. The ranks agree, since registering is something that all of them do. */
void *comm_alloc(size_t bytes)
{
    if (!gather)
        return device_alloc(bytes);
    double failed = ncclMemAlloc(&registered, bytes ? bytes : 1) != ncclSuccess, mine = failed;
    comm_max(&failed, 1);
    if (failed == 0) {
        device_zero(registered, bytes);
        device_sync();
        failed = ncclCommWindowRegister(gather, registered, bytes, &window, NCCL_WIN_COLL_SYMMETRIC) != ncclSuccess || !window;
        comm_max(&failed, 1);
        if (failed == 0)
            return registered;
    }
    warn("NCCL cannot register memory as a symmetric window (%s): all-gathers take SMs from the computation",
         ncclGetLastError(gather));
    if (window)
        NCCL_CHECK(ncclCommWindowDeregister(gather, window));
    if (mine == 0)
        NCCL_CHECK(ncclMemFree(registered));
    registered = NULL;
    window = NULL;
    return device_alloc(bytes);
}

void comm_free(void *p)
{
    device_sync();
    if (!registered) {
        device_free(p);
        return;
    }
    NCCL_CHECK(ncclCommWindowDeregister(gather, window));
    NCCL_CHECK(ncclMemFree(registered));
    registered = NULL;
    window = NULL;
}

static ncclDataType_t type_of(Tensor x)
{
    return x.format.dtype == F32 ? ncclFloat32 : ncclBfloat16;
}

/* BF16 sums are rounded at every hop of NCCL's ring. The order of summation is that of the ring: the same every time
 * on the same machine with the same number of ranks. */
void comm_all_reduce(Tensor x, Ranks g)
{
    CHECK_PLAIN(x);
    if (comm_group_size(g) == 1)
        return;
    CHECK(group[g], "comm_init comes first");
    NCCL_CHECK(ncclAllReduce(x.data, x.data, tensor_numel(x), type_of(x), ncclSum, group[g], device_stream()));
}

void comm_all_reduce_max(Tensor x, Ranks g)
{
    CHECK(x.format.dtype == F32, "the maximum of %s", format_name(x.format));
    if (comm_group_size(g) > 1)
        NCCL_CHECK(ncclAllReduce(x.data, x.data, tensor_numel(x), ncclFloat32, ncclMax, group[g], device_stream()));
}

void comm_reduce_scatter(Tensor part, Tensor whole)
{
    const int W = comm_group_size(RANKS_SHARD);
    CHECK_PLAIN(whole);
    CHECK(whole.cols == W * part.cols && format_equal(whole.format, part.format), "%d elements for %d ranks with %d",
          whole.cols, W, part.cols);
    if (W > 1)
        NCCL_CHECK(ncclReduceScatter(whole.data, part.data, tensor_numel(part), type_of(part), ncclSum, group[RANKS_SHARD],
                                     device_stream()));
    else if (part.data != whole.data)
        device_copy(part.data, whole.data, tensor_bytes(part));
}

void comm_all_gather(void *whole, const void *part, size_t bytes)
{
    if (comm_group_size(RANKS_SHARD) > 1)
        NCCL_CHECK(ncclAllGather(part, whole, bytes, ncclUint8, gather, device_stream()));
    else if (whole != part)
        device_copy(whole, part, bytes);
}
