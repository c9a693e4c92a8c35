/* The folders of checkpoints on disk: stepN, stepN.tmp while it is written, stepN.old while it is replaced, `latest`. What else has
 * such a name is not touched: stepN.tmp and stepN.old of ours hold an empty file .unfinished, and take another number at their end
 * where the name is taken.
 * Rank 0 acts; errors die and name the path, but what cannot be deleted is told once and left. Strings returned are malloc'ed. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

bool  folder_holds(const char *name);                 /* whether it can be the name of a file in a folder: no path */

/* The real path of what `latest` points to, or else of the step<N> of the largest N; NULL: there is none. */
char *folder_newest(const char *save_folder);
/* N of a step<N> that this program has not made; -1: there is none. */
long  folder_foreign_step(const char *save_folder);

/* Tries in save_folder all that a save does, and dies of what it cannot do without. Where there are no symbolic links, it warns,
 * and `latest` is a file. */
void  folder_try(const char *save_folder);

void  folder_clean(const char *save_folder);          /* removes what an interrupted save left behind */

/* The same; the path of a step<N>.tmp that is not there. prepare: makes it. */
char *folder_choose (const char *save_folder, long step);
void  folder_prepare(const char *temporary);

/* What folder_prepare made last becomes step<N>, what was there is deleted, and `latest` points to it; all of it durable. A crash
 * in between leaves the old step<N>, or it as step<N>.old, or the new one. */
void  folder_publish(const char *save_folder, long step);

/* The same becomes step<N>-aborted, which nothing goes on from unless it is named; others that were saved as that are deleted.
 * Returns its path. Durable. */
char *folder_set_aside(const char *save_folder, long step);

/* target: "step<N>", or the absolute path of a checkpoint elsewhere. Durable too. */
void  folder_point_latest(const char *save_folder, const char *target);
/* Deletes it, unless nothing in it can be deleted. Of a link the link, of any checkpoint the folder alone. */
void  folder_remove_step(const char *save_folder, long step);
void  folder_remove_later(const char *save_folder, long step);          /* all beyond it, the last one first */
void  folder_clear(const char *save_folder);          /* removes all checkpoints and `latest` */
char *folder_latest(const char *save_folder);         /* what `latest` says: "step100"; NULL: there is none */
char *folder_latest_path(const char *save_folder);    /* the path of that */
char *folder_say_latest(const char *save_folder);     /* "the last checkpoint is runs/x/step100", or that there is none */
char *folder_say_others(const char *checkpoint);      /* what to go on from instead: the one before it, or another beside it */

void  folder_remove_tree(const char *path);           /* whatever it is; a link alone */
void  folder_write(const char *path, const char *data, size_t bytes);       /* a whole file, on disk when it returns */
void  folder_sync(const char *path);                  /* the names in it are durable, where the file system can */
bool  folder_fsync(int fd);                           /* fsync; true also where the file system has none. errno is set */
