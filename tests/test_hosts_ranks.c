/* Hosts that end, fall silent and come back, as seen by the others. Each rank simulates a host. On
 * 2 and 4 ranks. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/hosts.h"
#include "tests/test.h"
#include "tests/ranks.h"

static bool is_leaving;

/* Looks, as the watchdog does, for `seconds`. */
static void look_for(double seconds)
{
    const double end = clock_seconds() + seconds;
    double last = clock_seconds();
    while (last < end) {
        usleep(20000);
        const double now = clock_seconds();
        hosts_look(now - last, is_leaving);
        last = now;
    }
}

static bool is_heard(void)
{
    return hosts_silence() < 1;
}

/* On a busy machine the other rank may be delayed. */
static void look_until(bool (*happened)(void))
{
    for (double end = clock_seconds() + 60; !happened() && clock_seconds() < end;)
        look_for(0.05);
    assert_true(happened());
}

static void expect_named(double silence, const char *expected, const char *name)
{
    char text[256], host[64] = "", whole[256] = "";
    gethostname(host, sizeof host - 1);
    if (*expected)
        snprintf(whole, sizeof whole, expected, host, host);
    hosts_name(text, sizeof text, silence);
    if (strcmp(text, whole) != 0)
        fail_msg("%s: '%s', expected '%s'", name, text, whole);
}

/* Healthy hosts are heard, and have not ended. */
TEST(test_well)
{
    hosts_start(comm_rank());
    comm_barrier();
    look_for(1);
    look_until(is_heard);
    assert_false(hosts_ended());
    expect_named(1, "", "all are well");
    look_for(0.1);
    comm_barrier();
    hosts_stop();
}

/* The last host is silent for a while: rank 0 names it; then it is back. */
TEST(test_silent)
{
    const int last = comm_size() - 1;
    char expected[64];
    if (last == 0)
        skip();
    hosts_start(comm_rank());
    comm_barrier();
    if (comm_rank() == last)
        usleep(1500000);
    else
        look_for(1.5);
    snprintf(expected, sizeof expected, "rank %d on %%s", last);
    if (comm_rank() == 0) {
        assert_true(hosts_silence() >= 1);
        assert_false(hosts_ended());
        expect_named(1, expected, "silent");
    }
    comm_barrier();
    look_for(0.1);
    look_until(is_heard);
    expect_named(1, "", "back");
    look_for(0.1);
    comm_barrier();
    hosts_stop();
}

/* The last host ends: rank 0 detects it at once, the others do not. Then rank 0 ends, which all
 * detect. */
TEST(test_ended)
{
    const int rank = comm_rank(), last = comm_size() - 1;
    char expected[64];
    if (last == 0)
        skip();
    hosts_start(rank);
    comm_barrier();
    look_for(0.1);
    if (rank == last)
        hosts_stop();
    else if (rank == 0)
        look_until(hosts_ended);
    comm_barrier();
    look_for(0.1);
    snprintf(expected, sizeof expected, "rank %d on %%s", last);
    assert_int_equal(hosts_ended(), rank == 0);
    if (rank == 0)
        expect_named(0, expected, "ended");
    comm_barrier();
    if (rank == 0)
        hosts_stop();
    else if (rank < last) {
        look_until(hosts_ended);
        expect_named(0, "rank 0 on %s", "the first has ended");
    }
    hosts_stop();
}

/* The last host sends that it ends all: rank 0 receives it and forwards it. */
TEST(test_leaving)
{
    const int rank = comm_rank(), last = comm_size() - 1;
    if (last == 0)
        skip();
    hosts_start(rank);
    comm_barrier();
    look_for(0.2);
    assert_false(hosts_leaving());
    comm_barrier();
    is_leaving = rank == last;
    if (rank == 0)
        look_until(hosts_leaving);
    else
        look_for(0.2);
    assert_int_equal(hosts_leaving(), rank == 0);
    comm_barrier();
    is_leaving = rank == 0;
    look_for(0.2);
    if (rank > 0)
        look_until(hosts_leaving);
    assert_false(hosts_ended());
    is_leaving = false;
    comm_barrier();
    hosts_stop();
}

/* Ranks of a host are printed as ranges, also if they are not consecutive: of 4, host 1 has ranks 1
 * and 3, and ends. */
TEST(test_ranges)
{
    const int rank = comm_rank();
    if (comm_size() < 4)
        skip();
    hosts_start(rank % 2);
    comm_barrier();
    if (rank == 1)
        hosts_stop();
    if (rank == 0) {
        look_until(hosts_ended);
        expect_named(0, "ranks 1, 3 on %s", "every other");
    }
    comm_barrier();
    hosts_stop();
    comm_barrier();
    hosts_start(rank < 3 ? 0 : 3);
    comm_barrier();
    if (rank == 0)
        hosts_stop();
    if (rank == 3) {
        look_until(hosts_ended);
        expect_named(0, "ranks 0-2 on %s", "a range");
    }
    hosts_stop();
}

/* A single host has no connections and never sees a failure. */
TEST(test_one_host)
{
    hosts_start(0);
    look_for(0.1);
    assert_true(hosts_silence() == 0);
    assert_false(hosts_ended());
    hosts_stop();
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
