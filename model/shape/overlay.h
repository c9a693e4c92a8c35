/* Overlays the buffers that all blocks and the head share: buffers that are never live at the same
 * time may use the same memory. lifetimes.h finds which buffers are live at the same time. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/shape/activations.h"

/* Names of buffers that blocks share: of each tensor, of the transpose of an FP8 operand (_T), of
 * floats, and of attention's scratch memory. */
#define BUFFER_PAIR(name, ...) BUFFER_##name, BUFFER_##name##_T,
#define BUFFER_ONE(name) BUFFER_##name,
typedef enum {
    BLOCK_TENSORS(BUFFER_PAIR) BLOCK_FLOATS(BUFFER_ONE) BUFFER_attention,
    WORK_TENSORS(BUFFER_PAIR) OTHER_TENSORS(BUFFER_PAIR) NUM_BUFFERS
} Buffer;
#undef BUFFER_PAIR
#undef BUFFER_ONE

const char *buffer_name(Buffer b); /* the buffer's name in messages */

/* A set of buffers: one bit per buffer. */
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

typedef struct {
    /* bytes: size; 0: the buffer does not exist. at: offset in the shared memory */
    size_t bytes, at;
    BufferSet meets; /* the buffers that are live at the same time, including this one */
} OverlaidBuffer;

/* Places [NUM_BUFFERS] buffers so that buffers that are live at the same time do not overlap.
 * Returns the total size in bytes. least: a lower bound of this size. */
size_t overlay_place(OverlaidBuffer *s, size_t least);
