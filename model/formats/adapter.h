/* PEFT's adapter_config.json, read and written. It describes the adapters of a folder and names
 * their base model. */
#pragma once
#include "model/shape/config.h"

/* Whether a folder holds adapters: it has an adapter_config.json. */
bool adapter_is(const char *folder);

/* The folder of the base model that the file names, relative to the current directory or, if it is
 * not there, to `folder`. The caller checks that it exists. NULL: the file names none.
 * malloc'ed. */
char *adapter_base(const char *folder);

/* Reads rank, alpha, use_rslora, target and, with images, projector of adapters of the model `m`;
 * other fields are unchanged. `dropout`: that of their training. Dies on unsupported settings
 * (DoRA, ranks of single matrices, adapters in only some blocks, further trained tensors but the
 * projector), naming the key and the value found. */
void adapter_read(Lora *l, double *dropout, const char *folder, const ModelConfig *m);

/* The module of that name, such as "q_proj" or "self_attn.q_proj"; NUM_LORA_MODULES: there is
 * none. */
LoraModule adapter_module(const char *name);
const char *adapter_module_name(LoraModule module); /* "q_proj" */

/* The contents of adapter_config.json for the adapters of a run, as PEFT's save_pretrained writes
 * it; malloc'ed. */
char *adapter_config_text(const Config *c);

/* "adapters: rank 16 on all linear layers, scale 2, base in nf4", for people; malloc'ed. */
char *adapter_describe(const Config *c);
