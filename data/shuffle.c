/* numpy.random.Generator(PCG64(seed)).shuffle(arange(n, dtype=uint32)), bit for bit: OLMo's order
 * of the data.
 *
 * It has three parts, each as numpy defines it:
 * - SeedSequence hashes the seed into the generator's 256 initial bits (M. E. O'Neill's
 *   seed_seq_fe).
 * - PCG64 is a 128-bit linear congruential generator with the XSL-RR output function (O'Neill,
 *   "PCG", 2014). Its 32-bit numbers are the low and then the high half of each 64-bit number.
 * - Fisher-Yates from the end. Indices are drawn by masking and rejection, not by Lemire's
 *   multiplication as in other functions of numpy. */
#include "data/shuffle.h"

typedef unsigned __int128 Uint128;

typedef struct {
    Uint128 state, increment;
    uint32_t high; /* second half of the last 64-bit number */
    bool has_high;
} Pcg64;

static uint32_t seed_hash(uint32_t value, uint32_t *constant, uint32_t multiplier)
{
    value ^= *constant;
    *constant *= multiplier;
    value *= *constant;
    return value ^ value >> 16;
}

static uint32_t seed_mix(uint32_t x, uint32_t y)
{
    uint32_t z = 0xca01f9ddu * x - 0x4973f715u * y;
    return z ^ z >> 16;
}

/* SeedSequence(seed).generate_state(4, uint64). A seed below 2^64 fills two of the four words of
 * the pool. */
static void seed_sequence(uint64_t out[4], uint64_t seed)
{
    uint32_t pool[4] = { (uint32_t)seed, (uint32_t)(seed >> 32), 0, 0 };
    uint32_t constant = 0x43b0d7e5u;
    for (int i = 0; i < 4; i++)
        pool[i] = seed_hash(pool[i], &constant, 0x931e8875u);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (i != j)
                pool[j] = seed_mix(pool[j], seed_hash(pool[i], &constant, 0x931e8875u));

    constant = 0x8b51f9ddu;
    for (int i = 0; i < 4; i++) {
        uint64_t low = seed_hash(pool[2 * i % 4], &constant, 0x58f38dedu);
        uint64_t high = seed_hash(pool[(2 * i + 1) % 4], &constant, 0x58f38dedu);
        out[i] = low | high << 32;
    }
}

static void pcg64_step(Pcg64 *g)
{
    const Uint128 multiplier = (Uint128)0x2360ed051fc65da4ull << 64 | 0x4385df649fccf645ull;
    g->state = g->state * multiplier + g->increment;
}

static Pcg64 pcg64_start(uint64_t seed)
{
    uint64_t s[4];
    seed_sequence(s, seed);
    Pcg64 g = { .state = 0, .increment = ((Uint128)s[2] << 64 | s[3]) << 1 | 1 };
    pcg64_step(&g);
    g.state += (Uint128)s[0] << 64 | s[1];
    pcg64_step(&g);
    return g;
}

static inline uint32_t pcg64_next32(Pcg64 *g)
{
    if (g->has_high) {
        g->has_high = false;
        return g->high;
    }
    pcg64_step(g);
    uint64_t folded = (uint64_t)(g->state >> 64) ^ (uint64_t)g->state;
    int rotation = (int)(g->state >> 122);
    uint64_t x = folded >> rotation | folded << (-rotation & 63);
    g->high = (uint32_t)(x >> 32);
    g->has_high = true;
    return (uint32_t)x;
}

/* index: n entries, n <= 2^32. A block of indices is drawn before its swaps, because draws do not
 * depend on the entries. Meanwhile the entries are prefetched: for a large n they are not in a
 * cache. */
bool numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *arg), void *arg)
{
    enum { BLOCK = 64, ASK = 1 << 18 }; /* numbers of entries */
    for (uint64_t i = 0; i < n; i++) {
        index[i] = (uint32_t)i;
        if (go_on && i % ASK == 0 && !go_on(arg))
            return false;
    }
    if (n < 2)
        return true;

    Pcg64 g = pcg64_start(seed);
    uint32_t draw[BLOCK], mask = UINT32_MAX;
    uint64_t asked = n;
    for (uint64_t top = n - 1; top > 0;) {
        int count = top < BLOCK ? (int)top : BLOCK;
        for (int b = 0; b < count;) {
            uint32_t i = (uint32_t)(top - b);
            while (mask >> 1 >= i) /* the smallest 2^k - 1 that is >= i */
                mask >>= 1;
            draw[b] = pcg64_next32(&g) & mask;
            /* a rejected draw is overwritten: this avoids a branch that cannot be predicted */
            b += draw[b] <= i;
        }
        for (int b = 0; b < count; b++)
            __builtin_prefetch(&index[draw[b]], 1);
        for (int b = 0; b < count; b++) {
            uint32_t x = index[top - b];
            index[top - b] = index[draw[b]];
            index[draw[b]] = x;
        }
        top -= count;
        if (go_on && asked - top >= ASK) {
            asked = top;
            if (!go_on(arg))
                return false;
        }
    }
    return true;
}
