#include "model/config/files.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/error.h"

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
