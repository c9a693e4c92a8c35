/* Finds the fastest meshes for a dry run's ranks, by predicted time. */
#pragma once
#include "model/shape/config.h"

/* Whether the ranks can form the mesh of c->strategy, by the conditions of config/check_ranks.c
 * without a message, and whether the mesh divides the batch. */
bool mesh_is_possible(const Config *c);

/* Tries all replicas x shards x context ranks x tensor ranks x stages, with the configured
 * micro-batch. Prints the three fastest meshes that fit the memory, on rank 0. All ranks must call
 * this. */
void mesh_search_print(const Config *c);
