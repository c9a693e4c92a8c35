/* Brings the states of ranks to other hosts. Ranks of the same host read each other's states in
 * shared memory. The first rank of each host and rank 0 send each other the states of their hosts'
 * ranks by UDP, a few times a second. */
#pragma once
#include "kernels/runtime/rank_state.h"

/* All ranks call this function. state: (ranks), in memory that the ranks of this host share.
 * `state` already contains the host of each rank. */
void hosts_start(SharedState *state);
/* After this call, rank 0 detects that the first rank of another host has ended, and the first
 * ranks of other hosts detect that rank 0 has ended. */
void hosts_stop(void);

/* Sends and receives states. One thread of each host's first rank calls this function; in other
 * ranks it does nothing. Returns a first rank that has ended; -1: none. */
int hosts_exchange(void);
