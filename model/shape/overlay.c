/* Places buffers that share memory. */
#include "model/shape/overlay.h"

#include <string.h>

#define NAME_PAIR(name, ...) #name, #name "_T",
#define NAME_ONE(name) #name,
static const char *const names[] = { BLOCK_TENSORS(NAME_PAIR) BLOCK_FLOATS(NAME_ONE) "attention",
                                     WORK_TENSORS(NAME_PAIR) OTHER_TENSORS(NAME_PAIR) };
_Static_assert(sizeof names / sizeof *names == NUM_BUFFERS, "each buffer has its name");

const char *buffer_name(Buffer b)
{
    return names[b];
}

/* The lowest offset at which s overlaps no placed buffer that is live at the same time. */
static size_t lowest_place(const OverlaidBuffer *s, const Buffer *placed, int count,
                           const OverlaidBuffer *all)
{
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        const OverlaidBuffer *p = &all[placed[i]];
        if (buffers_have(&s->meets, placed[i]) && p->at < at + s->bytes && at < p->at + p->bytes) {
            at = p->at + p->bytes;
            i = -1; /* start over: at this offset, other buffers may overlap */
        }
    }
    return at;
}

/* Places buffers in this order; returns their total size in bytes. *top: index in `order` of the
 * buffer with the highest end. */
static size_t place_in_order(OverlaidBuffer *s, const Buffer *order, int *top)
{
    size_t end = 0;
    *top = 0;
    for (int i = 0; i < NUM_BUFFERS; i++) {
        OverlaidBuffer *b = &s[order[i]];
        b->at = lowest_place(b, order, i, s);
        if (b->at + b->bytes > end) {
            end = b->at + b->bytes;
            *top = i;
        }
    }
    return end;
}

static void move_to_front(Buffer *order, int i)
{
    const Buffer first = order[i];
    for (; i > 0; i--)
        order[i] = order[i - 1];
    order[0] = first;
}

/* Places the largest buffer first, because it is the hardest to place. While the result exceeds
 * `least`, moves the highest buffer to the front of the order and tries again. */
size_t overlay_place(OverlaidBuffer *s, size_t least)
{
    enum { TRIALS = 64 };
    Buffer order[NUM_BUFFERS], best[NUM_BUFFERS];
    int top;
    for (Buffer b = 0; b < NUM_BUFFERS; b++) {
        int i = (int)b;
        for (; i > 0 && s[order[i - 1]].bytes < s[b].bytes; i--)
            order[i] = order[i - 1];
        order[i] = b;
    }
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
