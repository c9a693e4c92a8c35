#include "kernels/runtime/agree.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

bool agree_any(bool own)
{
    double any = own;
    comm_max(&any, 1);
    return any > 0;
}

double agree_least(double own)
{
    double negative = -own;
    comm_max(&negative, 1);
    return -negative;
}

double agree_least_of_stage(double own)
{
    const int ranks = comm_group_size(RANKS_STAGE);
    double least = own, *all = xmalloc(sizeof *all * (size_t)ranks);
    comm_gather(all, &own, sizeof own, RANKS_STAGE);
    for (int r = 0; r < ranks; r++)
        least = all[r] < least ? all[r] : least;
    free(all);
    return least;
}

int agree_first(bool own)
{
    const double first = agree_least(own ? comm_rank() : comm_size());
    return first < comm_size() ? (int)first : -1;
}

char *agree_problem(const char *own)
{
    enum { SIZE = 4096 };
    char text[SIZE] = "";
    const int rank = agree_first(own);
    if (rank < 0)
        return NULL;
    if (rank == comm_rank())
        snprintf(text, sizeof text, "%s", own);
    comm_broadcast(text, sizeof text, rank);
    return rank > 0 ? xasprintf("rank %d: %s", rank, text) : xstrdup(text);
}
