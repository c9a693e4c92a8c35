/* ./train --generate=PROMPTS: continuations of prompts by a loaded model. */
#pragma once
#include "data/prompts.h"
#include "model/config.h"

/* prompts_read by rank 0, with room for a token behind each prompt in m->max_sequence_length; then all ranks have them. */
void prompts_share(Prompts *p, const char *path, const ModelConfig *m);

/* All ranks call, with connected devices. Prints a line of JSON on stdout for each prompt, in their order: {"prompt": number from 0,
 * "tokens": the new ones, "finish": "eos", which is then their last, or "length"}; and on stderr how long a token took. */
void generate(const Config *c);
