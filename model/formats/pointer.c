#include "model/formats/pointer.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/error.h"

/* Reads one complete line of at most PATH_MAX bytes, with nothing after it. */
static char *read_line(const char *path)
{
    char text[PATH_MAX + 2];
    FILE *file = fopen(path, "re");
    const size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[n] = '\0';
    char *end = strchr(text, '\n');
    if (n < 2 || !end || end == text || end != text + n - 1)
        return NULL;
    *end = '\0';
    return xstrdup(text);
}

char *pointer_read(const char *path)
{
    char target[PATH_MAX];
    struct stat status;
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n >= 0) {
        target[n] = '\0';
        return xstrdup(target);
    }
    return lstat(path, &status) == 0 && S_ISREG(status.st_mode) ? read_line(path) : NULL;
}

char *pointer_target(const char *path)
{
    char *name = pointer_read(path);
    const char *slash = strrchr(path, '/');
    if (!name || *name == '/' || !slash)
        return name;
    char *target = xasprintf("%.*s/%s", (int)(slash - path), path, name);
    free(name);
    return target;
}

char *pointer_follow(const char *path)
{
    struct stat status;
    const char *slash = path ? strrchr(path, '/') : NULL, *name = slash ? slash + 1 : path;
    if (!path || strcmp(name, "latest") != 0 || lstat(path, &status) != 0 ||
        !S_ISREG(status.st_mode))
        return NULL;
    char *target = pointer_target(path);
    if (target && stat(target, &status) == 0 && S_ISDIR(status.st_mode))
        return target;
    free(target);
    return NULL;
}

void pointer_replace(char **path)
{
    char *target = pointer_follow(*path);
    if (target) {
        free(*path);
        *path = target;
    }
}
