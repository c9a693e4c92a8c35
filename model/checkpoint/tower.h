/* The vision tower of a model with images: tensors that the run neither computes with nor changes.
 * It reads them from the loaded folder and writes them to each checkpoint, under the same names,
 * byte for byte. */
#pragma once
#include <jansson.h>
#include <stdint.h>

#include "model/checkpoint/weight_files.h"

/* Whether a tensor of that name is one of the tower. */
bool tower_owns(const char *name);

/* Keeps the files with such tensors open until the next call: the folder may not exist any more
 * when the run saves. */
void tower_read(const WeightFiles *s);

/* Whether there are any. Then the weights of a folder are several files, with an index. */
bool tower_exists(void);

/* A hash of the tower's tensors: the sum of those of each, independent of files, their order and
 * their types; 0: there is no tower. FNV-1a of a tensor's name without "vision_tower." and
 * "vision_model.", a zero, and 256 values each from its start, its middle and its end in F32;
 * scripts/make_image_features.py computes the same. */
uint64_t tower_fingerprint(const WeightFiles *s);

/* Writes the file of these tensors into `folder`, durable, and adds its name to map (tensor: file),
 * its bytes to files (file: bytes) and the tensors' checksums to sums; each may be NULL. Returns
 * the bytes of the tensors. Nothing without tower_exists. */
size_t tower_write(const char *folder, json_t *map, json_t *files, json_t *sums);
