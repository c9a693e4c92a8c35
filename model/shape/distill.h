/* Distillation: soft labels, which a teacher wrote, replace or complement the labels of the data.
 *
 * The soft labels of a token of the data are a word of 64 bits and entries of 6 bytes. Word: number
 * of the first entry (38 bits), number of entries (10), code of the tail (16); 0: none. Entry: id
 * (32), code of its probability (16). Little-endian. A code c stands for exp(-c / 2048), with a
 * relative error of 2^-12; 65535 stands for 0. */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef enum { DISTILL_NONE, DISTILL_FORWARD, DISTILL_REVERSE } DistillKind;

/* How --score chooses the entries of a token. */
typedef enum {
    CHOOSE_TOP,          /* the most likely ids, and a tail */
    CHOOSE_COUNTS,       /* drawn ids; a probability is count / draws */
    CHOOSE_PROBABILITIES /* drawn ids; probabilities are the teacher's, divided by their sum */
} EntryChoice;

/* Settings of a run (section `distill` of the configuration). */
typedef struct {
    DistillKind kind; /* DISTILL_NONE: no soft labels */
    double temperature;
    double ce_weight; /* the loss is ce_weight CE + (1 - ce_weight) temperature^2 KL */
    char *targets;    /* a folder of --score with top_k, or a file */
} Distill;

enum { SOFT_ENTRY = 6, SOFT_COUNT = 1023 };
#define SOFT_OFFSETS (UINT64_C(1) << 38)

static inline unsigned soft_code(double probability)
{
    const double code = probability > 0 ? -2048 * log(probability) : 65535;
    return code >= 65535 ? 65535 : code <= 0 ? 0 : (unsigned)lrint(code);
}

static inline float soft_probability(unsigned code)
{
    return code == 65535 ? 0 : expf((float)code * (-1 / 2048.0f));
}

static inline uint64_t soft_word(uint64_t first, int count, double tail)
{
    return first | (uint64_t)count << 38 | (uint64_t)soft_code(tail) << 48;
}

static inline uint64_t soft_first(uint64_t word)
{
    return word & (SOFT_OFFSETS - 1);
}

static inline int soft_count(uint64_t word)
{
    return (int)(word >> 38 & SOFT_COUNT);
}

static inline float soft_tail(uint64_t word)
{
    return soft_probability((unsigned)(word >> 48));
}

static inline void soft_put(uint8_t *entry, uint32_t id, double probability)
{
    const uint16_t code = (uint16_t)soft_code(probability);
    memcpy(entry, &id, sizeof id);
    memcpy(entry + sizeof id, &code, sizeof code);
}

static inline uint32_t soft_id(const uint8_t *entry, float *probability)
{
    uint32_t id;
    uint16_t code;
    memcpy(&id, entry, sizeof id);
    memcpy(&code, entry + sizeof id, sizeof code);
    *probability = soft_probability(code);
    return id;
}
