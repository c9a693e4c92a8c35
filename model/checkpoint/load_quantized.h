/* Loads the matrices of region QUANTIZED in the format of lora.base. Works on one matrix at a time,
 * so that only one matrix exists in another format. Also reads NF4 from folders that bitsandbytes
 * saved. */
#pragma once
#include "model/checkpoint/layout.h"

/* Reads all matrices of the store's region QUANTIZED from the `count` files. Sets their checksums
 * in l, the model's layout. Each rank reads everything; all ranks must call this. Dies on the
 * errors of layout_read, and on a value that is not finite. Waits for the device. */
void load_quantized(Layout *l, ParamStore *store, SafeFile *const *files, int count);
