/* The tokens that an export calibrates with. */
#pragma once
#include "model/checkpoint/export_files.h"
#include "model/config/export_options.h"

typedef struct {
    int  sequences, held, length;       /* of calibration; held out, which follow those; tokens of each */
    int *tokens, *targets;              /* (sequences + held, length); target: the next token, -1 at the end */
    int  files;
} CalibrationData;

/* Sequences of the files of the options, at random places, the same each time. Dies if there are too few, and on ids that the
 * vocabulary of the model of x does not have. */
CalibrationData calibration_read(const ExportOptions *o, const Export *x);
void            calibration_free(CalibrationData *d);
