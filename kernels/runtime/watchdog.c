/* A collective waits for ever for a missing rank. Launchers detect a process that has ended, but
 * not its operation, and not a process that hangs. So each rank has a thread that reads, a few
 * times a second, the marks of all ranks of its host, and ends the run if
 *   - the process of another rank is gone, without having announced it, or announced but without having ended the others;
 *   - the device's communication reports an error;
 *   - a thread that its main thread waits for has made no progress for the timeout;
 *   - the first rank of another host has ended (see hosts.h): the launcher may take long to end this host;
 *   - its own rank has made no progress for the timeout, nor has the rank it waits for. That is a rank whose watchdog thread has
 *     stopped too (SIGSTOP), else the one that has entered the fewest collectives, else one that is in none. If all are in the same
 *     collective, they wait for a device or for another host.
 * The first rank of a host that detects a fault reports it, then calls _exit(1): the main thread
 * may be inside MPI, so no other thread may call MPI, not even MPI_Abort. mpirun ends the other
 * ranks, stopped ones too; if the launcher does not, the ranks of the host detect that this one is
 * gone.
 *
 * Marks and beats are counters, not times: each watchdog measures with its own clock how long a
 * counter has not changed. So a job that was suspended as a whole continues normally, and hosts
 * need no common clock. */
#include "kernels/runtime/watchdog.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/hosts.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/runtime/watchdog_state.h"

/* Memory shared by the ranks of a host. */
typedef struct {
    /* a rank of this host has reported a fault, or one of another host ends all */
    atomic_bool spoken;
    /* seconds without a heartbeat of another host; the first rank knows which */
    _Atomic double silence;
    RankState rank[]; /* (n) */
} SharedTable;

/* What this rank knows of another rank: the counters, and for how many seconds they have not
 * changed. */
typedef struct {
    unsigned long progress, beats;
    double idle, silent;
    bool visible; /* kill() finds its process; containers may hide it */
} Heartbeat;

typedef enum { NO_FAULT, GONE, LEFT, STOPPED, HUNG, NOBODY, DEVICE, ENDED, AWAY } FaultKind;
typedef struct {
    FaultKind kind;
    int who;
    const char *text;
} Fault; /* who: local rank */

static const double INTERVAL = 0.25; /* seconds; mpirun ends all ranks a second after one */
/* seconds for ranks that know more, and for the launcher to end all */
static const double GRACE = 2;
/* seconds without a heartbeat of another host until a warning, */
static const double SILENCE = 5;
/* and until it can end the run. NOTE: mpirun with the keepalive options of README is earlier. But
 * TCP sends no keepalives while data are unsent: if mpirun had messages for the lost host, as after
 * the end of a rank, it would wait for a quarter of an hour */
static const double AWAY_AFTER = 15;

static struct {
    SharedTable *table;
    RankState *rank;      /* table->rank */
    Heartbeat *heartbeat; /* (n) */
    int n, self;
    _Atomic int timeout; /* the main thread may change this and the next */
    void (*_Atomic name)(int part, char text[PART_NAME]);
    bool stop;
    pthread_t thread;
    pthread_mutex_t lock; /* guards stop */
    pthread_cond_t wake;
} watchdog = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* Called by comm before the host waits for other ranks. */
static void mark_wait(const char *operation)
{
    watchdog_mark_together(operation, -1);
}

/* This rank is about to end all ranks with its own message. */
static void leave(void)
{
    watchdog_own->state = LEAVING;
}

/* ---- messages -------------------------------------------------------------------------------- */

/* "all-gather of block 3"; returns the length */
static int name_part(char text[128], const char *operation, int part)
{
    void (*name)(int, char *) = watchdog.name;
    char called[PART_NAME];
    if (part < 0)
        return snprintf(text, 128, "%s", operation);
    if (name)
        name(part, called);
    else
        snprintf(called, sizeof called, "part %d", part);
    return snprintf(text, 128, "%s of %s", operation, called);
}

/* The busy worker that s waits for; NULL: none. */
static const WorkerState *needed(const RankState *s)
{
    const int needs = s->needs;
    return s->worker[needs].busy ? &s->worker[needs] : NULL;
}

/* What s does, or the worker that it waits for. */
static void read_operation(char text[OPERATION_NAME], const RankState *s, const WorkerState *worker)
{
    shared_text_read(text, worker ? &worker->doing : &s->operation);
    if (!text[0])
        strcpy(text, "starting");
}

void watchdog_operation(char text[OPERATION_NAME])
{
    read_operation(text, watchdog_own, needed(watchdog_own));
}

/* "all-gather of block 3 in step 12" */
static const char *describe(char text[128], const RankState *s)
{
    const WorkerState *w = needed(s);
    char operation[OPERATION_NAME];
    read_operation(operation, s, w);
    int n = name_part(text, operation, w ? -1 : s->part);
    if (s->step > 0)
        snprintf(text + n, (size_t)(128 - n), " in step %ld", s->step);
    return text;
}

static const char advice[] = "--try_load_latest_save continues from the last complete checkpoint";

/* Seconds until a thread counts as stopped, here or on another host. */
static double long_silence(void)
{
    return watchdog.timeout > 4 ? watchdog.timeout / 2.0 : 2;
}

/* The message about another host that ended, or sends no heartbeats. */
static int compose_away(char *text, size_t size, FaultKind kind)
{
    char who[512], waiting[128];
    hosts_name(who, sizeof who, long_silence());
    describe(waiting, watchdog_own);
    if (kind == ENDED)
        return snprintf(text, size,
                        "error (rank %d): %s ended while rank %d was in %s. Their messages say "
                        "why; if there are "
                        "none, they crashed or were killed. %s\n",
                        watchdog_own->rank, who, watchdog_own->rank, waiting, advice);
    return snprintf(text, size,
                    "error (rank %d): no heartbeat from %s for %.0f s: that host or the network to "
                    "it is down, or "
                    "its ranks are stopped. Rank %d is in %s. %s\n",
                    watchdog_own->rank, who, hosts_silence(), watchdog_own->rank, waiting, advice);
}

/* One line with rank, host and operation. */
static int compose(char *text, size_t size, const Fault *f)
{
    const RankState *s = &watchdog.rank[f->who];
    const Heartbeat *seen = &watchdog.heartbeat[f->who];
    char host[64] = "", who[160], culprit[128], waiting[128], device[160] = "", other[160] = "";
    int part = -1;
    const char *blocked = f->kind == NOBODY ? trace_blocked(&part) : NULL;
    if (blocked) {
        name_part(culprit, blocked, part);
        snprintf(device, sizeof device, " (this rank's device waits for %s)", culprit);
    }
    gethostname(host, sizeof host - 1);
    snprintf(who, sizeof who, "error (rank %d): rank %d (process %d on %s)", watchdog_own->rank,
             s->rank, s->pid, host);
    describe(culprit, s);
    describe(waiting, watchdog_own);
    if (f->who != watchdog.self)
        snprintf(other, sizeof other, "; rank %d is in %s", watchdog_own->rank, waiting);
    switch (f->kind) {
    case GONE:
        return snprintf(text, size,
                        "%s ended without a message, during %s; it crashed or was killed, perhaps "
                        "because the host ran out of memory: see dmesg. %s\n",
                        who, culprit, advice);
    case LEFT:
        return snprintf(text, size,
                        "%s ended with an error of its own, during %s: see its message. %s\n", who,
                        culprit, advice);
    case STOPPED:
        return snprintf(
            text, size,
            "%s has not responded for %.0f s, since %s; rank %d waits for it in %s. It is "
            "stopped, or its host is overloaded. %s\n",
            who, seen->silent, culprit, watchdog_own->rank, waiting, advice);
    case HUNG:
        return snprintf(text, size,
                        "%s has made no progress for %.0f s, since %s%s. If it is only slow, raise "
                        "timeout_seconds (now %d). %s\n",
                        who, seen->idle, culprit, other, watchdog.timeout, advice);
    case NOBODY:
        return snprintf(text, size,
                        "error (rank %d): no rank of %s has made progress for %.0f s, since %s: %s "
                        "does not answer%s; NCCL_DEBUG=INFO says more. timeout_seconds is %d. %s\n",
                        watchdog_own->rank, host, seen->idle, waiting,
                        comm_size() > 1 ? "a device or a rank of another host" : "the device",
                        device, watchdog.timeout, advice);
    case ENDED:
    case AWAY: return compose_away(text, size, f->kind);
    default:
        return snprintf(text, size, "error (rank %d): %s, during %s. %s\n", watchdog_own->rank,
                        f->text, waiting, advice);
    }
}

/* write, not stdio: the main thread may hold stderr's lock. */
static void say(const char *text)
{
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
}

/* The pause: when mpirun ends the other ranks, it drops output that it has not read. */
static _Noreturn void end(const char *text, int status, bool silent)
{
    watchdog_own->state = LEAVING;
    if (silent)
        usleep((useconds_t)(GRACE * 1e6));
    else {
        say(text);
        usleep(300000);
    }
    _exit(status);
}

static _Noreturn void report(const Fault *f)
{
    char text[1500];
    compose(text, sizeof text, f);
    end(text, 1, atomic_exchange(&watchdog.table->spoken, true));
}

/* NOTE: launchers send signals, too, to the ranks that remain after one has ended: its message, or
 * that of the watchdogs, comes first. Ranks without a watchdog yet wait for rank 0, whose end ends
 * them too. */
void watchdog_end(const char *text, int status)
{
    bool silent = false;
    usleep(watchdog.table ? (useconds_t)(2 * INTERVAL * 1e6) : comm_rank() > 0 ? 1000000 : 0);
    for (int i = 0; watchdog.table && i < watchdog.n; i++)
        silent = silent || (i != watchdog.self && watchdog.rank[i].state == LEAVING);
    end(text, status, silent || (watchdog.table && atomic_exchange(&watchdog.table->spoken, true)));
}

/* ---- watching -------------------------------------------------------------------------------- */

static bool process_exists(const RankState *s)
{
    return kill(s->pid, 0) == 0 || errno == EPERM;
}

static bool is_silent(int i)
{
    return watchdog.heartbeat[i].silent >= long_silence();
}

static void look(double passed)
{
    for (int i = 0; i < watchdog.n; i++) {
        Heartbeat *s = &watchdog.heartbeat[i];
        const WorkerState *w = needed(&watchdog.rank[i]);
        unsigned long progress = w ? w->beats : watchdog.rank[i].marks,
                      beats = watchdog.rank[i].beats;
        s->idle = progress == s->progress ? s->idle + passed : 0;
        s->silent = beats == s->beats ? s->silent + passed : 0;
        s->progress = progress;
        s->beats = beats;
    }
}

/* For the first rank: heartbeats to and from the other hosts. If a rank of another host reports a
 * fault, this host prints nothing. Rank 0 warns of a silent host long before it counts as a fault:
 * the launcher may detect it too, and end all without naming ranks. */
static void look_at_hosts(double passed)
{
    static bool told = false;
    bool leaving = watchdog.table->spoken;
    for (int i = 0; i < watchdog.n; i++)
        leaving = leaving || watchdog.rank[i].state == LEAVING;
    hosts_look(passed, leaving);
    if (hosts_leaving())
        watchdog.table->spoken = true;
    const double silence = hosts_silence();
    watchdog.table->silence = silence;
    if (silence >= SILENCE && !told && watchdog_own->rank == 0) {
        char who[512], text[640];
        hosts_name(who, sizeof who, SILENCE);
        snprintf(text, sizeof text, "warning: no heartbeat from %s for %.0f s\n", who, silence);
        say(text);
    }
    told = silence >= SILENCE;
}

static bool is_late(int i)
{
    const RankState *s = &watchdog.rank[i];
    return watchdog.heartbeat[i].idle >=
           (double)watchdog.timeout * (s->patient && !needed(s) ? PATIENCE : 1);
}

/* Whether b is likelier to wait for a than a for b. */
static bool is_behind(const RankState *a, const RankState *b)
{
    if (a->together != b->together)
        return a->together < b->together;
    if (a->stage == b->stage && a->stage >= 0 && a->inside != b->inside)
        return a->inside < b->inside;
    return !a->waits && b->waits;
}

static Fault find_fault(void)
{
    int last = 0;
    bool differ = false;
    for (int i = 0; i < watchdog.n; i++)
        if (i != watchdog.self && watchdog.heartbeat[i].visible &&
            !process_exists(&watchdog.rank[i]))
            return (Fault){ watchdog.rank[i].state == WATCHING ? GONE : LEFT, i, NULL };
    const char *text = comm_device_error();
    if (text)
        return (Fault){ DEVICE, watchdog.self, text };
    for (int i = 0; i < watchdog.n; i++)
        if (is_silent(i) && watchdog.heartbeat[watchdog.self].idle >= watchdog.timeout)
            return (Fault){ STOPPED, i, NULL };
    if (hosts_ended())
        return (Fault){ ENDED, watchdog.self, NULL };
    if (!is_late(watchdog.self))
        return (Fault){ NO_FAULT };
    if (needed(watchdog_own))
        return (Fault){ HUNG, watchdog.self, NULL };
    /* then ranks of this host may wait for different things */
    if (watchdog.table->silence >= long_silence())
        return (Fault){ watchdog.table->silence < AWAY_AFTER ? NO_FAULT
                        : watchdog.self == 0                 ? AWAY
                                                             : NOBODY,
                        watchdog.self, NULL };
    for (int i = 0; i < watchdog.n; i++) {
        if (is_behind(&watchdog.rank[i], &watchdog.rank[last]))
            last = i;
        differ = differ || is_behind(&watchdog.rank[i], &watchdog.rank[0]) ||
                 is_behind(&watchdog.rank[0], &watchdog.rank[i]);
    }
    if (!is_late(last)) /* it makes progress, slowly */
        return (Fault){ NO_FAULT };
    return (Fault){ !differ && watchdog_own->waits ? NOBODY : HUNG, last, NULL };
}

/* Whether other ranks may know better. A rank in a collective may wait for one of another host,
 * whose watchdog will say so. */
static bool others_know(const Fault *f)
{
    const bool waits = f->kind == HUNG && watchdog.rank[f->who].waits && watchdog.n < comm_size();
    return waits || f->kind == NOBODY || f->kind == LEFT || f->kind == ENDED;
}

/* Sleeps; false: the watchdog is to stop. */
static bool sleep_or_stop(void)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long ns = until.tv_nsec + (long)(INTERVAL * 1e9);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    pthread_mutex_lock(&watchdog.lock);
    int status = 0;
    while (!watchdog.stop && status != ETIMEDOUT)
        status = pthread_cond_timedwait(&watchdog.wake, &watchdog.lock, &until);
    bool go_on = !watchdog.stop;
    pthread_mutex_unlock(&watchdog.lock);
    return go_on;
}

static void *watch(void *nothing)
{
    double last = clock_seconds(), faulty = 0;
    while (sleep_or_stop()) {
        /* if longer, this process was suspended */
        double now = clock_seconds(), passed = now - last < 1 ? now - last : 1;
        last = now;
        watchdog_own->beats++;
        look(passed);
        if (watchdog.self == 0)
            look_at_hosts(passed);
        if (watchdog_own->state == LEAVING)
            continue;
        Fault f = find_fault();
        if (f.kind == NO_FAULT)
            faulty = 0;
        else if (others_know(&f) && faulty < GRACE)
            faulty += passed;
        else
            report(&f);
    }
    return nothing;
}

/* ---- start and end --------------------------------------------------------------------------- */

void watchdog_set_timeout(int timeout)
{
    watchdog.timeout = timeout;
}

void watchdog_set_names(void (*name)(int part, char text[PART_NAME]))
{
    watchdog.name = name;
}

void watchdog_start(int timeout)
{
    watchdog.n = comm_local_size();
    watchdog.self = comm_local_rank();
    watchdog_set_timeout(timeout);
    watchdog.table =
        comm_host_memory(sizeof *watchdog.table + sizeof *watchdog.rank * (size_t)watchdog.n);
    watchdog.rank = watchdog.table->rank;
    watchdog.heartbeat = xcalloc((unsigned long)watchdog.n, sizeof *watchdog.heartbeat);
    watchdog_own = &watchdog.rank[watchdog.self];
    watchdog_own->rank = comm_rank();
    watchdog_own->pid = getpid();
    watchdog_own->part = watchdog_own->stage = -1;
    watchdog_own->state = WATCHING;
    comm_set_before_waiting(mark_wait);
    error_set_dying(leave);
    comm_barrier();
    hosts_start(watchdog.rank[0].rank);
    for (int i = 0; i < watchdog.n; i++)
        watchdog.heartbeat[i].visible = process_exists(&watchdog.rank[i]);

    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&watchdog.wake, &clock);
    pthread_condattr_destroy(&clock);
    int error = pthread_create(&watchdog.thread, NULL, watch, NULL);
    if (error)
        die("cannot start the watchdog's thread: %s", strerror(error));
}

void watchdog_stop(void)
{
    if (!watchdog.table)
        return;
    comm_barrier();
    comm_set_before_waiting(NULL);
    error_set_dying(NULL);
    leave();
    pthread_mutex_lock(&watchdog.lock);
    watchdog.stop = true;
    pthread_cond_signal(&watchdog.wake);
    pthread_mutex_unlock(&watchdog.lock);
    pthread_join(watchdog.thread, NULL);
    pthread_cond_destroy(&watchdog.wake);
    comm_barrier(); /* no rank's end counts as a fault */
    hosts_stop();
    free(watchdog.heartbeat);
    watchdog_alone();
    watchdog.table = NULL;
    watchdog.stop = false;
}
