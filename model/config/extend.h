/* `extend`: a run continues from its stable part. */
#pragma once
#include "model/config/reader.h"

/* Replaces load_path by the checkpoint. */
void extend_find(Reader *r);
/* Dies if it is in the decay of the schedule. */
void extend_check(const Reader *r);

/* c with the schedule of the run that saved this checkpoint, and with the length and batches that
 * it depends on, but c's optimizer.learning_rate; c itself if that run is not known. What pointers
 * refer to stays c's. */
Config extend_with_schedule_of(const char *checkpoint, const Config *c);
