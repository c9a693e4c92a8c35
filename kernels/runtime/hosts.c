/* A star around rank 0: rank 0 reports failures of every other host, and these report that of rank
 * 0's; hosts that see no failure wait for such a report. Heartbeats, rather than only the state of
 * the connection, since TCP takes minutes to give up, and a connection that resumes after a network
 * failure must count as healthy again. Other programs that connect to the port lack the token and
 * are closed. */
#include "kernels/runtime/hosts.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/comm_mpi.h"
#include "kernels/runtime/error.h"

enum { ADDRESSES = 16, TOKEN = 16, ANSWER = 8, NAME = 64 };
static const double CONNECT = 5; /* seconds */

/* Where rank 0 listens for connections. */
typedef struct {
    unsigned char token[TOKEN], answer[ANSWER];
    int n; /* 0: no network */
    struct sockaddr_storage address[ADDRESSES];
} Listener;

/* The first message of a host. */
typedef struct {
    unsigned char token[TOKEN];
    int leader;
} Greeting;

/* The host of a rank. */
typedef struct {
    int leader;
    char name[NAME];
} RankHost;

typedef struct {
    int leader;                 /* of the other host */
    int fd;                     /* -1: never connected, ended, or given up by TCP */
    bool known, ended, leaving; /* known: was connected; leaving: has sent LEAVING */
    double silent;              /* seconds since its last heartbeat */
} Link;

static struct {
    RankHost *of_rank; /* (ranks) */
    Link *link;        /* (n) */
    int n;
} hosts;

/* ---- connecting ------------------------------------------------------------------------------ */

static bool is_usable(const struct ifaddrs *i)
{
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP))
        return false;
    if (i->ifa_addr->sa_family == AF_INET6) /* link-local ones need an interface */
        return !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr);
    return i->ifa_addr->sa_family == AF_INET;
}

static socklen_t address_size(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* At the same offset in both families. */
static in_port_t *port_of(struct sockaddr_storage *a)
{
    return &((struct sockaddr_in *)a)->sin_port;
}

/* The network over which other hosts reach this one is unknown: lists all addresses. */
static void list_addresses(Listener *d, in_port_t port)
{
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return;
    for (struct ifaddrs *i = all; i && d->n < ADDRESSES; i = i->ifa_next) {
        if (!is_usable(i))
            continue;
        struct sockaddr_storage *a = &d->address[d->n++];
        a->ss_family = i->ifa_addr->sa_family;
        memcpy(a, i->ifa_addr, address_size(a));
        *port_of(a) = port;
    }
    freeifaddrs(all);
}

/* Listens at all addresses of this host, at a port that the system chooses; -1: failed. */
static int listen_in(sa_family_t family, in_port_t *port)
{
    struct sockaddr_storage any = { .ss_family = family };
    socklen_t size = sizeof any;
    int no = 0, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (family == AF_INET6) /* accepts IPv4 too */
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    if (bind(fd, (struct sockaddr *)&any, address_size(&any)) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, (struct sockaddr *)&any, &size) != 0) {
        close(fd);
        return -1;
    }
    *port = *port_of(&any);
    return fd;
}

static int open_listener(Listener *d)
{
    in_port_t port;
    int fd = listen_in(AF_INET6, &port);
    if (fd < 0)
        fd = listen_in(AF_INET, &port);
    if (fd >= 0 && getrandom(d->token, TOKEN, 0) == TOKEN &&
        getrandom(d->answer, ANSWER, 0) == ANSWER)
        list_addresses(d, port);
    return fd;
}

static Link *link_of(int leader)
{
    for (int i = 0; i < hosts.n; i++)
        if (hosts.link[i].leader == leader)
            return &hosts.link[i];
    return NULL;
}

/* Accepts a host that sends the token and is not yet connected; sends it the answer. */
static bool let_in(int fd, const Listener *d)
{
    const struct timeval patience = { .tv_sec = 1 };
    Greeting hello = { .leader = -1 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const bool knows = recv(fd, &hello, sizeof hello, MSG_WAITALL) == sizeof hello &&
                       memcmp(hello.token, d->token, TOKEN) == 0;
    Link *l = knows ? link_of(hello.leader) : NULL;
    if (!l || l->known || send(fd, d->answer, ANSWER, MSG_NOSIGNAL) != ANSWER) {
        close(fd);
        return false;
    }
    l->fd = fd;
    l->known = true;
    return true;
}

/* Rank 0 */
static void wait_for_all(int listener, const Listener *d)
{
    struct pollfd p = { .fd = listener, .events = POLLIN };
    const double until = clock_seconds() + CONNECT + 1;
    for (int in = 0; in < hosts.n && clock_seconds() < until;)
        if (poll(&p, 1, 100) == 1) {
            int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            in += fd >= 0 && let_in(fd, d);
        }
}

static int begin_to_connect(const struct sockaddr_storage *a)
{
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)a, address_size(a)) != 0 &&
        errno != EINPROGRESS) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* One step of a connection: sends the hello once connected, then waits for the answer. True: it has
 * come. NOTE: an address of rank 0's host, for example of a container bridge, may also exist on
 * this host, with another program at this port. */
static bool advance(struct pollfd *p, const Greeting *hello, const Listener *d)
{
    unsigned char answer[ANSWER];
    if (p->events == POLLIN && recv(p->fd, answer, ANSWER, 0) == ANSWER &&
        memcmp(answer, d->answer, ANSWER) == 0)
        return true;
    if (p->events == POLLOUT && send(p->fd, hello, sizeof *hello, MSG_NOSIGNAL) == sizeof *hello) {
        p->events = POLLIN;
        return false;
    }
    close(p->fd);
    p->fd = -1;
    return false;
}

/* Connects to rank 0 at all of its addresses at once. Returns the connection answered first; -1:
 * none in time. */
static int connect_to(const Listener *d, int leader)
{
    struct pollfd p[ADDRESSES];
    Greeting hello = { .leader = leader };
    int found = -1;
    memcpy(hello.token, d->token, TOKEN);
    for (int i = 0; i < d->n; i++)
        p[i] = (struct pollfd){ .fd = begin_to_connect(&d->address[i]), .events = POLLOUT };
    for (double until = clock_seconds() + CONNECT; found < 0 && clock_seconds() < until;) {
        poll(p, (nfds_t)d->n, 100);
        for (int i = 0; i < d->n && found < 0; i++)
            if (p[i].fd >= 0 && p[i].revents && advance(&p[i], &hello, d)) {
                found = p[i].fd;
                p[i].fd = -1;
            }
    }
    for (int i = 0; i < d->n; i++)
        if (p[i].fd >= 0)
            close(p[i].fd);
    return found;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* "ranks 0-3, 8 on B"; returns the length */
static size_t name_host(char *text, size_t size, int leader)
{
    const int ranks = comm_size();
    size_t at = 0;
    int count = 0, first = 0;
    for (int r = 0; r < ranks; r++)
        count += hosts.of_rank[r].leader == leader;
    at += (size_t)snprintf(text, size, "%s", count > 1 ? "ranks" : "rank");
    for (int r = 0; r < ranks; r++) {
        const bool here = hosts.of_rank[r].leader == leader;
        const bool begins = here && (r == 0 || hosts.of_rank[r - 1].leader != leader);
        const bool ends = here && (r + 1 == ranks || hosts.of_rank[r + 1].leader != leader);
        if (begins)
            first = r;
        if (ends && at < size)
            at += (size_t)snprintf(text + at, size - at, r > first ? "%s %d-%d" : "%s %d",
                                   first == leader ? "" : ",", first, r);
    }
    if (at < size)
        at += (size_t)snprintf(text + at, size - at, " on %s", hosts.of_rank[leader].name);
    return at;
}

void hosts_name(char *text, size_t size, double silence)
{
    const bool ended = hosts_ended();
    size_t at = 0;
    text[0] = '\0';
    for (int i = 0; i < hosts.n; i++) {
        const Link *l = &hosts.link[i];
        if (ended ? !l->ended : !l->known || l->silent < silence)
            continue;
        if (at > 0 && at < size)
            at += (size_t)snprintf(text + at, size - at, ", ");
        if (at < size)
            at += name_host(text + at, size - at, l->leader);
    }
}

/* ---- beats ----------------------------------------------------------------------------------- */

enum { WELL, LEAVING }; /* heartbeat bytes */

/* A connection that TCP gave up says nothing about the process at its other end; nor does a reset
 * after a silence, which comes from a side that gave up. */
static void break_off(Link *l, int error)
{
    close(l->fd);
    l->fd = -1;
    l->ended = error == 0 || ((error == ECONNRESET || error == EPIPE) && l->silent < CONNECT);
}

static void receive(Link *l, double passed)
{
    char bytes[256];
    ssize_t n = recv(l->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0) {
        l->silent = 0;
        l->leaving |= memchr(bytes, LEAVING, (size_t)n) != NULL;
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR))
        l->silent += passed;
    else
        break_off(l, n == 0 ? 0 : errno);
}

/* A full buffer (EAGAIN) means that the other side has long not read. */
static void beat(Link *l, bool leaving)
{
    const char byte = leaving ? LEAVING : WELL;
    if (send(l->fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN && errno != EINTR)
        break_off(l, errno);
}

void hosts_look(double passed, bool leaving)
{
    for (int i = 0; i < hosts.n; i++) {
        Link *l = &hosts.link[i];
        if (l->fd >= 0)
            receive(l, passed);
        else if (l->known && !l->ended)
            l->silent += passed;
        if (l->fd >= 0)
            beat(l, leaving);
    }
}

double hosts_silence(void)
{
    double most = 0;
    for (int i = 0; i < hosts.n; i++)
        if (hosts.link[i].known && !hosts.link[i].ended && hosts.link[i].silent > most)
            most = hosts.link[i].silent;
    return most;
}

bool hosts_ended(void)
{
    for (int i = 0; i < hosts.n; i++)
        if (hosts.link[i].ended)
            return true;
    return false;
}

bool hosts_leaving(void)
{
    for (int i = 0; i < hosts.n; i++)
        if (hosts.link[i].leaving)
            return true;
    return false;
}

/* ---- start and end --------------------------------------------------------------------------- */

/* Lists the hosts that this rank is to connect with. */
static void list_links(int leader)
{
    const int rank = comm_rank(), ranks = comm_size();
    RankHost own = { .leader = leader };
    gethostname(own.name, sizeof own.name - 1);
    hosts.of_rank = xcalloc((size_t)ranks, sizeof *hosts.of_rank);
    hosts.link = xcalloc((size_t)ranks, sizeof *hosts.link);
    hosts.n = 0;
    MPI_Allgather(&own, sizeof own, MPI_BYTE, hosts.of_rank, sizeof own, MPI_BYTE,
                  comm_mpi(RANKS_ALL));
    for (int r = 0; r < ranks; r++)
        if (hosts.of_rank[r].leader == r && rank == leader && (rank == 0) != (r == 0))
            hosts.link[hosts.n++] = (Link){ .leader = r, .fd = -1 };
}

static bool several_hosts(void)
{
    for (int r = 0; r < comm_size(); r++)
        if (hosts.of_rank[r].leader != hosts.of_rank[0].leader)
            return true;
    return false;
}

/* Closes connections that only one side has, and warns. */
static void agree(void)
{
    const int ranks = comm_size();
    int own = comm_rank() != 0 && hosts.n > 0 && hosts.link[0].known;
    int *connected = xcalloc((size_t)ranks, sizeof *connected);
    MPI_Allgather(&own, 1, MPI_INT, connected, 1, MPI_INT, comm_mpi(RANKS_ALL));
    for (int i = 0; comm_rank() == 0 && i < hosts.n; i++) {
        Link *l = &hosts.link[i];
        char text[256];
        if (connected[l->leader])
            continue;
        if (l->fd >= 0)
            close(l->fd);
        *l = (Link){ .leader = l->leader, .fd = -1 };
        name_host(text, sizeof text, l->leader);
        warn(
            "%s cannot connect to rank 0 on %s by TCP: if that host fails, no message will name it",
            text, hosts.of_rank[0].name);
    }
    free(connected);
}

void hosts_start(int leader)
{
    Listener d = { .n = 0 };
    list_links(leader);
    if (!several_hosts())
        return;
    int listener = comm_rank() == 0 ? open_listener(&d) : -1;
    comm_broadcast(&d, sizeof d, 0);
    if (comm_rank() == 0 && d.n > 0)
        wait_for_all(listener, &d);
    else if (hosts.n > 0) {
        hosts.link[0].fd = connect_to(&d, leader);
        hosts.link[0].known = hosts.link[0].fd >= 0;
    }
    if (listener >= 0)
        close(listener);
    agree();
}

void hosts_stop(void)
{
    for (int i = 0; i < hosts.n; i++)
        if (hosts.link[i].fd >= 0)
            close(hosts.link[i].fd);
    free(hosts.of_rank);
    free(hosts.link);
    memset(&hosts, 0, sizeof hosts);
}
