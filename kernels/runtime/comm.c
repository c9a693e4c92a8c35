/* Ranks, and host values over MPI. MPI's default error handler ends all ranks with a message, so
 * return values need no checks. */
#include "kernels/runtime/comm.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/runtime/comm_mpi.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/watchdog_marks.h"

static int rank = 0, size = 1, local_rank = 0, local_size = 1;
static MPI_Win host_memory = MPI_WIN_NULL;
/* started: the real mesh, which is restored after comm_pretend */
static Mesh mesh = { { 1, 1, 1, 1, 1, 1 } }, started;
static int mesh_rank; /* this rank's number in the mesh */
static bool pretends;
static size_t sent[NUM_SENT];
static struct {
    Ranks ranks;
    MPI_Comm mpi;
} groups[] = {
    /* groups that have a communicator */
    { RANKS_ALL, MPI_COMM_NULL },      { RANKS_SHARD, MPI_COMM_NULL },
    { RANKS_REPLICA, MPI_COMM_NULL },  { RANKS_CONTEXT, MPI_COMM_NULL },
    { RANKS_PIPELINE, MPI_COMM_NULL }, { RANKS_COPY, MPI_COMM_NULL },
    { RANKS_TENSOR, MPI_COMM_NULL },   { RANKS_STAGE, MPI_COMM_NULL },
    { RANKS_NEAR, MPI_COMM_NULL },     { RANKS_HOSTS, MPI_COMM_NULL },
};
enum { NUM_GROUPS = sizeof groups / sizeof groups[0] };
static pthread_t main_thread;
static void (*device_finish)(void);
static const char *(*_Atomic device_error)(void);

void comm_set_device(void (*finish)(void), const char *(*error)(void))
{
    device_finish = finish;
    device_error = error;
}

void comm_device_finish(void)
{
    void (*finish)(void) = device_finish;
    comm_set_device(NULL, NULL);
    if (finish)
        finish();
}

const char *comm_device_error(void)
{
    const char *(*error)(void) = device_error;
    return error ? error() : NULL;
}

/* NOTE: MPI_Abort prints eight lines about itself after our error message. OpenMPI has no setting
 * for these lines only; mpirun's --quiet also hides the message that there are too few slots. In
 * OpenMPI 4 all such texts go through this pointer. */
#if OMPI_MAJOR_VERSION == 4
typedef int ShowHelp(const char *file, const char *topic, int header, ...);

static int say_nothing(const char *file, const char *topic, int header, ...)
{
    (void)file, (void)topic, (void)header;
    return 0;
}

static void silence_abort(void)
{
    ShowHelp **show_help = dlsym(RTLD_DEFAULT, "opal_show_help");
    if (show_help)
        *show_help = say_nothing;
}
#else
static void silence_abort(void)
{
}
#endif

/* NOTE: MPI allows calls of the main thread only. In another thread the process exits without MPI.
 * The launcher detects that a process has ended, and ends the other ranks. */
static void end_all_ranks(int status)
{
    if (!pthread_equal(pthread_self(), main_thread))
        _exit(status);
    silence_abort();
    MPI_Abort(MPI_COMM_WORLD, status);
}

/* NOTE: srun without PMI starts processes that do not know each other. Each process would be a
 * separate run in the same folder. A single rank is correct if mpirun started it, which sets the
 * number of ranks, or if a step of Slurm has one task. */
static void check_launcher(void)
{
    const char *step = getenv("SLURM_STEP_NUM_TASKS"), *job = getenv("SLURM_NTASKS");
    if (size > 1 || getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE"))
        return;
    if (step && atol(step) > 1)
        die("srun started %s tasks (SLURM_STEP_NUM_TASKS), and MPI sees one rank: each task would "
            "train alone, all in the same "
            "save_folder. Start ranks with srun --mpi=pmix (srun --mpi=list shows what this Slurm "
            "has) or with mpirun. For "
            "separate runs: env -u SLURM_STEP_NUM_TASKS ./train ...",
            step);
    if (!step && job && atol(job) > 1)
        warn("Slurm has %s tasks for this job (SLURM_NTASKS), and this run has one rank; srun "
             "--mpi=pmix ./train or mpirun ./train "
             "starts one rank per task",
             job);
}

void comm_start(int *argc, char ***argv)
{
    MPI_Comm host;
    int provided;
    main_thread = pthread_self();
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    mesh_rank = rank;
    error_set_ranks(rank, size, end_all_ranks);
    if (rank != 0)
        progress_silence();
    if (provided < MPI_THREAD_FUNNELED)
        die("this MPI supports no threads (MPI_Init_thread provides %d); use an MPI with "
            "MPI_THREAD_FUNNELED, such as OpenMPI",
            provided);
    check_launcher();
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local_rank);
    MPI_Comm_size(host, &local_size);
    MPI_Comm_free(&host);
    comm_set_mesh(mesh_of_shards(size, 1));
}

static void free_groups(void)
{
    for (int i = 0; i < NUM_GROUPS; i++)
        if (groups[i].mpi != MPI_COMM_NULL)
            MPI_Comm_free(&groups[i].mpi);
}

/* Called before communicators are made, because a rank with another mesh would wait there for
 * ever. */
static void check_same(const Mesh *m)
{
    for (MeshDim d = 0; d < MESH_DIMS; d++) {
        double sizes[2] = { m->size[d], -m->size[d] };
        comm_max(sizes, 2);
        if (sizes[0] != -sizes[1])
            die("the ranks would form groups of %.0f to %.0f ranks; give every rank the same "
                "configuration and every host the same number of ranks, or set "
                "fsdp.hybrid_sharding_num_model_replicas",
                -sizes[1], sizes[0]);
    }
}

void comm_set_mesh(Mesh m)
{
    CHECK(mesh_ranks(&m) == size, "a mesh of %d ranks; expected %d", mesh_ranks(&m), size);
    check_same(&m);
    mesh = m;
    free_groups();
    for (int i = 0; i < NUM_GROUPS; i++)
        MPI_Comm_split(MPI_COMM_WORLD, comm_group(groups[i].ranks), rank, &groups[i].mpi);
}

MPI_Comm comm_mpi(Ranks g)
{
    for (int i = 0; i < NUM_GROUPS; i++)
        if (groups[i].ranks == g && groups[i].mpi != MPI_COMM_NULL)
            return groups[i].mpi;
    die("no communicator for the dimensions %#x of the mesh: comm_start comes first, and comm.c "
        "lists the groups",
        g);
}

int comm_group(Ranks g)
{
    return mesh_group(&mesh, mesh_rank, g);
}

int comm_group_size(Ranks g)
{
    return mesh_group_size(&mesh, g);
}

int comm_group_rank(Ranks g)
{
    return mesh_group_rank(&mesh, mesh_rank, g);
}

Ranks comm_near(void)
{
    return comm_group_size(RANKS_HOSTS) > 1 ? RANKS_NEAR : RANKS_SHARD;
}

void comm_pretend(const Mesh *m, int as)
{
    if (!pretends)
        started = mesh;
    pretends = m != NULL;
    mesh = m ? *m : started;
    mesh_rank = m ? as : rank;
}

size_t comm_ring_bytes(Sent what, size_t bytes, int ranks)
{
    const size_t others = (size_t)ranks - 1, n = (size_t)ranks;
    switch (what) {
    case SENT_SUMS: return 2 * others * bytes / n;
    case SENT_EXCHANGES:
    case SENT_CODES:
    case SENT_MESSAGES: return bytes;
    default: return others * bytes;
    }
}

void comm_count(Sent what, size_t bytes, Ranks g)
{
    sent[what] += comm_ring_bytes(what, bytes, comm_group_size(g));
}

size_t comm_sent(Sent what)
{
    return sent[what];
}

/* The memory is an MPI window, so it is freed however the ranks end. */
void *comm_host_memory(size_t bytes)
{
    MPI_Comm host;
    MPI_Aint length;
    int unit;
    void *memory;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host);
    MPI_Win_allocate_shared(local_rank == 0 ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL, host, &memory,
                            &host_memory);
    MPI_Win_shared_query(host_memory, 0, &length, &unit, &memory);
    if (local_rank == 0)
        memset(memory, 0, bytes);
    MPI_Barrier(host);
    MPI_Comm_free(&host);
    return memory;
}

void comm_finish(void)
{
    comm_device_finish();
    if (host_memory != MPI_WIN_NULL)
        MPI_Win_free(&host_memory);
    free_groups();
    error_set_ranks(0, 1, NULL);
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
    if (size == 1 || pretends)
        return;
    watchdog_mark_together("waiting for all ranks", -1);
    MPI_Barrier(MPI_COMM_WORLD);
}

void comm_broadcast(void *data, size_t bytes, int root)
{
    const size_t most = 1 << 30; /* MPI counts in int */
    if (size == 1 || pretends)
        return;
    watchdog_mark_together("broadcast of host values", -1);
    for (size_t at = 0; at < bytes; at += most)
        MPI_Bcast((char *)data + at, (int)(bytes - at < most ? bytes - at : most), MPI_BYTE, root,
                  MPI_COMM_WORLD);
}

void comm_sum(double *x, int n)
{
    comm_sum_over(x, n, RANKS_ALL);
}

void comm_gather(void *all, const void *own, size_t bytes, Ranks g)
{
    CHECK(bytes <= INT_MAX, "%zu bytes: MPI counts in int", bytes);
    if (comm_group_size(g) == 1) {
        memcpy(all, own, bytes);
        return;
    }
    watchdog_mark_together("gather of host values", -1);
    MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, comm_mpi(g));
}

char *comm_disagreement(const char *what, uint64_t hash)
{
    typedef struct {
        uint64_t hash;
        char host[64];
    } Reading;
    Reading own = { .hash = hash };
    char *found = NULL;
    gethostname(own.host, sizeof own.host - 1);
    Reading *all = xmalloc((size_t)size * sizeof *all);
    comm_gather(all, &own, sizeof own, RANKS_ALL);
    for (int r = 1; r < size && !found; r++)
        if (all[r].hash != all[0].hash)
            found = xasprintf("the ranks have different %s: those of rank %d on %s differ from "
                              "those of rank 0 on %s. Give every rank the same "
                              "files and arguments",
                              what, r, all[r].host, all[0].host);
    free(all);
    return found;
}

void comm_agree(const char *what, uint64_t hash)
{
    char *found = comm_disagreement(what, hash);
    if (found)
        die("%s", found);
}

/* Every rank adds the values in the order of ranks, because MPI_Allreduce does not guarantee the
 * same bits on all ranks. */
void comm_sum_over(double *x, int n, Ranks g)
{
    const int W = comm_group_size(g);
    comm_count(SENT_HOST_VALUES, sizeof *x * (size_t)n, g);
    if (W == 1 || pretends)
        return;
    watchdog_mark_together("sum over ranks", -1);
    double *all = xmalloc(sizeof *all * (size_t)W * (size_t)n);
    MPI_Allgather(x, n, MPI_DOUBLE, all, n, MPI_DOUBLE, comm_mpi(g));
    memset(x, 0, sizeof *x * (size_t)n);
    for (int r = 0; r < W; r++)
        for (int i = 0; i < n; i++)
            x[i] += all[(size_t)r * (size_t)n + (size_t)i];
    free(all);
}

void comm_max(double *x, int n)
{
    if (size == 1 || pretends)
        return;
    watchdog_mark_together("maximum over ranks", -1);
    MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}
