/* The weights that a folder holds: a checkpoint of ours, or what save_pretrained wrote. */
#pragma once
#include "model/checkpoint/safetensors.h"
#include "model/config.h"

typedef struct { SafeFile **file; int count; } Source;

/* Opens model.safetensors, or the files of model.safetensors.index.json, with the checksums that the manifest of a checkpoint
 * lists. Dies if there are no weights, or if it is a checkpoint that is not complete. */
Source source_open (const char *folder);
void   source_close(Source *s);

/* Whether a tensor that the model has no place for is known to be of no use: old Llama folders hold the rotary frequencies; some
 * tied ones repeat the embedding as a head. */
bool   source_may_have(const char *name, const char *folder, const ModelConfig *c);
