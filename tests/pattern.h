/* Bytes that depend only on (seed, their number): any range of these bytes can be made and checked
 * separately. The bytes are below 64, so that they are finite and not negative in every format;
 * weights and moments with other values would not be saved. */
#pragma once
#include <stdlib.h>
#include <string.h>

#include "kernels/random.h"
#include "kernels/runtime/device.h"

static inline unsigned char pattern_byte(uint64_t seed, size_t i)
{
    return (unsigned char)(random_bits(seed, i / 8) >> i % 8 * 8) & 63;
}

/* Sets device bytes [0, n) to the pattern's bytes from `first` on. */
static inline void pattern_put(void *device, uint64_t seed, size_t first, size_t n)
{
    unsigned char *host = malloc(n + 1);
    for (size_t i = 0; i < n; i++)
        host[i] = pattern_byte(seed, first + i);
    if (n)
        device_put(device, host, n);
    free(host);
}

/* Returns the index of the first of the device bytes [0, n) that differs from the pattern's bytes
 * from `first` on; n: none differs. */
static inline size_t pattern_check(const void *device, uint64_t seed, size_t first, size_t n)
{
    unsigned char *host = malloc(n + 1);
    size_t i = 0;
    if (n)
        device_get(host, device, n);
    while (i < n && host[i] == pattern_byte(seed, first + i))
        i++;
    free(host);
    return i;
}
