/* Finds the boundaries of documents in a file of tokens. Inside data/ only. */
#pragma once
#include "data/shard.h"

typedef void DocumentFn(void *arg, uint64_t start, uint64_t end);

/* Calls take(arg, start, end) for each document of the file, its tokens [start, end), in order;
 * none is empty. Documents end after each eos (-1: none) and at the end of the file. With
 * spec->metadata they are the rows of X.csv.gz next to X.npy, START,END[,...], as written by Dolma
 * and open-instruct; tokens between two rows are in no document. Dies if that file is missing,
 * damaged, or does not fit, naming file and line. */
void documents_each(const Shard *s, const DataSpec *spec, DocumentFn *take, void *arg);

/* For messages: the setting that makes documents of these data end after an eos. */
const char *documents_by_eos(const DataSpec *spec);

/* The tokens at which, by metadata, a document begins, or a range in no document. inside: number of
 * tokens in documents. */
typedef struct {
    uint64_t *at, count, inside;
} Begins;

Begins documents_begins(const Shard *s, const DataSpec *spec); /* the caller frees .at */

/* begins[t] = 1 at t = 0 and if token first + t is in b, else 0; t < T. */
void documents_mark(uint8_t *begins, const Begins *b, uint64_t first, int T);
