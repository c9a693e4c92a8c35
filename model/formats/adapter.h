/* Reads and writes PEFT's adapter_config.json, which describes the adapters of a folder and names
 * their base model. */
#pragma once
#include "model/shape/config.h"

/* Whether a folder has adapters: it has an adapter_config.json. */
bool adapter_is(const char *folder);

/* The folder of the base model that adapter_config.json names, malloc'ed. A relative path starts at
 * the current directory or, if the folder does not exist there, at `folder`. The caller checks that
 * the folder exists. NULL: the file names no base model. */
char *adapter_base(const char *folder);

/* Reads rank, alpha, use_rslora, target and, with images, projector of adapters of the model `m`;
 * other fields do not change. `dropout`: the dropout of the adapters' training. Dies on unsupported
 * settings (DoRA, ranks of single matrices, adapters in only some blocks, trained tensors other
 * than the projector); the message names the key and the value found. */
void adapter_read(Lora *l, double *dropout, const char *folder, const ModelConfig *m);

/* The module of this name, such as "q_proj" or "self_attn.q_proj"; NUM_LORA_MODULES: there is
 * none. */
LoraModule adapter_module(const char *name);
const char *adapter_module_name(LoraModule module); /* name of the module, such as "q_proj" */

/* The contents of adapter_config.json for the adapters of a run, as PEFT's save_pretrained writes
 * it; malloc'ed. */
char *adapter_config_text(const Config *c);

/* A text for messages: "adapters: rank 16 on all linear layers, scale 2, base in nf4";
 * malloc'ed. */
char *adapter_describe(const Config *c);
