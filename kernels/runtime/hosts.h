/* Notices hosts that go away. Memory shows a rank what its neighbours of one host do; of other hosts it sees nothing, and a
 * collective waits for them without a word. So the first rank of each host keeps a TCP connection to rank 0 and sends a byte
 * over it a few times a second, and rank 0 sends one to each. What has ended closes its connection; what is down is silent. The
 * byte says whether a rank is about to end all: its message is the one to read. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Connects the hosts. All ranks call, the same number of times. `leader`: the first rank of this rank's host. Hosts that rank 0
 * cannot be reached from are named in a warning, and nothing is said about them later. */
void hosts_start(int leader);
void hosts_stop (void);                 /* closes the connections, which the others take for an end */

/* The rest is for one thread of each first rank. Elsewhere, and on one host, there are no connections: nothing is ever wrong. */
void   hosts_look(double passed, bool leaving);    /* sends and receives; `passed`: seconds since the last call; `leaving`: a rank
                                         * of this host, or of one that it has heard of, ends all with a message of its own */
double hosts_silence(void);             /* seconds that the most silent host has not been heard for */
bool   hosts_ended(void);               /* some host's first rank has ended */
bool   hosts_leaving(void);             /* some host has said that it is */

/* "ranks 2-3 on B, rank 4 on C": those that have ended, or else those that were not heard for `silence` seconds. */
void hosts_name(char *text, size_t size, double silence);
