/* Writes the files of reference.h and soft_labels.h. */
#pragma once
#include "model/model.h"

/* Computes the log-probabilities of a data set with the current weights or, with --score and top_k,
 * soft labels, and writes the file into the folder. All ranks must call this. */
void score_write(const Config *c, const EvalSet *set, Model *m, ParamStore *store,
                 const char *folder);
