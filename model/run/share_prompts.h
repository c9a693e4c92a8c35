/* The same prompts on all ranks. */
#pragma once
#include "data/prompts.h"
#include "model/config.h"

/* prompts_read by rank 0, with room for a token behind each prompt in m->max_sequence_length. All ranks call. */
void prompts_share(Prompts *p, const char *path, const ModelConfig *m);
