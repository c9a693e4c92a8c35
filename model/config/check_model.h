/* Checks the settings of the model. */
#pragma once
#include "model/config/reader.h"

void check_model(Reader *r, bool from_hf);
void check_model_trainable(Reader *r);
