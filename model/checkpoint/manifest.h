/* trainer.json: the trainer's state, and the files of a checkpoint with their sizes. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/checkpoint.h"

/* Whether every file that the manifest lists is there in full; if not, `problem` says what is wrong. */
bool manifest_is_complete(const char *folder, const json_t *manifest, char *problem, size_t size);

/* TrainState.base_sample, which old checkpoints do not have: 0. */
uint64_t manifest_base(const json_t *manifest, const char *folder);

/* All else of it. Dies on a value that is missing or that no run could have: file, key, expected, found. */
void manifest_state(TrainState *s, const json_t *manifest, const char *folder);
