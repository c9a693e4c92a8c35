/* Start and end of tests that run on several ranks with device collectives. */
#pragma once
#include <unistd.h>

#include "kernels/collectives.h"
#include "kernels/runtime/device.h"

static inline void start_ranks(int *argc, char ***argv)
{
    alarm(300);         /* a rank that fails leaves the others in a collective */
    comm_start(argc, argv);
    device_init(comm_local_rank());
    comm_init();
}

/* The exit code of all ranks: 1 if any has failed. */
static inline int finish_ranks(int failed)
{
    double any = failed;
    comm_max(&any, 1);
    comm_finish();
    return any > 0;
}
