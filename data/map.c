/* Maps files into memory. Reading a page of a file that was truncated meanwhile causes SIGBUS; the
 * handler turns it into an error message. */
#include "data/map.h"

#include "kernels/runtime/error.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Map {
    struct Map *next;
    char *start, *path;
    size_t bytes;
    const char *key;
} Map;

static Map *maps;

/* If a byte cannot be read, this thread leaves the message here and jumps to *back. back NULL: the
 * program ends with the message. */
static _Thread_local struct {
    sigjmp_buf *back;
    char *problem;
} reading;

static _Noreturn void fail_at(const Map *m, size_t at)
{
    char *problem = xasprintf(
        "%s: %s can no longer be read at byte %zu of %zu: the file was truncated since the start, "
        "or the disk failed. Restore the file and continue with --try_load_latest_save",
        m->key, m->path, at, m->bytes);
    if (!reading.back)
        die("%s", problem);
    reading.problem = problem;
    siglongjmp(*reading.back, true);
}

/* NOTE: the signal comes from our own memory access, not from inside a library, so the handler may
 * call any function. */
static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    const char *at = info->si_addr;
    for (const Map *m = maps; m; m = m->next)
        if (at >= m->start && at < m->start + m->bytes)
            fail_at(m, (size_t)(at - m->start));
    signal(number, SIG_DFL);
}

/* NOTE: checks the file type before opening, because opening a pipe waits for its writer. */
static int open_regular(size_t *bytes, const char *key, const char *path)
{
    static const char check[] =
        "Check the path (a relative path starts at the folder in which the program was started)";
    struct stat status;
    if (stat(path, &status) != 0)
        die("%s: cannot open %s: %s. %s", key, path, strerror(errno), check);
    if (S_ISDIR(status.st_mode))
        die("%s: %s is a folder. Name its files, for example '%s/*.npy'", key, path, path);
    if (!S_ISREG(status.st_mode))
        die("%s: %s is not a regular file. Give a file of tokens on a disk, not a pipe or device",
            key, path);
    if (status.st_size == 0)
        die("%s: %s is empty (0 bytes): did a download or a tokenizer not finish? Make it again or "
            "remove it "
            "from %s",
            key, path, key);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        die("%s: cannot open %s: %s. %s", key, path, strerror(errno), check);
    if (fstat(file, &status) != 0)
        die("%s: cannot examine %s: %s", key, path, strerror(errno));
    *bytes = (size_t)status.st_size;
    return file;
}

const void *map_file(size_t *bytes, const char *key, const char *path)
{
    int file = open_regular(bytes, key, path);
    void *start = mmap(NULL, *bytes, PROT_READ, MAP_SHARED, file, 0);
    if (start == MAP_FAILED)
        die("%s: cannot map %s (%zu bytes): %s. With very many files, raise the limit "
            "vm.max_map_count",
            key, path, *bytes, strerror(errno));
    close(file);
    if (!maps)
        sigaction(SIGBUS,
                  &(struct sigaction){ .sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO },
                  NULL);
    Map *m = xmalloc(sizeof *m);
    *m = (Map){ .next = maps, .start = start, .path = strdup(path), .bytes = *bytes, .key = key };
    CHECK(m->path, "out of host memory");
    maps = m;
    return start;
}

void unmap_file(const void *bytes)
{
    for (Map **p = &maps; *p; p = &(*p)->next) {
        Map *m = *p;
        if (m->start != bytes)
            continue;
        *p = m->next;
        munmap(m->start, m->bytes);
        free(m->path);
        free(m);
        return;
    }
}

const void *map_newest(void)
{
    return maps ? maps->start : NULL;
}

void unmap_files_since(const void *newest)
{
    while (maps && maps->start != newest)
        unmap_file(maps->start);
}

char *map_read(void (*read)(void *), void *what)
{
    sigjmp_buf back;
    reading.back = &back;
    reading.problem = NULL;
    if (sigsetjmp(back, true) == 0)
        read(what);
    reading.back = NULL;
    return reading.problem;
}
