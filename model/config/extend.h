/* The setting `extend`: continues a run of the WSD schedule from its last checkpoint before the
 * decay. */
#pragma once
#include "model/config/reader.h"

/* Sets load_path to that checkpoint. */
void extend_find(Reader *r);
/* Dies if the loaded checkpoint is in the decay of the schedule. */
void extend_check(const Reader *r);

/* c with the schedule of the run that saved this checkpoint, and with the length and batches that
 * it depends on, but c's optimizer.learning_rate; c itself if that run is not known. What pointers
 * refer to stays c's. */
Config extend_with_schedule_of(const char *checkpoint, const Config *c);
