/* A training run: everything between the configuration and the first step. */
#pragma once
#include "data/loader.h"
#include "model/checkpoint/checkpoint.h"
#include "model/model.h"
#include "model/run/health.h"
#include "model/run/log.h"
#include "model/run/telemetry.h"

typedef struct {
    const Config *config;
    Model      model;
    Fsdp       fsdp;
    Loader    *loader;
    TrainState state;
    RunLength  length;         /* of max_duration */
    long       last_step;      /* of max_duration or stop_at, whichever comes first */
    Log       *log;
    Telemetry *telemetry;
    Health    *health;
    long       first_step;     /* steps done before this process began */
    long       saved_step;     /* of the last checkpoint; -1: none yet */
} Run;

/* Opens the data, creates the save folder, places the model, and initializes it or loads it. Prints what it did.
 * False for a dry run, which stops behind the memory plan and has created nothing. */
bool run_open (Run *r, const Config *c);
bool run_is_over(const Run *r);            /* max_duration or stop_at is reached */
void run_close(Run *r);
