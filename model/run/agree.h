/* Communication of ranks about problems, and agreement on inputs. All ranks call each of these. */
#pragma once
#include "data/prompts.h"
#include "model/shape/config.h"

bool agree_any(bool own);                /* whether it is true on any rank */
double agree_least(double own);          /* the minimum over all ranks */
double agree_least_of_stage(double own); /* over the ranks of RANKS_STAGE */
int agree_first(bool own);               /* the first rank where it is true; -1: there is none */

/* own: the problem of this rank, NULL: none. Returns, on all ranks, the problem of the first rank
 * that has one, with its number, malloc'ed; NULL: there is none. */
char *agree_problem(const char *own);

/* Dies unless all ranks have the same configuration and load from the same folder. */
void agree_on_run(const Config *c);

/* Rank 0 calls prompts_read, with space for a token after each prompt in m->max_sequence_length,
 * and broadcasts the prompts. no_features: as in TokenLimits. */
void agree_on_prompts(Prompts *p, const char *path, const ModelConfig *m, const char *no_features);
