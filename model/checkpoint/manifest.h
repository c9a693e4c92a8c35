/* trainer.json: the trainer's state, and the files of a checkpoint with their sizes. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/checkpoint.h"

/* Whether every file of the manifest exists with its full size; if not, `problem` describes the
 * first missing or short file. */
bool manifest_is_complete(const char *folder, const json_t *manifest, char *problem, size_t size);

/* Reads TrainState.base_fingerprint; sets 0 for a checkpoint of an early version, which lacks
 * it. */
uint64_t manifest_base(const json_t *manifest, const char *folder);

/* manifest_state reads the rest of TrainState; manifest_counts reads the counts of the optimizer's
 * states. Both die on a missing or impossible value; the message names the file, the key, the value
 * expected and the value found. */
void manifest_state(TrainState *s, const json_t *manifest, const char *folder);
StateCounts manifest_counts(const json_t *manifest, const char *folder);
