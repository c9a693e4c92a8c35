/* Tokens for the calibration of an export. */
#pragma once
#include "model/export/export_files.h"
#include "model/config/export_options.h"

typedef struct {
    /* number of sequences for calibration; number of held-out sequences; tokens of each sequence */
    int sequences, held, length;
    /* (sequences + held, length); target: the next token, -1 at the end */
    int *tokens, *targets;
    int files;
} CalibrationData;

/* Reads random sequences, always the same, from the files that the options name. Dies if there are
 * too few sequences, and on ids outside the vocabulary of x's model. */
CalibrationData calibration_read(const ExportOptions *o, const Export *x);
void calibration_free(CalibrationData *d);
