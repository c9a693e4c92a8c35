/* Expands ** here and all other wildcards with the C library's glob. Results are sorted by bytes,
 * not by the locale, so that every rank and host gets the same order. */
#include "data/pattern.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"

/* A folder and its parents, to detect links that lead back to one of these folders. */
typedef struct Above {
    const struct Above *next;
    dev_t device;
    ino_t number;
} Above;

typedef struct {
    Matches found;
    int error;
} Search;

static void search(Search *s, const char *pattern);

bool pattern_is(const char *path)
{
    return strpbrk(path, "*?[") != NULL;
}

static void add(Search *s, const char *path)
{
    Matches *m = &s->found;
    if ((m->count & (m->count - 1)) == 0)
        m->path = xrealloc(m->path, (m->count ? 2 * (size_t)m->count : 1) * sizeof *m->path);
    m->path[m->count++] = xstrdup(path);
}

/* The first ** that is a whole component of the path; NULL: there is none. */
static const char *find_folders(const char *pattern)
{
    for (const char *at = pattern; (at = strstr(at, "**")); at++)
        if ((at == pattern || at[-1] == '/') && (at[2] == '\0' || at[2] == '/'))
            return at;
    return NULL;
}

/* Escapes an existing name: the pattern then matches only this name. */
static char *quoted(const char *path)
{
    char *text = xmalloc(2 * strlen(path) + 1), *end = text;
    for (; *path; path++) {
        if (strchr("*?[\\", *path))
            *end++ = '\\';
        *end++ = *path;
    }
    *end = '\0';
    return text;
}

/* Adds the matches of `rest` in the folder and in all folders below it. rest "": adds every file.
 * `folder` is "" or ends with a slash. */
static void search_below(Search *s, const char *folder, const char *rest, const Above *above)
{
    struct stat status;
    DIR *dir = opendir(*folder ? folder : ".");
    if (!dir || fstat(dirfd(dir), &status) != 0) {
        s->error = errno;
        return;
    }
    const Above here = { above, status.st_dev, status.st_ino };
    for (const Above *a = above; a; a = a->next)
        if (a->device == here.device && a->number == here.number) {
            closedir(dir);
            return;
        }
    char *name = quoted(folder), *pattern = xasprintf("%s%s", name, rest);
    if (*rest)
        search(s, pattern);
    free(name);
    free(pattern);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.')
            continue;
        char *path = xasprintf("%s%s", folder, entry->d_name), *below = xasprintf("%s/", path);
        if (stat(path, &status) == 0 && S_ISDIR(status.st_mode))
            search_below(s, below, rest, &here);
        else if (!*rest)
            add(s, path);
        free(path);
        free(below);
    }
    closedir(dir);
}

typedef void Take(Search *s, const char *path, const char *rest);

static void search_plain(Search *s, const char *pattern, Take *take, const char *rest)
{
    glob_t found;
    errno = 0;
    const int error = glob(pattern, GLOB_ERR, NULL, &found);
    if (error && error != GLOB_NOMATCH && errno != ENOENT)
        s->error = errno ? errno : ENOMEM;
    for (size_t i = 0; !error && i < found.gl_pathc; i++)
        take(s, found.gl_pathv[i], rest);
    if (!error)
        globfree(&found);
}

static void take_path(Search *s, const char *path, const char *rest)
{
    (void)rest;
    add(s, path);
}

static void take_folder(Search *s, const char *path, const char *rest)
{
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode))
        search_below(s, path, rest, NULL);
}

static void search(Search *s, const char *pattern)
{
    const char *folders = find_folders(pattern);
    if (!folders) {
        search_plain(s, pattern, take_path, NULL);
        return;
    }
    const char *rest = folders[2] ? folders + 3 : "";
    char *before = xasprintf("%.*s", (int)(folders - pattern), pattern);
    /* the pattern ends with a slash, and so do its matches */
    if (*before)
        search_plain(s, before, take_folder, rest);
    else
        search_below(s, "", rest, NULL);
    free(before);
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

Matches pattern_match(const char *pattern, int *error)
{
    Search s = { 0 };
    search(&s, pattern);
    Matches *m = &s.found;
    int kept = 0;
    if (m->count > 0)
        qsort(m->path, (size_t)m->count, sizeof *m->path, by_bytes);
    for (int i = 0; i < m->count; i++)
        if (kept > 0 && strcmp(m->path[kept - 1], m->path[i]) == 0)
            free(m->path[i]); /* a path is found twice if ** occurs twice */
        else
            m->path[kept++] = m->path[i];
    m->count = kept;
    *error = s.error;
    return *m;
}

void pattern_free(Matches *m)
{
    for (int i = 0; i < m->count; i++)
        free(m->path[i]);
    free(m->path);
}
