/* Plans memory for ranks that do not run. */
#pragma once
#include "model/config/reader.h"

/* Sets the world to the ranks that a dry run plans for. */
void dry_run_choose_ranks(Reader *r);
