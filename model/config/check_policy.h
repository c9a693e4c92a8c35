/* Checks of policy gradients, after data and ranks. */
#pragma once
#include "model/config/reader.h"

void check_policy(Reader *r);
