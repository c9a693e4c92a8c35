/* PEFT's adapter_config.json, which says what the adapters of a folder are and which model they stand beside: read and written. */
#pragma once
#include "model/config.h"

/* Whether a folder holds adapters: it has an adapter_config.json. */
bool  adapter_is(const char *folder);

/* The folder of the base model that the file names: relative to the current directory or, if it is not there, to `folder`; whether
 * it exists is the caller's question. NULL: it names none. malloc'ed. */
char *adapter_base(const char *folder);

/* What the file says of adapters beside the model `m`: rank, alpha, use_rslora and target; the other fields stay. `dropout`: what
 * they were trained with. Dies on what is not computed here (DoRA, ranks of single matrices, adapters in some blocks alone, further
 * trained tensors), naming the key and what was found. */
void  adapter_read(Lora *l, double *dropout, const char *folder, const ModelConfig *m);

/* The module of that name, as "q_proj" or "self_attn.q_proj"; NUM_LORA_MODULES: there is none. */
LoraModule  adapter_module(const char *name);
const char *adapter_module_name(LoraModule module);        /* "q_proj" */

/* The contents of adapter_config.json for the adapters of a run, as PEFT's save_pretrained writes it; malloc'ed. */
char *adapter_config_text(const Config *c);

/* "adapters: rank 16 on all linear layers, scale 2, base in nf4", for people; malloc'ed. */
char *adapter_describe(const Config *c);
