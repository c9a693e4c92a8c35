/* Checks of preference pairs, after data and ranks. */
#pragma once
#include "model/config/reader.h"

void check_preference(Reader *r);
