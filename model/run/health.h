/* The state of the GPUs, in metrics.jsonl and, where one slows or endangers the run, on the terminal. A thread of each rank reads
 * its own GPU once a second, beside training; now and then, at a multiple of console_log_interval, the ranks put together what
 * theirs have read, and rank 0 writes a line:
 *
 *   system/gpu_power_watts               mean over GPUs, since the last such line, by their energy counters
 *   system/gpu_power_watts_max           of the GPU that takes most
 *   system/gpu_power_limit_watts         mean of the limits in force
 *   system/gpu_energy_joules             of all GPUs together, since this process began
 *   system/tokens_per_joule              tokens of the run, over the energy of all GPUs, since the last such line
 *   system/gpu_temperature_celsius       mean over GPUs; _max: the hottest
 *   system/gpu_sm_clock_mhz              mean over GPUs; _min: the slowest, for which all others wait
 *   system/gpu_memory_clock_mhz          mean over GPUs
 *   system/gpu_power_capped_share        share of the readings in which the power limit kept the clock down, as FP8 GEMMs may do
 *   system/gpu_slowed_share              share of the readings with a clock that heat, the power brake or the hardware lowered
 *   system/gpu_ecc_corrected             errors of GPU memory since the drivers were loaded, of all GPUs together; _uncorrected
 *   system/gpus_at_fault                 GPUs that one of the faults of kernels/runtime/device.h was seen on
 *
 * Clocks and temperatures are means over the readings since the last such line. What no driver tells is left out; without NVML,
 * and on the CPU, all is. A GPU at fault is named once for each of its faults, by its rank. */
#pragma once
#include "model/run/log.h"

typedef struct Health Health;

/* All ranks call. `interval`: steps, as console_log_interval; `step`, `tokens`: done before; `seconds`: between two readings. NULL
 * if no rank's device tells anything: then the other calls do nothing. */
Health *health_open (Log *log, long interval, long step, long tokens, double seconds);

/* Behind a step; `tokens`: done by all ranks. All ranks call. Waits for no reading. */
void    health_step (Health *h, long step, long tokens);
void    health_close(Health *h);
