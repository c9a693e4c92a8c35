/* The folders of checkpoints on disk: stepN, stepN.tmp while it is written, stepN.old while it is
 * replaced, `latest`. Other folders with such a name are not touched: our stepN.tmp and stepN.old
 * contain an empty file .unfinished. A number follows a taken name. Rank 0 acts. Errors die and
 * name the path; for files that cannot be deleted it warns once. Returned strings are malloc'ed. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* whether it is a valid name of a file in a folder, not a path */
bool folder_holds(const char *name);

/* The real path of the target of `latest`, or else of the step<N> of the largest N; NULL: there is
 * none. */
char *folder_newest(const char *save_folder);
/* N of a step<N> that was not made by this program; -1: there is none. */
long folder_foreign_step(const char *save_folder);

/* Tries all file operations of a save in save_folder; dies if a necessary one fails. Without
 * symbolic links it warns, and `latest` will be a file. */
void folder_try(const char *save_folder);

/* removes the remains of an interrupted save */
void folder_clean(const char *save_folder);

/* folder_choose: as folder_clean; returns the path of a new step<N>.tmp. folder_prepare: creates
 * it. */
char *folder_choose(const char *save_folder, long step);
void folder_prepare(const char *temporary);

/* Renames the folder of the last folder_prepare to step<N>, deletes an old step<N>, and points
 * `latest` to it, all durable. A crash in between leaves the old step<N>, also as step<N>.old, or
 * the new one. */
void folder_publish(const char *save_folder, long step);

/* Renames the folder to step<N>-aborted, which a run loads only if a user names it. Deletes older
 * aborted states. Returns the path. Durable. */
char *folder_set_aside(const char *save_folder, long step);

/* Renames the folder to step<N>-average. Replaces an earlier average that this program wrote, which
 * has an average.json. */
char *folder_put_average(const char *save_folder, long step);

/* Points `latest` to target: "step<N>", or the absolute path of a checkpoint elsewhere. Durable. */
void folder_point_latest(const char *save_folder, const char *target);
/* Deletes a checkpoint, unless nothing in it can be deleted; of a link only the link. */
void folder_remove_step(const char *save_folder, long step);
/* deletes all checkpoints and averages of later steps, the last one first */
void folder_remove_later(const char *save_folder, long step);
void folder_clear(const char *save_folder); /* removes all checkpoints and `latest` */
char *
folder_latest(const char *save_folder); /* the target of `latest`: "step100"; NULL: there is none */
char *folder_latest_path(const char *save_folder); /* the path of this target */
char *folder_say_latest(
    const char *save_folder); /* "the last checkpoint is runs/x/step100", or that there is none */
/* a text that says which checkpoint to load instead */
char *folder_say_others(const char *checkpoint);

/* a file, link or folder; links are not followed */
void folder_remove_tree(const char *path);
/* a whole file, on disk when it returns */
void folder_write(const char *path, const char *data, size_t bytes);
/* makes the names in it durable, if the file system can */
void folder_sync(const char *path);
/* fsync; true also if the file system has none. Sets errno */
bool folder_fsync(int fd);
