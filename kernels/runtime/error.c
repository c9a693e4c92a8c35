/* All errors have one reaction: a message on stderr, then every rank ends.
 *
 * exit() on one rank would leave the other ranks waiting in a collective for ever. So
 * error_set_ranks sets how all ranks end. Most errors (a missing file, a wrong key) occur on every
 * rank at once. Rank 0 prints at once and ends. Its end ends the other ranks while they wait, so
 * the message appears once. An error of only one other rank appears a moment later. */
#include "kernels/runtime/error.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/progress.h"

enum { MESSAGE_SIZE = 4096 };

static struct {
    int rank, size;
    void (*end_all)(int status); /* NULL: exit(status) ends the process */
    void (*dying)(void);         /* NULL: nothing is called */
    int status;
} process = { .size = 1, .status = STATUS_FAULT };

void error_set_status(int status)
{
    process.status = status;
}

void error_set_ranks(int rank, int size, void (*end_all)(int status))
{
    process.rank = rank;
    process.size = size;
    process.end_all = end_all;
}

void error_set_dying(void (*dying)(void))
{
    process.dying = dying;
}

/* Where die() returns to in this thread, and its message. NULL: die() ends the program. */
static _Thread_local struct {
    sigjmp_buf *back;
    char *message;
} caught;

char *error_catch(void (*call)(void *), void *what)
{
    sigjmp_buf back;
    caught.back = &back;
    caught.message = NULL;
    if (sigsetjmp(back, true) == 0)
        call(what);
    caught.back = NULL;
    return caught.message;
}

/* Prints each message by one fputs, so that messages of different ranks do not mix. */
static void print_line(const char *line)
{
    fflush(stdout);
    progress_clear();
    fputs(line, stderr);
    fflush(stderr);
}

static void print_message(const char *prefix, const char *format, va_list args)
{
    char message[MESSAGE_SIZE], line[MESSAGE_SIZE + 64];
    vsnprintf(message, sizeof message, format, args);
    snprintf(line, sizeof line, "%s: %s\n", prefix, message);
    print_line(line);
}

static _Noreturn void fail(int status, const char *format, va_list args)
{
    char prefix[64] = "error";
    if (caught.back) {
        caught.message = xmalloc(MESSAGE_SIZE);
        vsnprintf(caught.message, MESSAGE_SIZE, format, args);
        siglongjmp(*caught.back, true);
    }
    if (process.size > 1)
        snprintf(prefix, sizeof prefix, "error (rank %d)", process.rank);
    if (process.dying)
        process.dying();
    signal(SIGTERM, SIG_DFL); /* so that this rank prints nothing if another rank ends first */
    if (process.rank != 0)
        sleep(3);
    print_message(prefix, format, args);
    if (process.end_all) {
        /* when mpirun ends the ranks, it drops output that it has not read */
        usleep(300000);
        process.end_all(status);
    }
    exit(status);
}

_Noreturn void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(process.status, format, args);
}

_Noreturn void die_fault(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(STATUS_FAULT, format, args);
}

_Noreturn void die_check(const char *file, int line, const char *condition, const char *format, ...)
{
    char text[MESSAGE_SIZE];
    int n = snprintf(text, sizeof text, "%s:%d: check failed: %s: ", file, line, condition);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, sizeof text - n, format, args);
    die_fault("%s", text);
}

void check_regular(const char *path)
{
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode))
        die("%s: %s, expected a regular file. Put the file itself there, or remove it", path,
            S_ISDIR(status.st_mode)    ? "is a folder"
            : S_ISFIFO(status.st_mode) ? "is a pipe"
                                       : "is a device or socket");
}

/* Warnings that are held back. The lock is needed because threads of the loader warn, too. */
static struct {
    pthread_mutex_t lock;
    bool hold;
    char **line;
    int count;
} messages = { .lock = PTHREAD_MUTEX_INITIALIZER };

void warn(const char *format, ...)
{
    char message[MESSAGE_SIZE];
    if (process.rank != 0)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    char *line = xasprintf("warning: %s\n", message);
    pthread_mutex_lock(&messages.lock);
    bool said = false;
    for (int i = 0; i < messages.count; i++)
        said |= strcmp(messages.line[i], line) == 0;
    if (said)
        free(line);
    else if (messages.hold) {
        messages.line =
            xrealloc(messages.line, sizeof *messages.line * (size_t)(messages.count + 1));
        messages.line[messages.count++] = line;
    } else {
        print_line(line);
        free(line);
    }
    pthread_mutex_unlock(&messages.lock);
}

void error_hold_warnings(bool hold)
{
    pthread_mutex_lock(&messages.lock);
    messages.hold = hold;
    for (int i = 0; i < messages.count && !hold; i++) {
        print_line(messages.line[i]);
        free(messages.line[i]);
    }
    if (!hold) {
        free(messages.line);
        messages.line = NULL;
        messages.count = 0;
    }
    pthread_mutex_unlock(&messages.lock);
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

char *xstrdup(const char *text)
{
    return text ? strcpy(xmalloc(strlen(text) + 1), text) : NULL;
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

FILE *xtext(char **text)
{
    static _Thread_local size_t size; /* open_memstream writes it; no function reads it */
    FILE *f = open_memstream(text, &size);
    if (!f)
        die("out of host memory");
    return f;
}
