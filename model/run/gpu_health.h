/* Reports the state of the GPUs in metrics.jsonl, and warns about faults. A thread of each rank
 * reads its own GPU once a second; about every two seconds, at a multiple of console_log_interval,
 * the ranks combine their readings and rank 0 writes a line:
 *
 *   system/gpu_power_watts               mean over GPUs since the last such line, by their energy counters
 *   system/gpu_power_watts_max           power of the GPU with the highest power
 *   system/gpu_power_limit_watts         mean of the enforced limits
 *   system/gpu_energy_joules             sum over all GPUs, since this process started
 *   system/tokens_per_joule              tokens of the run / energy of all GPUs, since the last such line
 *   system/gpu_temperature_celsius       mean over GPUs; _max: the hottest
 *   system/gpu_sm_clock_mhz              mean over GPUs; _min: the slowest, for which all others wait
 *   system/gpu_memory_clock_mhz          mean over GPUs
 *   system/gpu_power_capped_share        share of readings with a clock lowered by the power limit, which is frequent in FP8 GEMMs
 *   system/gpu_slowed_share              share of readings with a clock lowered by heat, the power brake or the hardware
 *   system/gpu_ecc_corrected             memory errors since the drivers were loaded, sum over all GPUs; _uncorrected
 *   system/gpus_at_fault                 number of GPUs with a fault of kernels/runtime/device.h
 *
 * Clocks and temperatures are means over the readings since the last such line. Values that no
 * driver reports are left out; without NVML, and on the CPU, all values are left out. Each rank
 * warns once about each fault of its GPU. */
#pragma once
#include "model/run/log.h"

typedef struct GpuHealth GpuHealth;

/* Starts the thread. All ranks must call this. `interval`: console_log_interval; `step`, `tokens`:
 * steps and tokens of earlier processes; `seconds`: time between two readings. Returns NULL if no
 * rank's device gives readings; the other functions then do nothing. */
GpuHealth *gpu_health_open(Log *log, long interval, long step, long tokens, double seconds);

/* Call after a step on all ranks; `tokens`: trained on by all ranks so far. Does not wait for a
 * reading. */
void gpu_health_step(GpuHealth *h, long step, long tokens);
void gpu_health_close(GpuHealth *h);
