/* ./train --generate=PROMPTS: continues prompts with a loaded model. */
#pragma once
#include "model/shape/config.h"

/* All ranks must call this, with connected devices. Prints a line of JSON on stdout for each
 * prompt, in order: {"prompt": number from 0, "tokens": the new tokens, "finish": "eos" (the eos is
 * then the last token) or "length"}. Prints the time per token on stderr. */
void generate(const Config *c);
