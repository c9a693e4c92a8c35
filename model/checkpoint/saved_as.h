/* How long a checkpoint is kept. The settings of the run decide this when the checkpoint is saved;
 * its trainer.json stores the decision. */
#pragma once
#include "model/shape/config.h"

typedef enum {
    /* trainer.json does not say how the checkpoint was saved, or another program made it */
    SAVED_UNKNOWN,
    /* never deleted: saved by save_interval_unsharded, or the run keeps all checkpoints */
    SAVED_PERMANENT,
    SAVED_INTERVAL,  /* rotated: counts towards save_num_checkpoints_to_keep */
    SAVED_EPHEMERAL, /* the next checkpoint replaces it */
    SAVED_ABORTED,   /* the state of a run that could not continue: step<N>-aborted */
    NUM_SAVED_AS
} SavedAs;

SavedAs saved_as_of(const Config *c, long step);
SavedAs saved_as_read(const char *folder);
const char *saved_as_name(SavedAs s); /* the value in trainer.json */

/* Whether the folder is a checkpoint that this program made, even a damaged one. */
bool saved_as_ours(const char *folder);
/* Whether the folder has an optimizer's states, under the names of any version. */
bool saved_as_with_states(const char *folder);

/* Compares the save_folder in a checkpoint's config.yaml with `save_folder`. 1: both are the same
 * folder; 0: they differ; -1: config.yaml names no folder, or a relative path, which may belong to
 * another project. */
int saved_as_in(const char *folder, const char *save_folder);
