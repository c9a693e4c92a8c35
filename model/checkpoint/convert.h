/* Converts weights between F32 and the types of files: F32, BF16 and F16, by the names of
 * safetensors. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

bool convert_knows(const char *dtype);

/* Decodes n elements of type `from` at raw into x. Exact. */
void convert_decode(float *x, const char *from, const void *raw, size_t n);

/* Encodes x in type `to` into raw, rounded to nearest, ties to even; raw may be x. Returns the
 * index of the first element that is not finite in this type, or n if there is none. */
size_t convert_encode(void *raw, const char *to, const float *x, size_t n);
