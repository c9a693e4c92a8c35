/* Checks how ranks divide the work. */
#pragma once
#include "model/config/reader.h"

/* Number of ranks that read different sequences. Ranks that read the same sequences count as
 * one. */
int check_ranks_groups(const Reader *r);
const char *check_ranks_group_name(const Reader *r); /* "rank", "tensor group", ... */
void check_ranks(Reader *r);
