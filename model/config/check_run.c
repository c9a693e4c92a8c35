/* Checks of the run: batches, schedule, folders, ranks. */
#include "model/config/check_run.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/config/batch_warmup.h"
#include "model/config/check_ranks.h"
#include "model/config/extend.h"
#include "model/config/load_folder.h"
#include "model/update/schedule.h"

static void check_batch(Reader *r)
{
    Config *c = &r->s->c;
    int world = check_ranks_groups(r), micro = c->device_train_microbatch_size,
        batch = c->global_train_batch_size;
    long unit = (long)world * micro;
    if (batch % unit == 0)
        return;
    const char *where = reader_where(r, "global_train_batch_size");
    char batches[96];
    if (batch > unit)
        snprintf(batches, sizeof batches, "%ld or %ld", batch / unit * unit,
                 (batch / unit + 1) * unit);
    else
        snprintf(batches, sizeof batches, "%ld", unit);
    if (batch % world != 0)
        die("%s: global_train_batch_size %d is not a multiple of %d %ss x "
            "device_train_microbatch_size %d; "
            "use --global_train_batch_size=%s",
            where, batch, world, check_ranks_group_name(r), micro, batches);
    int share = batch / world, smaller = micro < share ? micro : share;
    while (share % smaller != 0)
        smaller--;
    die("%s: global_train_batch_size %d gives each of %d %s%s %d sequences, not a multiple of "
        "device_train_microbatch_size %d; use --device_train_microbatch_size=%d or "
        "--global_train_batch_size=%s",
        where, batch, world, check_ranks_group_name(r), world == 1 ? "" : "s", share, micro,
        smaller, batches);
}

/* Gradients are summed in F32 if fsdp.precision is mixed, or if a sum has many terms. */
static void choose_grads(Reader *r)
{
    Config *c = &r->s->c;
    const int ranks = r->world / pipeline_stages(&c->strategy), n = gradient_terms(c, r->world);
    const bool mixed = r->s->fsdp.precision == FSDP_MIXED && ranks > 1,
               given = reader_given(r, "format.grads");
    c->grads_by_terms = !given && !mixed;
    if (!given && (mixed || n > MOST_BF16_TERMS))
        c->recipe.grads = (Format){ F32, 0, false };
    else if (given && c->recipe.grads.dtype == BF16 && n > MOST_BF16_TERMS)
        warn("%s: gradients of %d %s are summed in bf16; sums of more than %d lose precision",
             reader_where(r, "format.grads"), n, n == ranks ? "ranks" : "micro-batches a step",
             MOST_BF16_TERMS);
}

/* The number of tokens of a micro-batch, also when rounded up, must fit an int, and so must the
 * number of sequences of all ranks. */
static void check_micro_batch(Reader *r)
{
    const Config *c = &r->s->c;
    const int T = c->model.max_sequence_length;
    if ((double)c->device_train_microbatch_size * T > INT_MAX / 2)
        die("%s: %d sequences of %d tokens exceed the 2^30 - 1 tokens that a micro-batch can have",
            reader_where(r, "device_train_microbatch_size"), c->device_train_microbatch_size, T);
    if ((double)c->device_eval_batch_size * check_ranks_groups(r) > INT_MAX)
        die("%s: %d sequences on each of %d %ss exceed the 2^31 - 1 sequences that a batch can "
            "have",
            reader_where(r, "device_eval_batch_size"), c->device_eval_batch_size,
            check_ranks_groups(r), check_ranks_group_name(r));
}

static void check_tile(Reader *r)
{
    enum { MULTIPLE = 128 };
    const Config *c = &r->s->c;
    const char *where = reader_where(r, "tiled_mlp_tokens");
    if (c->tiled_mlp_tokens == 0)
        return;
    if (c->tiled_mlp_tokens % MULTIPLE != 0)
        die("%s: tiled_mlp_tokens %d is not a multiple of %d, so FP8 operands would not be "
            "aligned; use --tiled_mlp_tokens=%d",
            where, c->tiled_mlp_tokens, MULTIPLE,
            c->tiled_mlp_tokens <= INT_MAX - MULTIPLE
                ? (c->tiled_mlp_tokens + MULTIPLE - 1) / MULTIPLE * MULTIPLE
                : c->tiled_mlp_tokens / MULTIPLE * MULTIPLE);
    if (!recipe_recomputes(&c->recipe))
        die("%s: tiled_mlp_tokens %d: forward saves the MLP of all tokens in every block, so tiles "
            "would not save memory; let backward recompute blocks (--activations.keep=block), or "
            "use "
            "--tiled_mlp_tokens=0",
            where, c->tiled_mlp_tokens);
}

static void check_length_warmup(const Reader *r)
{
    const Config *c = &r->s->c;
    const int min = c->length_warmup.min, T = c->model.max_sequence_length;
    const char *where = reader_where(r, "sequence_length_warmup");
    if ((min > 0) != (c->length_warmup.steps > 0))
        die("%s: sequence_length_warmup needs both min_sequence_length and warmup_steps; %s is "
            "missing",
            where, min > 0 ? "warmup_steps" : "min_sequence_length");
    if (min > T)
        die("%s: sequence_length_warmup.min_sequence_length %d is more than "
            "model.max_sequence_length %d",
            where, min, T);
}

static void check_average(const Reader *r)
{
    const Config *c = &r->s->c;
    if ((c->average.last > 0) != (c->average.every > 0))
        die("%s: average needs both last and every, as in average: {last: 5, every: 200}; %s is "
            "missing",
            reader_where(r, c->average.last > 0 ? "average.last" : "average.every"),
            c->average.last > 0 ? "every" : "last");
}

static void check_schedule(Reader *r)
{
    Config *c = &r->s->c;
    c->scheduler.in_tokens = r->s->scheduler_units == UNITS_TOKENS;
    const bool share = c->scheduler.warmup_fraction > 0;
    if (share && reader_given(r, "scheduler.t_warmup") && c->scheduler.t_warmup > 0)
        die("%s: scheduler.t_warmup and scheduler.warmup_fraction both set the length of the "
            "warmup; unset one of them: "
            "--scheduler.t_warmup=0 or --scheduler.warmup_fraction=null",
            reader_where(r, "scheduler.warmup_fraction"));
    if (share)
        c->scheduler.t_warmup = 0;
    const long warmup = c->scheduler.t_warmup, end = c->scheduler.t_max;
    if (end > 0 && warmup > end)
        die("%s: scheduler.t_warmup %ld is longer than scheduler.t_max %ld; shorten the warmup or "
            "lengthen t_max",
            reader_where(r, "scheduler.t_warmup"), warmup, end);
    if (c->scheduler.name == INVERSE_SQRT_WITH_WARMUP && warmup == 0 && !share)
        die("%s: inverse_sqrt_with_warmup needs scheduler.t_warmup > 0",
            reader_where(r, "scheduler.t_warmup"));
    if (c->scheduler.name == WSD && c->scheduler.t_decay == 0)
        die("%s: wsd needs scheduler.t_decay, the length of the final decay",
            reader_where(r, "scheduler.name"));
    char *where =
        xasprintf("%s: ", reader_where(r, c->scheduler.name == WSD ? "scheduler.t_decay"
                                                                   : "scheduler.t_warmup"));
    schedule_check(c, schedule_duration(c), where);
    free(where);
    extend_check(r);
    if (c->scheduler.name != WSD && c->scheduler.t_decay > 0)
        reader_note(r, "scheduler.t_decay (only wsd reads this key)");
    if (c->scheduler.warmup_min_lr > c->optimizer.lr)
        die("%s: scheduler.warmup_min_lr %g is above optimizer.learning_rate %g",
            reader_where(r, "scheduler.warmup_min_lr"), c->scheduler.warmup_min_lr,
            c->optimizer.lr);
}

void check_run_choose_save_folder(Config *c)
{
    if (!c->save_folder && (!config_forward_only(c) || c->try_load_latest_save))
        c->save_folder = xasprintf("runs/%s", c->run_name);
}

static void check_folders(Reader *r)
{
    Config *c = &r->s->c;
    check_run_choose_save_folder(c);
    if (c->save_folder && c->save_folder[0] == '\0')
        die("%s: save_folder is empty; give a folder, '.' for the current one",
            reader_where(r, "save_folder"));
    if (c->save_folder && strstr(c->save_folder, "://"))
        die("%s: save_folder '%s' is remote; save to a local folder and copy it from there",
            reader_where(r, "save_folder"), c->save_folder);
    load_folder_check_path(r);
}

/* Sets the name of the run's folder in runs/. */
static void check_run_name(const Reader *r)
{
    const char *name = r->s->c.run_name;
    if (!name || !*name)
        die("%s: run_name is empty", reader_where(r, "run_name"));
    char *path = xasprintf("/%s/", name);
    if (strstr(path, "/../"))
        die("%s: run_name %s leads out of the folder runs; use --save_folder",
            reader_where(r, "run_name"), name);
    free(path);
}

/* Generation runs one sequence at a time and reads only the logits of its last token. */
static void check_generation(Reader *r)
{
    Config *c = &r->s->c;
    if (c->generate_features && !c->generate)
        reader_note(r, "generate_features (generate is not given)");
    if (!c->generate)
        return;
    if (c->generate_features && c->model.image.feature_size == 0)
        die("%s: generate_features: the model reads only text; load_path must be a LLaVA folder",
            reader_where(r, "generate_features"));
    if (c->eval_only)
        die("%s: generate and eval_only are both given; use one of them",
            reader_where(r, "generate"));
    c->device_train_microbatch_size = c->device_eval_batch_size = c->loss_chunk = 1;
    c->stops_at_eos = reader_given(r, "model.eos_token_id");
    if (c->temperature == 0 && c->top_p < 1)
        reader_note(r, "top_p (without a temperature the most likely token is taken)");
}

void check_run(Reader *r)
{
    Config *c = &r->s->c;
    check_run_name(r);
    check_ranks(r);
    check_generation(r);
    if (!config_forward_only(c)) {
        check_batch(r);
        batch_warmup_check(r);
    }
    check_tile(r);
    check_micro_batch(r);
    choose_grads(r);
    check_schedule(r);
    check_average(r);
    check_length_warmup(r);
    check_folders(r);
    c->z_loss = r->s->softmax_auxiliary_loss ? r->s->auxiliary_loss_multiplier : 0;
    if (c->eval_subset_num_batches == 0)
        die("%s: eval_subset_num_batches 0 evaluates nothing: use -1 for all batches, or "
            "eval_interval null",
            reader_where(r, "eval_subset_num_batches"));
    if (c->device_eval_batch_size == 0)
        c->device_eval_batch_size = c->device_train_microbatch_size;
}
