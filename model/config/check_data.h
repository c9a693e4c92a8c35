/* Checks the settings of data. */
#pragma once
#include "model/config/reader.h"

void check_data(Reader *r);
/* call it after the checks of data */
void check_data_eval_documents(const Config *c, const EvalSet *set);
