/* A file with one JSON object per line. The first key of a step's object is "step". */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct {
    char *path;
    FILE *file;    /* NULL: nothing is written */
    json_t *there; /* all values that an earlier process wrote for step `last` */
} Metrics;

/* Opens folder/name for appending. Lines of steps up to `last` stay (-1: no lines of steps); lines
 * without a step stay, too. locks: locks the file, and dies if another process has locked it. */
Metrics metrics_open(const char *folder, const char *name, long last, bool locks);
void metrics_write(Metrics *m,
                   json_t *object); /* adds the Unix "time" in seconds; frees the object */
void metrics_close(Metrics *m);
