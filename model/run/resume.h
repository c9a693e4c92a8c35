/* What a run that goes on does otherwise than before. */
#pragma once
#include "model/config.h"

/* Prints a line for each setting that can change what is learned and is another one than in the config.yaml of the checkpoint
 * `folder`: "resume: global_train_batch_size 32, was 16"; with the same recipe also for each column that was another in its row.
 * Nothing if it has no such file. Rank 0 calls. */
void resume_print(const Config *c, const char *folder);
