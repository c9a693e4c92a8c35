/* Losses on the terminal. */
#pragma once

double plot_mean(const double *x, long from, long to);

/* n losses of the steps first to last, each column the mean of its share of them. */
void plot(const double *loss, long n, long first, long last);
