/* What ranks know of each other, and agree on. All ranks call each of these. */
#pragma once
#include "data/prompts.h"
#include "model/config.h"

bool   agree_any  (bool own);           /* whether it is so on any rank                          */
double agree_least(double own);         /* of all ranks                                          */
int    agree_first(bool own);           /* the first rank where it is so, -1: there is none      */

/* own: what is wrong on this rank, NULL: nothing. Returns what is wrong on the first rank where anything is, which it names, on all
 * ranks, malloc'ed; NULL: nothing is. */
char  *agree_problem(const char *own);

/* Dies unless all have this configuration, and load from the same folder. */
void   agree_on_run(const Config *c);

/* prompts_read by rank 0, with room for a token after each prompt in m->max_sequence_length; the same prompts on all ranks. */
void   agree_on_prompts(Prompts *p, const char *path, const ModelConfig *m);
