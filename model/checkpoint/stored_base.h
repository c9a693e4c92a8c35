/* The matrices that lora.base says how to store (region BASE): made while they are read, one at a time, so that no more than one of
 * them exists in another format. NF4 is also taken from folders that bitsandbytes saved. */
#pragma once
#include "model/checkpoint/layout.h"

/* Reads all matrices of f's region BASE from the `count` files of `source`; l: the model's layout, whose sums of them it sets. Each
 * rank reads all, and all call. Dies as layout_read, and on a value that is not finite. Waits for the device. */
void stored_base_read(Layout *l, Fsdp *f, SafeFile *const *source, int count);
