/* Finds values that are not finite: a checkpoint must not contain such values. */
#pragma once
#include "model/checkpoint/layout.h"

/* Returns the name of the first tensor with a value, on any rank, that is not finite or, in AdamW's
 * v, below 0; NULL: there is no such value. All ranks must call this. They get the same name, valid
 * as long as the layout. Waits for the device. */
const char *layout_not_finite(const Layout *l, const ParamStore *store);
