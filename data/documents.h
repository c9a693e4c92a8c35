/* Where the documents of a file of tokens begin and end. Inside data/ only. */
#pragma once
#include "data/shard.h"

typedef void DocumentFn(void *who, uint64_t start, uint64_t end);

/* take(who, start, end) for each document of the file, its tokens [start, end), in order; none is empty. It ends behind each eos
 * (-1: none) and at the end of the file, or, if spec->metadata, where the rows of the file beside it say: START,END[,...] in
 * X.csv.gz for X.npy, as Dolma and open-instruct write them. Tokens between two rows are in no document. Dies if that file is
 * missing, damaged, or no description of this one: with its name and line. */
void documents_each(const Shard *s, const DataSpec *spec, DocumentFn *take, void *who);

/* The setting that lets the documents of these data end behind an eos, for messages. */
const char *documents_by_eos(const DataSpec *spec);

/* Where the metadata of a file say that something begins: a document, or tokens that are in none. inside: tokens in documents. */
typedef struct { uint64_t *at, count, inside; } Begins;

Begins documents_begins(const Shard *s, const DataSpec *spec);       /* at is malloc'ed */

/* begins[t] = 1 at t = 0 and where something begins at token first + t, else 0; t < T. */
void documents_mark(uint8_t *begins, const Begins *b, uint64_t first, int T);
