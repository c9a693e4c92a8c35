/* data.mix: a list of sources of training data. */
#pragma once
#include "model/config/reader.h"

void data_mix_read(Reader *r);
void data_mix_free(Config *c);
void data_mix_print(FILE *f, const Config *c); /* the text after `mix:` */
