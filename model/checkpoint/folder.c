/* rename() is atomic, and durable after an fsync of the parent folder. So a checkpoint is written
 * under a temporary name, and renamed when it is complete and on disk. Nothing ever reads a
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

/* the mark: an empty file in our step<N>.tmp and step<N>.old, and in a step<N> before it is renamed
 * to one of these */
static const char mark[] = ".unfinished";
static const char aborted[] = "-aborted", average[] = "-average";
static char *unfinished; /* the folder that folder_prepare created */
static bool no_links;    /* the file system has no symbolic links; folder_try detects this */

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
        die("%s is not a link to a checkpoint (a copy that followed links?); delete it, and start "
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

/* Returns the first of step<N><suffix>, step<N><suffix>2, ... that does not exist. */
static char *free_step_name(const char *save_folder, long step, const char *suffix)
{
    char *name = step_path(save_folder, step, suffix);
    for (int k = 2; file_exists(name); k++) {
        free(name);
        name = xasprintf("%s/step%ld%s%d", save_folder, step, suffix, k);
    }
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

/* Warns with errno's reason, once per path instead of at each save. */
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

/* Deletes a folder, its mark last, so that the remains after an interruption still have the
 * mark. */
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

/* Removes every step<N>.tmp and step<N>.old that is empty or has our mark. Without `all`, keeps a
 * step<N>.old if there is no step<N>. */
static void remove_marked(const char *save_folder, bool all)
{
    DIR *dir = opendir(save_folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        const long old = file_step(entry->d_name, ".old", true);
        char *path = xasprintf("%s/%s", save_folder, entry->d_name),
             *replacing = step_path(save_folder, old, "");
        if ((file_step(entry->d_name, ".tmp", true) >= 0 ||
             (old >= 0 && (all || file_exists(replacing)))) &&
            !is_link(path) && rmdir(path) != 0 && file_is_in(path, mark))
            folder_remove_tree(path);
        free(path);
        free(replacing);
    }
    if (dir)
        closedir(dir);
}

void folder_clean(const char *save_folder)
{
    remove_marked(save_folder, false);
}

/* Whether this program made the folder step<N><suffix>, or a link is in its place. */
static bool is_ours(const char *path, const char *suffix)
{
    return strcmp(suffix, average) == 0   ? file_is_in(path, "average.json")
           : strcmp(suffix, aborted) == 0 ? saved_as_read(path) == SAVED_ABORTED
                                          : is_link(path) || saved_as_ours(path);
}

/* Deletes `path`. Renames it first, because a half-deleted checkpoint must not look complete. must:
 * dies on an error. */
static void discard(const char *path, const char *temporary, bool must)
{
    const bool marked = is_link(path) || put_mark(path);
    if ((marked || must) && rename(path, temporary) == 0)
        folder_remove_tree(temporary);
    else if (must)
        die("%s: cannot delete: %s; delete it, or give another --save_folder", path,
            strerror(errno));
    else {
        leave(path);
        take_mark(path);
    }
}

/* Deletes our step<N><suffix> with N from `first` to `last`, the last one first. */
static void remove_range(const char *save_folder, const char *suffix, long first, long last,
                         bool must)
{
    long *steps;
    for (int i = file_steps(&steps, save_folder, suffix) - 1; i >= 0; i--) {
        char *path = step_path(save_folder, steps[i], suffix),
             *temporary = free_step_name(save_folder, steps[i], ".tmp");
        if (steps[i] >= first && steps[i] <= last && is_ours(path, suffix))
            discard(path, temporary, must);
        free(path);
        free(temporary);
    }
    free(steps);
}

void folder_remove_step(const char *save_folder, long step)
{
    remove_range(save_folder, "", step, step, false);
}

void folder_remove_later(const char *save_folder, long step)
{
    remove_range(save_folder, average, step + 1, LONG_MAX, false);
    remove_range(save_folder, "", step + 1, LONG_MAX, true);
}

/* `latest` is deleted last: after an interruption, either the run can be continued or no checkpoint
 * is left. */
void folder_clear(const char *save_folder)
{
    char *latest = xasprintf("%s/latest", save_folder), *name = pointer_read(latest);
    folder_remove_later(save_folder, -1);
    remove_range(save_folder, aborted, 0, LONG_MAX, false);
    remove_marked(save_folder, true);
    if (name && unlink(latest) != 0)
        die("%s: cannot delete: %s", latest, strerror(errno));
    free(latest);
    free(name);
}

/* ---- a save ---------------------------------------------------------------------------------- */

void folder_try(const char *save_folder)
{
    char *made = xasprintf("%s/.try-save", save_folder), *moved = xasprintf("%sd", made),
         *link = xasprintf("%s/link", moved);
    folder_remove_tree(made);
    folder_remove_tree(moved);
    if (mkdir(made, 0777) == 0) {
        folder_sync(made);
        if (rename(made, moved) != 0)
            die("save_folder %s: cannot rename a folder in it: %s; complete checkpoints are "
                "renamed, so give a --save_folder on another file system",
                save_folder, strerror(errno));
        no_links = symlink("saved", link) != 0;
        if (no_links)
            warn("save_folder %s: cannot create symbolic links there (%s): `latest` is a file that "
                 "names the newest checkpoint",
                 save_folder, strerror(errno));
        folder_remove_tree(moved);
    } else if (errno != ENOSPC &&
               errno != EDQUOT) /* a disk that is full now may have space at the first save */
        die("save_folder %s: cannot create a folder in it: %s; give another --save_folder",
            save_folder, strerror(errno));
    folder_sync(save_folder);
    free(made);
    free(moved);
    free(link);
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
    char *latest = xasprintf("%s/latest", save_folder),
         *temporary = xasprintf("%s/.latest.tmp", save_folder), *line = xasprintf("%s\n", target);
    unlink(temporary);
    if (no_links || symlink(target, temporary) != 0)
        folder_write(temporary, line, strlen(line));
    move(temporary, latest);
    folder_sync(save_folder);
    free(latest);
    free(temporary);
    free(line);
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
    take_mark(path); /* in a step<N>, a mark that cannot be deleted has no effect */
    folder_point_latest(save_folder, strrchr(path, '/') + 1);
    if (foreign)
        warn("%s was not a checkpoint of this run; it was renamed to %s", path, old);
    else if (old)
        folder_remove_tree(old);
    folder_clean(save_folder);
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
    remove_range(save_folder, aborted, 0, LONG_MAX, false);
    return put(save_folder, step, aborted);
}

char *folder_put_average(const char *save_folder, long step)
{
    remove_range(save_folder, average, step, step, false);
    return put(save_folder, step, average);
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
        /* false for step6-aborted, because step6 is another checkpoint */
        const bool whole = !slash[end];
        *slash = '\0';
        const int count = file_steps(&steps, path, "");
        for (int i = 0; i < count; i++)
            if (!whole || (steps[i] != step && (best < 0 || steps[i] < step)))
                best = steps[i];
        free(steps);
    }
    if (best >= 0)
        text =
            xasprintf("%s/step%ld exists, too: to go back to this checkpoint, give its folder as "
                      "--load_path; in the same save_folder also give --save_overwrite, but "
                      "not --try_load_latest_save",
                      path, best);
    free(path);
    return text ? text
                : xstrdup("The folder has no other checkpoint: copy the files of this checkpoint "
                          "again, or start a new run");
}
