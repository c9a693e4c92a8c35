/* States of ranks on other hosts that end, fall silent and come back. Each rank simulates a host.
 * On 2 and 4 ranks. */
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/hosts.h"
#include "tests/test.h"
#include "tests/ranks.h"

enum { MOST = 64 };
static SharedState table[MOST]; /* the states that this rank's host knows */
static RankState own;
static int last_rank, ended;

static RankState state_of(int rank)
{
    RankState s;
    state_read(&s, &table[rank], STATE_WHOLE);
    return s;
}

/* leader: the first rank of this rank's host. */
static void start(int leader)
{
    RankState all[MOST];
    last_rank = comm_size() - 1;
    own = (RankState){ .rank = comm_rank(), .leader = leader };
    comm_gather(all, &own, sizeof own, RANKS_ALL);
    for (int r = 0; r < comm_size(); r++)
        state_write(&table[r], &all[r], STATE_WHOLE);
    hosts_start(table);
}

static void stop(void)
{
    comm_barrier();
    hosts_stop();
}

/* Sends beats as the watchdog does, also for other ranks of this host. */
static void beat(void)
{
    own.beats++;
    for (int r = 0; r < comm_size(); r++)
        if (state_of(r).leader == own.leader)
            state_write(&table[r], &own.beats, STATE_MEMBER(beats));
    ended = hosts_exchange();
}

static void beat_for(double seconds)
{
    for (const double end = clock_seconds() + seconds; clock_seconds() < end; usleep(20000))
        beat();
}

/* On a busy machine, other ranks may be delayed. Afterwards all ranks continue together. */
static void beat_until(bool (*happened)(void))
{
    const double end = clock_seconds() + 60;
    double waiting = 1;
    for (bool seen = false; waiting > 0; usleep(20000)) {
        beat();
        seen = seen || happened();
        waiting = !seen && clock_seconds() < end;
        comm_max(&waiting, 1);
    }
    assert_true(clock_seconds() < end);
}

/* Rank 0 hears the watchdogs of all ranks. Other first ranks hear the watchdogs of rank 0's
 * host. */
static bool is_heard(void)
{
    bool heard = true;
    if (own.rank != own.leader)
        return true;
    for (int r = 0; r < comm_size(); r++)
        heard = heard && (state_of(r).beats > 0 ||
                          (own.rank != 0 && state_of(r).leader != state_of(0).leader));
    return heard;
}

static bool nothing(void)
{
    return true;
}

/* States arrive whole, and no host has ended. */
TEST(test_well)
{
    start(comm_rank());
    snprintf(own.main.operation, sizeof own.main.operation, "work %ld", own.rank);
    own.main.step = 7 + own.rank;
    own.worker[WORKER_SAVE] = (WorkerState){ .beats = 5, .busy = true, .doing = "writing" };
    state_write(&table[own.rank], &own, STATE_WHOLE);
    beat_until(is_heard);
    for (int r = 0; r < comm_size(); r++) {
        const RankState s = state_of(r);
        char operation[OPERATION_NAME];
        snprintf(operation, sizeof operation, "work %d", r);
        if (own.rank != 0 && r != 0 && r != own.rank) {
            assert_int_equal(s.beats, 0);
            continue;
        }
        assert_int_equal(s.rank, r);
        assert_int_equal(s.main.step, 7 + r);
        assert_string_equal(s.main.operation, operation);
        assert_int_equal(s.worker[WORKER_SAVE].beats, 5);
        assert_string_equal(s.worker[WORKER_SAVE].doing, "writing");
    }
    assert_int_equal(ended, -1);
    stop();
}

static unsigned long old_beats;

static bool is_back(void)
{
    return own.rank != 0 || state_of(last_rank).beats > old_beats;
}

/* The last host is silent for a while, then comes back. */
TEST(test_silent)
{
    if (comm_size() == 1)
        skip();
    start(comm_rank());
    beat_until(is_heard);
    if (own.rank == last_rank)
        usleep(1500000);
    else {
        beat_for(0.5); /* what the host sent before */
        old_beats = state_of(last_rank).beats;
        beat_for(0.5);
        assert_int_equal(state_of(last_rank).beats, old_beats);
    }
    assert_int_equal(ended, -1);
    comm_barrier();
    beat_until(is_back);
    assert_int_equal(ended, -1);
    stop();
}

static bool has_ended(void)
{
    return ended >= 0 || own.rank == last_rank || (last_rank > 1 && own.rank != 0);
}

static bool first_has_ended(void)
{
    return ended == 0 || own.rank == 0 || own.rank == last_rank;
}

/* The last host ends. Rank 0 detects this, the other hosts do not. Then rank 0 ends, which all
 * hosts detect. */
TEST(test_ended)
{
    if (comm_size() == 1)
        skip();
    start(comm_rank());
    beat_until(is_heard);
    if (own.rank == last_rank)
        hosts_stop();
    beat_until(has_ended);
    assert_int_equal(ended, own.rank == 0 ? last_rank : -1);
    if (own.rank == 0)
        hosts_stop();
    beat_until(first_has_ended);
    stop();
}

static bool is_told(void)
{
    return state_of(last_rank).leaving;
}

/* The last host announces that it ends all ranks. Rank 0 receives the message and forwards it. */
TEST(test_leaving)
{
    start(comm_rank());
    beat_until(is_heard);
    own.leaving = own.rank == last_rank;
    state_write(&table[own.rank], &own.leaving, STATE_MEMBER(leaving));
    beat_until(is_told);
    beat_until(nothing);
    assert_int_equal(ended, -1);
    stop();
}

/* A host has several ranks, which may be not consecutive: of 4 ranks, host 1 has ranks 1 and 3. */
TEST(test_several_ranks)
{
    if (comm_size() < 4)
        skip();
    start(comm_rank() % 2);
    beat_until(is_heard);
    assert_int_equal(ended, -1);
    if (own.rank == 1)
        hosts_stop();
    for (int i = 0; i < 50 && own.rank == 0 && ended < 0; i++)
        beat_for(0.1);
    assert_int_equal(ended, own.rank == 0 ? 1 : -1);
    stop();
}

/* Returns the address of the socket that hosts_start has opened. */
static struct sockaddr_in own_address(void)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_storage bound;
        int type = 0;
        socklen_t size = sizeof type, bound_size = sizeof bound;
        if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_DGRAM &&
            getsockname(fd, (struct sockaddr *)&bound, &bound_size) == 0 &&
            bound.ss_family != AF_UNIX)
            /* the port is at the same place as in IPv6 */
            a.sin_port = ((struct sockaddr_in *)&bound)->sin_port;
    }
    assert_int_not_equal(a.sin_port, 0);
    return a;
}

/* Messages of other programs change nothing, whatever their size. */
TEST(test_strangers)
{
    struct {
        unsigned char token[16];
        RankState state;
        char more[64];
    } stranger = { .state = {
                       .rank = comm_size() - 1, .leader = comm_size() - 1, .beats = 1u << 30 } };
    static const size_t sizes[] = { 0, 1, 16 + sizeof(RankState), sizeof stranger };
    if (comm_size() == 1)
        skip();
    start(comm_rank());
    beat_until(is_heard);
    comm_barrier(); /* the other ranks are silent */
    hosts_exchange();
    if (own.rank == 0) {
        const struct sockaddr_in to = own_address();
        const int fd = socket(AF_INET, SOCK_DGRAM, 0);
        for (int i = 0; i < 4; i++)
            assert_int_equal(
                sendto(fd, &stranger, sizes[i], 0, (const struct sockaddr *)&to, sizeof to),
                sizes[i]);
        close(fd);
        hosts_exchange();
    }
    assert_true(state_of(last_rank).beats < stranger.state.beats);
    stop();
}

/* A single host exchanges nothing. */
TEST(test_one_host)
{
    start(0);
    beat();
    assert_int_equal(ended, -1);
    stop();
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
