/* Detects hosts that fail. Ranks of one host see each other through shared memory, but not those of
 * other hosts, and a collective waits for a lost host silently. So the first rank of each host
 * keeps a TCP connection to rank 0; both sides send a heartbeat byte a few times a second. A
 * process that ends closes its connection; a host that is down sends nothing. The byte says whether
 * a rank is about to end all ranks: its message is the one to read. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Connects the hosts. All ranks call, the same number of times. `leader`: the first rank of this
 * rank's host. A warning names hosts that cannot reach rank 0; their failure is not reported
 * later. */
void hosts_start(int leader);
/* closes the connections: the other hosts see that as an end */
void hosts_stop(void);

/* The rest is for one thread of each first rank. Other ranks, and runs on one host, have no
 * connections and never see a failure. */
/* sends and receives; `passed`: seconds since the last call; `leaving`: a rank of this host, or of
 * one that said so, ends all ranks with its own message */
void hosts_look(double passed, bool leaving);
/* the longest time without a heartbeat of a host, seconds */
double hosts_silence(void);
bool hosts_ended(void);   /* the first rank of a host has ended */
bool hosts_leaving(void); /* a host has sent that it is leaving */

/* "ranks 2-3 on B, rank 4 on C": hosts that have ended, or else hosts without a heartbeat for
 * `silence` seconds. */
void hosts_name(char *text, size_t size, double silence);
