/* Values that are not finite, which no checkpoint may have. */
#pragma once
#include "model/checkpoint/layout.h"

/* The first tensor with a value, on any rank, that is not finite or, in AdamW's v, below 0; NULL:
 * there is none. All ranks call and get the same name, valid as long as the layout. Waits for the
 * device. */
const char *layout_not_finite(const Layout *l, const ParamStore *store);
