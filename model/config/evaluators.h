/* Reads the list `evaluators` into Config.eval. */
#pragma once
#include "model/config/reader.h"

void evaluators_read(Reader *r);
