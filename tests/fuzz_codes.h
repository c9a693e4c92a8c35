/* Valid files of codes and scales, the seeds of tests/fuzz_kinds.c. */
#pragma once
#include "tests/mutate.h"

enum { FUZZ_CODES = 6 };

/* Sets seed[] to files with the weights of the model in folder/step1, one for each readable format
 * with codes that the shapes of the model allow. The files stay in the folder. */
void fuzz_codes(Input seed[FUZZ_CODES], const char *folder);
