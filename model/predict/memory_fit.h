/* Whether a run fits its devices. All ranks must call these functions. */
#pragma once
#include "model/shape/config.h"

/* Bytes of device memory that a rank of this dry run needs: its plan, and the allowance for
 * libraries. */
double memory_fit_needed(const Config *c);

/* The largest micro-batch that fits, in sequences, up to a rank's sequences of a step; 0: no
 * micro-batch fits. */
int memory_fit_largest(const Config *c);

/* Prints the last lines of a dry run on stdout, on rank 0. */
void memory_fit_print(const Config *c);
