/* Overlays the buffers that all blocks and the head share: those that are never live at the same
 * time may share memory. lifetimes.h finds which are. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Members of Acts, BackwardScratch and Model (buffers.h); _T: data_t of FP8 operands; ATTENTION:
 * scratch. */
typedef enum {
    BUFFER_ATTN_RES,
    BUFFER_MLP_RES,
    BUFFER_ATTN_X,
    BUFFER_MLP_X,
    BUFFER_BRANCH,
    BUFFER_ATTN_STATS,
    BUFFER_MLP_STATS,
    BUFFER_ATTN_H,
    BUFFER_ATTN_H_T,
    BUFFER_MLP_H,
    BUFFER_MLP_H_T,
    BUFFER_QKV_RAW,
    BUFFER_QKV_SAVED,
    BUFFER_QKV_ROTATED,
    BUFFER_QK_STATS,
    BUFFER_ATTN_OUT,
    BUFFER_ATTN_SAVED,
    BUFFER_ATTN_OPERAND,
    BUFFER_ATTN_OPERAND_T,
    BUFFER_LSE,
    BUFFER_OWN_LSE,
    BUFFER_ATTENTION,
    BUFFER_GATE_UP_RAW,
    BUFFER_GATE_UP_SAVED,
    BUFFER_SWIGLU_OPERAND,
    BUFFER_SWIGLU_OPERAND_T,
    BUFFER_XA_QKV,
    BUFFER_XA_OUT,
    BUFFER_XA_GATE_UP,
    BUFFER_XA_DOWN,
    BUFFER_DRES,
    BUFFER_DY,
    BUFFER_DY_T,
    BUFFER_DH,
    BUFFER_DACT,
    BUFFER_DGATE_UP,
    BUFFER_DGATE_UP_T,
    BUFFER_DATT,
    BUFFER_DQKV,
    BUFFER_DQKV_OP,
    BUFFER_DQKV_OP_T,
    BUFFER_DXA,
    BUFFER_OWN,
    BUFFER_PARTIAL,
    BUFFER_EXCHANGED,
    BUFFER_QKV_HEADS,
    BUFFER_ATTN_OUT_HEADS,
    BUFFER_DATT_HEADS,
    BUFFER_DQKV_HEADS,
    BUFFER_FINAL_H,
    BUFFER_DOWN,
    BUFFER_LOGITS,
    BUFFER_DLOGITS,
    BUFFER_HEAD_H,
    BUFFER_HEAD_H_T,
    BUFFER_HEAD_W,
    BUFFER_IMAGE_RES,
    BUFFER_IMAGE_H,
    BUFFER_IMAGE_ACT,
    BUFFER_IMAGE_Y,
    NUM_BUFFERS
} Buffer;

/* A bit per buffer. */
typedef uint64_t BufferSet;
_Static_assert(NUM_BUFFERS <= 8 * sizeof(BufferSet), "a set has a bit for each buffer");

static inline BufferSet buffer_bit(Buffer b)
{
    return (BufferSet)1 << b;
}

/* bytes: 0: the buffer does not exist; at: its offset in the shared memory; meets: buffers that are
 * live at the same time, including itself. */
typedef struct {
    size_t bytes, at;
    BufferSet meets;
} OverlaidBuffer;

/* Places [NUM_BUFFERS] buffers so that those that meet do not overlap; returns the bytes of all.
 * least: a lower bound of these. */
size_t overlay_place(OverlaidBuffer *s, size_t least);
