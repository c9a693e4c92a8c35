/* A line of the file contains the checksum of the rest of the line in 16 digits, the key, and the
 * value in hexadecimal digits. */
#include "kernels/runtime/autotune.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/error.h"

enum { CHECK_DIGITS = 16, LINE_BYTES = 1024 };
/* maximum size of a file, some 3000 lines; no lines are added beyond this size */
static const size_t MOST_BYTES = 1 << 20;

/* The FNV-1a hash. */
static uint64_t checksum(const char *text, size_t n)
{
    uint64_t x = 14695981039346656037u;
    for (size_t i = 0; i < n; i++)
        x = (x ^ (unsigned char)text[i]) * 1099511628211u;
    return x;
}

/* Sets `path` to the cache folder. Returns false if the user has no cache folder. */
static bool folder(char path[PATH_MAX])
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (cache && cache[0] == '/')
        n = snprintf(path, PATH_MAX, "%s", cache);
    else if (home && home[0] == '/')
        n = snprintf(path, PATH_MAX, "%s/.cache", home);
    return n > 0 && n < PATH_MAX - 64;
}

static int open_file(const char *file, int flags)
{
    char path[PATH_MAX];
    if (!folder(path))
        return -1;
    if (flags & O_CREAT)
        mkdir(path, 0700);
    strcat(path, "/coat");
    if (flags & O_CREAT)
        mkdir(path, 0777);
    strcat(strcat(path, "/"), file);
    return open(path, flags | O_CLOEXEC, 0666);
}

char *autotune_read(const char *file)
{
    char *text = xcalloc(MOST_BYTES + 1, 1);
    const int f = open_file(file, O_RDONLY);
    ssize_t n = 0;
    for (size_t at = 0; f >= 0 && (n = read(f, text + at, MOST_BYTES - at)) > 0;)
        at += (size_t)n;
    if (f >= 0)
        close(f);
    return text;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Parses a line without its line break. Returns true if its checksum is right, and it has this key
 * and a value of this size. */
static bool parse(const char *line, size_t n, const char *key, unsigned char *value, size_t bytes)
{
    const size_t length = strlen(key), first = CHECK_DIGITS + 1 + length + 1;
    char check[CHECK_DIGITS + 1];
    if (n != first + 2 * bytes || memcmp(line + CHECK_DIGITS + 1, key, length) != 0 ||
        line[first - 1] != ' ')
        return false;
    snprintf(check, sizeof check, "%016" PRIx64, checksum(line + CHECK_DIGITS, n - CHECK_DIGITS));
    if (memcmp(line, check, CHECK_DIGITS) != 0)
        return false;
    for (size_t i = 0; i < bytes; i++) {
        const int high = digit(line[first + 2 * i]), low = digit(line[first + 2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        value[i] = (unsigned char)(16 * high + low);
    }
    return true;
}

bool autotune_find(const char *text, const char *key, void *value, size_t bytes)
{
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1)
        if (parse(line, (size_t)(end - line), key, value, bytes))
            return true;
    return false;
}

/* NOTE: one write in append mode is atomic among processes. On file systems that break this rule,
 * checksums detect damaged lines. Each added line begins with a line break, so that it stays intact
 * even if the line before it was truncated. */
void autotune_add(const char *file, const char *key, const void *value, size_t bytes)
{
    char line[LINE_BYTES];
    const size_t start = 1 + CHECK_DIGITS, length = start + 1 + strlen(key) + 1 + 2 * bytes + 1;
    struct stat s;
    CHECK(length < sizeof line && !strchr(key, '\n'), "a choice of %zu bytes", length);
    size_t n = start + (size_t)snprintf(line + start, sizeof line - start, " %s ", key);
    for (size_t i = 0; i < bytes; i++)
        n += (size_t)snprintf(line + n, sizeof line - n, "%02x", ((const unsigned char *)value)[i]);
    char check[CHECK_DIGITS + 1];
    snprintf(check, sizeof check, "%016" PRIx64, checksum(line + start, n - start));
    memcpy(line + 1, check, CHECK_DIGITS);
    line[0] = line[n++] = '\n';
    const int f = open_file(file, O_WRONLY | O_APPEND | O_CREAT);
    if (f < 0)
        return;
    if (fstat(f, &s) == 0 && (size_t)s.st_size + n <= MOST_BYTES && write(f, line, n) != (ssize_t)n)
        warn("cannot write %s in the cache folder: the next run will time algorithms again", file);
    close(f);
}
