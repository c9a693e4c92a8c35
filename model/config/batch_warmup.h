/* batch_size_warmup: the steps after which the batch doubles. */
#pragma once
#include "model/config/reader.h"

/* Reads the list of steps into s->c.batch_warmup. Dies with `where` unless the list has ascending
 * numbers of steps. */
void batch_warmup_read(Settings *s, const char *where);
void batch_warmup_check(Reader *r);
