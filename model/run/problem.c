#include "model/run/problem.h"

#include <stdio.h>

#include "kernels/comm.h"
#include "kernels/error.h"

char *problem_share(const char *own)
{
    enum { SIZE = 4096 };
    char text[SIZE] = "";
    double first = own ? comm_size() - comm_rank() : 0;
    comm_max(&first, 1);
    if (first == 0)
        return NULL;
    const int rank = comm_size() - (int)first;
    if (rank == comm_rank())
        snprintf(text, sizeof text, "%s", own);
    comm_broadcast(text, sizeof text, rank);
    return rank > 0 ? xasprintf("rank %d: %s", rank, text) : xstrdup(text);
}
