/* Checks quantized matrices against the settings of their folder. */
#pragma once
#include "model/checkpoint/safetensors.h"
#include "model/formats/quantized.h"

/* Dies unless one of the codings describes the bits, scales and order of inputs of the matrix
 * NAME.weight. Without codings, does nothing. */
void coded_check(SafeFile *const *file, int count, const char *name, const Coding *said,
                 int count_said);
