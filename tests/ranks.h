/* Start and end of tests that run on several ranks with device collectives. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "model/checkpoint/safetensors.h"
#include "tests/sanitized.h"

static inline void start_ranks(int *argc, char ***argv)
{
    alarm(SANITIZED ? 1800 : 300); /* if a rank fails, the others wait in a collective */
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

/* A folder that all ranks use, whose files are read in small chunks: setup and teardown of a group
 * of tests. */
static char shared[] = "/tmp/coat-ranks-XXXXXX";

static inline int make_shared(void **state)
{
    (void)state;
    safetensors_chunk = 4096;
    const bool made = comm_rank() != 0 || mkdtemp(shared);
    comm_broadcast(shared, sizeof shared, 0);
    return made ? 0 : -1;
}

static inline int remove_shared(void **state)
{
    (void)state;
    char command[64];
    comm_barrier();
    snprintf(command, sizeof command, "rm -r %s", shared);
    return comm_rank() == 0 ? system(command) : 0;
}
