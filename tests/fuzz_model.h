/* What the readers and the good inputs of tests/fuzz.c share. */
#pragma once
#include "tests/saved.h"

enum { VOCAB = 100 };       /* ids of tokens in data */

extern Run model;           /* what checkpoints are loaded into */
