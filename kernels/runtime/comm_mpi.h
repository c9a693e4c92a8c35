/* MPI communicators of the groups of ranks, for files that call MPI. */
#pragma once
#include <mpi.h>

#include "kernels/runtime/mesh.h"

MPI_Comm comm_mpi(Ranks g);
