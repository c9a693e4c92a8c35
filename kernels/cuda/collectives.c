/* Collectives on device memory, through NCCL, on the stream of the current queue. Collectives run
 * in order with the kernels of that stream.
 *
 * All-gathers have communicators of their own. If both tensors lie in memory that comm_alloc
 * registered as a symmetric window, the GPU's copy engines copy, and no SMs are used [NCCL 2.28,
 * CTA policy ZERO]. In a window, sends and receives need no copy in between, so exchanges use the
 * window, too. If registration fails, or a tensor lies in other memory, these collectives run as
 * ordinary kernels. Sums need SMs and are slower in a window (NCCL 2.28.3), so the communicators of
 * sums have no window.
 *
 * Two communicators also let an all-gather and a sum overlap, on two streams. For the same reason
 * RANKS_TENSOR has a third communicator, for all-reduces: sums of gradients and, in generation, of
 * the parts of a layer. Each stage has a communicator of two ranks for messages to each neighbour,
 * and one for messages from each neighbour: NCCL runs the operations of a communicator one after
 * the other, and a send may wait. MPI only broadcasts NCCL's identifier. With one rank NCCL is not
 * started. */
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/runtime/watchdog_marks.h"

#define NCCL_CHECK(call) nccl_check((call), #call)

/* nccl: the communicator of sums and exchanges. gathers: the communicator of all-gathers; NULL:
 * `nccl` is. nccl NULL: the group has one rank, or nobody uses it. */
typedef struct {
    Ranks ranks;
    bool has_gathers;
    ncclComm_t nccl, gathers;
} Group;
static Group groups[] = { { RANKS_ALL, 0 },     { RANKS_SHARD, true },  { RANKS_REPLICA, 0 },
                          { RANKS_CONTEXT, 0 }, { RANKS_TENSOR, true }, { RANKS_STAGE, true },
                          { RANKS_NEAR, 0 },    { RANKS_HOSTS, 0 } };
enum { NUM_GROUPS = sizeof groups / sizeof groups[0] };
static ncclComm_t all, tensor_sums;
/* communicators of two ranks, for messages to a neighbour and from a neighbour */
static ncclComm_t sends[NUM_NEIGHBOURS], receives[NUM_NEIGHBOURS];
/* all communicators in `sends` and `receives`, in the order in which all ranks make them */
static ncclComm_t links[2 * NUM_NEIGHBOURS];
static int num_links;
enum { MAX_WINDOWS = 2 }; /* maximum number of windows for the memory of one use: see find_users */
/* The memory and windows of each use. memory NULL: no memory is registered. */
static struct {
    void *memory;
    ncclWindow_t window[MAX_WINDOWS];
} registered[NUM_MEMORY_USES];

static void nccl_check(ncclResult_t status, const char *call)
{
    if (status != ncclSuccess)
        die_fault("%s: %s (%s); set NCCL_DEBUG=INFO for details", call, ncclGetErrorString(status),
                  ncclGetLastError(all));
}

static ncclComm_t split(Ranks g, int policy)
{
    ncclComm_t c;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = policy;
    NCCL_CHECK(ncclCommSplit(all, comm_group(g), comm_rank(), &c, &config));
    return c;
}

static Group *find_group(Ranks g)
{
    Group *x = groups;
    while (x < groups + NUM_GROUPS && x->ranks != g)
        x++;
    CHECK(x < groups + NUM_GROUPS, "collectives.c has no group for the dimensions %#x of the mesh",
          g);
    return x;
}

static ncclComm_t nccl_of(Ranks g)
{
    ncclComm_t c = find_group(g)->nccl;
    CHECK(c, "no communicator for the dimensions %#x of the mesh: call comm_init first", g);
    return c;
}

static const char *error_of(ncclComm_t c)
{
    static char text[512];
    ncclResult_t error = ncclSuccess;
    if (!c || (ncclCommGetAsyncError(c, &error) == ncclSuccess &&
               (error == ncclSuccess || error == ncclInProgress)))
        return NULL;
    snprintf(text, sizeof text, "NCCL error on the GPU: %s (%s); set NCCL_DEBUG=INFO for details",
             ncclGetErrorString(error), ncclGetLastError(c));
    return text;
}

/* Returns an error that occurred while a collective ran on the GPU. No call of the main thread
 * returns such an error. */
static const char *find_error(void)
{
    const char *error = error_of(tensor_sums);
    for (int i = 0; i < NUM_GROUPS && !error; i++)
        error =
            error_of(groups[i].gathers) ? error_of(groups[i].gathers) : error_of(groups[i].nccl);
    for (int n = 0; n < NUM_NEIGHBOURS && !error; n++)
        error = error_of(sends[n]) ? error_of(sends[n]) : error_of(receives[n]);
    return error;
}

static void destroy(ncclComm_t *c)
{
    if (*c)
        NCCL_CHECK(ncclCommDestroy(*c));
    *c = NULL;
}

static void finish(void)
{
    device_sync();
    destroy(&tensor_sums);
    /* each call waits for the other rank, so another order of the ranks would be a deadlock */
    for (int i = 0; i < num_links; i++)
        destroy(&links[i]);
    for (int n = 0; n < NUM_NEIGHBOURS; n++)
        sends[n] = receives[n] = NULL;
    num_links = 0;
    /* the last group has all ranks and is the parent of the other groups */
    for (int i = NUM_GROUPS - 1; i >= 0; i--) {
        destroy(&groups[i].gathers);
        destroy(&groups[i].nccl);
    }
    all = NULL;
}

static int peer(ncclComm_t c)
{
    int own;
    CHECK(c, "comm_send or comm_receive without pipeline stages");
    NCCL_CHECK(ncclCommUserRank(c, &own));
    return 1 - own;
}

/* Connects all neighbours at once. NCCL connects two ranks at their first message, and the host
 * waits for this connection. In one NCCL group the order of the ranks does not matter. */
static void connect_neighbours(void)
{
    char *bytes = device_alloc(2 * NUM_NEIGHBOURS);
    NCCL_CHECK(ncclGroupStart());
    for (int n = 0; n < NUM_NEIGHBOURS; n++) {
        NCCL_CHECK(ncclSend(bytes + n, 1, ncclUint8, peer(sends[n]), sends[n], device_stream()));
        NCCL_CHECK(ncclRecv(bytes + NUM_NEIGHBOURS + n, 1, ncclUint8, peer(receives[n]),
                            receives[n], device_stream()));
    }
    NCCL_CHECK(ncclGroupEnd());
    device_sync();
    device_free(bytes);
}

/* Splitting is collective. So all ranks make the communicators of all stages, and keep the
 * communicators of their own stage. */
static void connect_stages(void)
{
    const int stages = comm_group_size(RANKS_PIPELINE), own = comm_group_rank(RANKS_PIPELINE);
    for (int n = 0; n < NUM_NEIGHBOURS && stages > 1; n++)
        for (int from = 0; from < stages; from++) {
            const int to = (from + (n == NEXT_STAGE ? 1 : stages - 1)) % stages;
            const bool takes_part = own == from || own == to;
            ncclComm_t c = NULL;
            NCCL_CHECK(ncclCommSplit(all,
                                     takes_part ? comm_group(RANKS_PIPELINE) : NCCL_SPLIT_NOCOLOR,
                                     comm_rank(), &c, NULL));
            if (takes_part)
                links[num_links++] = c;
            if (own == from)
                sends[n] = c;
            else if (own == to)
                receives[n == NEXT_STAGE ? PREVIOUS_STAGE : NEXT_STAGE] = c;
        }
    if (stages > 1)
        connect_neighbours();
}

/* Returns true if the group needs communicators. Without tensor ranks RANKS_STAGE equals
 * RANKS_SHARD, and so does RANKS_NEAR if shards are not cut by hosts. */
static bool is_used(Ranks g)
{
    return comm_group_size(g) > 1 && (g != RANKS_STAGE || comm_group_size(RANKS_TENSOR) > 1) &&
           (g != RANKS_NEAR || comm_near() == RANKS_NEAR);
}

void comm_init(void)
{
    if (comm_size() == 1)
        return;
    /* NVLink multicast (NVLS) depends on the host's fabric and may fail late. Users whose fabric
     * supports it can set the variable to 1. */
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    ncclUniqueId id;
    if (comm_rank() == 0)
        NCCL_CHECK(ncclGetUniqueId(&id));
    comm_broadcast(&id, sizeof id, 0);
    watchdog_mark_together("connecting the devices by NCCL", -1);
    NCCL_CHECK(ncclCommInitRank(&all, comm_size(), id, comm_rank()));
    if (comm_group_size(RANKS_TENSOR) > 1)
        tensor_sums = split(RANKS_TENSOR, NCCL_CTA_POLICY_DEFAULT);
    for (Group *g = groups; g < groups + NUM_GROUPS; g++) {
        g->gathers =
            g->has_gathers && is_used(g->ranks) ? split(g->ranks, NCCL_CTA_POLICY_ZERO) : NULL;
        g->nccl = g->ranks == RANKS_ALL ? all
                  : is_used(g->ranks)   ? split(g->ranks, NCCL_CTA_POLICY_DEFAULT)
                                        : NULL;
    }
    connect_stages();
    comm_set_device(finish, find_error);
}

/* Sets `user` to the communicators that access memory of this use in a window. Returns their
 * number. */
static int find_users(MemoryUse use, ncclComm_t user[MAX_WINDOWS])
{
    const ncclComm_t of[NUM_MEMORY_USES][MAX_WINDOWS] = {
        [FOR_WEIGHTS] = { find_group(RANKS_SHARD)->gathers, find_group(RANKS_STAGE)->gathers },
        [FOR_ACTIVATIONS] = { find_group(RANKS_TENSOR)->gathers, find_group(RANKS_CONTEXT)->nccl },
        [FOR_GRADIENTS] = { find_group(comm_near())->nccl }
    };
    int count = 0;
    for (int i = 0; i < MAX_WINDOWS; i++)
        if (of[use][i])
            user[count++] = of[use][i];
    return count;
}

/* Returns true if true_here is true on all ranks. Registration is collective, so the ranks must
 * agree first. */
static bool all_ranks(bool true_here)
{
    double failed = !true_here;
    comm_max(&failed, 1);
    return failed == 0;
}

static void unregister(MemoryUse use)
{
    ncclComm_t user[MAX_WINDOWS];
    const int users = find_users(use, user);
    for (int i = 0; i < users; i++)
        if (registered[use].window[i])
            NCCL_CHECK(ncclCommWindowDeregister(user[i], registered[use].window[i]));
    NCCL_CHECK(ncclMemFree(registered[use].memory));
    memset(&registered[use], 0, sizeof registered[use]);
}

/* Returns the largest `bytes` of the stage's ranks, because windows have the same size on all
 * ranks. The memory that contains activations may also contain optimizer states, whose size may
 * differ between shard ranks. */
static size_t most_of_stage(size_t bytes)
{
    const int ranks = comm_group_size(RANKS_STAGE);
    size_t most = 1, *all = xmalloc(sizeof *all * (size_t)ranks);
    comm_gather(all, &bytes, sizeof bytes, RANKS_STAGE);
    for (int r = 0; r < ranks; r++)
        most = all[r] > most ? all[r] : most;
    free(all);
    return most;
}

/* Registers windows over the memory for all users. Returns false if registration failed on any
 * rank. */
static bool register_windows(MemoryUse use, size_t bytes)
{
    ncclComm_t user[MAX_WINDOWS];
    const int users = find_users(use, user);
    bool succeeds = true;
    backend_device_zero(registered[use].memory, bytes);
    device_sync();
    for (int i = 0; i < users; i++) {
        ncclWindow_t *w = &registered[use].window[i];
        const ncclResult_t status = ncclCommWindowRegister(user[i], registered[use].memory, bytes,
                                                           w, NCCL_WIN_COLL_SYMMETRIC);
        succeeds &= status == ncclSuccess && *w;
    }
    return all_ranks(succeeds);
}

/* Without windows (older driver, no peer access, limits of a container) all-gathers and exchanges
 * are slower, but correct. If memory is short, device_alloc prints the error. */
void *comm_alloc(size_t bytes, MemoryUse use)
{
    ncclComm_t user[MAX_WINDOWS];
    if (find_users(use, user) == 0)
        return device_alloc(bytes);
    CHECK(!registered[use].memory, "a second comm_alloc of use %d", use);
    check_comm_alloc(OPERATION, bytes, use);
    const size_t most = most_of_stage(bytes);
    const bool allocated = ncclMemAlloc(&registered[use].memory, most) == ncclSuccess;
    if (all_ranks(allocated) && register_windows(use, most))
        return registered[use].memory;
    const char *error = ncclGetLastError(user[0]);
    if (allocated)
        unregister(use);
    registered[use].memory = NULL;
    void *p = device_alloc(bytes);
    static const char *const names[NUM_MEMORY_USES] = {
        [FOR_WEIGHTS] = "all-gathers of weights",
        [FOR_ACTIVATIONS] = "all-gathers of activations, and exchanges,",
        [FOR_GRADIENTS] = "exchanges of gradients"
    };
    warn("NCCL cannot register memory as a symmetric window (%s): %s take SMs from the computation",
         error, names[use]);
    return p;
}

void comm_free(void *p)
{
    device_sync();
    for (MemoryUse use = 0; use < NUM_MEMORY_USES; use++)
        if (registered[use].memory == p) {
            unregister(use);
            return;
        }
    device_free(p);
}

static ncclDataType_t type_of(Tensor x)
{
    return x.format.dtype == F32 ? ncclFloat32 : ncclBfloat16;
}

/* NCCL's ring rounds BF16 sums at every hop. The ring sets the order of summation. This order is
 * always the same on the same machine with the same number of ranks. */
void backend_comm_all_reduce(Tensor x, Ranks g)
{
    CHECK_PLAIN(x);
    if (comm_group_size(g) == 1)
        return;
    comm_count(SENT_SUMS, tensor_bytes(x), g);
    NCCL_CHECK(ncclAllReduce(x.data, x.data, tensor_numel(x), type_of(x), ncclSum,
                             g == RANKS_TENSOR ? tensor_sums : nccl_of(g), device_stream()));
}

void backend_comm_all_reduce_max(Tensor x, Ranks g)
{
    CHECK(x.format.dtype == F32, "comm_all_reduce_max: x is %s; expected f32",
          format_name(x.format));
    comm_count(SENT_SUMS, tensor_bytes(x), g);
    if (comm_group_size(g) > 1)
        NCCL_CHECK(ncclAllReduce(x.data, x.data, tensor_numel(x), ncclFloat32, ncclMax, nccl_of(g),
                                 device_stream()));
}

void backend_comm_reduce_scatter(Tensor part, Tensor whole, Ranks g)
{
    const int W = comm_group_size(g);
    CHECK_PLAIN(whole);
    CHECK(tensor_numel(whole) == (size_t)W * tensor_numel(part) &&
              format_equal(whole.format, part.format),
          "%zu elements for %d ranks with %zu", tensor_numel(whole), W, tensor_numel(part));
    comm_count(SENT_SCATTERED_SUMS, tensor_bytes(part), g);
    if (W > 1)
        NCCL_CHECK(ncclReduceScatter(whole.data, part.data, tensor_numel(part), type_of(part),
                                     ncclSum, nccl_of(g), device_stream()));
    else if (part.data != whole.data)
        backend_device_copy(part.data, whole.data, tensor_bytes(part));
}

static char *row_at(Tensor t, int row, size_t bytes)
{
    return (char *)t.data + (size_t)row * bytes;
}

/* NCCL joins the sends and receives of a group, including those from a rank to itself, in one
 * kernel. */
void backend_comm_exchange(Tensor y, const RowRange *received, Tensor x, const RowRange *sent,
                           int items, Ranks g)
{
    const int W = comm_group_size(g);
    const size_t bytes = check_rows(OPERATION, y, received, x, sent, items, g);
    size_t rows = 0;
    NCCL_CHECK(ncclGroupStart());
    for (int i = 0; i < items; i++)
        for (int r = 0; r < W; r++) {
            const RowRange from = sent[r * items + i], to = received[r * items + i];
            rows += r == comm_group_rank(g) ? 0 : (size_t)from.count;
            if (W == 1)
                backend_device_copy(row_at(y, to.first, bytes), row_at(x, from.first, bytes),
                                    (size_t)to.count * bytes);
            if (W > 1 && from.count > 0)
                NCCL_CHECK(ncclSend(row_at(x, from.first, bytes), (size_t)from.count * bytes,
                                    ncclUint8, r, nccl_of(g), device_stream()));
            if (W > 1 && to.count > 0)
                NCCL_CHECK(ncclRecv(row_at(y, to.first, bytes), (size_t)to.count * bytes, ncclUint8,
                                    r, nccl_of(g), device_stream()));
        }
    NCCL_CHECK(ncclGroupEnd());
    comm_count(comm_sent_as(g), rows * bytes, g);
}

void backend_comm_send(Tensor x, Neighbour to)
{
    CHECK_PLAIN(x);
    comm_count(SENT_MESSAGES, tensor_bytes(x), RANKS_PIPELINE);
    NCCL_CHECK(
        ncclSend(x.data, tensor_bytes(x), ncclUint8, peer(sends[to]), sends[to], device_stream()));
}

void backend_comm_receive(Tensor x, Neighbour from)
{
    CHECK_PLAIN(x);
    NCCL_CHECK(ncclRecv(x.data, tensor_bytes(x), ncclUint8, peer(receives[from]), receives[from],
                        device_stream()));
}

void backend_comm_all_gather(void *whole, const void *part, size_t bytes, Ranks g)
{
    const ncclComm_t gathers = find_group(g)->gathers;
    comm_count(SENT_GATHERS, bytes, g);
    if (comm_group_size(g) > 1)
        NCCL_CHECK(ncclAllGather(part, whole, bytes, ncclUint8, gathers ? gathers : nccl_of(g),
                                 device_stream()));
    else if (whole != part)
        backend_device_copy(whole, part, bytes);
}
