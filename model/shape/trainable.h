/* Chooses which parameters are trained; the others keep their loaded values. `trainable` has
 * patterns of Hugging Face names. With adapters, only the adapters are trained, and the projector
 * if lora.projector says so. A run with only forward passes trains none. */
#pragma once
#include "model/shape/architecture.h"

/* All units with each parameter in its region; the caller frees them: units_free. trainable_split
 * must have found nothing. tensor: the model's (hf_tensors_of). Afterwards the caller calls
 * unit_lay_out. */
UnitLayout *trainable_shapes(const Config *c, const HfTensor *tensor, int count);

/* Our parameter may be several tensors in files. If one has both trained and frozen tensors: "a is
 * trained and b is frozen", malloc'ed; NULL: none has. */
char *trainable_split(const Config *c, const HfTensor *tensor, int count);

/* The first pattern that matches no tensor (* matches any characters, ? one); NULL: each matches
 * one. */
const char *trainable_unknown(const Config *c, const HfTensor *tensor, int count);
