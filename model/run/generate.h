/* ./train --generate=PROMPTS: continuations of prompts by a loaded model. */
#pragma once
#include "model/config.h"

/* All ranks call, with connected devices. Prints a line of JSON on stdout for each prompt, in their order: {"prompt": number from
 * 0, "tokens": the new ones, "finish": "eos", which is then their last, or "length"}; and on stderr how long a token took. */
void generate(const Config *c);
