/* Valid files of codes and scales, the seeds of tests/fuzz_kinds.c. */
#pragma once
#include "tests/mutate.h"

enum { FUZZ_CODES = 6 };

/* The model of folder/step1 in every readable format that its shapes allow; files stay in the
 * folder. */
void fuzz_codes(Input seed[FUZZ_CODES], const char *folder);
