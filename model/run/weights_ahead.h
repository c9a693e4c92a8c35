/* The weights of what is exported, unit by unit: each is read while the one before it is worked on. */
#pragma once
#include <pthread.h>

#include "model/checkpoint/export_files.h"

/* A tensor of a unit. Where it becomes codes of 4 bits, `scale` has their scales (rows, cols / group), else it is NULL. */
typedef struct { HfTensor tensor; float *values, *scale; } Weight;

typedef struct {
    const Export      *x;
    const ModelConfig *model;
    int       unit;                 /* that is being read, or was */
    bool      is_reading;
    pthread_t thread;
    Weight    weight[HF_TENSORS];
    int       count;
} WeightsAhead;

/* Starts to read that unit of the model. The weights of the one before must have been freed. */
void weights_begin(WeightsAhead *a, int unit);

/* Waits until they are there; weights_free frees them, and what was set to NULL is the caller's. */
void weights_wait(WeightsAhead *a);
void weights_free(WeightsAhead *a);
