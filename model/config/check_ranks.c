/* Checks how ranks divide the work: the mesh, and the strategy of each group of ranks. */
#include "model/config/check_ranks.h"

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/config/check_tensor_ranks.h"

int check_ranks_groups(const Reader *r)
{
    return data_ranks(&r->s->c.strategy, r->world);
}

const char *check_ranks_group_name(const Reader *r)
{
    const Strategy *s = &r->s->c.strategy;
    return pipeline_stages(s) > 1 ? "pipeline"
           : context_ranks(s) > 1 ? "context group"
           : tensor_ranks(s) > 1  ? "tensor group"
                                  : "rank";
}

/* Returns the largest common divisor of a and b that is at most `most`. */
static int largest_divisor(int a, int b, int most)
{
    int d = most;
    while (a % d != 0 || b % d != 0)
        d--;
    return d;
}

static int largest_context(const ModelConfig *m, int most, int world)
{
    while (!context_divides(m, most) || world % most != 0)
        most--;
    return most;
}

/* A rank's number of tokens is a multiple of 16, as FP8 GEMMs need. In generation, context ranks
 * work like other ranks of a shard group: they only shard weights. */
static void check_context(Reader *r)
{
    enum { MULTIPLE = 16 };
    const Config *c = &r->s->c;
    const ModelConfig *m = &c->model;
    const int n = context_ranks(&c->strategy), T = m->max_sequence_length;
    const char *where = reader_where(r, "parallelism.context");
    if (n == 1)
        return;
    if (r->world % n != 0)
        die("%s: parallelism.context %d: %d rank%s cannot form groups of %d that share sequences; "
            "start a multiple of %d ranks, or "
            "use --parallelism.context=%d",
            where, n, r->world, r->world == 1 ? "" : "s", n, n,
            largest_divisor(r->world, r->world, n < r->world ? n : r->world));
    if (c->generate)
        return;
    if (!context_divides(m, n))
        die("%s: parallelism.context %d: the model has %d heads and %d key heads, which %d ranks "
            "cannot share equally; "
            "use --parallelism.context=%d",
            where, n, m->n_heads, m->n_kv_heads, n, largest_context(m, n, r->world));
    if (T % (MULTIPLE * n) != 0)
        die("%s: parallelism.context %d: model.max_sequence_length %d is not a multiple of %d "
            "ranks x %d tokens; use --model.max_sequence_length=%d",
            where, n, T, n, MULTIPLE, (T + MULTIPLE * n - 1) / (MULTIPLE * n) * (MULTIPLE * n));
}

/* Checks that the schedule can divide the chunks and the micro-batches. */
static void check_schedule_of_stages(Reader *r)
{
    const Config *c = &r->s->c;
    const Strategy *s = &c->strategy;
    const int n = pipeline_stages(s), chunks = s->pipeline_chunks,
              sequences = c->global_train_batch_size / data_ranks(s, r->world);
    const int own = sequences / c->device_train_microbatch_size;
    const char *where = reader_where(r, "parallelism.pipeline_schedule");
    if (s->pipeline_schedule == PIPELINE_INTERLEAVED && chunks == 1)
        die("%s: parallelism.pipeline_schedule Interleaved1F1B: each stage has one virtual stage; "
            "use --parallelism.pipeline_virtual_stages=2 or more, or "
            "1F1B",
            where);
    if (s->pipeline_schedule != PIPELINE_INTERLEAVED && chunks > 1)
        die("%s: parallelism.pipeline_virtual_stages %d: only Interleaved1F1B supports more than "
            "one virtual stage; use --parallelism.pipeline_schedule=Interleaved1F1B",
            reader_where(r, "parallelism.pipeline_virtual_stages"), chunks);
    if (c->model.n_layers < n * chunks)
        die("%s: parallelism.pipeline %d: the model has %d blocks, fewer than %d stages x %d "
            "virtual stages; use "
            "--parallelism.pipeline=%d",
            reader_where(r, "parallelism.pipeline"), n, c->model.n_layers, n, chunks,
            c->model.n_layers > chunks ? c->model.n_layers / chunks : 1);
    if (chunks > 1 && !config_forward_only(c) && own % n != 0)
        die("%s: parallelism.pipeline_schedule Interleaved1F1B: a stage has %d micro-batches a "
            "step, not a multiple of the %d stages; use --global_train_batch_size=%ld or 1F1B",
            where, own, n,
            (long)(own / n + 1) * n * c->device_train_microbatch_size * data_ranks(s, r->world));
}

/* Refuses settings that pipeline stages do not support, before files are read or written. */
static void check_pipeline(Reader *r)
{
    const Config *c = &r->s->c;
    const int n = pipeline_stages(&c->strategy),
              context = context_ranks(&c->strategy) * tensor_ranks(&c->strategy);
    const int groups = r->world / context;
    const char *where = reader_where(r, "parallelism.pipeline");
    if (n == 1)
        return;
    if (groups % n != 0)
        die("%s: parallelism.pipeline %d: %d rank%s cannot form %d stages of equal size%s; start a "
            "multiple of %d ranks, or use "
            "--parallelism.pipeline=%d",
            where, n, r->world, r->world == 1 ? "" : "s", n,
            context > 1
                ? ", each of groups that share sequences (parallelism.context, parallelism.tensor)"
                : "",
            n * context, largest_divisor(groups, groups, n < groups ? n : groups));
    if (r->s->fsdp.grad_sync_mode == SUM_OFTEN)
        die("%s: fsdp.grad_sync_mode micro_batch: pipeline stages sum gradients once per step; use "
            "batch or null",
            reader_where(r, "fsdp.grad_sync_mode"));
    check_schedule_of_stages(r);
}

/* Returns the number of shards that parallelism.replicate and parallelism.shard define, in a stage
 * of `world` ranks or tensor groups. */
static int shard_ranks_of_mesh(Reader *r, int world)
{
    const int replicate = r->s->fsdp.replicate, shard = r->s->fsdp.shard,
              context = context_ranks(&r->s->c.strategy);
    const int groups = world / context, tensor = tensor_ranks(&r->s->c.strategy),
              given = replicate ? replicate : shard;
    const int divisor = largest_divisor(groups, groups, given < groups ? given : groups);
    const char *name = replicate ? "parallelism.replicate" : "parallelism.shard",
               *where = reader_where(r, name);
    if (r->s->fsdp.replicas)
        die("%s: %s and fsdp.hybrid_sharding_num_model_replicas (%s) both set the number of "
            "replicas; leave one of them out",
            where, name, reader_where(r, "fsdp.hybrid_sharding_num_model_replicas"));
    if (given != divisor || (replicate && shard && (long)replicate * shard != groups))
        die("%s: parallelism.replicate %d x shard %d x context %d x tensor %d (0: not given) must "
            "be the %d rank%s%s; use "
            "--parallelism.replicate=%d --parallelism.shard=%d",
            where, replicate, shard, context, tensor, world * tensor,
            world * tensor == 1 ? "" : "s",
            pipeline_stages(&r->s->c.strategy) > 1 ? " of a stage" : "",
            replicate ? divisor : groups / divisor, replicate ? groups / divisor : divisor);
    const int shards = replicate ? groups / replicate : shard;
    if (r->s->fsdp.strategy == NO_SHARD && shards > 1)
        die("%s: %s gives replicas of %d ranks, but fsdp.sharding_strategy NO_SHARD shards "
            "nothing; use FULL_SHARD or "
            "SHARD_GRAD_OP, or --parallelism.replicate=%d",
            where, name, shards, groups);
    return shards * context;
}

/* The number of ranks that share one copy of a stage. Context ranks are part of this group, so that
 * their gradients are summed, too. */
static int shard_ranks(Reader *r)
{
    const ShardingStrategy strategy = r->s->fsdp.strategy;
    const bool hybrid = strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2;
    const int stage = r->world / pipeline_stages(&r->s->c.strategy),
              world = stage / tensor_ranks(&r->s->c.strategy);
    const int context = context_ranks(&r->s->c.strategy),
              hosts = stage > comm_local_size() ? stage / comm_local_size() : 1;
    const int replicas = r->s->fsdp.replicas ? r->s->fsdp.replicas : hosts;
    if (r->s->fsdp.replicate || r->s->fsdp.shard)
        return shard_ranks_of_mesh(r, world);
    if (r->s->fsdp.replicas && !hybrid)
        reader_note(r,
                    "fsdp.hybrid_sharding_num_model_replicas (only HYBRID_SHARD reads this key)");
    if (strategy == NO_SHARD)
        return context;
    if (!hybrid)
        return world;
    if (replicas < 1 || world % replicas != 0)
        die("%s: %d ranks cannot form %d groups of equal size; "
            "fsdp.hybrid_sharding_num_model_replicas must divide the "
            "ranks of a stage (groups of parallelism.tensor), null makes one group per host",
            reader_where(r, "fsdp.hybrid_sharding_num_model_replicas"), world, replicas);
    if (world / replicas % context != 0)
        die("%s: %d ranks in %d replicas are %d each, which cannot form groups of %d that share "
            "sequences (parallelism.context); "
            "fsdp.hybrid_sharding_num_model_replicas must divide %d",
            reader_where(r, "fsdp.hybrid_sharding_num_model_replicas"), world, replicas,
            world / replicas, context, world / context);
    return world / replicas;
}

/* Ranks that do not sum gradients send no codes. */
static Wire grad_wire(Reader *r)
{
    const Strategy *s = &r->s->c.strategy;
    if (r->s->fsdp.grad_wire == NOT_GIVEN)
        return WIRE_NONE;
    if (r->s->fsdp.precision == FSDP_MIXED)
        die("%s: fsdp.grad_wire sends gradients in 8 or 16 bits, and fsdp.precision mixed (%s) "
            "sums "
            "them in f32; leave one of them out",
            reader_where(r, "fsdp.grad_wire"), reader_where(r, "fsdp.precision"));
    if (r->world / pipeline_stages(s) / tensor_ranks(s) > 1)
        return (Wire)r->s->fsdp.grad_wire;
    reader_note(r, "fsdp.grad_wire (no two ranks sum gradients of the same matrix)");
    return WIRE_NONE;
}

/* With pipeline stages, weights are gathered and gradients summed once per step, because a stage
 * alternates between forward and backward of different micro-batches. */
static void complete_strategy(Reader *r)
{
    const Strategy *s = &r->s->c.strategy;
    const bool stages = pipeline_stages(s) > 1;
    const ShardingStrategy strategy = r->s->fsdp.strategy;
    const bool keeps = strategy == SHARD_GRAD_OP || strategy == HYBRID_SHARD_ZERO2;
    const int mode = r->s->fsdp.grad_sync_mode;
    const int shards = shard_ranks(r);
    const bool gathers = shards * tensor_ranks(s) > 1;
    r->s->c.strategy =
        (Strategy){ .shard_ranks = shards,
                    .by_mesh = r->s->fsdp.replicate || r->s->fsdp.shard,
                    .gathering = keeps || (stages && gathers) ? GATHER_ONCE : GATHER_ONCE_IF_FITS,
                    .grad_sum = stages              ? SUM_ONCE
                                : mode == NOT_GIVEN ? SUM_ONCE_IF_FITS
                                                    : (GradSum)mode,
                    .context_ranks = r->s->c.generate ? 1 : context_ranks(s),
                    .tensor_ranks = tensor_ranks(s),
                    .pipeline_stages = pipeline_stages(s),
                    .pipeline_chunks = s->pipeline_chunks,
                    .pipeline_schedule = s->pipeline_schedule,
                    .wire = grad_wire(r),
                    .ranks_per_host = r->s->c.dry_run ? r->s->c.gpus_per_host : comm_local_size() };
}

void check_ranks(Reader *r)
{
    check_context(r);
    check_tensor_ranks(r);
    check_pipeline(r);
    complete_strategy(r);
}
