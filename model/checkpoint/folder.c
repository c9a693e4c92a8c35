/* rename() is atomic, and durable once the folder that holds the name is synced; so a checkpoint is written under
 * another name and takes its own when it is complete and on disk. Nothing ever reads a stepN.tmp. */
#include "model/checkpoint/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/error.h"

static char *step_path(const char *save_folder, long step, const char *suffix)
{
    return xasprintf("%s/step%ld%s", save_folder, step, suffix);
}

bool folder_exists(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0;
}

bool folder_holds(const char *name)
{
    return *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static int ascending(const void *a, const void *b)
{
    long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

int folder_steps(long **steps, const char *save_folder, const char *suffix)
{
    int count = 0;
    *steps = NULL;
    DIR *dir = opendir(save_folder);
    if (!dir)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir)); ) {
        char *end;
        const char *digits = entry->d_name + 4;
        if (strncmp(entry->d_name, "step", 4) != 0 || *digits < '0' || *digits > '9')
            continue;
        long step = strtol(digits, &end, 10);
        if (strcmp(end, suffix) != 0)
            continue;
        *steps = xrealloc(*steps, sizeof **steps * (size_t)(count + 1));
        (*steps)[count++] = step;
    }
    closedir(dir);
    if (count)
        qsort(*steps, (size_t)count, sizeof **steps, ascending);
    return count;
}

char *folder_newest(const char *save_folder)
{
    long *steps;
    const int count = folder_steps(&steps, save_folder, "");
    char *link = xasprintf("%s/latest", save_folder), *newest = realpath(link, NULL);
    char *path = count ? step_path(save_folder, steps[count - 1], "") : NULL;
    if (!newest && path)
        newest = realpath(path, NULL);
    free(link);
    free(path);
    free(steps);
    return newest;
}

static bool is_described(const char *folder)
{
    static const char *const names[] = { "trainer.json", "config.yaml", "config.json", "adapter_config.json" };
    bool found = false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        found |= folder_exists(path);
        free(path);
    }
    return found;
}

long folder_foreign_step(const char *save_folder)
{
    long *steps, foreign = -1;
    const int count = folder_steps(&steps, save_folder, "");
    for (int i = 0; i < count; i++) {
        char *path = step_path(save_folder, steps[i], "");
        if (!is_described(path))
            foreign = steps[i];
        free(path);
    }
    free(steps);
    return foreign;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *where)
{
    (void)status, (void)type, (void)where;
    return remove(path);
}

static void remove_tree(const char *path)
{
    if (folder_exists(path) && nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0)
        die("%s: cannot delete: %s", path, strerror(errno));
}

void folder_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
    close(fd);
}

static void move(const char *from, const char *to)
{
    if (rename(from, to) != 0)
        die("%s: cannot rename to %s: %s", from, to, strerror(errno));
}

/* Removes every step<N><suffix>; with `only_if_replaced`, only those next to a step<N>. */
static void remove_all(const char *save_folder, const char *suffix, bool only_if_replaced)
{
    long *steps;
    int count = folder_steps(&steps, save_folder, suffix);
    for (int i = 0; i < count; i++) {
        char *path = step_path(save_folder, steps[i], suffix), *step = step_path(save_folder, steps[i], "");
        if (!only_if_replaced || folder_exists(step))
            remove_tree(path);
        free(path);
        free(step);
    }
    free(steps);
}

void folder_clean(const char *save_folder)
{
    remove_all(save_folder, ".tmp", false);
    remove_all(save_folder, ".old", true);
}

void folder_prepare(const char *save_folder, long step)
{
    folder_clean(save_folder);
    char *path = step_path(save_folder, step, ".tmp");
    if (mkdir(path, 0777) != 0)
        die("%s: cannot create: %s", path, strerror(errno));
    free(path);
}

void folder_point_latest(const char *save_folder, long step)
{
    char *link = xasprintf("%s/latest", save_folder), *temporary = xasprintf("%s/latest.tmp", save_folder);
    char *target = xasprintf("step%ld", step);
    if (unlink(temporary) != 0 && errno != ENOENT)
        die("%s: cannot delete: %s", temporary, strerror(errno));
    if (symlink(target, temporary) != 0)
        die("%s: cannot create: %s", temporary, strerror(errno));
    move(temporary, link);
    folder_sync(save_folder);
    free(link);
    free(temporary);
    free(target);
}

void folder_publish(const char *save_folder, long step)
{
    char *path = step_path(save_folder, step, ""), *old = step_path(save_folder, step, ".old");
    char *temporary = step_path(save_folder, step, ".tmp");
    folder_sync(temporary);
    if (folder_exists(path)) {
        remove_tree(old);
        move(path, old);
    }
    move(temporary, path);
    folder_sync(save_folder);
    folder_point_latest(save_folder, step);
    remove_tree(old);
    free(path);
    free(old);
    free(temporary);
}

void folder_set_aside(const char *save_folder, long step)
{
    char *temporary = step_path(save_folder, step, ".tmp"), *path = step_path(save_folder, step, "-aborted");
    folder_sync(temporary);
    remove_all(save_folder, "-aborted", false);
    move(temporary, path);
    folder_sync(save_folder);
    free(temporary);
    free(path);
}

/* Under the other name first: a half-deleted checkpoint must not look like one. */
void folder_remove_step(const char *save_folder, long step)
{
    char *path = step_path(save_folder, step, ""), *temporary = step_path(save_folder, step, ".tmp");
    remove_tree(temporary);
    move(path, temporary);
    remove_tree(temporary);
    free(path);
    free(temporary);
}

void folder_remove_later(const char *save_folder, long step)
{
    long *steps;
    for (int i = folder_steps(&steps, save_folder, "") - 1; i >= 0 && steps[i] > step; i--)
        folder_remove_step(save_folder, steps[i]);
    free(steps);
}

/* `latest` last: what an interruption leaves is a run that can be continued, or nothing. */
void folder_clear(const char *save_folder)
{
    long *steps;
    const int count = folder_steps(&steps, save_folder, "");
    char *link = xasprintf("%s/latest", save_folder);
    for (int i = 0; i < count; i++)
        folder_remove_step(save_folder, steps[i]);
    remove_all(save_folder, ".tmp", false);
    remove_all(save_folder, ".old", false);
    remove_all(save_folder, "-aborted", false);
    if (unlink(link) != 0 && errno != ENOENT)
        die("%s: cannot delete: %s", link, strerror(errno));
    free(link);
    free(steps);
}

char *folder_latest(const char *save_folder)
{
    char *link = xasprintf("%s/latest", save_folder), target[PATH_MAX];
    ssize_t n = readlink(link, target, sizeof target - 1);
    if (n < 0 && errno == EINVAL)
        die("%s is no link to a checkpoint, as in a copy that followed links; delete it, and begin with --load_path=%s/stepN", link,
            save_folder);
    free(link);
    if (n < 0)
        return NULL;
    target[n] = '\0';
    return strdup(target);
}

char *folder_say_latest(const char *save_folder)
{
    char *name = folder_latest(save_folder);
    char *text = name ? xasprintf("the last checkpoint is %s/%s", save_folder, name)
                      : xasprintf("there is no checkpoint in %s", save_folder);
    free(name);
    return text;
}

char *folder_say_others(const char *checkpoint)
{
    char *path = realpath(checkpoint, NULL), *slash = path ? strrchr(path, '/') : NULL, *text = NULL;
    long step, *steps, best = -1;
    int end = 0;
    if (slash && sscanf(slash, "/step%ld%n", &step, &end) == 1) {
        if (slash[end])         /* step6-aborted: step6 is another */
            step = LONG_MAX;
        *slash = '\0';
        for (int i = folder_steps(&steps, path, "") - 1; i >= 0; i--)
            if (steps[i] != step && (best < 0 || (best > step && steps[i] < best)))
                best = steps[i];
        free(steps);
    }
    if (best >= 0)
        text = xasprintf("%s/step%ld is there too: --load_path of it goes back to it, in the same save_folder with "
                         "--save_overwrite and without --try_load_latest_save", path, best);
    free(path);
    return text ? text : xstrdup("There is no other checkpoint beside it: get these files again, or begin anew");
}

void folder_write(const char *path, const char *data, size_t bytes)
{
    FILE *file = fopen(path, "w");
    if (!file)
        die("%s: cannot create: %s", path, strerror(errno));
    if (fwrite(data, 1, bytes, file) != bytes || fflush(file) != 0 || fsync(fileno(file)) != 0 || fclose(file) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
}

/* A lock of a folder that is being filled: it goes with its holder, however that ends. */
static int lock(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die("%s: another process is writing it", path);
    return fd;
}

/* The empty file by which a <path>.tmp of folder_begin differs from other folders of that name. */
static char *mark_of(const char *temporary)
{
    return xasprintf("%s/unfinished", temporary);
}

bool folder_is_unfinished(const char *path)
{
    char *mark = mark_of(path);
    const bool found = folder_exists(mark);
    free(mark);
    return found;
}

/* Whatever else has that name, somebody may need. */
static void remove_unfinished(const char *temporary)
{
    if (folder_exists(temporary) && !folder_is_unfinished(temporary) && rmdir(temporary) != 0)
        die("%s is there, and nothing that an interruption left: move it, or name another folder", temporary);
    remove_tree(temporary);
}

int folder_begin(const char *path)
{
    char *temporary = xasprintf("%s.tmp", path), *mark = mark_of(temporary);
    if (folder_exists(path))
        die("%s is there already, and nothing is written over: name a folder that is not there yet", path);
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

void folder_complete(const char *path, int begun)
{
    char *temporary = xasprintf("%s.tmp", path), *mark = mark_of(temporary), *parent = xstrdup(path), *slash = strrchr(parent, '/');
    if (slash)
        slash[slash == parent] = '\0';
    if (unlink(mark) != 0)
        die("%s: cannot delete: %s", mark, strerror(errno));
    folder_sync(temporary);
    move(temporary, path);
    folder_sync(slash ? parent : ".");
    close(begun);
    free(temporary);
    free(mark);
    free(parent);
}
