/* The fastest meshes of a dry run's ranks, by predicted time. */
#pragma once
#include "model/shape/config.h"

/* Whether the ranks can form the mesh that c->strategy has: the conditions of config/check_ranks.c,
 * without a message; and whether the batch divides. */
bool mesh_is_possible(const Config *c);

/* Tries all replicas x shards x context ranks x tensor ranks x stages, with the configured
 * micro-batch, and prints the best three of those that fit the memory, on rank 0. All ranks
 * call. */
void mesh_search_print(const Config *c);
