/* Checks of preference pairs and of scoring, after data and ranks. */
#pragma once
#include "model/config/reader.h"

void check_preference(Reader *r);
