/* The weights of a folder: a checkpoint of ours, or a folder of save_pretrained. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/safetensors.h"
#include "model/shape/config.h"

typedef struct {
    SafeFile **file;
    int count;
} WeightFiles;

/* Returns the manifest of a complete checkpoint, owned by the caller; NULL: the folder is no
 * checkpoint of ours. Dies if the checkpoint is incomplete. */
json_t *weight_files_manifest(const char *folder);

/* Opens model.safetensors, or the files of model.safetensors.index.json, with the checksums of a
 * checkpoint's manifest. Dies if there are no weights, or if a checkpoint is incomplete. */
WeightFiles weight_files_open(const char *folder);
/* As weight_files_open, for adapter_model.safetensors. */
WeightFiles weight_files_open_adapter(const char *folder);
/* As weight_files_open, for the optimizer files of a manifest. */
WeightFiles weight_files_open_optimizer(const char *folder, json_t *manifest);
void weight_files_close(WeightFiles *s);

/* Dies if weights are quantized in another format than those of coded_source.h, or not as the
 * folder's config.json says. */
void weight_files_refuse_quantized(const WeightFiles *s, const char *folder);

/* Whether a tensor that the model does not have can be ignored: old Llama folders have rotary
 * frequencies; some folders with a tied head repeat the embedding as a head. Dies if that head
 * differs from the embedding. All ranks must call this. */
bool weight_files_may_have(const WeightFiles *s, const char *name, const char *folder,
                           const ModelConfig *c);

/* Dies if an unknown tensor in a folder of adapters is the embedding, the head or an adapter of a
 * vision tower. */
void weight_files_refuse_adapter(const char *folder, const char *name);
