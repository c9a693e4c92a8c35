/* rename() is atomic, and durable once the folder of the name is synced. So a checkpoint is written
 * under another name and renamed when it is complete and on disk. Nothing ever reads a
 * stepN.tmp. */
#include "model/checkpoint/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/saved_as.h"
#include "model/formats/file.h"
#include "model/formats/pointer.h"

/* in our step<N>.tmp and .old, and in a step<N> before it is renamed to one */
static const char mark[] = ".unfinished";
static char *unfinished; /* by folder_prepare */
static bool no_links;    /* found by folder_try */

static char *step_path(const char *save_folder, long step, const char *suffix)
{
    return xasprintf("%s/step%ld%s", save_folder, step, suffix);
}

bool folder_holds(const char *name)
{
    return *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

char *folder_latest(const char *save_folder)
{
    char *latest = xasprintf("%s/latest", save_folder), *name = pointer_read(latest);
    if (!name && file_exists(latest))
        die("%s is no link to a checkpoint (a copy that followed links?); delete it, and start "
            "with --load_path=%s/stepN",
            latest, save_folder);
    free(latest);
    return name;
}

char *folder_latest_path(const char *save_folder)
{
    char *latest = xasprintf("%s/latest", save_folder), *path = pointer_target(latest);
    free(latest);
    return path;
}

char *folder_newest(const char *save_folder)
{
    long *steps;
    const int count = file_steps(&steps, save_folder, "");
    char *latest = folder_latest_path(save_folder),
         *newest = latest ? realpath(latest, NULL) : NULL;
    char *path = count ? step_path(save_folder, steps[count - 1], "") : NULL;
    if (!newest && path)
        newest = realpath(path, NULL);
    free(latest);
    free(path);
    free(steps);
    return newest;
}

long folder_foreign_step(const char *save_folder)
{
    long *steps, foreign = -1;
    const int count = file_steps(&steps, save_folder, "");
    for (int i = 0; i < count; i++) {
        char *path = step_path(save_folder, steps[i], "");
        if (!saved_as_ours(path))
            foreign = steps[i];
        free(path);
    }
    free(steps);
    return foreign;
}

/* ---- names, links, the disk ------------------------------------------------------------------ */

/* The first of path, path2, path3, ... that does not exist. */
static char *free_name(const char *path)
{
    char *name = xstrdup(path);
    for (int k = 2; file_exists(name); k++) {
        free(name);
        name = xasprintf("%s%d", path, k);
    }
    return name;
}

static char *free_step_name(const char *save_folder, long step, const char *suffix)
{
    char *path = step_path(save_folder, step, suffix), *name = free_name(path);
    free(path);
    return name;
}

bool folder_fsync(int fd)
{
    return fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP || errno == ENOSYS;
}

void folder_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || !folder_fsync(fd))
        die("%s: cannot write: %s", path, strerror(errno));
    close(fd);
}

void folder_write(const char *path, const char *data, size_t bytes)
{
    FILE *file = fopen(path, "w");
    if (!file)
        die("%s: cannot create: %s", path, strerror(errno));
    if (fwrite(data, 1, bytes, file) != bytes || fflush(file) != 0 || !folder_fsync(fileno(file)) ||
        fclose(file) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
}

static void move(const char *from, const char *to)
{
    if (rename(from, to) != 0)
        die("%s: cannot rename to %s: %s", from, to, strerror(errno));
}

static bool is_link(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0 && S_ISLNK(status.st_mode);
}

static bool put_mark(const char *folder)
{
    char *path = xasprintf("%s/%s", folder, mark);
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666), error = errno;
    if (fd >= 0)
        close(fd);
    free(path);
    errno = error;
    return fd >= 0;
}

static void take_mark(const char *folder)
{
    char *path = xasprintf("%s/%s", folder, mark);
    unlink(path);
    free(path);
}

/* ---- deleting -------------------------------------------------------------------------------- */

/* Warns with errno's reason; once per path, not at each save. */
static void leave(const char *path)
{
    static char **told;
    static int count;
    const int error = errno;
    for (int i = 0; i < count; i++)
        if (strcmp(told[i], path) == 0)
            return;
    told = xrealloc(told, sizeof *told * (size_t)(count + 1));
    told[count++] = xstrdup(path);
    warn("%s: cannot delete: %s; it stays there, and the run continues", path, strerror(error));
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *where)
{
    (void)status, (void)type;
    const bool last =
        where->level == 0 || (where->level == 1 && strcmp(path + where->base, mark) == 0);
    return last ? 0 : remove(path);
}

/* The mark is deleted last, so that the remains of an interruption have it. */
void folder_remove_tree(const char *path)
{
    if (!file_exists(path))
        return;
    if (!is_link(path)) {
        if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0) {
            leave(path);
            return;
        }
        take_mark(path);
    }
    if (remove(path) != 0)
        leave(path);
}

/* Removes every step<N><suffix> that has our mark, or is empty; with `only_if_replaced`, only if
 * there is a step<N>. */
static void remove_marked(const char *save_folder, const char *suffix, bool only_if_replaced)
{
    char **path = NULL;
    int count = 0;
    DIR *dir = opendir(save_folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        const long step = file_step(entry->d_name, suffix, true);
        char *replacing = step_path(save_folder, step, "");
        if (step >= 0 && (!only_if_replaced || file_exists(replacing))) {
            path = xrealloc(path, sizeof *path * (size_t)(count + 1));
            path[count++] = xasprintf("%s/%s", save_folder, entry->d_name);
        }
        free(replacing);
    }
    if (dir)
        closedir(dir);
    for (int i = 0; i < count; i++) {
        if (is_link(path[i]) || rmdir(path[i]) == 0)
            continue;
        if (file_is_in(path[i], mark))
            folder_remove_tree(path[i]);
    }
    for (int i = 0; i < count; i++)
        free(path[i]);
    free(path);
}

void folder_clean(const char *save_folder)
{
    remove_marked(save_folder, ".tmp", false);
    remove_marked(save_folder, ".old", true);
}

/* Deletes the entry `name` of save_folder, which starts with step<N>. Renames it first: a
 * half-deleted checkpoint must not look complete. `must`: dies if it cannot be deleted. */
static void remove_named(const char *save_folder, const char *name, bool must)
{
    char *path = xasprintf("%s/%s", save_folder, name);
    char *temporary = free_step_name(save_folder, strtol(name + 4, NULL, 10), ".tmp");
    const bool link = is_link(path), ours = link || saved_as_ours(path);
    if (ours && !link && !put_mark(path) && !must)
        leave(path);
    else if (ours && rename(path, temporary) == 0)
        folder_remove_tree(temporary);
    else if (ours && must)
        die("%s: cannot delete: %s; delete it, or give another --save_folder", path,
            strerror(errno));
    else if (ours) {
        leave(path);
        take_mark(path);
    }
    free(path);
    free(temporary);
}

void folder_remove_step(const char *save_folder, long step)
{
    char name[32];
    snprintf(name, sizeof name, "step%ld", step);
    remove_named(save_folder, name, false);
}

/* Our step<N>-average with N from `first` to `last`, not other folders of that name. */
static void remove_averages(const char *save_folder, long first, long last)
{
    long *steps;
    for (int i = file_steps(&steps, save_folder, "-average") - 1; i >= 0; i--) {
        char *path = step_path(save_folder, steps[i], "-average"),
             *temporary = free_step_name(save_folder, steps[i], ".tmp");
        const bool ours = steps[i] >= first && steps[i] <= last && file_is_in(path, "average.json");
        if (ours && put_mark(path) && rename(path, temporary) == 0)
            folder_remove_tree(temporary);
        else if (ours)
            leave(path);
        free(path);
        free(temporary);
    }
    free(steps);
}

void folder_remove_later(const char *save_folder, long step)
{
    long *steps;
    remove_averages(save_folder, step + 1, LONG_MAX);
    for (int i = file_steps(&steps, save_folder, "") - 1; i >= 0 && steps[i] > step; i--) {
        char name[32];
        snprintf(name, sizeof name, "step%ld", steps[i]);
        remove_named(save_folder, name, true);
    }
    free(steps);
}

/* All our step<N>-aborted, not other folders of that name. */
static void remove_aborted(const char *save_folder)
{
    long *steps;
    for (int i = file_steps(&steps, save_folder, "-aborted") - 1; i >= 0; i--) {
        char *path = step_path(save_folder, steps[i], "-aborted");
        if (saved_as_read(path) == SAVED_ABORTED)
            remove_named(save_folder, strrchr(path, '/') + 1, false);
        free(path);
    }
    free(steps);
}

/* `latest` is deleted last: an interruption leaves a run that can be continued, or nothing. */
void folder_clear(const char *save_folder)
{
    char *latest = xasprintf("%s/latest", save_folder), *name = pointer_read(latest);
    folder_remove_later(save_folder, -1);
    remove_aborted(save_folder);
    remove_marked(save_folder, ".tmp", false);
    remove_marked(save_folder, ".old", false);
    if (name && unlink(latest) != 0)
        die("%s: cannot delete: %s", latest, strerror(errno));
    free(latest);
    free(name);
}

/* ---- a save ---------------------------------------------------------------------------------- */

void folder_try(const char *save_folder)
{
    static const char *const names[] = { ".try-save", ".try-saved", ".try-link" };
    char *path[3];
    for (int i = 0; i < 3; i++) {
        path[i] = xasprintf("%s/%s", save_folder, names[i]);
        folder_remove_tree(path[i]);
    }
    const bool made = mkdir(path[0], 0777) == 0,
               full = !made && (errno == ENOSPC || errno == EDQUOT);
    if (!made && !full)
        die("save_folder %s: cannot create a folder in it: %s; give another --save_folder",
            save_folder, strerror(errno));
    if (made)
        folder_sync(path[0]);
    if (made && rename(path[0], path[1]) != 0)
        die("save_folder %s: cannot rename a folder in it: %s; complete checkpoints are renamed, "
            "so give a "
            "--save_folder on another file system",
            save_folder, strerror(errno));
    folder_sync(save_folder);
    no_links = !full && symlink(names[1], path[2]) != 0;
    if (no_links)
        warn("save_folder %s: cannot create symbolic links there (%s): `latest` is a file that "
             "names the newest checkpoint",
             save_folder, strerror(errno));
    for (int i = 0; i < 3; i++) {
        folder_remove_tree(path[i]);
        free(path[i]);
    }
}

char *folder_choose(const char *save_folder, long step)
{
    folder_clean(save_folder);
    return free_step_name(save_folder, step, ".tmp");
}

void folder_prepare(const char *temporary)
{
    if (mkdir(temporary, 0777) != 0 || !put_mark(temporary))
        die("%s: cannot create: %s", temporary, strerror(errno));
    free(unfinished);
    unfinished = xstrdup(temporary);
}

void folder_point_latest(const char *save_folder, const char *target)
{
    char *latest = xasprintf("%s/latest", save_folder), *usual = xasprintf("%s.tmp", latest),
         *left = pointer_read(usual);
    if (left && file_step(left, "", false) >= 0 && unlink(usual) != 0)
        die("%s: cannot delete: %s", usual, strerror(errno));
    char *temporary = free_name(usual), *line = xasprintf("%s\n", target);
    if (no_links || symlink(target, temporary) != 0)
        folder_write(temporary, line, strlen(line));
    move(temporary, latest);
    folder_sync(save_folder);
    free(latest);
    free(usual);
    free(left);
    free(temporary);
    free(line);
}

/* If the mark cannot be deleted it has no effect in a step<N>. */
static void point_latest_to_step(const char *save_folder, long step)
{
    char *path = step_path(save_folder, step, "");
    take_mark(path);
    folder_point_latest(save_folder, strrchr(path, '/') + 1);
    free(path);
}

void folder_publish(const char *save_folder, long step)
{
    char *path = step_path(save_folder, step, ""), *old = NULL;
    const bool foreign = file_exists(path) && !is_link(path) &&
                         (!saved_as_ours(path) || saved_as_in(path, save_folder) == 0);
    folder_sync(unfinished);
    if (file_exists(path)) {
        old = free_step_name(save_folder, step, ".old");
        if (!foreign && !is_link(path))
            put_mark(path);
        move(path, old);
    }
    move(unfinished, path);
    folder_sync(save_folder);
    point_latest_to_step(save_folder, step);
    if (foreign)
        warn("%s was no checkpoint of this run; it was renamed to %s", path, old);
    else if (old)
        folder_remove_tree(old);
    remove_marked(save_folder, ".old", true);
    free(path);
    free(old);
}

/* Renames the folder of the last folder_prepare to a free name step<N><suffix>; returns its
 * path. */
static char *put(const char *save_folder, long step, const char *suffix)
{
    char *path = free_step_name(save_folder, step, suffix);
    folder_sync(unfinished);
    move(unfinished, path);
    take_mark(path);
    folder_sync(save_folder);
    return path;
}

char *folder_set_aside(const char *save_folder, long step)
{
    remove_aborted(save_folder);
    return put(save_folder, step, "-aborted");
}

char *folder_put_average(const char *save_folder, long step)
{
    remove_averages(save_folder, step, step);
    return put(save_folder, step, "-average");
}

/* ---- texts for messages ---------------------------------------------------------------------- */

char *folder_say_latest(const char *save_folder)
{
    char *path = folder_latest_path(save_folder);
    char *text = path ? xasprintf("the last checkpoint is %s", path)
                      : xasprintf("there is no checkpoint in %s", save_folder);
    free(path);
    return text;
}

char *folder_say_others(const char *checkpoint)
{
    char *path = realpath(checkpoint, NULL), *slash = path ? strrchr(path, '/') : NULL,
         *text = NULL;
    long step, *steps, best = -1;
    int end = 0;
    if (slash && sscanf(slash, "/step%ld%n", &step, &end) == 1) {
        if (slash[end]) /* step6-aborted: step6 is an alternative */
            step = LONG_MAX;
        *slash = '\0';
        for (int i = file_steps(&steps, path, "") - 1; i >= 0; i--)
            if (steps[i] != step && (best < 0 || (best > step && steps[i] < best)))
                best = steps[i];
        free(steps);
    }
    if (best >= 0)
        text = xasprintf("%s/step%ld exists, too: to go back to it, give it as --load_path; in the "
                         "same save_folder with "
                         "--save_overwrite and without --try_load_latest_save",
                         path, best);
    free(path);
    return text ? text
                : xstrdup("There is no other checkpoint next to it: get these files again, or "
                          "start a new run");
}
