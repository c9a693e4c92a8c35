/* Chooses which parameters are trained; the others keep their loaded values. `trainable` has
 * patterns of Hugging Face names. With adapters, only the adapters are trained, and the projector
 * if lora.projector says so. A run with only forward passes trains no parameter. */
#pragma once
#include "model/shape/architecture.h"

/* All units, with each parameter in its region; free them with units_free. Call trainable_split
 * before: it must return NULL. tensor: the model's tensors (hf_tensors_of). The caller must then
 * call unit_lay_out. */
UnitLayout *trainable_shapes(const Config *c, const HfTensor *tensor, int count);

/* One of our parameters may be several tensors in files. If a parameter has both trained and frozen
 * tensors, returns "a is trained and b is frozen", malloc'ed; NULL: no parameter has both. */
char *trainable_split(const Config *c, const HfTensor *tensor, int count);

/* Returns the first pattern that matches no tensor (* matches any characters, ? one character);
 * NULL: each pattern matches a tensor. */
const char *trainable_unknown(const Config *c, const HfTensor *tensor, int count);
