/* All errors have one reaction: a message says what is wrong, where, and what to do. Then every
 * rank ends. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Exit statuses. After STATUS_FAULT, the same command may succeed: a GPU, a host, the network or a
 * file system failed. After the others it would fail again. scripts/supervise.py reads them. */
enum {
    STATUS_FAULT = 1,
    STATUS_INPUT = 2, /* the configuration, the data or the command line */
    STATUS_DIVERGED = 3
};

/* Prints "error: ..." on stderr (with the rank, if there are several) and ends all ranks, with
 * STATUS_FAULT or the status that error_set_status set. An error of every rank is printed once:
 * ranks other than 0 wait a moment, so that rank 0 prints first. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_set_status(int status);

/* As die, always with STATUS_FAULT. For errors of the GPU and the network. */
_Noreturn void die_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* On rank 0, prints "warning: ..." on stderr. Other ranks print nothing. error_hold_warnings(true)
 * holds warnings back. error_hold_warnings(false) prints them, each once, as the last lines before
 * a run's first step. If an error ends the run, they are not printed. */
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_hold_warnings(bool hold);

/* Dies if `path` exists but is not a regular file. Opening a pipe would wait for its writer. */
void check_regular(const char *path);

/* CHECK is for conditions that the program itself guarantees, and ends with STATUS_FAULT. Errors of
 * user input are reported by die(), in the user's terms. */
#define CHECK(condition, ...) \
    do { \
        if (!(condition)) \
            die_check(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (0)
_Noreturn void die_check(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Sets rank and size, and how all ranks end with a status. Any thread may call `end_all`, which
 * does not return. If it is NULL, exit(status) is called. */
void error_set_ranks(int rank, int size, void (*end_all)(int status));

/* Sets a function that is called as soon as an error occurs, before its message; NULL: no
 * function. */
void error_set_dying(void (*dying)(void));

/* Runs call(what) in this thread. If the call would die, no rank ends and nothing is printed; the
 * function returns the message, malloc'ed. What the call had opened stays open. Returns NULL if the
 * call returned. Calls of error_catch cannot be nested. */
char *error_catch(void (*call)(void *), void *what);

/* malloc, calloc, realloc, strdup and asprintf that never return NULL, except for xstrdup(NULL).
 * xtext opens a stream. After fflush or fclose the stream's text is in *text, malloc'ed. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t bytes);
void *xrealloc(void *memory, size_t bytes);
char *xstrdup(const char *text);
char *xasprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));
FILE *xtext(char **text);
