/* The setting `extend`: continues a run of the WSD schedule from its last checkpoint before the
 * decay. */
#pragma once
#include "model/config/reader.h"

/* Sets load_path to that checkpoint. */
void extend_find(Reader *r);
/* Dies if the loaded checkpoint is in the decay of its schedule. */
void extend_check(const Reader *r);

/* Returns c with the schedule of the run that saved this checkpoint, and with the length and
 * batches that the schedule depends on, but with c's optimizer.learning_rate. Returns c itself if
 * that run is not known. Objects that pointers refer to belong to c. */
Config extend_with_schedule_of(const char *checkpoint, const Config *c);
