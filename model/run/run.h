/* A training run: everything between the configuration and the first step. */
#pragma once
#include "data/loader.h"
#include "model/block/policy.h"
#include "model/block/preference.h"
#include "model/checkpoint/checkpoint.h"
#include "model/model.h"
#include "model/run/gpu_health.h"
#include "model/run/log.h"
#include "model/run/samples.h"
#include "model/run/telemetry.h"

typedef struct {
    const Config *config;
    Model model;
    ParamStore store;
    Loader *loader;
    TrainState state;
    RunLength length; /* length by max_duration */
    long last_step;   /* last step, by max_duration or stop_at: the earlier of the two */
    Log *log;
    char *validation; /* lines that describe the evaluators' data; malloc'ed */
    Samples *samples;
    Telemetry *telemetry;
    GpuHealth *health;
    long first_step;  /* number of steps before this process began */
    long saved_step;  /* step of the last checkpoint; -1: none yet */
    bool save_is_due; /* a save is due, but a step that was not finite delayed it */
    /* no finite loss followed saved_step, so this save must not be published yet */
    bool unproven;
    PairCount pairs; /* pairs of the global batch of the last step */
    double pair_sums[NUM_PAIR_SUMS];
    PolicyCount policy; /* documents of the global batch of the last step */
    double policy_sums[NUM_POLICY_SUMS];
    const uint8_t *soft_entries; /* of distill.targets, in a mapped file */
    Batch batch;                 /* batch of the last step */
    uint8_t *begins;             /* memory of length_warmup.h */
    bool diverged;               /* the last loss is far above the loss of an untrained model */
} Run;

/* Dies unless the device can multiply in the run's formats. All GPUs can store and convert FP8, but
 * not all can multiply FP8. */
void run_check_device(const Config *c);

/* Runs a dry run: prints the memory plan, the warnings so far, and whether the plan fits. Opens no
 * data and creates no files; needs a device only if device_memory is not given. */
void run_plan(const Config *c);

/* Opens the data, creates the save folder, places the model, initializes or loads it, and prints
 * these steps. With eval_only, opens only the evaluators' data, and no loader, telemetry or
 * health. */
void run_open(Run *r, const Config *c);
bool run_is_over(const Run *r); /* max_duration or stop_at is reached */
void run_close(Run *r);
