/* Questions about texts that the C library has no function for. */
#pragma once
#include <stdbool.h>
#include <string.h>

static inline bool text_ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}
