/* A file of JSON objects, one a line, of which those of a step begin with "step". */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct {
    char   *path;
    FILE   *file;          /* NULL: there is none, and nothing is written */
    json_t *there;         /* all that an earlier process has written of the last step that stays */
} Metrics;

/* Opens folder/name for appending. Lines of steps up to `last` stay, -1: none; those that say no step stay as well. locks: dies if
 * another process has locked it. */
Metrics metrics_open (const char *folder, const char *name, long last, bool locks);
void    metrics_write(Metrics *m, json_t *object);         /* with the "time" in seconds of Unix; frees the object */
void    metrics_close(Metrics *m);
