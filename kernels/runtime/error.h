/* Errors have one reaction: a message says what is wrong, where, and what to do; then every rank
 * ends. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Prints "error: ..." (with the rank, if there are several) on stderr and aborts all ranks with
 * status 1. An error of every rank is printed once: ranks other than 0 wait a moment, so that rank
 * 0 prints first. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Rank 0 prints "warning: ..." on stderr; the other ranks print nothing. error_hold_warnings(true)
 * holds warnings back; error_hold_warnings(false) prints them, each once, as the last lines before
 * a run's first step. After an error they are not printed. */
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_hold_warnings(bool hold);

/* Dies if `path` exists but is no regular file: opening a pipe would wait for its writer. */
void check_regular(const char *path);

/* For what the program itself guarantees. Errors of user input are reported with die(), in the
 * user's terms. */
#define CHECK(condition, ...) \
    do { \
        if (!(condition)) \
            die_check(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    } while (0)
_Noreturn void die_check(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Sets rank and size, and how all ranks end with status 1: `end_all` may be called from any thread
 * and does not return; NULL: exit(1). */
void error_set_ranks(int rank, int size, void (*end_all)(void));

/* `dying` is called as soon as an error occurs, before its message; NULL: no call. */
void error_set_dying(void (*dying)(void));

/* Runs call(what) in this thread. If it would die, no rank ends and nothing is printed: returns the
 * message, malloc'ed; what the call had opened stays open. NULL: it returned. Cannot be nested. */
char *error_catch(void (*call)(void *), void *what);

/* malloc, calloc, realloc, strdup and asprintf that never return NULL, except for xstrdup(NULL).
 * xtext: a stream; after fflush or fclose its text is in *text, malloc'ed. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t bytes);
void *xrealloc(void *memory, size_t bytes);
char *xstrdup(const char *text);
char *xasprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));
FILE *xtext(char **text);
