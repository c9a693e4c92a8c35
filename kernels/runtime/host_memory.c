/* Reads /proc/meminfo and the memory controllers of cgroups [Linux:
 * Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst]. */
#include "kernels/runtime/host_memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* The names of files in cgroup v2 and in cgroup v1. */
static const struct Names {
    const char *folder, *limit, *used, *cache[2];
} v2 = { "/sys/fs/cgroup", "memory.max", "memory.current", { "active_file", "inactive_file" } },
  v1 = { "/sys/fs/cgroup/memory",
         "memory.limit_in_bytes",
         "memory.usage_in_bytes",
         { "total_active_file", "total_inactive_file" } };

/* Returns the number in a file, or NAN if the file has none, such as a limit of "max". */
static double read_number(const char *folder, const char *file)
{
    char *path = xasprintf("%s/%s", folder, file);
    double n = NAN;
    FILE *f = fopen(path, "r");
    if (f) {
        if (fscanf(f, "%lf", &n) != 1)
            n = NAN;
        fclose(f);
    }
    free(path);
    return n;
}

/* Returns the number after `name` in a file of lines "name number". */
static double read_named(const char *path, const char *name)
{
    char line[256];
    double n = NAN;
    const size_t length = strlen(name);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, name, length) == 0 && (line[length] == ' ' || line[length] == ':'))
            n = strtod(line + length + 1, NULL);
    if (f)
        fclose(f);
    return n;
}

static double left_in(const char *folder, const struct Names *names)
{
    const double limit = read_number(folder, names->limit), used = read_number(folder, names->used);
    if (isnan(limit) || isnan(used))
        return INFINITY;
    char *stat = xasprintf("%s/memory.stat", folder);
    double left = limit - used;
    for (int i = 0; i < 2; i++) {
        const double cache = read_named(stat, names->cache[i]);
        left += isnan(cache) ? 0 : cache;
    }
    free(stat);
    return left;
}

/* Returns the least memory left in the group `path` and in all of its parents. */
static double left_in_groups(const char *root, const struct Names *names, const char *path)
{
    char *folder = xasprintf("%s%s%s", root, names->folder, strcmp(path, "/") ? path : "");
    const size_t shortest = strlen(root) + strlen(names->folder);
    double left = left_in(folder, names);
    for (char *slash; strlen(folder) > shortest && (slash = strrchr(folder, '/'));) {
        *slash = '\0';
        left = fmin(left, left_in(folder, names));
    }
    free(folder);
    return left;
}

double host_memory_left(const char *root)
{
    char line[4096], *path = xasprintf("%s/proc/meminfo", root);
    const double available = 1024 * read_named(path, "MemAvailable");
    double left = isnan(available) ? INFINITY : available;
    free(path);
    path = xasprintf("%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) { /* "0::/path" in v2, "4:memory:/path" in v1 */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group = '\0';
        if (controllers[1] == '\0')
            left = fmin(left, left_in_groups(root, &v2, group + 1));
        else if (strstr(controllers + 1, "memory"))
            left = fmin(left, left_in_groups(root, &v1, group + 1));
    }
    if (f)
        fclose(f);
    free(path);
    return left;
}
