/* Stored log-probabilities of the labels of a data set, as float32 files in a folder: one number for
 * each token of the data, in the order of the shards; 0: the token is no label, or not in the packed
 * sequences. The names are logps-MODEL-RECIPE-DATA.f32, with a hash of the loaded weights, of the
 * formats of the forward pass and the temperature, and of the packed data. */
#pragma once
#include "data/loader.h"
#include "model/shape/config.h"

/* Hashes of the weights of load_path, of the formats of the forward pass, and of the data. */
typedef struct {
    uint64_t model, recipe, data;
} ReferenceHashes;
ReferenceHashes reference_hashes(const Loader *l, const Config *c);

/* preference.reference, or the folder `reference` in save_folder; with --score its folder.
 * malloc'ed. */
char *reference_folder(const Config *c);
/* The path of the file for the model of load_path and the loader's data; malloc'ed. */
char *reference_path(const Loader *l, const Config *c, const char *folder);

/* Maps the file with the log-probabilities of the loader's data and makes the loader use them.
 * The file must belong to the model in load_path. If not `exact`, and there is no such file, the
 * only file for this recipe and these data is used, whatever its model: the model with which the
 * run began may no longer exist. Returns false if no file is found. All ranks must call this. */
bool reference_use(Loader *l, const Config *c, const char *folder, bool exact);

/* Dies with a message that names the expected file and the files in the folder. */
_Noreturn void reference_missing(const Loader *l, const Config *c, const char *folder);
