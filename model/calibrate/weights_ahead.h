/* Reads the weights of an export unit by unit. A thread reads the next unit while the current one
 * is in use. */
#pragma once
#include <pthread.h>

#include "model/export/export_files.h"

/* A tensor of a unit. scale: (rows, cols / group), the scales of its 4-bit codes; NULL: the tensor
 * has no codes. */
typedef struct {
    HfTensor tensor;
    float *values, *scale;
} Weight;

typedef struct {
    const Export *x;
    const ModelConfig *model;
    int unit; /* the unit that is being read, or was read last */
    bool is_reading;
    pthread_t thread;
    Weight *weight; /* [count] */
    int count;
} WeightsAhead;

/* Starts to read a unit of the model. Free the weights of the previous unit first. */
void weights_begin(WeightsAhead *a, int unit);

/* Waits until the weights are read. weights_free frees all pointers that the caller has not set to
 * NULL. */
void weights_wait(WeightsAhead *a);
void weights_free(WeightsAhead *a);
