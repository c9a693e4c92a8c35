/* Checks that adapters are used with the base weights of their training. */
#pragma once
#include "model/checkpoint/weight_files.h"

/* The sum of checksums of all tensors' names, types and some bytes, independent of files and their
 * order; never 0. */
uint64_t base_fingerprint(const WeightFiles *base);

/* `adapters`: their folder; `base_path`, `fingerprint`: their base now. Dies if its weights differ
 * from those recorded in trainer.json. If base_path is another folder than in training, it only
 * warns unless the run continues with the adapters' moments; also if nothing is recorded (PEFT's or
 * old adapters). */
void base_fingerprint_check(const char *adapters, const char *base_path, uint64_t fingerprint,
                            bool continues);
