/* Inputs that must be the same on all ranks before a run begins. All ranks must call each
 * function. */
#pragma once
#include "data/prompts.h"
#include "model/shape/config.h"

/* Dies unless all ranks have the same configuration and load the same folder. */
void inputs_agree(const Config *c);

/* Rank 0 calls prompts_read, with space for a token after each prompt in m->max_sequence_length,
 * and broadcasts the prompts. no_features: as in TokenLimits. */
void inputs_read_prompts(Prompts *p, const char *path, const ModelConfig *m,
                         const char *no_features);
