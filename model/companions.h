/* What a Hugging Face folder holds beside the model: the tokenizer, settings for generation. A run that started from one
 * hands it on to its checkpoints, so that they can be used as they are. */
#pragma once

/* Reads them from `folder`, whose checkpoint or model is loaded, into memory: it may be gone when the run saves. Rank 0 acts. */
void companions_read (const char *folder);

/* Writes into `folder` what was read. Dies if the disk does not take it. */
void companions_write(const char *folder);
