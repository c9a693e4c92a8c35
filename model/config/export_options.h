/* The command line of an export, ./train --export=CHECKPOINT [--key=value ...] FOLDER, as a table of keys. */
#pragma once
#include <stdbool.h>

#include "model/config/table.h"

typedef enum { EXPORT_BF16, EXPORT_F16, EXPORT_F32, EXPORT_FP8, EXPORT_INT8, EXPORT_INT4, EXPORT_NF4 } ExportType;
typedef enum { AS_COMPRESSED_TENSORS, AS_FP8, AS_BITSANDBYTES } ExportLayout;
typedef enum { SCALES_COMPUTED, SCALES_TRAINED } ExportScales;

typedef struct {
    char        *source;            /* a checkpoint, the save folder of a run (its latest one), or a folder of save_pretrained */
    char        *target;            /* the folder to write, without a slash at its end */
    char        *base_path;         /* where the model is that its adapters stand next to; NULL: where they say */
    ExportType   dtype;
    int          layout;            /* ExportLayout or NOT_GIVEN, as the next two */
    int          block, group;      /* elements that share a scale: block x block of a matrix; group of a row */
    ExportScales scales;
    char       **calibration;       /* files of tokens, or patterns, that int4's codes are calibrated with */
    int          num_calibration;   /* 0: they are not */
    int          token_bytes;       /* of those files; NOT_GIVEN: as the run says that is exported */
    int          sequences, length; /* of calibration, and their tokens; length 0: the model's, up to 2048 */
    double       damping;           /* of GPTQ: kernels/gptq.h, as the next */
    bool         ordered;
} ExportOptions;

extern const ConfigKey export_keys[];       /* ends with name == NULL */

/* Whether the command line asks for an export, and not for help. */
bool export_is_asked(int argc, char **argv);

/* Reads it. Dies on arguments that make no sense. */
void export_options_read(ExportOptions *o, int argc, char **argv);
void export_options_free(ExportOptions *o);

/* The word that stands for the value of that key, as in an argument. The text is constant. */
const char *export_word(const char *key, int value);
