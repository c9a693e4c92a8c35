/* The exchange has the form of a star around rank 0. Rank 0 gets the states of all ranks; the first
 * ranks of other hosts get the states of rank 0's host. Lost messages do no harm, and the exchange
 * goes on after a network failure. Messages to a process that has ended are refused. Messages to a
 * host that is down are lost, and the watchdog measures for how long no messages come back. A token
 * distinguishes our messages from those of other programs. */
#include "kernels/runtime/hosts.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

enum { ADDRESSES = 16, TOKEN = 16 };

typedef struct sockaddr_storage Address;

/* What other hosts need to know to send to rank 0. */
typedef struct {
    unsigned char token[TOKEN];
    int n; /* 0: no network */
    Address address[ADDRESSES];
} Meeting;

typedef struct {
    unsigned char token[TOKEN];
    RankState state;
} Message;

static struct {
    SharedState *state;
    Meeting meeting;
    Address own; /* any address of this host, with this rank's port */
    int fd;      /* receives from all hosts; -1: this rank takes no part */
    int *peer;   /* (ranks) socket connected with the first rank of a host; -1: none */
    int ended;
} hosts = { .fd = -1 };

static long leader_of(int rank)
{
    RankState s;
    state_read(&s, &hosts.state[rank], STATE_WHOLE);
    return s.leader;
}

/* ---- sockets --------------------------------------------------------------------------------- */

/* NOTE: SO_REUSEADDR must not be set before the first socket is bound, so that this socket gets a
 * port of its own. */
static int open_socket(void)
{
    socklen_t size = sizeof hosts.own;
    const int no = 0, yes = 1, again = hosts.fd >= 0;
    const int fd = socket(hosts.own.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no); /* the socket receives by IPv4 too */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &again, sizeof again);
    if (bind(fd, (struct sockaddr *)&hosts.own, size) == 0 &&
        getsockname(fd, (struct sockaddr *)&hosts.own, &size) == 0 &&
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0)
        return fd;
    close(fd);
    return -1;
}

/* Returns the size of an address, or 0 if the address is not usable. */
static size_t usable_size(const struct ifaddrs *i)
{
    const sa_family_t family =
        i->ifa_addr && i->ifa_flags & IFF_UP ? i->ifa_addr->sa_family : AF_UNSPEC;
    if (family == AF_INET6) /* link-local addresses need an interface */
        return IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr)
                   ? 0
                   : sizeof(struct sockaddr_in6);
    return family == AF_INET ? sizeof(struct sockaddr_in) : 0;
}

/* Lists all addresses of this host, because the network over which other hosts reach it is
 * unknown. */
static void list_addresses(Meeting *m)
{
    struct ifaddrs *all = NULL;
    getifaddrs(&all);
    for (struct ifaddrs *i = all; i && m->n < ADDRESSES; i = i->ifa_next) {
        const size_t size = usable_size(i);
        if (size == 0)
            continue;
        Address *a = &m->address[m->n++];
        memcpy(a, i->ifa_addr, size);
        /* the port is at the same offset in IPv4 and IPv6 addresses */
        ((struct sockaddr_in *)a)->sin_port = ((struct sockaddr_in *)&hosts.own)->sin_port;
    }
    freeifaddrs(all);
}

/* ---- exchange -------------------------------------------------------------------------------- */

/* Connects a socket with the sender of a message. Rank 0 has a socket per host; each other rank has
 * only one socket. */
static void meet(int *peer, const Address *from)
{
    *peer = comm_rank() == 0 ? open_socket() : hosts.fd;
    if (*peer >= 0)
        connect(*peer, (const struct sockaddr *)from, sizeof *from);
}

/* Receives all messages that have arrived. Returns errno. */
static int receive(int fd)
{
    Message m;
    Address from;
    for (;;) {
        socklen_t size = sizeof from;
        const ssize_t n = recvfrom(fd, &m, sizeof m, MSG_DONTWAIT, (struct sockaddr *)&from, &size);
        if (n < 0)
            return errno;
        if (n != sizeof m || memcmp(m.token, hosts.meeting.token, TOKEN) != 0)
            continue;
        /* rank 0 may have forwarded a state of this host, which is older */
        if (m.state.leader != comm_rank())
            state_write(&hosts.state[m.state.rank], &m.state, STATE_WHOLE);
        int *peer = &hosts.peer[comm_rank() == 0 ? m.state.leader : 0];
        if (*peer < 0)
            meet(peer, &from);
    }
}

/* Sends the states of this host. Rank 0 also forwards the states of ranks that are ending all
 * ranks. to: NULL for a connected socket. Returns errno of the last failure, or 0. */
static int send_states(int fd, const Address *to)
{
    int error = 0;
    Message m;
    memcpy(m.token, hosts.meeting.token, TOKEN);
    for (int r = 0; r < comm_size(); r++) {
        state_read(&m.state, &hosts.state[r], STATE_WHOLE);
        if ((m.state.leader == comm_rank() || (comm_rank() == 0 && m.state.leaving)) &&
            sendto(fd, &m, sizeof m, MSG_DONTWAIT, (const struct sockaddr *)to,
                   to ? sizeof *to : 0) < 0)
            error = errno;
    }
    return error;
}

int hosts_exchange(void)
{
    if (hosts.fd < 0)
        return -1;
    if (hosts.peer[0] < 0) /* on rank 0, and on hosts that rank 0 has not answered yet */
        receive(hosts.fd);
    for (int r = 0; r < comm_size(); r++)
        if (hosts.peer[r] >= 0 && (receive(hosts.peer[r]) == ECONNREFUSED ||
                                   send_states(hosts.peer[r], NULL) == ECONNREFUSED))
            hosts.ended = r;
    for (int i = 0; comm_rank() != 0 && hosts.peer[0] < 0 && i < hosts.meeting.n; i++)
        send_states(hosts.fd, &hosts.meeting.address[i]);
    return hosts.ended;
}

/* ---- start and end --------------------------------------------------------------------------- */

static void open_own(sa_family_t family)
{
    hosts.own = (Address){ .ss_family = family };
    hosts.fd = open_socket();
}

void hosts_start(SharedState *state)
{
    const int rank = comm_rank(), ranks = comm_size();
    bool several = false;
    hosts.state = state;
    hosts.ended = -1;
    hosts.meeting.n = 0;
    for (int r = 0; r < ranks; r++)
        several = several || leader_of(r) != leader_of(0);
    if (!several)
        return;
    if (leader_of(rank) == rank) {
        hosts.peer = xcalloc((size_t)ranks, sizeof *hosts.peer);
        for (int r = 0; r < ranks; r++)
            hosts.peer[r] = -1;
        open_own(AF_INET6);
        if (hosts.fd < 0)
            open_own(AF_INET);
    }
    if (rank == 0 && hosts.fd >= 0 && getrandom(hosts.meeting.token, TOKEN, 0) == TOKEN)
        list_addresses(&hosts.meeting);
    comm_broadcast(&hosts.meeting, sizeof hosts.meeting, 0);
}

void hosts_stop(void)
{
    if (hosts.fd < 0)
        return;
    for (int r = 0; r < comm_size(); r++)
        if (hosts.peer[r] >= 0 && hosts.peer[r] != hosts.fd)
            close(hosts.peer[r]);
    close(hosts.fd);
    free(hosts.peer);
    hosts.fd = -1;
}
