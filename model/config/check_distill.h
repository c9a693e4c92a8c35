/* Checks of scoring and of distillation, after data and ranks. */
#pragma once
#include "model/config/reader.h"

void check_distill(Reader *r);
