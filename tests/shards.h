/* Writes files of tokens and masks for tests. Include cmocka.h before this header. */
#pragma once
#include <stddef.h>
#include <stdio.h>

static inline void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}
