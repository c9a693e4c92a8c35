/* Which rank writes which elements. */
#pragma once
#include "model/checkpoint/layout.h"

/* The parts that this rank writes: of each region of each unit, at [unit * NUM_REGIONS + region].
 * All ranks call; malloc'ed. */
Range *layout_ranges(const ParamStore *store);
