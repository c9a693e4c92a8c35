/* Finds which of the buffers that all blocks and the head share are live at the same time. The
 * result follows from the code that uses the buffers.
 *
 * The operations of a micro-batch (pass.h) are called once with a model that is only planned. No
 * operation is executed; each reports its reads and writes (kernels/runtime/operations.h). A buffer
 * is live from a write to the last read of the written bytes, and during operations on it. */
#pragma once
#include "model/pass.h"

/* Call this before the recorded plan. It places buffers so far apart that an address identifies its
 * buffer. */
void lifetimes_separate(OverlaidBuffer *s);

/* Sets `meets` of m->shared, and m->shared_least. Dies if an operation would read bytes that no
 * operation has written. */
void lifetimes_record(Model *m, ParamStore *store);
