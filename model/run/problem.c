#include "model/run/problem.h"

#include <stdio.h>

#include "kernels/comm.h"
#include "kernels/error.h"

int problem_rank(bool own)
{
    double first = own ? comm_size() - comm_rank() : 0;
    comm_max(&first, 1);
    return first > 0 ? comm_size() - (int)first : -1;
}

char *problem_share(const char *own)
{
    enum { SIZE = 4096 };
    char text[SIZE] = "";
    const int rank = problem_rank(own);
    if (rank < 0)
        return NULL;
    if (rank == comm_rank())
        snprintf(text, sizeof text, "%s", own);
    comm_broadcast(text, sizeof text, rank);
    return rank > 0 ? xasprintf("rank %d: %s", rank, text) : xstrdup(text);
}
