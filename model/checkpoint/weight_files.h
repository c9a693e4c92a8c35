/* The weights of a folder: our checkpoint, or one written by save_pretrained. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/safetensors.h"
#include "model/shape/config.h"

typedef struct {
    SafeFile **file;
    int count;
} WeightFiles;

/* The manifest of a complete checkpoint, owned by the caller; NULL: not our checkpoint. Dies if the
 * checkpoint is incomplete. */
json_t *weight_files_manifest(const char *folder);

/* Opens model.safetensors, or the files of model.safetensors.index.json, with the checksums of a
 * checkpoint's manifest. Dies if there are no weights, or if a checkpoint is incomplete. adapter:
 * the same for adapter_model.safetensors. optimizer: for the optimizer files of a manifest. */
WeightFiles weight_files_open(const char *folder);
WeightFiles weight_files_open_adapter(const char *folder);
WeightFiles weight_files_open_optimizer(const char *folder, json_t *manifest);
void weight_files_close(WeightFiles *s);

/* Dies if weights are quantized, except in the formats of coded_source.h, and as the config.json of
 * the folder says. */
void weight_files_refuse_quantized(const WeightFiles *s, const char *folder);

/* Whether a tensor that the model does not have can be ignored: old Llama folders have rotary
 * frequencies; some with a tied head repeat the embedding as a head. Dies if that head is another
 * matrix; all ranks call. */
bool weight_files_may_have(const WeightFiles *s, const char *name, const char *folder,
                           const ModelConfig *c);

/* Dies if an unknown tensor in a folder of adapters is the embedding, the head or an adapter of a
 * vision tower. */
void weight_files_refuse_adapter(const char *folder, const char *name);
