/* Files of soft labels: a header, a word for each token of the data in the order of the shards, and
 * the entries (distill.h). The names are soft-MODEL-RECIPE-DATA.bin, with the hashes of reference.h;
 * that of the recipe covers the settings of top_k. */
#pragma once
#include "data/loader.h"
#include "model/evaluate/evaluate.h"

typedef struct SoftWriter SoftWriter;

/* Starts this rank's part of a file in the folder, for the loader's data. */
SoftWriter *soft_writer_open(const Loader *l, const Config *c, const char *folder);
/* A ScoreSink: adds the columns that the model chose in a micro-batch. */
void soft_writer_put(void *writer, const Loader *l, const Batch *b, int first, const Model *m);
/* Joins the parts of all ranks. Returns the file's path; malloc'ed. All ranks must call this. */
char *soft_writer_close(SoftWriter *w);

/* Finds and checks the soft labels of distill.targets for the loader's data, and makes the loader
 * use their words. Returns their entries, which stay valid as long as the loader. Dies if there is
 * not exactly one such file, or if its vocabulary, temperature or number of entries does not fit.
 * All ranks must call this. */
const uint8_t *soft_labels_use(Loader *l, const Config *c);
