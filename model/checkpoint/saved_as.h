/* How long a checkpoint is kept: decided by the settings when it was saved, and stored in its
 * trainer.json. */
#pragma once
#include "model/shape/config.h"

typedef enum {
    SAVED_UNKNOWN,   /* not stored, or not our checkpoint */
    SAVED_PERMANENT, /* kept: of save_interval_unsharded, or all are kept */
    SAVED_INTERVAL,  /* rotated: one of save_num_checkpoints_to_keep */
    SAVED_EPHEMERAL, /* ephemeral: the next checkpoint replaces it */
    SAVED_ABORTED,   /* step<N>-aborted */
    NUM_SAVED_AS
} SavedAs;

SavedAs saved_as_of(const Config *c, long step);
SavedAs saved_as_read(const char *folder);
const char *saved_as_name(SavedAs s); /* in trainer.json */

/* ours: whether the folder is a checkpoint that this program made, also a damaged one. with_states:
 * whether it has an optimizer's states, under the names of any version. */
bool saved_as_ours(const char *folder);
bool saved_as_with_states(const char *folder);

/* Compares the save_folder in a checkpoint's config.yaml with `save_folder`. 1: it is the same; 0:
 * it is another folder; -1: there is none, or it is a relative path, which may belong to another
 * project. */
int saved_as_in(const char *folder, const char *save_folder);
