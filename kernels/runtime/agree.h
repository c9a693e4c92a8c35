/* Ranks agree on whether one of them has a problem, and on the least of their values. All ranks
 * call each of these functions. */
#pragma once
#include <stdbool.h>

bool agree_any(bool own);                /* true if `own` is true on any rank */
double agree_least(double own);          /* the minimum over all ranks */
double agree_least_of_stage(double own); /* the minimum over the ranks of RANKS_STAGE */
int agree_first(bool own);               /* the first rank where `own` is true; -1: no rank */

/* own: the problem of this rank; NULL: none. Returns, on all ranks, the problem of the first rank
 * that has one, with the number of this rank, malloc'ed; NULL: no rank has a problem. */
char *agree_problem(const char *own);
