/* The folders of checkpoints on disk: stepN, stepN.tmp while it is written, stepN.old while it is
 * replaced, `latest`. Our stepN.tmp and stepN.old contain an empty file .unfinished; other folders
 * with such a name are not touched. If a folder of the chosen name exists, a number is appended to
 * the name. Only rank 0 calls these functions. They die on errors and name the path; if files
 * cannot be deleted, they only warn, once. Returned strings are malloc'ed. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* whether the text is a valid name of a file in a folder, not a path */
bool folder_holds(const char *name);

/* Returns the real path of the target of `latest`, or if there is no `latest`, of the step<N> with
 * the largest N; NULL: there is neither. */
char *folder_newest(const char *save_folder);
/* Returns the N of a step<N> that another program made; -1: there is none. */
long folder_foreign_step(const char *save_folder);

/* Tries all file operations of a save in save_folder; dies if a necessary one fails. If the file
 * system has no symbolic links, warns; `latest` will be a file. */
void folder_try(const char *save_folder);

/* removes the remains of an interrupted save */
void folder_clean(const char *save_folder);

/* Removes the remains as folder_clean does. Returns the path of a new step<N>.tmp. */
char *folder_choose(const char *save_folder, long step);
/* Creates the folder that folder_choose returned. */
void folder_prepare(const char *temporary);

/* Renames the folder of the last folder_prepare to step<N>, deletes an old step<N>, and points
 * `latest` to the new one. Everything is durable. A crash in between leaves either the old step<N>,
 * perhaps named step<N>.old, or the new one. */
void folder_publish(const char *save_folder, long step);

/* Renames the folder of the last folder_prepare to step<N>-aborted, which a run loads only if a
 * user names it. Deletes older aborted states. Returns the path. Durable. */
char *folder_set_aside(const char *save_folder, long step);

/* Renames the folder of the last folder_prepare to step<N>-average. Replaces an earlier average of
 * this program: a folder with an average.json. */
char *folder_put_average(const char *save_folder, long step);

/* Points `latest` to target: "step<N>", or the absolute path of a checkpoint elsewhere. Durable. */
void folder_point_latest(const char *save_folder, const char *target);
/* Deletes a checkpoint; keeps it if no file in it can be deleted. Of a link, deletes only the
 * link. */
void folder_remove_step(const char *save_folder, long step);
/* deletes all checkpoints and averages of later steps, from the last to the first */
void folder_remove_later(const char *save_folder, long step);
void folder_clear(const char *save_folder); /* removes all checkpoints and `latest` */
char *
folder_latest(const char *save_folder); /* the target of `latest`: "step100"; NULL: there is none */
char *folder_latest_path(const char *save_folder); /* the path of this target */
char *folder_say_latest(
    const char *save_folder); /* "the last checkpoint is runs/x/step100", or that there is none */
/* a text for messages that says which checkpoint to load instead */
char *folder_say_others(const char *checkpoint);

/* deletes a file, link or folder; does not follow links */
void folder_remove_tree(const char *path);
/* writes a whole file, which is on disk when it returns */
void folder_write(const char *path, const char *data, size_t bytes);
/* makes the names in the folder durable, if the file system supports it */
void folder_sync(const char *path);
/* calls fsync. Returns true also if the file system has no fsync. Sets errno on an error */
bool folder_fsync(int fd);
