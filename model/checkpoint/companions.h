/* What a Hugging Face folder holds beside the model: the tokenizer, settings for generation. A run that started from one
 * hands it on to its checkpoints, so that they can be used as they are. */
#pragma once
#include <jansson.h>

/* Reads them from `folder`, whose checkpoint or model is loaded, into memory: it may be gone when the run saves. Rank 0 acts. */
void companions_read (const char *folder);

/* What training does not change and the configuration does not say: the first token, further tokens that end a text, and the
 * length of texts that the loaded model knows, if it is more than that of the training. config: ours, see hf_config. */
void companions_complete(json_t *config);

/* Writes into `folder` what was read. Dies if the disk does not take it. */
void companions_write(const char *folder);
