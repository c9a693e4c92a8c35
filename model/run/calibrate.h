/* Codes of 4 bits that are calibrated: GPTQ [kernels/gptq.h] of all matrices of the blocks.
 *
 * Of a model there is one block on the device at a time, and the residual stream of all tokens in front of it. The block's forward
 * gives the sums of xT x over the inputs of its four layers; these get their codes; and forward with what these stand for gives the
 * stream in front of the next block, which so sees the errors of all before it. The layers of a block are calibrated together, with
 * inputs from its weights as they were [as llm-compressor does; GPTQ's code takes one after the other: no difference to measure on
 * a small model]. Sequences that are held out go along, once more without codes: their cross entropy is measured both ways. */
#pragma once
#include "model/checkpoint/export_files.h"
#include "model/run/calibration_data.h"

/* Mean losses of the tokens that were held out, `labels`, with the weights as they were and with the values of the codes. */
typedef struct { double before, after; long labels; } CalibrationLosses;

/* Gives x, which was begun, the codes and scales of all its matrices. On the device. */
CalibrationLosses calibrate(Export *x, const ExportOptions *o, const CalibrationData *d);
