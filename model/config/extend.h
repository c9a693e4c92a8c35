/* `extend`: a run continues from its stable part. */
#pragma once
#include "model/config/reader.h"

/* Replaces load_path by the checkpoint. */
void extend_find(Reader *r);
/* Dies if it is in the decay of the schedule. */
void extend_check(const Reader *r);
