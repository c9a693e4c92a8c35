#include "kernels/runtime/progress.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"

static const double FIRST = 1, PERIOD_ON_TERMINAL = 0.25, PERIOD_ELSEWHERE = 30; /* seconds */

static struct {
    const char *what; /* NULL: no work */
    bool silent, terminal;
    double start, said;
    /* length of the line on the terminal. Atomic, because other threads clear the line */
    atomic_int width;
} work;

void progress_silence(void)
{
    work.silent = true;
}

void progress_begin(const char *what)
{
    work.what = work.silent ? NULL : what;
    work.terminal = isatty(STDERR_FILENO);
    work.start = clock_seconds();
    work.said = work.terminal ? work.start + FIRST - PERIOD_ON_TERMINAL : work.start;
}

/* Limits the text to one line of the terminal. From a second line, \r would not return to the
 * beginning of the text. */
static int describe(char *text, size_t size, double share, const char *now)
{
    const double passed = clock_seconds() - work.start;
    int n = snprintf(text, size, "%s", work.what);
    if (share > 0 && share <= 1)
        n += snprintf(text + n, size - (size_t)n, " %.0f %%, %.0f s left", 100 * share,
                      passed * (1 - share) / share);
    else
        n += snprintf(text + n, size - (size_t)n, ", %.0f s", passed);
    if (now)
        n += snprintf(text + n, size - (size_t)n, ": %s", now);
    return n < (int)size ? n : (int)size - 1;
}

void progress_show(double share, const char *now)
{
    char text[80];
    const double time = clock_seconds();
    if (!work.what || time - work.said < (work.terminal ? PERIOD_ON_TERMINAL : PERIOD_ELSEWHERE))
        return;
    work.said = time;
    const int width = describe(text, sizeof text, share, now);
    if (work.terminal) {
        fflush(stdout);
        fprintf(stderr, "%-*s\r", atomic_exchange(&work.width, width), text);
    } else
        fprintf(stderr, "%s\n", text);
}

void progress_clear(void)
{
    const int width = atomic_exchange(&work.width, 0);
    if (width > 0)
        fprintf(stderr, "%*s\r", width, "");
}

void progress_end(void)
{
    progress_clear();
    work.what = NULL;
}
