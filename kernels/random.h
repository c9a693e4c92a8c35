/* Counter-based random numbers: number i of a seed depends only on (seed, i). So any thread can
 * compute any number, a resumed run computes the same numbers, and both back ends compute the same
 * bits. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

/* An odd number near 2^64 / golden ratio. Its multiples, modulo 2^64, are spread evenly. */
#define RANDOM_GOLDEN UINT64_C(0x9e3779b97f4a7c15)

/* A bijection in which every input bit affects every output bit [Steele, Lea & Flood 2014,
 * SplitMix64]. */
HOST_DEVICE static inline uint64_t random_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Returns the sequence of a seed. The seed is mixed, so that seeds that differ by 1 give unrelated
 * sequences. */
HOST_DEVICE static inline uint64_t random_sequence(uint64_t seed)
{
    return random_mix(seed + RANDOM_GOLDEN);
}

/* Number i of a sequence, as 64 random bits. */
HOST_DEVICE static inline uint64_t random_bits_of(uint64_t sequence, uint64_t i)
{
    return random_mix(sequence ^ (i * RANDOM_GOLDEN));
}

/* Number i of a sequence, as 16 random bits. Four consecutive 16-bit numbers are the parts of one
 * 64-bit number. */
HOST_DEVICE static inline uint32_t random_16_of(uint64_t sequence, uint64_t i)
{
    return (uint32_t)(random_bits_of(sequence, i / 4) >> (16 * (i % 4))) & 0xffffu;
}

/* The two functions above, for a seed instead of its sequence. */
HOST_DEVICE static inline uint64_t random_bits(uint64_t seed, uint64_t i)
{
    return random_bits_of(random_sequence(seed), i);
}

HOST_DEVICE static inline uint32_t random_16(uint64_t seed, uint64_t i)
{
    return random_16_of(random_sequence(seed), i);
}

/* A number in [0, 1), a multiple of 2^-24. */
HOST_DEVICE static inline float random_unit(uint64_t seed, uint64_t i)
{
    return (float)(random_bits(seed, i) >> 40) * 0x1p-24f;
}

/* Returns a normal number with |z| <= cutoff (0: no cutoff), by Box-Muller from two 32-bit halves;
 * |z| < 6.77 always. A number above the cutoff is drawn again from another sequence. The cutoff
 * must be >= 0.01, so that 4096 draws suffice. NOTE: the arithmetic is in double, because log and
 * cos differ by an ulp between back ends. In double this difference almost never survives rounding
 * to float, or straddles the cutoff. */
HOST_DEVICE static inline double random_normal(uint64_t seed, uint64_t i, double cutoff)
{
    double z = 0;
    for (uint64_t attempt = 0; attempt < 4096; attempt++) {
        uint64_t bits = random_bits(seed ^ (attempt << 40), i);
        double u = ((double)(bits >> 32) + 0.5) * 0x1p-32,
               angle = (double)(bits & 0xffffffffu) * 0x1p-32;
        z = sqrt(-2 * log(u)) * cos(6.283185307179586 * angle);
        if (cutoff == 0 || fabs(z) <= cutoff)
            return z;
    }
    return 0;
}

/* Returns x as BF16 bits, rounded up with probability (x - lower neighbour) / spacing, so the mean
 * of the results is x. To this end it adds 16 uniform bits r to the 16 bits that are cut off; the
 * sum carries with probability (cut bits) / 2^16. Infinities do not change. NaN becomes 0x7fff. */
HOST_DEVICE static inline uint16_t bf16_round_stochastic(float x, uint32_t r)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7f800000u) == 0x7f800000u)
        return (uint16_t)(u & 0x7fffffu ? 0x7fffu : u >> 16);
    return (uint16_t)((u + r) >> 16);
}
