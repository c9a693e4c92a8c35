#include "model/run/plot.h"

#include <math.h>
#include <stdio.h>

enum { WIDTH = 64, HEIGHT = 12 };

double plot_mean(const double *x, long from, long to)
{
    double s = 0;
    for (long i = from; i < to; i++)
        s += x[i];
    return s / (to - from);
}

void plot(const double *loss, long n, long first, long last)
{
    int width = n < WIDTH ? (int)n : WIDTH;
    double column[WIDTH], low = INFINITY, high = -INFINITY;
    for (int i = 0; i < width; i++) {
        column[i] = plot_mean(loss, n * i / width, n * (i + 1) / width);
        low = fmin(low, column[i]);
        high = fmax(high, column[i]);
    }
    if (high <= low)
        high = low + 1;
    for (int row = 0; row < HEIGHT; row++) {
        printf("%8.3f |", high - (high - low) * row / (HEIGHT - 1));
        for (int i = 0; i < width; i++)
            putchar((int)lround((high - column[i]) / (high - low) * (HEIGHT - 1)) == row ? '*'
                                                                                         : ' ');
        putchar('\n');
    }
    printf("%8s +%.*s\n%10ld%*ld\n", "loss", width,
           "----------------------------------------------------------------", first, width - 1,
           last);
}
