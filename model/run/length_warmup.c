#include "model/run/length_warmup.h"

#include "kernels/runtime/error.h"
#include "model/update/schedule.h"

const uint8_t *length_warmup_begins(Run *r, const Batch *b)
{
    const Config *c = r->config;
    const int T = c->model.max_sequence_length, length = schedule_length(c, r->state.step + 1);
    if (c->length_warmup.steps == 0)
        return b->begins;
    r->begins = xrealloc(r->begins, (size_t)b->sequences * (size_t)T + 1);
    for (size_t i = 0; i < (size_t)b->sequences * (size_t)T; i++)
        r->begins[i] =
            i % (size_t)T % (size_t)length == 0 || (c->data.generate_doc_lengths && b->begins[i]);
    return r->begins;
}
