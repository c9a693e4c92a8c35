/* The folders of checkpoints on disk: stepN, stepN.tmp while it is written, stepN.old while it is replaced, `latest`.
 * Rank 0 acts; errors die and name the path. Strings returned are malloc'ed. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

bool  folder_exists(const char *path);                /* anything of that name */
bool  folder_holds(const char *name);                 /* whether it can be the name of a file in a folder: no path */

/* N of all entries step<N><suffix>, ascending; their number. */
int   folder_steps(long **steps, const char *save_folder, const char *suffix);

/* The path of what `latest` points to, or else of the step<N> of the largest N; NULL: there is none. */
char *folder_newest(const char *save_folder);
/* N of a step<N> that holds none of a checkpoint's descriptions; -1: there is none. */
long  folder_foreign_step(const char *save_folder);

void  folder_clean(const char *save_folder);          /* removes what an interrupted save left behind */
void  folder_prepare(const char *save_folder, long step);       /* the same, and makes an empty step<N>.tmp */

/* step<N>.tmp becomes step<N>, whatever was there is deleted, and `latest` points to it; all of it durable. A crash
 * in between leaves the old step<N>, or it as step<N>.old, or the new one. */
void  folder_publish(const char *save_folder, long step);

/* step<N>.tmp becomes step<N>-aborted, which nothing goes on from unless it is named; others of the kind are deleted. Durable. */
void  folder_set_aside(const char *save_folder, long step);

void  folder_point_latest(const char *save_folder, long step);          /* durable too */
void  folder_remove_step(const char *save_folder, long step);
void  folder_remove_later(const char *save_folder, long step);          /* all beyond it, the last one first */
void  folder_clear(const char *save_folder);          /* removes all checkpoints and `latest` */
char *folder_latest(const char *save_folder);         /* what the link `latest` says: "step100"; NULL: there is none */
char *folder_say_latest(const char *save_folder);     /* "the last checkpoint is runs/x/step100", or that there is none */
char *folder_say_others(const char *checkpoint);      /* what to go on from instead: the one before it, or another beside it */

void  folder_write(const char *path, const char *data, size_t bytes);       /* a whole file, on disk when it returns */
void  folder_sync(const char *path);                  /* the names in it are durable */

/* A folder of another name, which appears when it is complete. begin: makes a <path>.tmp with an empty file `unfinished`, in place
 * of what was left by who was interrupted; dies if there is a `path`, a <path>.tmp that is none of these, or if another process
 * fills it. complete: it becomes `path`, durable. `begun`: what begin returned. is_unfinished: whether `path` is such a
 * <path>.tmp. */
int   folder_begin(const char *path);
void  folder_complete(const char *path, int begun);
bool  folder_is_unfinished(const char *path);
