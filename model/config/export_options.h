/* The command line of an export as a table of keys: ./train --export=CHECKPOINT [--key=value ...]
 * FOLDER, or ./train --average=A,B,C[:weights] [--key=value ...] FOLDER. */
#pragma once
#include <stdbool.h>

#include "model/keys/types.h"

typedef enum {
    EXPORT_BF16,
    EXPORT_F16,
    EXPORT_F32,
    EXPORT_FP8,
    EXPORT_INT8,
    EXPORT_INT4,
    EXPORT_NF4
} ExportType;
typedef enum { AS_COMPRESSED_TENSORS, AS_FP8, AS_BITSANDBYTES } ExportLayout;
typedef enum { SCALES_COMPUTED, SCALES_TRAINED } ExportScales;

typedef struct {
    /* a checkpoint, the save folder of a run (then its latest checkpoint), or a folder of
     * save_pretrained */
    char *source;
    char *average;   /* replaces source: the argument of --average */
    char **sources;  /* the folders that are averaged */
    double *weights; /* weights of the sources; their sum is 1 */
    int num_sources; /* 0: no average; `source` is exported */
    char *target;    /* the folder to write, without a final slash */
    /* folder of the adapters' base model; NULL: the folder that they name */
    char *base_path;
    ExportType dtype;
    int layout; /* ExportLayout or NOT_GIVEN */
    /* elements that share a scale: block x block of a matrix, or `group` consecutive elements of a
     * row; or NOT_GIVEN */
    int block, group;
    ExportScales scales;
    char **calibration;  /* files of tokens, or patterns, to calibrate int4 with */
    int num_calibration; /* 0: no calibration */
    int token_bytes;     /* bytes of a token in these files; NOT_GIVEN: as in the exported run */
    /* number of sequences for calibration; tokens of each sequence; 0: the model's length, at most
     * 2048 */
    int sequences, length;
    /* settings of GPTQ; see kernels/gptq_layer.h */
    double damping;
    bool ordered;
} ExportOptions;

extern const ConfigKey export_options_keys[]; /* ends with name == NULL */

/* Whether the command line asks for an export or an average, and not for help. */
bool export_options_asked(int argc, char **argv);

/* Parses the command line. Dies on wrong arguments. */
void export_options_read(ExportOptions *o, int argc, char **argv);
void export_options_free(ExportOptions *o);

/* The word for this value of the key, as in an argument. The text is constant. */
const char *export_options_word(const char *key, int value);
