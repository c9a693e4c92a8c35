/* Checks of the recipe and the optimizer. */
#pragma once
#include "model/config/reader.h"

void check_recipe_optimizer(Reader *r);
void check_recipe(Reader *r); /* call it after the checks of the optimizer */
