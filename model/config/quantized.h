/* Folders with quantized weights: detection, and the method. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

/* Dies if config.json (`config`, of `folder`), or another program's file next to it, describes
 * quantized weights of a kind that cannot be read [checkpoint/coded_source.h]. */
void quantized_refuse(const json_t *config, const char *folder);

/* Dies if a tensor of this name and safetensors type, in the file at `path`, is a quantized weight
 * or belongs to one, whatever config.json says. */
void quantized_refuse_tensor(const char *path, const char *name, const char *dtype);

/* Whether config.json says that bitsandbytes stored the folder's matrices in 4 bits. Then *nested:
 * whether their scales are quantized, too; otherwise *nested is unchanged. */
bool quantized_in_4_bits(const char *folder, bool *nested);
