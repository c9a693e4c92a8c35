/* Checks the settings of a model with experts. */
#pragma once
#include "model/config/reader.h"

void check_experts(Reader *r);
