/* The weights that a folder holds: a checkpoint of ours, or what save_pretrained wrote. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/safetensors.h"
#include "model/config.h"

typedef struct { SafeFile **file; int count; } Source;

/* The manifest of a complete checkpoint, which the caller owns; NULL: the folder is none of ours. Dies if it is one, but
 * incomplete. */
json_t *source_manifest(const char *folder);

/* Opens model.safetensors, or the files of model.safetensors.index.json, with the checksums that the manifest of a checkpoint
 * lists. Dies if there are no weights, or if it is a checkpoint that is not complete. adapter: the same of
 * adapter_model.safetensors. optimizer: of the optimizer files of a manifest. */
Source source_open          (const char *folder);
Source source_open_adapter  (const char *folder);
Source source_open_optimizer(const char *folder, json_t *manifest);
void   source_close         (Source *s);

/* Dies if weights are quantized, unless as coded_source.h says. */
void   source_refuse_quantized(const Source *s);

/* Whether a tensor that the model has no place for is known to be of no use: old Llama folders hold the rotary frequencies; some
 * tied ones repeat the embedding as a head. Dies if that head is another matrix; all ranks call. */
bool   source_may_have(const Source *s, const char *name, const char *folder, const ModelConfig *c);

/* Dies if a tensor in a folder of adapters, which has no place among these, is the embedding or the head. */
void   source_refuse_embedding(const char *folder, const char *name);
