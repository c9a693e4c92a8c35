/* Whether quantized matrices are as the settings of their folder say. */
#pragma once
#include "model/checkpoint/safetensors.h"
#include "model/formats/quantized.h"

/* Dies unless bits, scales and order of inputs of the matrix NAME.weight are as one of the codings
 * says, if there are any. */
void coded_check(SafeFile *const *file, int count, const char *name, const Coding *said,
                 int count_said);
