/* PEFT's adapter_config.json, which says what the adapters of a folder are and which model they stand beside: read and written. */
#pragma once
#include "model/config.h"

/* Whether a folder holds adapters: it has an adapter_config.json. */
bool  adapter_is(const char *folder);

/* What folder/adapter_config.json says: all of `l` but base, which that file does not know. base_path: as it is written there, NULL if it is null.
 * Dies on what is not computed here (DoRA, ranks or layers of their own, trained biases and modules) and on what is no such file,
 * naming the key. `n_layers`: of the base model. `dropout`: what training had. malloc'ed: base_path. */
void  adapter_read(Lora *l, double *dropout, const char *folder, int n_layers);

/* The contents of adapter_config.json for the adapters of a run, as PEFT's save_pretrained writes it; malloc'ed. */
char *adapter_config_text(const Config *c);

/* "adapters of rank 16 on all linear layers, scale 2, base nf4", for people; malloc'ed. */
char *adapter_describe(const Lora *l);
