/* Overlays the buffers that all blocks and the head share: those that are never live at the same
 * time may share memory. lifetimes.h finds which are. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/shape/activations.h"

/* Memory that blocks share: of each tensor, of the transpose of an FP8 operand (_T), of floats, and
 * of attention's scratch. */
#define BUFFER_PAIR(name, ...) BUFFER_##name, BUFFER_##name##_T,
#define BUFFER_ONE(name) BUFFER_##name,
typedef enum {
    BLOCK_TENSORS(BUFFER_PAIR) BLOCK_FLOATS(BUFFER_ONE) BUFFER_attention,
    WORK_TENSORS(BUFFER_PAIR) OTHER_TENSORS(BUFFER_PAIR) NUM_BUFFERS
} Buffer;
#undef BUFFER_PAIR
#undef BUFFER_ONE

const char *buffer_name(Buffer b); /* in messages */

/* A bit per buffer. */
enum { BUFFER_WORDS = (NUM_BUFFERS + 63) / 64 };
typedef struct {
    uint64_t word[BUFFER_WORDS];
} BufferSet;

static inline bool buffers_have(const BufferSet *s, Buffer b)
{
    return s->word[b / 64] >> b % 64 & 1;
}

static inline void buffers_set(BufferSet *s, Buffer b, bool is_in)
{
    s->word[b / 64] = (s->word[b / 64] & ~((uint64_t)1 << b % 64)) | (uint64_t)is_in << b % 64;
}

static inline void buffers_add(BufferSet *s, const BufferSet *more)
{
    for (int i = 0; i < BUFFER_WORDS; i++)
        s->word[i] |= more->word[i];
}

/* bytes: 0: the buffer does not exist; at: its offset in the shared memory; meets: buffers that are
 * live at the same time, including itself. */
typedef struct {
    size_t bytes, at;
    BufferSet meets;
} OverlaidBuffer;

/* Places [NUM_BUFFERS] buffers so that buffers that are live together do not overlap. Returns the
 * bytes that they take in all. least: a lower bound of this number. */
size_t overlay_place(OverlaidBuffer *s, size_t least);
