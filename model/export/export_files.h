/* Writes the files of an export: from a list of tensors with their sources to a folder of
 * safetensors. */
#pragma once
#include <jansson.h>

#include "model/shape/architecture.h"
#include "model/export/coded_encode.h"
#include "model/checkpoint/weight_files.h"

/* A tensor of the model: its source, its file in the export, and its adapter, if there is one. */
typedef struct Entry {
    HfTensor tensor;
    const SafeFile *from;
    const SafeTensor *source; /* NULL: stored as codes and scales, coded_source.h */
    int file;
    bool is_coded; /* exported as codes: a matrix of a block */
    bool is_written;
    const struct Entry *a, *b;
} Entry;

typedef struct Export {
    double start;
    const char *option;       /* the option of the command line, for messages */
    char *folder;             /* the source: a model or adapters */
    char *base;               /* folder of the model: `folder`, or that of the adapters' base */
    char *target, *temporary; /* the new folder, and its name until it is complete */
    int begun;                /* of target_begin */
    json_t *description;      /* config.json */
    const char *dtype;        /* type of the tensors without codes */
    bool is_coded;
    Coded coded;
    Lora lora; /* rank 0: no adapters */
    WeightFiles source, adapter;
    Entry *entry, *adapter_entry; /* entries of the model and of the adapters */
    int num_entries, num_adapter_entries, num_files;
    /* of `entry`; in the adapters' file, of `adapter_entry` and of entries next to these */
    NameIndex names, adapter_names;
    bool is_calibrated; /* export_write_int4 was called */
    SafeFile **file;
    struct Export *other; /* for an average: the other models, which have the same entries */
    int num_other;
    double weight; /* weight of this model in the average; 1 without an average */
} Export;

/* Divides the tensors among files: up to file_limit bytes in each, or one tensor. */
void export_divide(Export *x, size_t file_limit);
void export_create_files(Export *x);
size_t export_bytes(const Export *x);
/* model.safetensors.index.json; map and tower: the tensors of the vision tower with their file, and
 * their bytes. It takes map. */
json_t *export_index(const Export *x, json_t *map, size_t tower);

/* All values of the tensor `name`, with its adapter added, or their average. Another thread may
 * call export_write_int4 meanwhile, but not this. */
void export_read(const Export *x, const char *name, float *values);

/* Writes the tensors of the matrix `name` (rows, cols) in int4, with given codes, -8 to 7, and
 * scales (rows, cols / group), which have BF16 values. */
void export_write_int4(Export *x, const char *name, const int8_t *codes, const float *scale);

/* Writes all remaining tensors. They are on disk when it returns. */
void export_write(Export *x);
