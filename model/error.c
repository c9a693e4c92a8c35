/* The one reaction to errors: a message on stderr, then every rank goes down.
 *
 * exit() on one rank would leave the others waiting in a collective for ever; MPI_Abort takes all of them along.
 * Most errors (a missing file, a wrong key) are met by every rank at once. Rank 0 speaks at once and its abort ends
 * the others while they wait, so the message appears once; an error of one rank alone appears a moment later. */
#include "model/error.h"

#include <mpi.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "model/watchdog.h"

enum { MESSAGE_SIZE = 4096 };

/* Rank and size, or 0 of 1 outside MPI_Init .. MPI_Finalize; tells whether MPI may be called. */
static bool mpi_running(int *rank, int *size)
{
    int started = 0, finished = 0;
    *rank = 0;
    *size = 1;
    MPI_Initialized(&started);
    MPI_Finalized(&finished);
    if (!started || finished)
        return false;
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return true;
}

/* One fputs per message, so that messages of several ranks do not mix. */
static void print_message(const char *prefix, const char *format, va_list args)
{
    char message[MESSAGE_SIZE], line[MESSAGE_SIZE + 64];
    vsnprintf(message, sizeof message, format, args);
    snprintf(line, sizeof line, "%s: %s\n", prefix, message);
    fflush(stdout);
    fputs(line, stderr);
    fflush(stderr);
}

static _Noreturn void fail(const char *format, va_list args)
{
    int rank, size;
    bool running = mpi_running(&rank, &size);
    char prefix[64] = "error";
    if (size > 1)
        snprintf(prefix, sizeof prefix, "error (rank %d)", rank);
    watchdog_leave();
    signal(SIGTERM, SIG_DFL);       /* the abort of another rank ends this one without a word */
    if (rank != 0)
        sleep(3);
    print_message(prefix, format, args);
    if (running) {
        usleep(300000);             /* mpirun drops output that it has not read when it aborts */
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    exit(1);
}

_Noreturn void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(format, args);
}

_Noreturn void die_check(const char *file, int line, const char *condition, const char *format, ...)
{
    char text[MESSAGE_SIZE];
    int n = snprintf(text, sizeof text, "%s:%d: check failed: %s: ", file, line, condition);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, sizeof text - n, format, args);
    die("%s", text);
}

void warn(const char *format, ...)
{
    int rank, size;
    mpi_running(&rank, &size);
    if (rank != 0)
        return;
    va_list args;
    va_start(args, format);
    print_message("warning", format, args);
    va_end(args);
}

void *xmalloc(size_t bytes)
{
    return xrealloc(NULL, bytes);
}

void *xcalloc(size_t count, size_t bytes)
{
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!memory)
        die("out of host memory: %zu x %zu bytes asked for", count, bytes);
    return memory;
}

void *xrealloc(void *memory, size_t bytes)
{
    memory = realloc(memory, bytes ? bytes : 1);
    if (!memory)
        die("out of host memory: %zu bytes asked for", bytes);
    return memory;
}

char *xasprintf(const char *format, ...)
{
    char *text;
    va_list args;
    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        die("out of host memory");
    va_end(args);
    return text;
}
