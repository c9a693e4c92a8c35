/* Weights in the types in which folders hold them: F32, BF16 and F16, named as safetensors does. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

bool convert_knows(const char *dtype);

/* x = n elements of type `from` at raw. Exact. */
void convert_decode(float *x, const char *from, const void *raw, size_t n);

/* raw = x in type `to`, to nearest, ties to even; raw may be x. Returns the number of the first element that is not finite in that
 * type, n if there is none. */
size_t convert_encode(void *raw, const char *to, const float *x, size_t n);
