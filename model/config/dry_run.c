/* A dry run plans memory without data. The planned ranks need not run, and their devices need not
 * exist. */
#include "model/config/dry_run.h"

#include "kernels/runtime/error.h"

void dry_run_choose_ranks(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->dry_run) {
        if (reader_given(r, "ranks"))
            die("%s: ranks only sets how many ranks --dry_run plans for; start ranks with mpirun "
                "-n",
                reader_where(r, "ranks"));
        return;
    }
    if (c->ranks == 0) {
        c->ranks = r->world;
        return;
    }
    const char *where = reader_where(r, "ranks");
    if (r->world > 1 && r->world != c->ranks)
        die("%s: ranks: mpirun started %d; to plan for %d, start ./train --dry_run without mpirun",
            where, r->world, c->ranks);
    if (r->world != c->ranks && !r->s->fsdp.replicas &&
        (r->s->fsdp.strategy == HYBRID_SHARD || r->s->fsdp.strategy == HYBRID_SHARD_ZERO2))
        die("%s: ranks: HYBRID_SHARD has one group per host, and the number of hosts is unknown; "
            "give this number as "
            "--fsdp.hybrid_sharding_num_model_replicas",
            where);
    r->world = c->ranks;
}
