/* Whether a run fits the devices that it is meant for. All ranks call. */
#pragma once
#include "model/config.h"

/* Bytes of a device that a rank of this dry run takes: its plan, and what libraries take beyond it. */
double fit_needed(const Config *c);

/* The largest micro-batch that fits, in sequences, of those up to all that a rank has in a step; 0: not even one does. */
int    fit_largest(const Config *c);

/* On stdout, the last lines of a dry run. Rank 0 prints. */
void   fit_print(const Config *c);
