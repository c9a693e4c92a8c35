/* Folders with quantized weights: detection, and the method. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

/* Dies if config.json (`config`, of `folder`), or another program's file next to it, describes
 * quantized weights that cannot be read [checkpoint/coded_source.h]. */
void quantized_refuse(const json_t *config, const char *folder);

/* Dies if a tensor of this name and safetensors type, in the file at `path`, is a quantized weight
 * or belongs to one, whatever config.json says. */
void quantized_refuse_tensor(const char *path, const char *name, const char *dtype);

/* What the folder's settings say about the codes of some matrices. */
typedef struct {
    /* bits: bits of a code; 0: not given. There is one scale for each block of high outputs x wide
     * inputs. high 0: all outputs; wide 0: all inputs */
    json_int_t bits, high, wide;
    /* has_scales: the settings give high and wide. in_order: a group consists of consecutive
     * inputs, as without GPTQ's desc_act */
    bool has_scales, in_order;
} Coding;

/* Returns the codings of a folder, malloc'ed. *count: their number; -1 if the folder has no
 * quantization settings. */
Coding *quantized_codings(const char *folder, int *count);

/* Whether config.json says that bitsandbytes stored the folder's matrices in 4 bits. If so, sets
 * *nested to whether the scales are quantized, too; otherwise *nested does not change. */
bool quantized_in_4_bits(const char *folder, bool *nested);
