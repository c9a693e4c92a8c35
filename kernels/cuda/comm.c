/* Sums of device tensors over ranks, through NCCL on the one stream: in order with the kernels before and after.
 * MPI carries NCCL's identifier and nothing else; with one rank NCCL is never started. */
#include <nccl.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

#define NCCL_CHECK(call) nccl_check((call), #call)

static ncclComm_t comm;

static void nccl_check(ncclResult_t status, const char *call)
{
    if (status != ncclSuccess)
        die("%s: %s (%s); NCCL_DEBUG=INFO makes NCCL say more", call, ncclGetErrorString(status),
            ncclGetLastError(comm));
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
    NCCL_CHECK(ncclCommInitRank(&comm, comm_size(), id, comm_rank()));
}

void comm_device_finish(void)
{
    if (!comm)
        return;
    device_sync();
    NCCL_CHECK(ncclCommDestroy(comm));
    comm = NULL;
}

/* BF16 sums are rounded at every hop of NCCL's ring. The order of summation is that of the ring: the same every time
 * on the same machine with the same number of ranks. */
void comm_all_reduce(Tensor x)
{
    CHECK_PLAIN(x);
    if (comm_size() == 1)
        return;
    CHECK(comm, "comm_init comes first");
    ncclDataType_t type = x.format.dtype == F32 ? ncclFloat32 : ncclBfloat16;
    NCCL_CHECK(ncclAllReduce(x.data, x.data, tensor_numel(x), type, ncclSum, comm, device_stream()));
}
