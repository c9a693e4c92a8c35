/* The files of a Hugging Face folder besides weights: tokenizer and settings for generation. A run
 * copies these files from the loaded folder, or from the configured tokenizer, to its checkpoints,
 * so that other programs can use the checkpoints directly. */
#pragma once
#include <jansson.h>

/* Reads the files from `folder`, from which the model is loaded, into memory: the folder may no
 * longer exist when the run saves. Files that a folder of adapters lacks are read from `base`, the
 * folder of their base; for a whole model, `base` is `folder`. Only rank 0 calls this. */
void tokenizer_files_read(const char *folder, const char *base);

/* Replaces the folder's tokenizer by the one at `path`: a folder with a tokenizer, a tokenizer.json
 * or a tokenizer.model. Dies if there is none, or if it has ids >= vocab_size. Only rank 0 calls
 * this. */
void tokenizer_files_replace(const char *path, int vocab_size);

/* Adds values of the loaded config.json that the configuration lacks: the first token, further
 * tokens that end a text, and the model's sequence length if it is larger than in training. config:
 * the result of hf_config. Adds the run's eos to the generation_config.json that will be written,
 * if programs would otherwise not stop at this eos. */
void tokenizer_files_complete_config(json_t *config);

/* For folders without a config.json, such as folders of adapters. If the run's eos differs from the
 * eos of the loaded model, creates a generation_config.json that lists the run's eos first. An
 * existing generation_config.json stays. */
void tokenizer_files_keep_eos(const json_t *config);

/* Writes the files into `folder`. Dies if the disk fails. */
void tokenizer_files_write(const char *folder);
