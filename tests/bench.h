/* Times calls, prints a row for each call, and adds the rows up to the time of a training step. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/runtime/device.h"

enum { WARM_UP = 6, RUNS = 20 };

/* The parts of a training step. */
typedef enum { GEMMS, ATTENTION, ELEMENTWISE, OPTIMIZER, NUM_PARTS } Part;

static DeviceMark *marks[RUNS + 1];
static double copy_rate; /* bytes/s */
static double last_ms;   /* milliseconds of the last row */
static double part_ms[NUM_PARTS];

static inline int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median_ms(void)
{
    double ms[RUNS];
    for (int i = 0; i < RUNS; i++)
        ms[i] = device_elapsed(marks[i], marks[i + 1]);
    qsort(ms, RUNS, sizeof *ms, compare);
    return (ms[RUNS / 2 - 1] + ms[RUNS / 2]) / 2;
}

/* unit: GB or TFLOP; scale: 1e9 or 1e12; reference: the amount per second that counts as 100 %. */
static inline void print_row(const char *name, double ms, double amount, const char *unit,
                             double scale, double reference)
{
    last_ms = ms;
    char percent[16] = "";
    if (reference > 0)
        snprintf(percent, sizeof percent, "%.1f %%", 100 * amount / (1e-3 * ms) / reference);
    printf("%-42s %9.3f ms %8.3f %-5s %7.0f %s/s %*s\n", name, ms, amount / scale, unit,
           amount / (1e-3 * ms) / scale, unit, 15 - (int)strlen(unit), percent);
    fflush(stdout);
}

static inline void report_bytes(const char *name, double bytes)
{
    double ms = median_ms();
    if (copy_rate == 0)
        copy_rate = bytes / (1e-3 * ms);
    print_row(name, ms, bytes, "GB", 1e9, copy_rate);
}

static inline void report_flops(const char *name, double flops)
{
    print_row(name, median_ms(), flops, "TFLOP", 1e12,
              device_peak_flops(strstr(name, "FP8") ? 8 : 16));
}

/* Times `call` and prints its row by report_bytes(name, amount) or report_flops(name, amount). */
#define TIME(report, name, amount, call) \
    do { \
        for (int run_ = 0; run_ < WARM_UP; run_++) \
            call; \
        for (int run_ = 0; run_ < RUNS; run_++) { \
            marks[run_] = device_mark(marks[run_]); \
            call; \
        } \
        marks[RUNS] = device_mark(marks[RUNS]); \
        report(name, amount); \
    } while (0)

#define TIME_BYTES(name, bytes, call) TIME(report_bytes, name, bytes, call)
#define TIME_FLOPS(name, flops, call) TIME(report_flops, name, flops, call)

/* Says that a training step runs the call of the last row `times` times. */
static inline void in_step(Part part, double times)
{
    part_ms[part] += times * last_ms;
}

static inline void print_step(const char *recipe, int tokens)
{
    static const char *const names[] = { "GEMMs", "attention", "elementwise", "optimizer" };
    double sum = 0;
    for (int i = 0; i < NUM_PARTS; i++)
        sum += part_ms[i];
    printf("a step of %s, %d tokens, by these rows: %.3f s:", recipe, tokens, 1e-3 * sum);
    for (int i = 0; i < NUM_PARTS; i++)
        printf(" %s %.3f s (%.1f %%)%s", names[i], 1e-3 * part_ms[i], 100 * part_ms[i] / sum,
               i + 1 < NUM_PARTS ? "," : "\n");
}
