/* Runs that train nothing. A dry run plans memory for ranks that were not started, on devices that need not be here, without data;
 * it reads the configuration of evaluators. eval_only reads the data of evaluators and no other, generate reads no data. */
#include "model/config/table.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

bool config_is_unread(const Config *c, const char *name)
{
    return (c->dry_run || config_forward_only(c)) && text_is_among(name, "data.paths|data.datasets|data.label_mask_paths");
}

void config_choose_ranks(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->dry_run) {
        if (config_given(r, "ranks"))
            die("%s: ranks is for --dry_run, which plans without what it plans for; mpirun -n starts ranks",
                config_where(r, "ranks"));
        return;
    }
    if (c->ranks == 0) {
        c->ranks = r->world;
        return;
    }
    const char *place = config_where(r, "ranks");
    if (r->world > 1 && r->world != c->ranks)
        die("%s: ranks: %d were started already; a dry run of %d needs no mpirun", place, r->world, c->ranks);
    if (r->world != c->ranks && !r->s->fsdp.replicas
        && (r->s->fsdp.strategy == HYBRID_SHARD || r->s->fsdp.strategy == HYBRID_SHARD_ZERO2))
        die("%s: ranks: on how many hosts those would be decides what HYBRID_SHARD shards: give that number as "
            "--fsdp.hybrid_sharding_num_model_replicas", place);
    r->world = c->ranks;
}

/* One sequence at a time, of which the last token's logits are looked at. */
void config_check_generation(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->generate)
        return;
    if (c->eval_only)
        die("%s: generate and eval_only are two runs", config_where(r, "generate"));
    c->device_train_microbatch_size = c->device_eval_batch_size = c->loss_chunk = 1;
    c->stops_at_eos = config_given(r, "model.eos_token_id");
    if (c->temperature == 0 && c->top_p < 1)
        config_note(r, "top_p (without a temperature the most likely token is taken)");
}
