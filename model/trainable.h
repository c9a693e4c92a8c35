/* Which parameters are trained and which stay as they were loaded: `trainable`, patterns of Hugging Face's names. */
#pragma once
#include "model/params.h"

/* Sets the region of each parameter of a unit that unit_shape has described. The layout is the caller's: unit_lay_out. Dies where a
 * parameter of ours is several tensors there, of which some are trained and some are not. */
void trainable_mark(UnitShape *u, const Config *c, int unit);

/* How many tensors of the model a pattern names: * stands for any characters, ? for one. */
int  trainable_count(const Config *c, const char *pattern);
