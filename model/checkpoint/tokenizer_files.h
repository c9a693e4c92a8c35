/* The other files of a Hugging Face folder: tokenizer and settings for generation. A run copies
 * them from the loaded folder, or from the configured tokenizer, to its checkpoints, so that other
 * programs can use these directly. */
#pragma once
#include <jansson.h>

/* Reads them from `folder`, from which the model is loaded, into memory: it may not exist any more
 * when the run saves. Files that a folder of adapters lacks are read from `base`, the folder of
 * their base; for a model both are the same. Rank 0 acts. */
void tokenizer_files_read(const char *folder, const char *base);

/* Uses the tokenizer at `path` instead of that of the folder: a folder with one, a tokenizer.json
 * or a tokenizer.model. Dies if there is none, or if it has ids >= vocab_size. Rank 0 acts. */
void tokenizer_files_replace(const char *path, int vocab_size);

/* Adds values of the loaded config.json that are not in the configuration: the first token, further
 * tokens that end a text, and the model's sequence length if it is larger than that of training.
 * config: the one of hf_config. Adds its eos to those of the generation_config.json to write, where
 * programs would not stop at it otherwise. */
void tokenizer_files_complete_config(json_t *config);

/* For folders without a config.json, as those of adapters: if the eos differs from the loaded
 * model's, creates a generation_config.json with it, unless there is one. */
void tokenizer_files_keep_eos(const json_t *config);

/* Writes the files into `folder`. Dies if the disk fails. */
void tokenizer_files_write(const char *folder);
