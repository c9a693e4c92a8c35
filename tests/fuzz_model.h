/* Shared by readers and seeds of tests/fuzz.c. */
#pragma once
#include "tests/saved.h"

enum { VOCAB = 100 }; /* ids of tokens in data */

extern Run model; /* the run into which checkpoints are loaded */
