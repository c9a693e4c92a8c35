/* What stderr shows of long work, on a pseudo-terminal and in a pipe, at times that this test sets.
 * The expected texts were written by hand. */
#include "kernels/runtime/progress.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "kernels/runtime/error.h"
#include "tests/test.h"
#include "tests/kit.h"

static double now;

/* Replace libc's functions, also within progress.c. */
int clock_gettime(clockid_t clock, struct timespec *t)
{
    (void)clock;
    *t = (struct timespec){ .tv_sec = (time_t)now,
                            .tv_nsec = (long)(1e9 * (now - (double)(time_t)now)) };
    return 0;
}

/* Runs work() with stderr in a terminal that does not translate output, or in a pipe. Returns the
 * printed text. */
static const char *printed(bool terminal, void (*work)(void))
{
    static char text[4096];
    int end[2];
    if (terminal) {
        end[0] = posix_openpt(O_RDWR | O_NOCTTY);
        assert_true(end[0] >= 0 && grantpt(end[0]) == 0 && unlockpt(end[0]) == 0);
        end[1] = open(ptsname(end[0]), O_RDWR | O_NOCTTY);
        struct termios raw;
        assert_true(end[1] >= 0 && tcgetattr(end[1], &raw) == 0);
        cfmakeraw(&raw);
        tcsetattr(end[1], TCSANOW, &raw);
    } else
        assert_int_equal(pipe(end), 0);
    const int before = dup(STDERR_FILENO);
    dup2(end[1], STDERR_FILENO);
    now = 1000;
    work();
    fputc('.', stderr); /* gives the reader something to read */
    dup2(before, STDERR_FILENO);
    close(before);
    size_t n = 0;
    do
        n += (size_t)read(end[0], text + n, sizeof text - 1 - n);
    while (text[n - 1] != '.');
    text[n - 1] = '\0';
    close(end[0]);
    close(end[1]);
    return text;
}

static void at(double seconds, double share, const char *doing)
{
    now = 1000 + seconds;
    progress_show(share, doing);
}

static void work(void)
{
    at(0.5, 0.1, "no work");
    now = 1000;
    progress_begin("loading");
    at(0.99, 0.1, NULL);     /* too early on a terminal */
    at(2, 0.25, "a.weight"); /* 2 s for 1/4: 6 s are left */
    at(2.24, 0.5, NULL);     /* too soon after the previous line */
    at(2.5, 0.5, NULL);
    at(29.9, 0.6, NULL);
    at(30, 0.75, NULL);
    at(59.9, 0.8, NULL);
    at(61, -1, "b");
    warn("x");
    at(62, 0, NULL);
    progress_end();
    at(99, 0.9, NULL);
}

TEST(test_terminal)
{
    /* Each line covers the previous one: 32, 22, 23, 23, 19 and 16 columns. */
    assert_string_equal(printed(true, work), "loading 25 %, 6 s left: a.weight\r"
                                             "loading 50 %, 2 s left          \r"
                                             "loading 60 %, 20 s left\r"
                                             "loading 80 %, 15 s left\r"
                                             "loading, 61 s: b       \r"
                                             "                \rwarning: x\n"
                                             "loading, 62 s\r"
                                             "             \r");
}

TEST(test_pipe)
{
    assert_string_equal(printed(false, work),
                        "loading 75 %, 10 s left\nloading, 61 s: b\nwarning: x\n");
}

static void long_names(void)
{
    char name[200];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    progress_begin("loading");
    at(2, 0.5, name);
    progress_end();
}

/* A terminal of 80 columns wraps a line of 80. */
TEST(test_width)
{
    const char *text = printed(true, long_names);
    assert_int_equal(strcspn(text, "\r"), 79);
    assert_int_equal(strlen(text), 2 * 80);
}

TEST(test_silence)
{
    progress_silence();
    assert_string_equal(printed(true, work), "warning: x\n");
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
