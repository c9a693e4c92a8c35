/* safetensors files: a JSON header, then named tensors. Several ranks may read and write a file at
 * once, at any offset. The functions that describe, create and read a file die on an error; the
 * message names the file and the tensor. The functions that open for writing, write and sync may
 * run in a thread: they call watchdog_beat as WORKER_SAVE; on an error they return false and set
 * `problem`. */
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
    uint32_t sum;      /* CRC-32C of the tensor's bytes */
} SafeTensor;

typedef struct {
    char *path;
    int fd;       /* -1: not open */
    size_t data;  /* file offset of the data: 8 + length of the header */
    size_t bytes; /* size of the data */
    int count;
    SafeTensor *tensor; /* [count], in the order of their bytes */
    NameIndex names;    /* index of `tensor` by name, once the file is open or laid out */
    char *header;       /* header of a file to be written. Length: `data` - 8 bytes */
    size_t unsynced;    /* bytes written since the last safetensors_sync */
    char *problem;      /* error while writing, with the file's name; NULL: none so far */
} SafeFile;

size_t safetensors_dtype_size(const char *dtype); /* bytes of an element; 0: unknown type */

/* Opens a file for reading and checks its format: header, types, shapes, and the file's length. The
 * tensors must cover the data without holes. */
SafeFile *safetensors_open(const char *path);
/* Builds the index of names again. Call it after changing names of tensors. */
void safetensors_renamed(SafeFile *f);
/* the tensor of this name; NULL: there is none */
const SafeTensor *safetensors_find(const SafeFile *f, const char *name);

/* The tensor of this name, or the first tensor whose name ends with `end`, in the first of `count`
 * files that has such a tensor; tensor NULL: no file has one. */
typedef struct {
    const SafeFile *file;
    const SafeTensor *tensor;
} Found;
Found safetensors_find_in(SafeFile *const *file, int count, const char *name);
Found safetensors_find_ending(SafeFile *const *file, int count, const char *end);

/* For messages: "64 x 2 of BF16", malloc'ed. */
char *safetensors_shape(const SafeTensor *t);

/* at: offset in t */
void safetensors_read(const SafeFile *f, void *dst, const SafeTensor *t, size_t at, size_t bytes);

/* Bytes of F32 values, or of a copy, that are in memory at once while a tensor is read chunk by
 * chunk. Tests make this number small, so that small tensors have several chunks. */
extern size_t safetensors_chunk;

/* To write a file: describe all tensors, lay them out, create the file (one rank), then write any
 * bytes (all ranks). The layout depends only on the descriptions and their order. Tensors of wider
 * types come first, so every tensor is aligned. */
SafeFile *safetensors_new(const char *path);
void safetensors_add(SafeFile *f, const char *name, const char *dtype, int dims,
                     const size_t *shape);
void safetensors_lay_out(SafeFile *f);
/* writes the header and extends the file to its full size; the file stays open for writing */
void safetensors_create(SafeFile *f);
bool safetensors_open_write(SafeFile *f); /* opens a file that another rank created */
bool safetensors_write(SafeFile *f, const SafeTensor *t, size_t at, const void *src, size_t bytes);
/* all data written through `f` is on disk when it returns */
bool safetensors_sync(SafeFile *f);

void safetensors_close(SafeFile *f); /* frees f */
