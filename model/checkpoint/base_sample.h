/* Whether adapters stand beside the weights that they were trained beside. */
#pragma once
#include "model/checkpoint/source.h"

/* The sum of the checksums of all tensors' names, types and some bytes, in whatever files and order they are; never 0. */
uint64_t base_sample(const Source *base);

/* `adapters`: their folder; `base_path`, `sample`: what they are to stand beside now. Dies if those are other weights than their
 * trainer.json says, unless it is another folder for a run that does not go on with their moments: then it warns, as it does of
 * another folder where trainer.json, being PEFT's or old, does not say. */
void base_check(const char *adapters, const char *base_path, uint64_t sample, bool goes_on);
