/* Checks of models with images, after model, adapters and optimizer. */
#pragma once
#include "model/config/reader.h"

void check_images(Reader *r);
void check_images_data(Reader *r);
void check_images_files(const Config *c, const TokenFiles *f, const char *where, const char *prefix,
                        bool questions);
