/* Which parameters are trained and which stay as they were loaded: `trainable`, patterns of Hugging Face's names; with adapters they
 * alone are; none are where the run is forward passes alone. */
#pragma once
#include "model/params.h"

/* Sets the region of each parameter of a unit that unit_shape has described, where trainable_split found nothing. The layout is the
 * caller's: unit_lay_out. */
void trainable_mark(UnitShape *u, const Config *c, int unit);

/* A parameter of ours may be several tensors there. Of which some are trained and some are not: "a is trained and b is frozen",
 * malloc'ed; NULL: of none. */
char *trainable_split(const Config *c);

/* How many tensors of the model a pattern names: * stands for any characters, ? for one. */
int  trainable_count(const Config *c, const char *pattern);
