/* The files that an export writes: from a list of tensors with their sources to a folder of safetensors. */
#pragma once
#include <jansson.h>

#include "model/architecture.h"
#include "model/checkpoint/coded_encode.h"
#include "model/checkpoint/source.h"

/* A tensor of the model: where it is, the file that it goes to, and the adapter next to it, if there is one. */
typedef struct Entry {
    HfTensor            tensor;
    const SafeFile     *from;
    const SafeTensor   *source;         /* NULL: it is stored as codes and scales, coded_source.h */
    int                 file;
    bool                is_coded;       /* to be: a matrix of a block, where the export is of codes */
    bool                is_written;
    int                 shares;         /* entries with the same number have one scale, where coded_shares */
    const struct Entry *a, *b;
} Entry;

typedef struct {
    double      start;
    char       *folder;         /* that is exported: a model or adapters */
    char       *base;           /* where the model is: that folder, or that of the adapters' base */
    char       *target, *temporary;         /* the folder to be, and what is written until then */
    int         begun;          /* of target_begin */
    json_t     *description;    /* config.json */
    const char *dtype;          /* of what is not coded */
    bool        is_coded;
    Coded       coded;
    Lora        lora;           /* rank 0: there are no adapters */
    Source      source, adapter;
    Entry      *entry, *low;    /* the model's, and those of adapters */
    int         num_entries, num_low, num_files;
    bool        is_calibrated;  /* export_write_int4 was called */
    SafeFile  **file;
} Export;

/* Numbers the files: up to file_limit bytes in each, or one tensor. */
void    export_divide(Export *x, size_t file_limit);
void    export_create_files(Export *x);
size_t  export_bytes(const Export *x);
json_t *export_index(const Export *x);          /* model.safetensors.index.json */

/* All values of the tensor `name`, with its adapter added. Another thread may export at the same time, but not read. */
void    export_read(const Export *x, const char *name, float *values);

/* The tensors of the matrix `name` (rows, cols) in int4, from codes, from -8 to 7, and scales (rows, cols / group) that come from
 * elsewhere and have BF16 values. */
void    export_write_int4(Export *x, const char *name, const int8_t *codes, const float *scale);

/* All tensors that are not written yet; on disk when it returns. */
void    export_write(Export *x);

/* On a terminal: "<what> 12 %, 34 s left", if that was not said a moment ago. done: of `all`, since `start`. */
void    export_say_progress(const char *what, double start, size_t done, size_t all);
void    export_end_progress(void);
