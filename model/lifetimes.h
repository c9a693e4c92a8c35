/* Which of the buffers that all blocks share hold something at the same time: those that never do share memory too.
 *
 * A micro-batch goes through phases. In each an operation, or a few, read and write buffers: all that one of them touches, or that
 * a later one still reads, is alive in that phase. The table in lifetimes.c says which; who changes block.c changes it too. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* FORWARD_ and BACK_ are those of block_forward and block_backward, in this order; the head's comes between two blocks' or, where
 * backward runs a block's forward again, in front of it. */
typedef enum {
    PHASE_HEAD,
    FORWARD_QKV,            /* norm, first GEMM                                            */
    FORWARD_ATTEND,         /* rope, attention                                             */
    FORWARD_OUT,            /* second GEMM                                                 */
    FORWARD_GATE_UP,        /* norm, third GEMM, SwiGLU                                    */
    FORWARD_DOWN,           /* fourth GEMM                                                 */
    BACK_DOWN,              /* dact, dgate_up                                              */
    BACK_DOWN_DW,
    BACK_GATE_UP,           /* dh, and dres from it                                        */
    BACK_GATE_UP_DW,
    BACK_OUT,               /* what attention's backward reads, datt and the gradient of W */
    BACK_ATTEND,            /* dqkv                                                        */
    BACK_ROPE,              /* dqkv_op                                                     */
    BACK_QKV,               /* dh, and dres from it                                        */
    BACK_QKV_DW,
    NUM_PHASES
} Phase;

/* Members of Acts, Work and Model (buffers.h); _T: data_t of FP8 operands; ATTENTION: scratch. */
typedef enum {
    BUFFER_RES0, BUFFER_RES1, BUFFER_X0, BUFFER_X1, BUFFER_BRANCH, BUFFER_STATS0, BUFFER_STATS1, BUFFER_H0, BUFFER_H0_T,
    BUFFER_H1, BUFFER_H1_T, BUFFER_PROJ, BUFFER_QKV, BUFFER_ROT, BUFFER_QK_STATS, BUFFER_MIX, BUFFER_ATT, BUFFER_ATT_OP,
    BUFFER_ATT_OP_T, BUFFER_LSE, BUFFER_ATTENTION, BUFFER_WIDE, BUFFER_GATE_UP, BUFFER_ACT, BUFFER_ACT_T, BUFFER_LOW_QKV,
    BUFFER_LOW_OUT, BUFFER_LOW_GATE_UP, BUFFER_LOW_DOWN, BUFFER_DRES, BUFFER_DY, BUFFER_DY_T, BUFFER_DH, BUFFER_DACT,
    BUFFER_DGATE_UP, BUFFER_DGATE_UP_T, BUFFER_DATT, BUFFER_DQKV, BUFFER_DQKV_OP, BUFFER_DQKV_OP_T, BUFFER_DLOW, BUFFER_FINAL_H,
    BUFFER_LOGITS, BUFFER_DLOGITS, BUFFER_HEAD_H, BUFFER_HEAD_H_T, BUFFER_HEAD_W, NUM_BUFFERS
} Buffer;

/* direct: the gradients of weights read the operand itself, not a transposed copy. again: backward runs a block's forward again.
 * forward_only: there is no backward. observed: what forward leaves is looked at behind each block. */
typedef struct { bool direct, again, forward_only, observed; } BufferUse;

/* bytes: 0 where there is no such buffer; alive: a bit per phase; at: where it begins, from the start of what all share. */
typedef struct { size_t bytes, at; unsigned alive; } SharedBuffer;

unsigned buffer_alive(Buffer b, BufferUse u);

/* Lays [NUM_BUFFERS] buffers over each other where they are never alive together; returns the bytes of all. */
size_t   buffers_place(SharedBuffer *s);
