/* DIFFERS: OLMo-core also skips all steps after a step that is not finite, because a comparison
 * with NaN is false. */
#include "model/update/spikes.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* Adds in the order of the series, so that a resumed run computes the same bits. */
static double score(double x, const double *series, int count)
{
    double mean = 0, squares = 0;
    if (count < SPIKES_LEAST)
        return NAN;
    for (int i = 0; i < count; i++)
        mean += series[i];
    mean /= count;
    for (int i = 0; i < count; i++)
        squares += (series[i] - mean) * (series[i] - mean);
    return x == mean ? 0 : (x - mean) / sqrt(squares / (count - 1));
}

SpikeScores spikes_add(SpikeWindow *w, double loss, double grad_norm)
{
    const SpikeScores s = { score(loss, w->loss, w->count),
                            score(grad_norm, w->grad_norm, w->count) };
    if (w->count == SPIKES_WINDOW) {
        w->count--;
        memmove(w->loss, w->loss + 1, sizeof *w->loss * (size_t)w->count);
        memmove(w->grad_norm, w->grad_norm + 1, sizeof *w->grad_norm * (size_t)w->count);
    }
    w->loss[w->count] = loss;
    w->grad_norm[w->count++] = grad_norm;
    return s;
}

bool spikes_exceed(SpikeScores s)
{
    return s.loss > SPIKES_LIMIT || s.grad_norm > SPIKES_LIMIT;
}

/* 17 digits determine a double. */
char *spikes_print(const double *series, int count)
{
    enum { LENGTH = 26 }; /* bytes of -1.2345678901234567e-308, a blank and the final zero */
    char *text = xcalloc((size_t)count + 1, LENGTH), *end = text;
    for (int i = 0; i < count; i++)
        end += snprintf(end, LENGTH, "%s%.17g", i ? " " : "", series[i]);
    return text;
}

int spikes_parse(double series[SPIKES_WINDOW], const char *text)
{
    int count = 0;
    for (char *end; *text; text = end) {
        const double x = strtod(text, &end);
        if (end == text || count == SPIKES_WINDOW || !isfinite(x) || (*end && *end != ' '))
            return -1;
        series[count++] = x;
    }
    return count;
}
