/* A collective waits for ever for a missing rank. Launchers detect a process that has ended.
 * Launchers do not detect which operation this process was in, and they do not detect a process
 * that hangs. So each rank has a thread that reads, a few times a second, the states of all ranks
 * that it knows: the ranks of its host, and the ranks of other hosts whose states hosts.h brings.
 * This thread ends the run in four cases:
 *   - The process of another rank is gone, without having announced its end, or it announced its
 *     end but has not ended the other ranks.
 *   - The device's communication reports an error.
 *   - A worker that its main thread waits for has made no progress for the timeout.
 *   - Neither its own rank nor the rank that its own rank waits for has made progress for the
 *     timeout. The rank waited for is one whose watchdog thread has stopped too (SIGSTOP, or a host
 *     that is down); else the rank that has entered the fewest collectives; else a rank that is in
 *     no collective. If all ranks are in the same collective, all ranks wait for a device. Only the
 *     host of rank 0, which knows all ranks, looks for this rank. But every host detects that the
 *     host of rank 0 has stopped.
 * The first rank of a host that detects a fault reports it, then calls _exit(1). The main thread
 * may be inside MPI, so no other thread may call MPI, not even MPI_Abort. mpirun ends the other
 * ranks, including stopped ranks. If the launcher does not end them, they detect that this rank is
 * gone.
 *
 * Marks and beats are counters, not times. Each watchdog measures with its own clock how long a
 * counter has not changed. So a job that was suspended as a whole continues normally, and hosts
 * need no common clock. */
#include "kernels/runtime/watchdog.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/hosts.h"
#include "kernels/runtime/rank_state.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog_marks.h"

/* Memory that the ranks of a host share. */
typedef struct {
    atomic_bool spoken;  /* a rank of this host has reported a fault */
    atomic_int leader;   /* the first rank of this host */
    SharedState state[]; /* (ranks), the ranks of all hosts */
} SharedTable;

/* What this rank knows of another rank. idle: seconds since that rank last made progress. silent:
 * seconds since the last beat of its watchdog. */
typedef struct {
    RankState state;
    unsigned long progress;
    double idle, silent;
    /* kill() finds the process of this rank: the rank is on this host, and no container hides it */
    bool visible;
} View;

typedef enum { NO_FAULT, GONE, LEFT, STOPPED, HUNG, NOBODY, DEVICE } FaultKind;
typedef struct {
    FaultKind kind;
    int who;
} Fault;

static const double INTERVAL = 0.25; /* seconds; mpirun ends all ranks a second after one ends */
/* seconds that the launcher, and ranks that may know more about a fault, get to end all ranks */
static const double GRACE = 2;
/* seconds without a heartbeat of another host until rank 0 prints a warning */
static const double SILENCE = 5;
/* seconds without a heartbeat of another host until the silence can end the run. NOTE: mpirun with
 * the keepalive options of README ends the run earlier. But TCP sends no keepalives while data are
 * unsent. If mpirun had messages for the lost host, as after the end of a rank, it would wait for a
 * quarter of an hour. */
static const double AWAY_AFTER = 15;

static SharedTable *table; /* NULL: the watchdog has not started, or has stopped */
static View *view;         /* (ranks) */
static int ranks, self;
static int stopping; /* an eventfd that watchdog_stop writes */
/* seconds; the main thread may change most_seconds and name_of */
static _Atomic int most_seconds;
static void (*_Atomic name_of)(int unit, char text[WATCHDOG_UNIT_NAME]);
static pthread_t thread;

/* Announces that this rank is about to end all ranks with its own message. */
static void leave(void)
{
    const long leaving = 1;
    state_write(&table->state[self], &leaving, STATE_MEMBER(leaving));
}

/* ---- messages -------------------------------------------------------------------------------- */

/* Writes "all-gather of block 3". Returns the length. */
static int name_unit(char text[128], const char *operation, int unit)
{
    void (*name)(int, char *) = name_of;
    char called[WATCHDOG_UNIT_NAME];
    if (unit < 0 || !name)
        return snprintf(text, 128, "%s", operation);
    name(unit, called);
    return snprintf(text, 128, "%s of %s", operation, called);
}

/* Returns the busy worker that the rank waits for; NULL: none. */
static const WorkerState *needed(const RankState *s)
{
    const WorkerState *w = &s->worker[s->main.needs];
    return w->busy ? w : NULL;
}

/* Returns what a rank does or, if it waits for a worker, what the worker does. */
static const char *operation_of(const RankState *s)
{
    const char *text = needed(s) ? needed(s)->doing : s->main.operation;
    return *text ? text : "starting";
}

void watchdog_operation(char text[OPERATION_NAME])
{
    RankState s;
    watchdog_read_own(&s);
    strcpy(text, operation_of(&s));
}

/* Writes "all-gather of block 3 in step 12". */
static void describe(char text[128], const RankState *s)
{
    int n = name_unit(text, operation_of(s), needed(s) ? -1 : s->main.unit);
    if (s->main.step > 0)
        snprintf(text + n, (size_t)(128 - n), " in step %ld", s->main.step);
}

/* Writes one line with rank, host and operation. */
static void compose(char *text, size_t size, const Fault *f)
{
    const struct {
        const char *what, *why;
    } said[] = {
        [GONE] = { "ended without a message, during",
                   "It crashed or was killed, perhaps because the host ran out of memory: see "
                   "dmesg" },
        [LEFT] = { "ended with an error of its own, during", "See its message" },
        [STOPPED] = { "has not responded for %.0f s, since",
                      "The process is stopped, or its host is down, overloaded or cut off" },
        [HUNG] = { "has made no progress for %.0f s, since",
                   "If this rank is only slow, raise timeout_seconds" },
        [NOBODY] = { "has made no progress for %.0f s, since",
                     "All ranks wait, so a device does not answer: NCCL_DEBUG=INFO says more. If "
                     "the device is only slow, raise timeout_seconds" },
        [DEVICE] = { "has an error of its device, during", comm_device_error() },
    };
    const View *v = &view[f->who];
    int unit = -1;
    /* reading the trace is safe, because the main thread, which writes it, waits */
    const char *blocked = f->kind == NOBODY ? trace_blocked(&unit) : NULL;
    char what[64], does[128], here[128], other[160] = "";
    snprintf(what, sizeof what, said[f->kind].what, v->silent > v->idle ? v->silent : v->idle);
    describe(does, &v->state);
    describe(here, &view[self].state);
    if (f->who != self)
        snprintf(other, sizeof other, "; rank %d is in %s", self, here);
    else if (blocked && name_unit(here, blocked, unit))
        snprintf(other, sizeof other, "; its device waits for %s", here);
    snprintf(text, size,
             "error (rank %d): rank %ld (process %ld on %s) %s %s%s. %s. --try_load_latest_save "
             "continues from the last complete checkpoint\n",
             self, v->state.rank, v->state.pid, v->state.host, what, does, other,
             said[f->kind].why);
}

/* Calls write instead of stdio, because the main thread may hold stderr's lock. */
static void say(const char *text)
{
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
}

/* Returns true if a rank other than this rank and `who` is about to end all ranks. */
static bool others_speak(int who)
{
    bool speak = false;
    for (int i = 0; i < ranks; i++) {
        long leaving;
        state_read(&leaving, &table->state[i], STATE_MEMBER(leaving));
        speak = speak || (leaving && i != self && i != who);
    }
    return speak;
}

/* Ends this rank. One rank per host prints the text, unless another rank, except `who`, is about to
 * end all ranks. The pause is needed because mpirun, when it ends the other ranks, drops output
 * that it has not read. */
static _Noreturn void end(const char *text, int status, int who)
{
    const bool silent = table && (atomic_exchange(&table->spoken, true) || others_speak(who));
    if (!silent)
        say(text);
    usleep(silent ? (useconds_t)(GRACE * 1e6) : 300000);
    _exit(status);
}

static _Noreturn void report(const Fault *f)
{
    char text[1500];
    compose(text, sizeof text, f);
    leave();
    hosts_exchange(); /* so that other hosts know which rank ends all ranks */
    /* launchers need longer than GRACE to end several hosts after an error of `who` */
    end(text, 1, comm_local_size() == ranks ? f->who : self);
}

/* NOTE: when a rank has ended, launchers send signals to the remaining ranks, too. The ended rank's
 * message, or a watchdog's message, should come first. Ranks that have no watchdog yet wait for
 * rank 0, whose end ends them too. */
void watchdog_end(const char *text, int status)
{
    usleep(table ? (useconds_t)(2 * INTERVAL * 1e6) : comm_rank() > 0 ? 1000000 : 0);
    if (table)
        leave();
    end(text, status, self);
}

/* ---- watching -------------------------------------------------------------------------------- */

static bool is_here(const View *v)
{
    return v->state.leader == table->leader;
}

/* Rank 0 warns of a silent host long before the silence counts as a fault, because the launcher may
 * detect the silence too, and end all ranks without naming the host. */
static void warn_of_silence(const View *v)
{
    char text[256];
    snprintf(text, sizeof text, "warning: no heartbeat from rank %ld on %s for %.0f s%s\n",
             v->state.rank, v->state.host, v->silent,
             v->state.beats > 0 ? ""
                                : ": no UDP packet of this host reaches rank 0, so if the host "
                                  "fails, no message will name it");
    say(text);
}

/* Updates `view`. Progress of a rank is compared only when the rank beats, because states of other
 * hosts arrive late. */
static void look(double passed)
{
    for (View *v = view; v < view + ranks; v++) {
        RankState *s = &v->state;
        const unsigned long beats = s->beats;
        state_read(s, &table->state[v - view], STATE_WHOLE);
        const unsigned long progress = needed(s) ? needed(s)->beats : s->main.marks;
        v->silent += passed;
        if (s->beats != beats) {
            v->idle = progress == v->progress ? v->idle + v->silent : 0;
            v->silent = 0;
            v->progress = progress;
        } else if (self == 0 && s->rank == s->leader && !is_here(v) && v->silent >= SILENCE &&
                   v->silent - passed < SILENCE)
            warn_of_silence(v);
    }
}

static bool is_late(const View *v)
{
    const bool patient = v->state.main.patient && !needed(&v->state);
    return v->idle >= (double)most_seconds * (patient ? PATIENCE : 1);
}

/* Returns true if rank y is likelier to wait for rank x than rank x is to wait for rank y. */
static bool is_behind(const View *x, const View *y)
{
    const Marks *a = &x->state.main, *b = &y->state.main;
    if (a->together != b->together)
        return a->together < b->together;
    if (a->stage == b->stage && a->stage >= 0 && a->inside != b->inside)
        return a->inside < b->inside;
    return !a->waits && b->waits;
}

/* Finds the rank that this rank waits for in vain. */
static Fault find_hung(void)
{
    const View *own = &view[self], *last = own;
    bool differ = false;
    for (const View *v = view; v < view + ranks; v++) {
        if (v->state.beats == 0) /* the state of this rank is unknown */
            continue;
        differ = differ || is_behind(v, own) || is_behind(own, v);
        if (is_behind(v, last))
            last = v;
    }
    if (!is_late(last)) /* the rank makes progress, but slowly */
        return (Fault){ NO_FAULT };
    return (Fault){ !differ && own->state.main.waits ? NOBODY : HUNG, (int)(last - view) };
}

static Fault find_fault(int ended)
{
    const View *own = &view[self];
    /* seconds without a beat until a watchdog thread counts as stopped */
    const double stopped = most_seconds > 4 ? most_seconds / 2.0 : 2;
    int silent = -1;
    for (int i = 0; i < ranks; i++) {
        const View *v = &view[i];
        if (i == ended || (v->visible && kill((pid_t)v->state.pid, 0) != 0))
            return (Fault){ v->state.leaving ? LEFT : GONE, i };
        if (v->state.beats > 0 && v->silent >= stopped && (silent < 0 || is_here(v)))
            silent = i;
    }
    if (comm_device_error())
        return (Fault){ DEVICE, self };
    if (silent >= 0 && own->idle >= most_seconds &&
        (is_here(&view[silent]) || view[silent].silent >= AWAY_AFTER))
        return (Fault){ STOPPED, silent };
    if (!is_late(own))
        return (Fault){ NO_FAULT };
    if (needed(&own->state))
        return (Fault){ HUNG, self };
    /* if a host is silent, ranks of the other hosts may wait for different operations */
    const bool elsewhere = view[0].state.beats > 0 && !is_here(view);
    return silent >= 0 || elsewhere ? (Fault){ NO_FAULT } : find_hung();
}

/* Returns true if another rank may know more about the fault. */
static bool others_know(const Fault *f)
{
    return f->kind == LEFT || f->kind == NOBODY || !is_here(&view[f->who]);
}

static void *watch(void *nothing)
{
    struct pollfd stop = { .fd = stopping, .events = POLLIN };
    double last = clock_seconds(), faulty = 0;
    for (unsigned long beats = 1; poll(&stop, 1, (int)(INTERVAL * 1e3)) <= 0; beats++) {
        /* a longer interval means that this process was suspended */
        double now = clock_seconds(), passed = now - last < 1 ? now - last : 1;
        last = now;
        state_write(&table->state[self], &beats, STATE_MEMBER(beats));
        const int ended = hosts_exchange();
        look(passed);
        if (view[self].state.leaving)
            continue;
        Fault f = find_fault(ended);
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
    most_seconds = timeout;
}

void watchdog_set_names(void (*name)(int unit, char text[WATCHDOG_UNIT_NAME]))
{
    name_of = name;
}

/* Writes the initial states of the ranks into the table of this host. */
static void show_ranks(void)
{
    RankState own = { .rank = self, .pid = getpid() }, *all = xcalloc((size_t)ranks, sizeof *all);
    gethostname(own.host, sizeof own.host - 1);
    if (comm_local_rank() == 0)
        table->leader = self;
    comm_barrier();
    own.leader = table->leader;
    comm_gather(all, &own, sizeof own, RANKS_ALL);
    for (int i = 0; i < ranks; i++) {
        view[i].visible = all[i].leader == own.leader && kill((pid_t)all[i].pid, 0) == 0;
        if (own.leader == self)
            state_write(&table->state[i], &all[i], STATE_WHOLE);
    }
    free(all);
    comm_barrier();
}

void watchdog_start(int timeout)
{
    ranks = comm_size();
    self = comm_rank();
    watchdog_set_timeout(timeout);
    view = xcalloc((size_t)ranks, sizeof *view);
    table = comm_host_memory(sizeof *table + sizeof *table->state * (size_t)ranks);
    show_ranks();
    watchdog_show(&table->state[self]);
    error_set_dying(leave);
    hosts_start(table->state);
    stopping = eventfd(0, EFD_CLOEXEC);
    int error = pthread_create(&thread, NULL, watch, NULL);
    if (error)
        die("cannot start the watchdog's thread: %s", strerror(error));
}

void watchdog_stop(void)
{
    if (!table)
        return;
    comm_barrier();
    error_set_dying(NULL);
    leave();
    eventfd_write(stopping, 1);
    pthread_join(thread, NULL);
    close(stopping);
    comm_barrier(); /* from here on, the end of a rank is not a fault */
    hosts_stop();
    free(view);
    watchdog_show(NULL);
    table = NULL;
}
