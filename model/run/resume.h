/* Prints the settings that a resumed run changes. */
#pragma once
#include "model/shape/config.h"

/* Prints a line for each setting that affects training and differs from the config.yaml of the
 * checkpoint `folder`: "resume: global_train_batch_size 32, was 16"; if the recipe is the same,
 * also for each column with another value. Prints nothing if there is no config.yaml. Only rank 0
 * calls this. */
void resume_print(const Config *c, const char *folder);
