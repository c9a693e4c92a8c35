/* Runs that train nothing. A dry run plans memory without data, also for ranks that were not
 * started and devices that are not here; it reads the configuration of evaluators. eval_only reads
 * only the data of evaluators, generate reads none. */
#include "model/config/table.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

void config_choose_ranks(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->dry_run) {
        if (config_given(r, "ranks"))
            die("%s: ranks only sets how many ranks --dry_run plans for; start ranks with mpirun "
                "-n",
                config_where(r, "ranks"));
        return;
    }
    if (c->ranks == 0) {
        c->ranks = r->world;
        return;
    }
    const char *where = config_where(r, "ranks");
    if (r->world > 1 && r->world != c->ranks)
        die("%s: ranks: mpirun started %d; to plan for %d, start ./train --dry_run without mpirun",
            where, r->world, c->ranks);
    if (r->world != c->ranks && !r->s->fsdp.replicas &&
        (r->s->fsdp.strategy == HYBRID_SHARD || r->s->fsdp.strategy == HYBRID_SHARD_ZERO2))
        die("%s: ranks: HYBRID_SHARD has one group per host, and the number of hosts is unknown; "
            "give it as "
            "--fsdp.hybrid_sharding_num_model_replicas",
            where);
    r->world = c->ranks;
}

/* One sequence at a time; only the logits of its last token are read. */
void config_complete_generation(Reader *r)
{
    Config *c = &r->s->c;
    if (c->generate_features && !c->generate)
        config_note(r, "generate_features (there is no generate)");
    if (!c->generate)
        return;
    if (c->generate_features && c->model.image.feature_size == 0)
        die("%s: generate_features: the model is one of text only; load_path must be a LLaVA "
            "folder",
            config_where(r, "generate_features"));
    if (c->eval_only)
        die("%s: generate and eval_only are both given; use one of them",
            config_where(r, "generate"));
    c->device_train_microbatch_size = c->device_eval_batch_size = c->loss_chunk = 1;
    c->stops_at_eos = config_given(r, "model.eos_token_id");
    if (c->temperature == 0 && c->top_p < 1)
        config_note(r, "top_p (without a temperature the most likely token is taken)");
}
