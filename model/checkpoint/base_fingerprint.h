/* Checks that the base weights of adapters are the weights of their training. */
#pragma once
#include "model/checkpoint/weight_files.h"

/* The sum of checksums of all tensors: of the name, the type and some bytes of each. It is
 * independent of files and their order; never 0. */
uint64_t base_fingerprint(const WeightFiles *base);

/* adapters: folder of the adapters. base_path, fingerprint: the base that they are used with now.
 * Dies if `fingerprint` differs from the fingerprint in trainer.json. Only warns if base_path is
 * another folder than in training and the run does not continue with the adapters' moments, or if
 * no fingerprint is recorded (adapters of PEFT or of an old version). */
void base_fingerprint_check(const char *adapters, const char *base_path, uint64_t fingerprint,
                            bool continues);
