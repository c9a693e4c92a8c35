/* Errors have one reaction: say what is wrong, where and what to do, then take every rank down. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Prints "error: ..." (with the rank, if there are several) on stderr and aborts all ranks with status 1.
 * An error that every rank meets is printed once: ranks other than 0 wait a moment for rank 0 to speak first. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Rank 0 prints "warning: ..." on stderr; the other ranks print nothing. From error_hold_warnings(true) on warnings are kept;
 * error_hold_warnings(false) prints them, each once: as the last lines before a run's first step, where they are seen. An error
 * stands alone. */
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void error_hold_warnings(bool hold);

/* Dies if there is something at `path` that is no regular file: who opens a pipe waits for its writer. */
void check_regular(const char *path);

/* For what the program itself guarantees; user input is reported with die() in the user's words. */
#define CHECK(condition, ...)                                                  \
    do {                                                                       \
        if (!(condition))                                                      \
            die_check(__FILE__, __LINE__, #condition, __VA_ARGS__);            \
    } while (0)
_Noreturn void die_check(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* What runs several ranks says who this one is and how all end with status 1: `end_all` may be called from any thread and does
 * not return. NULL: by exit(1) again. */
void error_set_ranks(int rank, int size, void (*end_all)(void));

/* `dying` is called as soon as an error is met, before its message; NULL: nothing is. */
void error_set_dying(void (*dying)(void));

/* call(what), of this thread alone. Where it would die, no rank goes down and nothing is printed: the message is returned,
 * malloc'ed, and what the call had open stays open. NULL: it returned. Not within another one. */
char *error_catch(void (*call)(void *), void *what);

/* malloc, calloc, realloc, strdup and asprintf that never return NULL, except for xstrdup(NULL). xtext: a stream whose text is
 * malloc'ed and in *text after fflush or fclose. */
void *xmalloc (size_t bytes);
void *xcalloc (size_t count, size_t bytes);
void *xrealloc(void *memory, size_t bytes);
char *xstrdup  (const char *text);
char *xasprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));
FILE *xtext    (char **text);
