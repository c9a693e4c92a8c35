/* FLOPs of a token, and the peak speed of a device. shape: the layouts of all units, which say what
 * is trained. */
#pragma once
#include "model/shape/params.h"

/* FLOPs of forward and backward per token: GEMMs, and causal attention over T tokens with windows.
 * head_forward: the part of `head` that is forward. */
typedef struct {
    double linear, head, head_forward, attention;
} TokenFlops;
TokenFlops token_flops(const Config *c, const UnitLayout *shape);

/* Tokens per second at the device's data-sheet rates: 100 % of peak in the progress line. 0:
 * unknown. */
double speed_of_light(const Config *c, const UnitLayout *shape);

/* As speed_of_light, for other peaks: dense FLOP/s for operands of `bits` bits. */
double speed_at_peak(const Config *c, const UnitLayout *shape, double (*peak)(int bits));
