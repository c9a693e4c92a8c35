/* One thread per rank adds readings to a window; the training thread takes the window and starts a
 * new one. A driver that does not answer only blocks the reading thread. */
#include "model/run/gpu_health.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/agree.h"

/* Readings since the last line: sums of values, and all faults. */
typedef struct {
    int n, slowed;
    double power, temperature, sm_clock, memory_clock, power_capped;
    unsigned faults;
} Window;

/* Values that are combined over ranks. */
enum {
    SUM_RANKS,
    SUM_POWER,
    SUM_LIMIT,
    SUM_ENERGY,
    SUM_TEMPERATURE,
    SUM_SM_CLOCK,
    SUM_MEMORY_CLOCK,
    SUM_CAPPED,
    SUM_SLOWED,
    SUM_CORRECTED,
    SUM_UNCORRECTED,
    SUM_AT_FAULT,
    NUM_SUMS
};
enum { MAX_POWER, MAX_TEMPERATURE, MAX_SLOWNESS, MAX_SECONDS, NUM_MAXIMA };

struct GpuHealth {
    Log *log;
    /* minimum number of steps between lines; first step of the next line */
    long interval, next;
    double seconds;
    bool reads; /* whether this rank's device gives readings */
    pthread_t thread;
    pthread_mutex_t mutex; /* guards all members up to `stop` */
    pthread_cond_t wake;
    Window window;
    DeviceHealth now; /* the last reading, and its time */
    double at;
    bool stop;
    double sum[NUM_SUMS], max[NUM_MAXIMA]; /* values of this rank at the last line */
    /* this rank's energy counter at the start, and at the last line */
    double first_energy, energy, energy_at;
    double named_errors; /* number of uncorrectable errors in the last message */
    unsigned named;
    long tokens, step; /* tokens and step at the last line; the time of this line */
    double time;
};

/* ---- the thread ------------------------------------------------------------------------------ */

static void add(Window *w, const DeviceHealth *d)
{
    w->n++;
    w->slowed += (d->faults & ((1u << NUM_SLOWDOWNS) - 1)) != 0;
    w->power += d->power;
    w->temperature += d->temperature;
    w->sm_clock += d->sm_clock;
    w->memory_clock += d->memory_clock;
    w->power_capped += d->power_capped;
    w->faults |= d->faults;
}

static void *read_on(void *health)
{
    GpuHealth *h = health;
    pthread_mutex_lock(&h->mutex);
    while (!h->stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        const double t = (double)until.tv_nsec * 1e-9 + h->seconds;
        until.tv_sec += (time_t)t;
        until.tv_nsec = (long)(fmod(t, 1) * 1e9);
        if (pthread_cond_timedwait(&h->wake, &h->mutex, &until) != ETIMEDOUT)
            continue;
        pthread_mutex_unlock(&h->mutex);
        DeviceHealth d;
        device_health(&d);
        const double at = clock_seconds();
        pthread_mutex_lock(&h->mutex);
        add(&h->window, &d);
        h->now = d;
        h->at = at;
    }
    pthread_mutex_unlock(&h->mutex);
    return NULL;
}

static void start_thread(GpuHealth *h)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&h->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&h->mutex, NULL);
    int error = pthread_create(&h->thread, NULL, read_on, h);
    if (error)
        die("cannot start a thread that reads the GPU's sensors: %s", strerror(error));
}

/* ---- faults ---------------------------------------------------------------------------------- */

static const struct {
    const char *what, *advice;
} faults[NUM_FAULTS] = {
    [FAULT_HOT] = { "the driver lowers the GPU's clock because the GPU is hot",
                    "Look at the GPU's cooling" },
    [FAULT_TOO_HOT] = { "the GPU's clock is at half speed or less because the GPU is too hot",
                        "Look at the GPU's cooling" },
    [FAULT_POWER_BRAKE] = { "the server's power brake has lowered the GPU's clock to half or less",
                            "Look at the power supplies" },
    [FAULT_SLOWDOWN] = { "the GPU's hardware has lowered the GPU's clock to half or less",
                         "Look at the GPU's cooling and power" },
    [FAULT_ECC] = { "the GPU's memory had errors that could not be corrected",
                    "See nvidia-smi -q -d ECC, and dmesg for Xid" },
    [FAULT_REMAP_PENDING] = { "the GPU has faulty rows of memory, which the next reset replaces",
                              "Reset the GPU before the next run" },
    [FAULT_REMAP_FAILED] = { "a row of the GPU's memory is faulty, and there is no spare row",
                             "Replace the GPU" },
};

/* Every rank warns about its own GPU: once for each fault, and again if the number of uncorrectable
 * errors increases. */
static void name_faults(GpuHealth *h, unsigned seen, const DeviceHealth *d)
{
    if (d->ecc_uncorrected > h->named_errors) {
        h->named &= ~(1u << FAULT_ECC);
        h->named_errors = d->ecc_uncorrected;
    }
    for (int i = 0; i < NUM_FAULTS; i++) {
        if (!(seen & ~h->named & 1u << i))
            continue;
        char host[64] = "", more[96] = "";
        gethostname(host, sizeof host - 1);
        if (i < NUM_SLOWDOWNS)
            snprintf(more, sizeof more,
                     " (now %.0f degrees Celsius, %.0f MHz), and all ranks wait for this GPU",
                     d->temperature, d->sm_clock);
        else if (i == FAULT_ECC)
            snprintf(more, sizeof more, ", %.0f since the driver was loaded", d->ecc_uncorrected);
        fprintf(stderr, "warning: rank %d on %s, GPU %s (%s): %s%s. %s\n", comm_rank(), host,
                device_address(), device_name(), faults[i].what, more, faults[i].advice);
    }
    h->named |= seen;
}

/* ---- over ranks ------------------------------------------------------------------------------ */

/* A NAN would make the maximum over ranks unknown, too. */
static double known(double x)
{
    return isnan(x) ? -INFINITY : x;
}

/* Updates this rank's values from the readings since the last line. Without readings they stay. */
static void take_window(GpuHealth *h)
{
    pthread_mutex_lock(&h->mutex);
    const Window w = h->window;
    const DeviceHealth d = h->now;
    const double at = h->at;
    h->window = (Window){ 0 };
    pthread_mutex_unlock(&h->mutex);
    if (w.n == 0)
        return;
    const double counted = (d.energy - h->energy) / (at - h->energy_at),
                 power = isnan(counted) ? w.power / w.n : counted;
    h->energy = d.energy;
    h->energy_at = at;
    const double sum[NUM_SUMS] = {
        [SUM_RANKS] = 1,
        [SUM_POWER] = power,
        [SUM_LIMIT] = d.power_limit,
        [SUM_ENERGY] = d.energy - h->first_energy,
        [SUM_TEMPERATURE] = w.temperature / w.n,
        [SUM_SM_CLOCK] = w.sm_clock / w.n,
        [SUM_MEMORY_CLOCK] = w.memory_clock / w.n,
        [SUM_CAPPED] = w.power_capped / w.n,
        [SUM_SLOWED] = (double)w.slowed / w.n,
        [SUM_CORRECTED] = d.ecc_corrected,
        [SUM_UNCORRECTED] = d.ecc_uncorrected,
        [SUM_AT_FAULT] = w.faults != 0,
    };
    memcpy(h->sum, sum, sizeof sum);
    h->max[MAX_POWER] = known(power);
    h->max[MAX_TEMPERATURE] = known(w.temperature / w.n);
    h->max[MAX_SLOWNESS] = known(-w.sm_clock / w.n);
    name_faults(h, w.faults, &d);
}

static void set(json_t *o, const char *name, double x)
{
    if (isfinite(x))
        log_set(o, name, x);
}

/* `rate`: tokens per second of all ranks. */
static void write_line(Log *log, long step, const double *sum, const double *max, double rate)
{
    const double n = sum[SUM_RANKS];
    json_t *o = json_pack("{s:I}", "step", (json_int_t)step);
    set(o, "system/gpu_power_watts", sum[SUM_POWER] / n);
    set(o, "system/gpu_power_watts_max", max[MAX_POWER]);
    set(o, "system/gpu_power_limit_watts", sum[SUM_LIMIT] / n);
    set(o, "system/gpu_energy_joules", sum[SUM_ENERGY]);
    /* true if all ranks have readings */
    set(o, "system/tokens_per_joule", n == comm_size() ? rate / sum[SUM_POWER] : NAN);
    set(o, "system/gpu_temperature_celsius", sum[SUM_TEMPERATURE] / n);
    set(o, "system/gpu_temperature_celsius_max", max[MAX_TEMPERATURE]);
    set(o, "system/gpu_sm_clock_mhz", sum[SUM_SM_CLOCK] / n);
    set(o, "system/gpu_sm_clock_mhz_min", -max[MAX_SLOWNESS]);
    set(o, "system/gpu_memory_clock_mhz", sum[SUM_MEMORY_CLOCK] / n);
    set(o, "system/gpu_power_capped_share", sum[SUM_CAPPED] / n);
    set(o, "system/gpu_slowed_share", sum[SUM_SLOWED] / n);
    set(o, "system/gpu_ecc_corrected", sum[SUM_CORRECTED]);
    set(o, "system/gpu_ecc_uncorrected", sum[SUM_UNCORRECTED]);
    set(o, "system/gpus_at_fault", sum[SUM_AT_FAULT]);
    log_object(log, o);
}

void gpu_health_step(GpuHealth *h, long step, long tokens)
{
    if (!h || step < h->next)
        return;
    const double time = clock_seconds();
    double sum[NUM_SUMS], max[NUM_MAXIMA];
    if (h->reads)
        take_window(h);
    h->max[MAX_SECONDS] = time - h->time;
    memcpy(sum, h->sum, sizeof sum);
    memcpy(max, h->max, sizeof max);
    comm_sum(sum, NUM_SUMS);
    comm_max(max, NUM_MAXIMA);
    if (h->log && sum[SUM_RANKS] > 0)
        write_line(h->log, step, sum, max, (double)(tokens - h->tokens) / max[MAX_SECONDS]);
    /* The next line comes two readings later. All ranks compute its step from the time of the
     * slowest rank. */
    const double steps = 2 * h->seconds * (double)(step - h->step) / max[MAX_SECONDS];
    h->next = step + h->interval * (long)fmax(1, ceil(steps / (double)h->interval));
    h->next -= h->next % h->interval;
    h->step = step;
    h->tokens = tokens;
    h->time = time;
}

/* ---- the run --------------------------------------------------------------------------------- */

GpuHealth *gpu_health_open(Log *log, long interval, long step, long tokens, double seconds)
{
    DeviceHealth d;
    const bool reads = device_health(&d);
    const double at = clock_seconds();
    if (!agree_any(reads))
        return NULL;
    GpuHealth *h = xcalloc(1, sizeof *h);
    *h = (GpuHealth){ .log = log,
                      .interval = interval,
                      .next = step + 1,
                      .seconds = seconds,
                      .reads = reads,
                      .step = step,
                      .tokens = tokens,
                      .time = clock_seconds(),
                      .max = { -INFINITY, -INFINITY, -INFINITY } };
    if (reads) {
        h->first_energy = h->energy = d.energy;
        h->energy_at = at;
        start_thread(h);
    }
    return h;
}

/* NOTE: a driver that does not answer must not keep a run from ending. In this case the thread and
 * its memory are left to the operating system. */
void gpu_health_close(GpuHealth *h)
{
    if (!h)
        return;
    if (h->reads) {
        pthread_mutex_lock(&h->mutex);
        h->stop = true;
        pthread_cond_signal(&h->wake);
        pthread_mutex_unlock(&h->mutex);
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 2;
        if (pthread_timedjoin_np(h->thread, NULL, &until) != 0)
            return;
        pthread_cond_destroy(&h->wake);
        pthread_mutex_destroy(&h->mutex);
    }
    free(h);
}
