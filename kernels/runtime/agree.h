/* Ranks agree on whether one of them has a problem, and on the least value of all. All ranks call
 * each of these functions. */
#pragma once
#include <stdbool.h>

bool agree_any(bool own);                /* whether `own` is true on any rank */
double agree_least(double own);          /* the minimum over all ranks */
double agree_least_of_stage(double own); /* the minimum over the ranks of RANKS_STAGE */
int agree_first(bool own);               /* the first rank where it is true; -1: there is none */

/* own: the problem of this rank, NULL: none. Returns, on all ranks, the problem of the first rank
 * that has one, with its number, malloc'ed; NULL: there is none. */
char *agree_problem(const char *own);
