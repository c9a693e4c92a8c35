/* Loads the matrices of region QUANTIZED, in the format of lora.base: one at a time, so that only
 * one of them exists in another format. NF4 is also read from folders saved by bitsandbytes. */
#pragma once
#include "model/checkpoint/layout.h"

/* Reads all matrices of the store's region QUANTIZED from the `count` files and sets their sums in
 * l, the model's layout. Each rank reads all; all ranks call. Dies as layout_read, and on a value
 * that is not finite. Waits for the device. */
void load_quantized(Layout *l, ParamStore *store, SafeFile *const *files, int count);
