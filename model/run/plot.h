/* Plots losses on the terminal. */
#pragma once

double plot_mean(const double *x, long from, long to);

/* n losses of the steps first to last; each column is the mean of its part of them. */
void plot(const double *loss, long n, long first, long last);
