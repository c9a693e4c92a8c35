/* batch_size_warmup: the steps after which the batch doubles. */
#include "model/config/batch_warmup.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "model/config/check_ranks.h"

void batch_warmup_read(Settings *s, const char *where)
{
    const int count = s->num_batch_warmup;
    if (count > MOST_DOUBLINGS)
        die("%s: batch_size_warmup: expected up to %d steps, found %d", where, MOST_DOUBLINGS,
            count);
    for (int i = 0; i < count; i++) {
        char *end;
        const char *text = s->batch_warmup[i];
        const long step = strtol(text, &end, 10);
        if (*end || !*text || step < 1 || (double)step > LONGS ||
            (i > 0 && step <= s->c.batch_warmup.step[i - 1]))
            die("%s: batch_size_warmup: expected ascending numbers of steps, as in [1000, 3000], "
                "found '%s'",
                where, text);
        s->c.batch_warmup.step[i] = step;
    }
    s->c.batch_warmup.count = count;
}

/* The smallest batch must consist of whole micro-batches on all ranks, too. */
void batch_warmup_check(Reader *r)
{
    const Config *c = &r->s->c;
    const int count = r->s->num_batch_warmup;
    const char *where = reader_where(r, "batch_size_warmup");
    const bool interleaved = c->strategy.pipeline_schedule == PIPELINE_INTERLEAVED;
    const int rounds = interleaved ? pipeline_stages(&c->strategy) : 1;
    const long unit = (long)check_ranks_groups(r) * c->device_train_microbatch_size * rounds;
    batch_warmup_read(r->s, where);
    if (count > 0 && (c->max_duration.epochs > 0 || c->stop_at.epochs > 0))
        die("%s: batch_size_warmup: the run's length in epochs is not supported; give max_duration "
            "and stop_at in steps or tokens",
            where);
    if (c->global_train_batch_size % (unit << count) != 0)
        die("%s: batch_size_warmup: global_train_batch_size %d halved %d time%s is not a multiple "
            "of %d %ss x "
            "device_train_microbatch_size %d%s; use a multiple of %ld, fewer doublings or a "
            "smaller micro-batch",
            where, c->global_train_batch_size, count, count == 1 ? "" : "s", check_ranks_groups(r),
            check_ranks_group_name(r), c->device_train_microbatch_size,
            rounds > 1 ? " x stages of Interleaved1F1B" : "", unit << count);
}
