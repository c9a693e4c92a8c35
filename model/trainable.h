/* Which parameters are trained and which stay as they were loaded: `trainable`, patterns of Hugging Face's names; with adapters
 * they alone are; none are where the run is forward passes alone. */
#pragma once
#include "model/architecture.h"

/* All units, each parameter in its region, where trainable_split found nothing; the caller frees them. tensor: the model's
 * (hf_tensors_of). The layout is the caller's: unit_lay_out. */
UnitShape *trainable_shapes(const Config *c, const HfTensor *tensor, int count);

/* A parameter of ours may be several tensors there. Of which some are trained and some are not: "a is trained and b is frozen",
 * malloc'ed; NULL: of none. */
char *trainable_split(const Config *c, const HfTensor *tensor, int count);

/* The first pattern that names no tensor (* stands for any characters, ? for one); NULL: each names one. */
const char *trainable_unknown(const Config *c, const HfTensor *tensor, int count);
