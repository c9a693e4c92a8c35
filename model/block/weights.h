/* Weights of labels, computed on the host. */
#pragma once
#include "model/shape/buffers.h"

/* Copies the weights of the micro-batch's labels, the last row of m->weighed.host, to the device.
 * Returns the largest absolute weight; 1 if all are 0. */
float weights_put(Model *m);
