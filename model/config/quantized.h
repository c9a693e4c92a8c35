/* Folders whose weights are quantized: what says so, and with what they are. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

/* Dies if config.json (`config`, of `folder`), or what other programs write next to it, says that weights are quantized in a way
 * that is not read here [checkpoint/coded_source.h]. */
void quantized_refuse(const json_t *config, const char *folder);

/* Dies if a tensor of this name and safetensors type, in the file at `path`, is a quantized weight or belongs to one; config.json
 * need not say so. */
void quantized_refuse_tensor(const char *path, const char *name, const char *dtype);

/* Whether bitsandbytes has stored that folder's matrices in 4 bits, by its config.json; *nested: whether their scales are quantized,
 * too, left as it is if not. */
bool quantized_in_4_bits(const char *folder, bool *nested);
