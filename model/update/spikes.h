/* Detects spikes of the loss and of the gradient norm: values more than SPIKES_LIMIT standard
 * deviations above the mean of earlier steps. Window, minimum number of steps and limit are as in
 * SkipStepOptimizer of OLMo-core 3.0.0 (optim/skip_step_optimizer.py: rolling_interval_length, half
 * of it, sigma_factor), which makes no update at a spike. A value below the mean, for example of an
 * easy batch, is not a spike. */
#pragma once
#include <stdbool.h>

enum { SPIKES_WINDOW = 128, SPIKES_LEAST = 63, SPIKES_LIMIT = 6 };

/* The last steps with finite loss and gradient norm, oldest first. Spikes are included: otherwise a
 * loss that stays higher would be a spike for ever. Part of a run's state. */
typedef struct {
    int count;
    double loss[SPIKES_WINDOW], grad_norm[SPIKES_WINDOW];
} SpikeWindow;

/* Number of standard deviations (n - 1 in the denominator) from the mean; NAN before SPIKES_LEAST
 * steps, infinite if all values are equal. */
typedef struct {
    double loss, grad_norm;
} SpikeScores;

/* Scores a step against the window, and adds it to the window. loss and grad_norm must be
 * finite. */
SpikeScores spikes_add(SpikeWindow *w, double loss, double grad_norm);
bool spikes_exceed(SpikeScores s); /* one of the scores exceeds SPIKES_LIMIT */

/* One series of a window as text, numbers separated by blanks, malloc'ed. */
char *spikes_print(const double *series, int count);
/* Reads this text back, bit for bit. Returns the count of numbers, or -1 if the text is anything
 * else. */
int spikes_parse(double series[SPIKES_WINDOW], const char *text);
