/* Finds the boundaries of documents in a file of tokens. Inside data/ only. */
#pragma once
#include "data/shard.h"

typedef void DocumentFn(void *arg, uint64_t start, uint64_t end);

/* Calls take(arg, start, end) for each document of the file, in order. The document is tokens
 * [start, end) of the file, and is not empty. A document ends after each eos (-1: there is no eos)
 * and at the end of the file. With spec->metadata, documents are instead the rows START,END[,...]
 * of X.csv.gz next to X.npy, as Dolma and open-instruct write them; tokens between two rows are in
 * no document. Dies with file and line if X.csv.gz is missing, damaged, or does not fit the
 * tokens. */
void documents_each(const Shard *s, const DataSpec *spec, DocumentFn *take, void *arg);

/* For messages: the setting that makes documents end after an eos. */
const char *documents_by_eos(const DataSpec *spec);

/* Boundaries by metadata. */
typedef struct {
    /* at: [count] tokens at which a document, or a range outside documents, begins. inside:
     * number of tokens that belong to a document */
    uint64_t *at, count, inside;
} Begins;

Begins documents_begins(const Shard *s, const DataSpec *spec); /* the caller frees .at */

/* begins[t] = 1 at t = 0 and if token first + t is a boundary of b, else 0; t < T. */
void documents_mark(uint8_t *begins, const Begins *b, uint64_t first, int T);
