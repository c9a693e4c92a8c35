#include "model/formats/file.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"

bool file_exists(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0;
}

bool file_is_in(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    const bool found = file_exists(path);
    free(path);
    return found;
}

bool file_is_same(const char *path, const char *other)
{
    char *here = realpath(path, NULL), *there = realpath(other, NULL);
    const bool same = here && there && strcmp(here, there) == 0;
    free(here);
    free(there);
    return same;
}

json_t *file_json(const char *folder, const char *name, size_t flags)
{
    char *path = xasprintf("%s/%s", folder, name);
    json_error_t error;
    check_regular(path);
    FILE *file = fopen(path, "r");
    if (!file && errno != ENOENT)
        die("%s: %s", path, strerror(errno));
    json_t *value = file ? json_loadf(file, flags, &error) : NULL;
    if (file && !value)
        die("%s:%d: not JSON: %s", path, error.line, error.text);
    if (file)
        fclose(file);
    free(path);
    return value;
}

json_t *file_try_json(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    check_regular(path);
    json_t *value = json_load_file(path, 0, NULL);
    free(path);
    return value;
}

static int ascending(const void *a, const void *b)
{
    long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

long file_step(const char *name, const char *suffix, bool numbered)
{
    enum { MOST_DIGITS = 18 };
    const char *digits = name + 4;
    const size_t n = strncmp(name, "step", 4) == 0 ? strspn(digits, "0123456789") : 0,
                 length = strlen(suffix);
    if (n == 0 || n > MOST_DIGITS || (*digits == '0' && n > 1) ||
        strncmp(digits + n, suffix, length) != 0)
        return -1;
    const char *rest = digits + n + length;
    return rest[numbered ? strspn(rest, "0123456789") : 0] ? -1 : strtol(digits, NULL, 10);
}

int file_steps(long **steps, const char *folder, const char *suffix)
{
    int count = 0;
    *steps = NULL;
    DIR *dir = opendir(folder);
    if (!dir)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        const long step = file_step(entry->d_name, suffix, false);
        if (step < 0)
            continue;
        *steps = xrealloc(*steps, sizeof **steps * (size_t)(count + 1));
        (*steps)[count++] = step;
    }
    closedir(dir);
    if (count)
        qsort(*steps, (size_t)count, sizeof **steps, ascending);
    return count;
}
