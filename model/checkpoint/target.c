#include "model/checkpoint/target.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/folder.h"
#include "model/formats/file.h"

/* Locks a folder that is being written; the lock ends with the process. */
static int lock(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die("%s: another process is writing it", path);
    return fd;
}

/* Name of the empty file that marks a <path>.tmp of target_begin. */
static const char UNFINISHED[] = "unfinished";

bool target_is_unfinished(const char *path)
{
    return file_is_in(path, UNFINISHED);
}

/* Dies on any other folder with this name: a user may need it. */
static void remove_unfinished(const char *temporary)
{
    if (file_exists(temporary) && !target_is_unfinished(temporary) && rmdir(temporary) != 0)
        die("%s exists and is not from an interrupted export: move it, or give another folder",
            temporary);
    folder_remove_tree(temporary);
}

int target_begin(const char *path)
{
    char *temporary = xasprintf("%s.tmp", path), *mark = xasprintf("%s/%s", temporary, UNFINISHED);
    if (file_exists(path))
        die("%s exists already and is not overwritten: give a new folder", path);
    int old = lock(temporary);
    remove_unfinished(temporary);
    if (mkdir(temporary, 0777) != 0)
        die("%s: cannot create: %s", temporary, strerror(errno));
    if (old >= 0)
        close(old);
    int fd = lock(temporary);
    folder_write(mark, "", 0);
    free(temporary);
    free(mark);
    return fd;
}

void target_complete(const char *path, int begun)
{
    char *temporary = xasprintf("%s.tmp", path), *mark = xasprintf("%s/%s", temporary, UNFINISHED),
         *parent = xstrdup(path), *slash = strrchr(parent, '/');
    if (slash)
        slash[slash == parent] = '\0';
    if (unlink(mark) != 0)
        die("%s: cannot delete: %s", mark, strerror(errno));
    folder_sync(temporary);
    if (rename(temporary, path) != 0)
        die("%s: cannot rename to %s: %s", temporary, path, strerror(errno));
    folder_sync(slash ? parent : ".");
    close(begun);
    free(temporary);
    free(mark);
    free(parent);
}
