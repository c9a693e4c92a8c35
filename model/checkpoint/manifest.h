/* trainer.json: the trainer's state, and the files of a checkpoint with their sizes. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/checkpoint.h"

/* Whether every file of the manifest exists with its full size; if not, `problem` describes the
 * first that does not. */
bool manifest_is_complete(const char *folder, const json_t *manifest, char *problem, size_t size);

/* Reads TrainState.base_fingerprint; 0: a checkpoint of an early version, without it. */
uint64_t manifest_base(const json_t *manifest, const char *folder);

/* Read the rest of TrainState, and the counts of the optimizer's states. They die on a missing or
 * impossible value, and name the file, the key, the value expected and the value found. */
void manifest_state(TrainState *s, const json_t *manifest, const char *folder);
StateCounts manifest_counts(const json_t *manifest, const char *folder);
