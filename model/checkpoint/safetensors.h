/* safetensors files: a JSON header, then named tensors, read and written at any offset, by several
 * ranks at once. Describing, creating and reading die on an error, naming the file and the tensor.
 * Opening for writing, writing and syncing may run in a thread: they call watchdog_beat as
 * WORKER_SAVE; on an error they return false and set `problem`. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/checkpoint/name_index.h"

enum { SAFE_DIMS = 8 };

typedef struct {
    char *name;
    char dtype[12]; /* as in the file: "F32", "BF16", "F8_E4M3", ... */
    int dims;
    size_t shape[SAFE_DIMS];
    size_t begin, end; /* bytes from the start of the file's data */
    bool has_sum;      /* `sum` was set from a manifest */
    uint32_t sum;      /* CRC-32C of its bytes */
} SafeTensor;

typedef struct {
    char *path;
    int fd;       /* -1: not open */
    size_t data;  /* file offset of the data: 8 + length of the header */
    size_t bytes; /* of data */
    int count;
    SafeTensor *tensor; /* [count], in the order of their bytes */
    NameIndex names;    /* index of `tensor` by name, once the file is open or laid out */
    char *header;       /* header of a file to be written: data - 8 bytes */
    size_t unsynced;    /* bytes written since the last safetensors_sync */
    char *problem;      /* error of writing, with the file's name; NULL: none so far */
} SafeFile;

size_t safetensors_dtype_size(const char *dtype); /* bytes of an element; 0: unknown type */

/* Opens a file for reading and checks its format: header, types, shapes, that the tensors cover the
 * data without holes, and the file's length. */
SafeFile *safetensors_open(const char *path);
/* Takes the names of the tensors again, which were changed. */
void safetensors_renamed(SafeFile *f);
/* NULL if there is none */
const SafeTensor *safetensors_find(const SafeFile *f, const char *name);

/* The tensor of that name, or the first with that end of its name, in the first of `count` files
 * with it; tensor NULL: in none. */
typedef struct {
    const SafeFile *file;
    const SafeTensor *tensor;
} Found;
Found safetensors_find_in(SafeFile *const *file, int count, const char *name);
Found safetensors_find_ending(SafeFile *const *file, int count, const char *end);

/* For messages: "64 x 2 of BF16", malloc'ed. */
char *safetensors_shape(const SafeTensor *t);

/* at: in t */
void safetensors_read(const SafeFile *f, void *dst, const SafeTensor *t, size_t at, size_t bytes);

/* Bytes of F32 values, or of a copy, that are in memory at once where a tensor is read chunk by
 * chunk. Tests make it small, so that small tensors have several chunks. */
extern size_t safetensors_chunk;

/* Writing: describe all tensors, lay them out, create the file (one rank), then write any bytes
 * (all ranks). The layout depends only on the descriptions and their order: wider types first, so
 * every tensor is aligned. */
SafeFile *safetensors_new(const char *path);
void safetensors_add(SafeFile *f, const char *name, const char *dtype, int dims,
                     const size_t *shape);
void safetensors_lay_out(SafeFile *f);
/* header, and the full size; stays open for writing */
void safetensors_create(SafeFile *f);
bool safetensors_open_write(SafeFile *f); /* a file created by another rank */
bool safetensors_write(SafeFile *f, const SafeTensor *t, size_t at, const void *src, size_t bytes);
/* all data written through `f` is on disk when it returns */
bool safetensors_sync(SafeFile *f);

void safetensors_close(SafeFile *f); /* frees f */
