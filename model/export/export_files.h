/* Writes the files of an export: the input is a list of tensors with their sources, the output a
 * folder of safetensors. */
#pragma once
#include <jansson.h>

#include "model/shape/architecture.h"
#include "model/export/coded_encode.h"
#include "model/checkpoint/weight_files.h"

/* A tensor of the model: its source, its file in the export, and its adapter, if there is one. */
typedef struct Entry {
    HfTensor tensor;
    const SafeFile *from;
    const SafeTensor *source; /* NULL: stored as codes and scales (coded_source.h) */
    int file;
    bool is_coded; /* exported as codes: the tensor is a matrix of a block */
    bool is_written;
    const struct Entry *a, *b;
} Entry;

typedef struct Export {
    double start;
    const char *option; /* for messages: the option of the command line */
    char *folder;       /* the source: a model or adapters */
    /* folder of the model: `folder`, or the folder of the adapters' base */
    char *base;
    char *target, *temporary; /* the new folder, and its name until it is complete */
    int begun;                /* result of target_begin */
    json_t *description;      /* content of config.json */
    const char *dtype;        /* type of the tensors that have no codes */
    bool is_coded;
    Coded coded;
    Lora lora; /* rank 0: no adapters */
    WeightFiles source, adapter;
    Entry *entry, *adapter_entry; /* entries of the model and of the adapters */
    int num_entries, num_adapter_entries, num_files;
    /* indexes by name. names: of `entry`. adapter_names: of `adapter_entry`, and of those entries
     * of `entry` that are trained with the adapters */
    NameIndex names, adapter_names;
    bool is_calibrated; /* export_write_int4 was called */
    SafeFile **file;
    struct Export *other; /* for an average: the other models, whose entries are the same */
    int num_other;
    double weight; /* weight of this model in the average; 1 without an average */
} Export;

/* Divides the tensors among files: up to file_limit bytes in each, or one larger tensor. */
void export_divide(Export *x, size_t file_limit);
void export_create_files(Export *x);
size_t export_bytes(const Export *x);
/* Returns model.safetensors.index.json. map: the tensors of the vision tower with their file; the
 * function takes ownership. tower: bytes of these tensors. */
json_t *export_index(const Export *x, json_t *map, size_t tower);

/* Reads all values of the tensor `name`: with its adapter added, or averaged over the models.
 * Meanwhile another thread may call export_write_int4, but not export_read. */
void export_read(const Export *x, const char *name, float *values);

/* Writes the tensors of the matrix `name` (rows, cols) in int4. codes: -8 to 7; scale: (rows, cols
 * / group), BF16 values. */
void export_write_int4(Export *x, const char *name, const int8_t *codes, const float *scale);

/* Writes all remaining tensors, which are on disk when it returns. */
void export_write(Export *x);
