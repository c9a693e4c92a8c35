/* Brings the states of ranks to other hosts. Ranks of one host read each other's states in shared
 * memory. The first rank of each host and rank 0 send each other the states of their host's ranks,
 * a few times a second, by UDP. */
#pragma once
#include "kernels/runtime/rank_state.h"

/* All ranks call. state: (ranks), in memory that the ranks of this host share; it has the hosts of
 * all ranks. */
void hosts_start(SharedState *state);
/* Rank 0 detects that the first rank of another host has ended, and the first ranks of other hosts
 * detect that rank 0 has ended. */
void hosts_stop(void);

/* Sends and receives; for one thread of each first rank, the others take no part. Returns a first
 * rank that has ended; -1: none. */
int hosts_exchange(void);
