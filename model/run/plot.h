/* Plots losses on the terminal. */
#pragma once

double plot_mean(const double *x, long from, long to);

/* Plots n losses of the steps `first` to `last`. Each column is the mean of the steps that it
 * covers. */
void plot(const double *loss, long n, long first, long last);
