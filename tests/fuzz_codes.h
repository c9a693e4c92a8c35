/* Good files of codes and scales for tests/fuzz_kinds.c to begin with. */
#pragma once
#include "tests/mutate.h"

enum { FUZZ_CODES = 6 };

/* The model of folder/step1 in every format that is read and that its shapes allow; files are left in the folder. */
void fuzz_codes(Input seed[FUZZ_CODES], const char *folder);
