/* How Hugging Face's transformers name, cut and describe our units. */
#pragma once
#include <jansson.h>

#include "model/params.h"

/* A tensor of a Hugging Face folder: `rows` x `cols` consecutive elements of a unit's region from `first`. */
typedef struct {
    char   name[80];
    Region region;          /* of the unit, ...                                                                     */
    size_t first, rows, cols;      /* ... where these elements are counted                                          */
    bool   vector;          /* one-dimensional: (cols), rows = 1                                                    */
    size_t max_rows;        /* > rows for the embedding and the head: such a file holds the padding rows as well    */
} HfTensor;
enum { HF_TENSORS = 11 };   /* at most, per unit */

int hf_tensors(HfTensor out[HF_TENSORS], const ModelConfig *c, const UnitShape *shape, int unit);   /* their number */

/* "LlamaForCausalLM", "OlmoForCausalLM" or "Olmo2ForCausalLM". Dies if none of them computes what `c` says. */
const char *hf_class(const ModelConfig *c);

/* The contents of config.json; `master`: the type in which weights are saved. The caller owns it. */
json_t *hf_config(const ModelConfig *c, DType master);
