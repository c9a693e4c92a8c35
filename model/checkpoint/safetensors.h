/* safetensors files: named tensors behind a JSON header, read and written at any offset, by several ranks at once.
 * Describing, creating and reading die on an error, naming the file and, where there is one, the tensor. Opening for
 * writing, writing and syncing may be done by a thread: they beat as WORKER_SAVE, return false and leave the reason in
 * `problem`. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SAFE_DIMS = 8 };

typedef struct {
    char  *name;
    char   dtype[12];                /* as in the file: "F32", "BF16", "F8_E4M3", ... */
    int    dims;
    size_t shape[SAFE_DIMS];
    size_t begin, end;               /* bytes from the start of the file's data */
    bool   has_sum;                  /* a manifest lists the next one */
    uint32_t sum;                    /* CRC-32C of its bytes */
} SafeTensor;

typedef struct {
    char  *path;
    int    fd;                       /* -1: not open */
    size_t data;                     /* file offset of the data: 8 + length of the header */
    size_t bytes;                    /* of data */
    int    count;
    SafeTensor *tensor;              /* [count], in the order of their bytes */
    char  *header;                   /* of a file to be written: data - 8 bytes */
    size_t unsynced;                 /* bytes written since the last safetensors_sync */
    char  *problem;                  /* why it cannot be written, with the file's name; NULL: none so far */
} SafeFile;

size_t safetensors_dtype_size(const char *dtype);     /* bytes of an element; 0: a type that we do not know */

/* Opens a file for reading and checks that it keeps to the format: header, types, shapes, and that the tensors cover
 * the data without holes and the file is as long as they say. */
SafeFile *safetensors_open(const char *path);
const SafeTensor *safetensors_find(const SafeFile *f, const char *name);       /* NULL if there is none */

/* The tensor of that name in the first of `count` files that has it, or the first whose name ends so; tensor NULL: in none. */
typedef struct { const SafeFile *file; const SafeTensor *tensor; } Found;
Found safetensors_find_in    (SafeFile *const *file, int count, const char *name);
Found safetensors_find_ending(SafeFile *const *file, int count, const char *end);

void safetensors_read(const SafeFile *f, void *dst, const SafeTensor *t, size_t at, size_t bytes);   /* at: in t */

/* Writing: describe all tensors, lay them out, create the file (one rank), then write any bytes (all ranks).
 * The layout depends on the descriptions and their order alone: wider types first, so every tensor is aligned. */
SafeFile *safetensors_new(const char *path);
void safetensors_add(SafeFile *f, const char *name, const char *dtype, int dims, const size_t *shape);
void safetensors_lay_out(SafeFile *f);
void safetensors_create(SafeFile *f);                 /* header, and the full size; stays open for writing */
bool safetensors_open_write(SafeFile *f);             /* what another rank has created */
bool safetensors_write(SafeFile *f, const SafeTensor *t, size_t at, const void *src, size_t bytes);
bool safetensors_sync(SafeFile *f);                   /* what was written through `f` is on disk when it returns */

void safetensors_close(SafeFile *f);                  /* frees f */
