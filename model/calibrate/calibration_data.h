/* The tokens for the calibration of an export. */
#pragma once
#include "model/export/export_files.h"
#include "model/config/export_options.h"

typedef struct {
    /* sequences for calibration; then held-out ones; tokens of each */
    int sequences, held, length;
    /* (sequences + held, length); target: the next token, -1 at the end */
    int *tokens, *targets;
    int files;
} CalibrationData;

/* Reads random sequences, always the same, from the files of the options. Dies if there are too
 * few, and on ids that are not in the vocabulary of x's model. */
CalibrationData calibration_read(const ExportOptions *o, const Export *x);
void calibration_free(CalibrationData *d);
