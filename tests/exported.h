/* Exports a checkpoint in one type, for tests. */
#pragma once
#include <string.h>

#include "model/export/export.h"

/* dtype: a word of --dtype, or its name in safetensors. */
static inline ExportOptions export_options_of(const char *source, const char *base,
                                              const char *target, const char *dtype)
{
    ExportOptions o = { .source = (char *)source,
                        .base_path = (char *)base,
                        .target = (char *)target,
                        .layout = NOT_GIVEN,
                        .block = NOT_GIVEN,
                        .group = NOT_GIVEN };
    while (strcasecmp(export_options_word("dtype", (int)o.dtype), dtype) != 0)
        o.dtype++;
    return o;
}

static inline void export_folder(const char *source, const char *base, const char *target,
                                 const char *dtype, size_t file_limit)
{
    const ExportOptions o = export_options_of(source, base, target, dtype);
    export_to(&o, file_limit);
}
