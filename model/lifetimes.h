/* Which of the buffers that all blocks and the head share hold something at the same time, as the code that uses them says.
 *
 * The operations of a micro-batch (pass.h) are called once with a model that is only planned. None is done; each says what it would
 * read and write (kernels/runtime/operations.h). A buffer holds something from where it is written to where that is read for the last time,
 * and while an operation works in it. */
#pragma once
#include "model/pass.h"

/* Before the plan that is recorded: places buffers so far from each other that an address tells whose it is. */
void lifetimes_separate(SharedBuffer *s);

/* Sets `meets` of m->shared, and m->shared_least. Dies if an operation would read what none has written. */
void lifetimes_record(Model *m, Fsdp *f);
