/* Finds which buffers that all blocks and the head share are live at the same time, from the code
 * that uses them.
 *
 * The operations of a micro-batch (pass.h) are called once with a model that is only planned. None
 * is executed; each reports its reads and writes (kernels/runtime/operations.h). A buffer is live
 * from a write to its last read, and during operations on it. */
#pragma once
#include "model/pass.h"

/* Before the recorded plan: places buffers so far apart that an address identifies its buffer. */
void lifetimes_separate(OverlaidBuffer *s);

/* Sets `meets` of m->shared, and m->shared_least. Dies if an operation would read bytes that none
 * has written. */
void lifetimes_record(Model *m, ParamStore *store);
