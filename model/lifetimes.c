/* The table of lifetimes, and the placement that follows from it. */
#include "model/lifetimes.h"

#include <stdint.h>
#include <string.h>

#define AT(p)       (1u << (p))
#define FROM(p, q)  ((AT(q) << 1) - AT(p))      /* the phases p to q */

enum { ALL_FORWARD = FROM(FORWARD_QKV, FORWARD_DOWN), ALL_BACK = FROM(BACK_DOWN, BACK_QKV_DW) };

/* always: in which phases a buffer is alive in any case. direct, again: in which ones besides, if its use is such (BufferUse), the
 * last only of what is read directly. A transposed copy is: backward makes it, unless that is left to a forward run again. */
static const struct { unsigned always, direct, again; } life[NUM_BUFFERS] = {
    [BUFFER_RES0]       = { ALL_FORWARD | AT(PHASE_HEAD), 0, 0 },
    [BUFFER_RES1]       = { FROM(FORWARD_OUT, FORWARD_DOWN), 0, FROM(FORWARD_OUT, BACK_GATE_UP_DW) },
    [BUFFER_X0]         = { FROM(FORWARD_QKV, FORWARD_OUT), 0, FROM(FORWARD_QKV, BACK_QKV_DW) },
    [BUFFER_X1]         = { FROM(FORWARD_GATE_UP, FORWARD_DOWN), 0, FROM(FORWARD_GATE_UP, BACK_GATE_UP_DW) },
    [BUFFER_BRANCH]     = { AT(FORWARD_OUT) | AT(FORWARD_DOWN), 0, 0 },
    [BUFFER_STATS0]     = { FROM(FORWARD_QKV, FORWARD_OUT), 0, FROM(FORWARD_QKV, BACK_QKV_DW) },
    [BUFFER_STATS1]     = { FROM(FORWARD_GATE_UP, FORWARD_DOWN), 0, FROM(FORWARD_GATE_UP, BACK_GATE_UP_DW) },
    [BUFFER_H0]         = { AT(FORWARD_QKV) | AT(FORWARD_GATE_UP), AT(BACK_GATE_UP_DW) | AT(BACK_QKV_DW),  /* may be h1 */
                            FROM(FORWARD_QKV, BACK_QKV_DW) },
    [BUFFER_H0_T]       = { AT(BACK_GATE_UP_DW) | AT(BACK_QKV_DW), 0, FROM(FORWARD_QKV, BACK_QKV_DW) },
    [BUFFER_H1]         = { AT(FORWARD_GATE_UP), AT(BACK_GATE_UP_DW), FROM(FORWARD_GATE_UP, BACK_GATE_UP_DW) },
    [BUFFER_H1_T]       = { AT(BACK_GATE_UP_DW), 0, FROM(FORWARD_GATE_UP, BACK_GATE_UP_DW) },
    [BUFFER_PROJ]       = { FROM(FORWARD_QKV, FORWARD_ATTEND) | FROM(BACK_OUT, BACK_ATTEND), 0, 0 },        /* may be rot */
    [BUFFER_QKV]        = { FROM(FORWARD_QKV, FORWARD_ATTEND), 0, FROM(FORWARD_QKV, BACK_ROPE) },
    [BUFFER_ROT]        = { AT(FORWARD_ATTEND) | FROM(BACK_OUT, BACK_ATTEND), 0, 0 },
    [BUFFER_QK_STATS]   = { AT(FORWARD_ATTEND), 0, FROM(FORWARD_ATTEND, BACK_ROPE) },
    [BUFFER_MIX]        = { FROM(FORWARD_ATTEND, FORWARD_OUT) | FROM(BACK_OUT, BACK_ATTEND), 0, 0 },        /* may be att_op */
    [BUFFER_ATT]        = { FROM(FORWARD_ATTEND, FORWARD_OUT), 0, FROM(FORWARD_ATTEND, BACK_ATTEND) },      /* may be mix */
    [BUFFER_ATT_OP]     = { AT(FORWARD_OUT), 0, 0 },
    [BUFFER_ATT_OP_T]   = { AT(BACK_OUT), 0, 0 },
    [BUFFER_LSE]        = { AT(FORWARD_ATTEND), 0, FROM(FORWARD_ATTEND, BACK_ATTEND) },
    [BUFFER_ATTENTION]  = { AT(FORWARD_ATTEND) | AT(BACK_ATTEND), 0, 0 },
    [BUFFER_WIDE]       = { AT(FORWARD_GATE_UP), 0, 0 },
    [BUFFER_GATE_UP]    = { AT(FORWARD_GATE_UP), 0, FROM(FORWARD_GATE_UP, BACK_GATE_UP_DW) }, /* or dgate_up */
    [BUFFER_ACT]        = { FROM(FORWARD_GATE_UP, FORWARD_DOWN), FROM(BACK_DOWN, BACK_DOWN_DW),
                            FROM(FORWARD_GATE_UP, BACK_DOWN_DW) },
    [BUFFER_ACT_T]      = { FROM(BACK_DOWN, BACK_DOWN_DW), 0, FROM(FORWARD_GATE_UP, BACK_DOWN_DW) },
    [BUFFER_LOW_QKV]     = { ALL_FORWARD, 0, ALL_FORWARD | ALL_BACK },
    [BUFFER_LOW_OUT]     = { ALL_FORWARD, 0, ALL_FORWARD | ALL_BACK },
    [BUFFER_LOW_GATE_UP] = { ALL_FORWARD, 0, ALL_FORWARD | ALL_BACK },
    [BUFFER_LOW_DOWN]    = { ALL_FORWARD, 0, ALL_FORWARD | ALL_BACK },
    [BUFFER_DRES]       = { AT(PHASE_HEAD) | ALL_BACK, 0, ALL_FORWARD },
    [BUFFER_DY]         = { AT(BACK_DOWN) | AT(BACK_OUT), FROM(BACK_DOWN, BACK_DOWN_DW), 0 },
    [BUFFER_DY_T]       = { FROM(BACK_DOWN, BACK_DOWN_DW) | AT(BACK_OUT), 0, 0 },
    [BUFFER_DH]         = { AT(PHASE_HEAD) | AT(BACK_GATE_UP) | AT(BACK_QKV), 0, 0 },
    [BUFFER_DACT]       = { AT(BACK_DOWN), 0, 0 },
    [BUFFER_DGATE_UP]   = { FROM(BACK_DOWN, BACK_GATE_UP), AT(BACK_GATE_UP_DW), 0 },
    [BUFFER_DGATE_UP_T] = { FROM(BACK_DOWN, BACK_GATE_UP_DW), 0, 0 },
    [BUFFER_DATT]       = { FROM(BACK_OUT, BACK_ATTEND), 0, 0 },
    [BUFFER_DQKV]       = { FROM(BACK_ATTEND, BACK_ROPE), FROM(BACK_QKV, BACK_QKV_DW), 0 },
    [BUFFER_DQKV_OP]    = { FROM(BACK_ROPE, BACK_QKV), AT(BACK_QKV_DW), 0 },
    [BUFFER_DQKV_OP_T]  = { FROM(BACK_ROPE, BACK_QKV_DW), 0, 0 },
    [BUFFER_DLOW]       = { ALL_BACK, 0, 0 },
    [BUFFER_FINAL_H]    = { AT(PHASE_HEAD), 0, 0 },
    [BUFFER_LOGITS]     = { AT(PHASE_HEAD), 0, 0 },
    [BUFFER_DLOGITS]    = { AT(PHASE_HEAD), 0, 0 },
    [BUFFER_HEAD_H]     = { AT(PHASE_HEAD), 0, 0 },
    [BUFFER_HEAD_H_T]   = { AT(PHASE_HEAD), 0, 0 },
    [BUFFER_HEAD_W]     = { AT(PHASE_HEAD), 0, 0 },
};

unsigned buffer_alive(Buffer b, BufferUse u)
{
    const unsigned alive = life[b].always | (u.direct ? life[b].direct | (u.again ? life[b].again : 0) : 0);
    if (u.forward_only)
        return alive & (AT(PHASE_HEAD) | ALL_FORWARD);
    return u.observed && alive & ALL_FORWARD ? alive | ALL_FORWARD : alive;
}

/* The lowest place where s fits beside all that was placed and is alive with it. */
static size_t lowest_place(const SharedBuffer *s, const SharedBuffer *const *placed, int count)
{
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        const SharedBuffer *p = placed[i];
        if (p->alive & s->alive && p->at < at + s->bytes && at < p->at + p->bytes) {
            at = p->at + p->bytes;
            i = -1;             /* from the start: others may stand there */
        }
    }
    return at;
}

/* Lays them in this order; returns the bytes of all, and in *top the place in the order of one that ends there. */
static size_t place_in_order(SharedBuffer *s, const int *order, int *top)
{
    const SharedBuffer *placed[NUM_BUFFERS];
    size_t end = 0;
    *top = 0;
    for (int i = 0; i < NUM_BUFFERS; i++) {
        SharedBuffer *b = &s[order[i]];
        b->at = lowest_place(b, placed, i);
        placed[i] = b;
        if (b->at + b->bytes > end) {
            end = b->at + b->bytes;
            *top = i;
        }
    }
    return end;
}

static void move_to_front(int *order, int i)
{
    const int first = order[i];
    for (; i > 0; i--)
        order[i] = order[i - 1];
    order[0] = first;
}

/* Bytes of what is alive in the fullest phase: less is not possible. */
static size_t least_bytes(const SharedBuffer *s)
{
    size_t most = 0;
    for (Phase p = 0; p < NUM_PHASES; p++) {
        size_t bytes = 0;
        for (int b = 0; b < NUM_BUFFERS; b++)
            bytes += s[b].alive & AT(p) ? s[b].bytes : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* The largest first, as they are the hardest to place; then, as long as there are gaps, the one that lies highest in front of all.
 * */
size_t buffers_place(SharedBuffer *s)
{
    enum { TRIALS = 64 };
    int order[NUM_BUFFERS], best[NUM_BUFFERS], top;
    for (int b = 0; b < NUM_BUFFERS; b++) {
        int i = b;
        for (; i > 0 && s[order[i - 1]].bytes < s[b].bytes; i--)
            order[i] = order[i - 1];
        order[i] = b;
    }
    const size_t least = least_bytes(s);
    size_t found = SIZE_MAX;
    for (int t = 0; t < TRIALS && found > least; t++) {
        const size_t bytes = place_in_order(s, order, &top);
        if (bytes < found) {
            found = bytes;
            memcpy(best, order, sizeof best);
        }
        move_to_front(order, top);
    }
    return place_in_order(s, best, &top);
}
