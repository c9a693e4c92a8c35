/* data.mix: a list of sources of training data. */
#pragma once
#include "model/config/reader.h"

void data_mixture_read(Reader *r);
void data_mixture_free(Config *c);
void data_mixture_print(FILE *f, const Config *c); /* prints the text after `mix:` */
