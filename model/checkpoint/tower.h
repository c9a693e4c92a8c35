/* The vision tower of a model with images: tensors that the run neither computes with nor changes.
 * The run reads these tensors from the loaded folder and writes them to each checkpoint, with the
 * same names and the same bytes. */
#pragma once
#include <jansson.h>
#include <stdint.h>

#include "model/checkpoint/weight_files.h"

/* Whether the tensor of this name belongs to the tower. */
bool tower_owns(const char *name);

/* Opens the files with such tensors and keeps them open until the next call: the folder may no
 * longer exist when the run saves. */
void tower_read(const WeightFiles *s);

/* Whether the model has a tower. If so, the weights of a folder are several files, with an
 * index. */
bool tower_exists(void);

/* A hash of the tower: the sum of the hashes of its tensors, independent of files, their order and
 * their types; 0: there is no tower. The hash of a tensor is FNV-1a of its name without
 * "vision_tower." and "vision_model.", a zero, and 256 values each from its start, its middle and
 * its end in F32; scripts/make_image_features.py computes the same. */
uint64_t tower_fingerprint(const WeightFiles *s);

/* Writes the file of these tensors into `folder`, durably. Adds its name to map (tensor: file), its
 * size to files (file: bytes) and the tensors' checksums to sums; each of the three may be NULL.
 * Returns the size of the tensors in bytes. Without a tower, does nothing. */
size_t tower_write(const char *folder, json_t *map, json_t *files, json_t *sums);
