/* Calibrated 4-bit codes: GPTQ [kernels/gptq_layer.h] for all matrices of the blocks.
 *
 * Device memory holds one block at a time, and the residual stream of all tokens at its input. A
 * forward of the block gives the sums of xT x over the inputs of its four linear layers. GPTQ
 * chooses the codes of these layers. A second forward, with the values of the codes, computes the
 * input of the next block, which therefore includes the errors of all earlier blocks. All layers of
 * a block are calibrated together, with inputs from its original weights [as in llm-compressor;
 * GPTQ's code calibrates one layer after the other: no measurable difference on a small model].
 * Held-out sequences are computed with and without codes to measure their cross entropy. */
#pragma once
#include "model/export/export_files.h"
#include "model/calibrate/calibration_data.h"

/* Mean losses of the `labels` held-out tokens, with the original weights and with the values of the
 * codes. */
typedef struct {
    double before, after;
    long labels;
} CalibrationLosses;

/* Writes the codes and scales of all matrices of x. Call it after export_begin. Uses the device. */
CalibrationLosses calibrate(Export *x, const ExportOptions *o, const CalibrationData *d);
