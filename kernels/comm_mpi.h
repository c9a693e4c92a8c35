/* MPI's names for the groups of ranks, for the files that call MPI. */
#pragma once
#include <mpi.h>

MPI_Comm comm_mpi(int group);           /* one of enum Ranks of comm.h */
