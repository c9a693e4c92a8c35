/* ./train --generate=PROMPTS: continuations of prompts by a loaded model. */
#pragma once
#include "model/shape/config.h"

/* All ranks call, with connected devices. Prints a line of JSON on stdout for each prompt, in
 * order: {"prompt": number from 0, "tokens": the new ones, "finish": "eos" (then the last token) or
 * "length"}; and on stderr the time per token. */
void generate(const Config *c);
