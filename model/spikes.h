/* Spikes of the loss and of the gradient norm: how far a step's lie from the mean of those before it, in standard deviations.
 * Window, least number of steps and limit are those of OLMo-core 3.0.0's SkipStepOptimizer (optim/skip_step_optimizer.py:
 * rolling_interval_length, half of it, sigma_factor), which makes no update of a step that is further above the mean. One that is
 * below it, such as an easy batch, is no spike. */
#pragma once
#include <stdbool.h>

enum { SPIKES_WINDOW = 128, SPIKES_LEAST = 63, SPIKES_LIMIT = 6 };

/* Of the last steps whose loss and gradient norm were finite, oldest first; of spikes too, or a loss that stays higher would be
 * a spike for ever. Part of a run's state. */
typedef struct {
    int    count;
    double loss[SPIKES_WINDOW], grad_norm[SPIKES_WINDOW];
} SpikeWindow;

/* Standard deviations (n - 1 in the denominator) from the mean; NAN before SPIKES_LEAST steps, infinite where all were the same. */
typedef struct { double loss, grad_norm; } SpikeScores;

/* The scores of a step, both of its values finite, among those of the window, which it then joins. */
SpikeScores spikes_add(SpikeWindow *w, double loss, double grad_norm);
bool        spikes_exceed(SpikeScores s);              /* one of them is more than SPIKES_LIMIT */

/* One series of a window as text, and back to the bit: numbers with blanks between. Text is malloc'ed; spikes_parse returns
 * their number, -1 if the text is anything else. */
char       *spikes_print(const double *series, int count);
int         spikes_parse(double series[SPIKES_WINDOW], const char *text);
