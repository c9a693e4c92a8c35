/* evaluators: a list, from which come the sets of Config.eval. */
#pragma once
#include "model/config/reader.h"

void evaluators_read(Reader *r);
