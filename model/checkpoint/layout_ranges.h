/* Decides which rank writes which elements. */
#pragma once
#include "model/checkpoint/layout.h"

/* Returns the range of elements that this rank writes, for each region of each unit, at [unit *
 * NUM_REGIONS + region]. All ranks must call this; malloc'ed. */
Range *layout_ranges(const ParamStore *store);
