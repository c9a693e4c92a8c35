/* What one rank meets and all must know of. */
#pragma once
#include <stdbool.h>

/* The first rank where anything is wrong, on all ranks; -1: nothing is. All ranks call. */
int   problem_rank(bool own);

/* own: what is wrong on this rank, NULL: nothing. Returns what is wrong on the first rank where anything is, which it names, on all
 * ranks, malloc'ed; NULL: nothing is. All ranks call. */
char *problem_share(const char *own);
