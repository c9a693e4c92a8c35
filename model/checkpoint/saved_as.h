/* What becomes of a checkpoint when later ones are saved: the settings of its time say so, and its trainer.json keeps it. */
#pragma once
#include "model/config.h"

typedef enum {
    SAVED_UNKNOWN,          /* by a program that did not say; or it is no checkpoint of ours */
    SAVED_PERMANENT,        /* stays: of save_interval_unsharded, or when all were kept */
    SAVED_INTERVAL,         /* one of save_num_checkpoints_to_keep */
    SAVED_EPHEMERAL,        /* the next one takes its place */
    SAVED_ABORTED,          /* set aside */
    NUM_SAVED_AS
} SavedAs;

SavedAs     saved_as_of  (const Config *c, long step);
SavedAs     saved_as_read(const char *folder);
const char *saved_as_name(SavedAs s);           /* in trainer.json */

/* Whether the folder is a checkpoint that this program made, also a damaged one. */
bool        saved_as_ours(const char *folder);

/* Whether a checkpoint's config.yaml names that save_folder: 1, another one: 0, none, or one of the same name from wherever the run was
 * started: -1. */
int         saved_as_in(const char *folder, const char *save_folder);
