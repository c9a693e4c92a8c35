#include "model/run/metrics.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "kernels/runtime/error.h"

/* Deletes all lines after the lines of step `last`, and an incomplete last line. */
static void drop_later_steps(Metrics *m, long last)
{
    FILE *in = fopen(m->path, "r");
    if (!in)
        return;
    char *line = NULL;
    size_t size = 0;
    long keep = 0, at = 0;
    ssize_t n;
    while ((n = getline(&line, &size, in)) > 0) {
        at += n;
        long step = 0;
        const bool says = sscanf(line, "{\"step\": %ld", &step) == 1;
        if (line[n - 1] != '\n' || step > last)
            break;
        keep = at;
        json_t *object = says && step == last ? json_loads(line, 0, NULL) : NULL;
        json_object_update(m->there, object);
        json_decref(object);
    }
    free(line);
    fclose(in);
    if (keep < at && truncate(m->path, keep) != 0)
        die("%s: cannot drop the steps from %ld on: %s", m->path, last + 1, strerror(errno));
}

/* Two processes in one folder would mix their steps and delete each other's checkpoints. So this
 * locks the file; the lock ends with the process. If the file system has no locks, nothing prevents
 * two processes. */
static void lock(FILE *file, const char *folder)
{
    if (flock(fileno(file), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die("another process trains in save_folder %s: wait until it ends, or use another "
            "--save_folder",
            folder);
}

Metrics metrics_open(const char *folder, const char *name, long last, bool locks)
{
    Metrics m = { .path = xasprintf("%s/%s", folder, name), .there = json_object() };
    m.file = fopen(m.path, "ae");
    if (!m.file)
        die("%s: cannot open for writing: %s", m.path, strerror(errno));
    if (locks)
        lock(m.file, folder);
    drop_later_steps(&m, last);
    return m;
}

void metrics_write(Metrics *m, json_t *object)
{
    json_object_set_new(object, "time", json_integer(time(NULL)));
    char *text = m->file ? json_dumps(object, JSON_REAL_PRECISION(9)) : NULL;
    if (m->file && (!text || fprintf(m->file, "%s\n", text) < 0 || fflush(m->file) != 0))
        die("%s: cannot write: %s; saved checkpoints are unchanged: free space, and start again",
            m->path, strerror(errno));
    free(text);
    json_decref(object);
}

void metrics_close(Metrics *m)
{
    if (m->file)
        fclose(m->file);
    json_decref(m->there);
    free(m->path);
}
