/* What a Hugging Face folder holds beside the model: the tokenizer, settings for generation. A run that started from one
 * hands it on to its checkpoints, so that they can be used as they are; so does a run whose configuration names a tokenizer. */
#pragma once
#include <jansson.h>

/* Reads them from `folder`, whose checkpoint or model is loaded, into memory: it may be gone when the run saves. Of adapters, what
 * that does not hold is `base`'s, the folder of their base; of a model both are the same. Rank 0 acts. */
void companions_read (const char *folder, const char *base);

/* Takes the tokenizer at `path` instead of that of any folder: a folder that holds one, a tokenizer.json or a tokenizer.model.
 * Dies if there is none, or if it has ids that a model of `vocab_size` tokens does not know. Rank 0 acts. */
void companions_take_tokenizer(const char *path, int vocab_size);

/* What training does not change and the configuration does not say: the first token, further tokens that end a text, and the
 * length of texts that the loaded model knows, if it is more than that of the training. config: ours, see hf_config. Its eos
 * joins those of the generation_config.json to write, where programs would not stop at it otherwise. */
void companions_complete(json_t *config);

/* Where such a config.json is not written, as beside adapters: its eos, if the loaded model's is another one, goes into a
 * generation_config.json, unless there is one. */
void companions_keep_eos(const json_t *config);

/* Writes into `folder` what was read. Dies if the disk does not take it. */
void companions_write(const char *folder);
