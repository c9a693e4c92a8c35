/* Opens a run: data, folder, memory, initial or loaded weights. All checks are made before the
 * first step. */
#include "model/run/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/tokenizer_files.h"
#include "model/config/extend.h"
#include "model/formats/adapter.h"
#include "model/formats/loadable.h"
#include "model/keys/types.h"
#include "model/run/inputs.h"
#include "model/predict/memory_fit.h"
#include "model/predict/memory.h"
#include "model/predict/mesh_search.h"
#include "model/run/mixture_state.h"
#include "model/evaluate/open_data.h"
#include "model/predict/pipeline_plan.h"
#include "model/predict/plan_time.h"
#include "model/run/resume.h"
#include "model/run/router_report.h"
#include "model/run/save_folder.h"
#include "model/update/schedule.h"
#include "kernels/runtime/version.h"

static void check_countable(const char *key, double n)
{
    if (n > LONGS)
        die("%s: the run would end after %g steps or tokens, more than the maximum %g; give a "
            "shorter length",
            key, n, LONGS);
}

static long steps_later(const Run *r, const char *key, double more)
{
    check_countable(key, (double)r->state.step + more);
    return r->state.step + (long)more;
}

/* The length of a run by the duration d. `key`: the configuration's name of d. If d is not given,
 * steps are 0. Remaining tokens or epochs are converted to steps, because earlier steps may have
 * had another batch size. */
static RunLength run_length(const Run *r, const char *key, const Duration *d)
{
    const Config *c = r->config;
    const long per_step = (long)c->global_train_batch_size * c->model.max_sequence_length;
    RunLength n = { .steps = d->steps };
    if (d->tokens > 0 && d->tokens < per_step)
        warn("%s: %ld tokens are less than one step, which has %ld tokens (global_train_batch_size "
             "%d "
             "sequences of %d): running one step",
             key, d->tokens, per_step, c->global_train_batch_size, c->model.max_sequence_length);
    if (d->tokens > 0) {
        const long left = d->tokens > r->state.tokens ? d->tokens - r->state.tokens : 0;
        n.steps = steps_later(r, key, schedule_steps_for(c, r->state.step, (double)left));
    } else if (d->epochs > 0 && c->data.num_mix > 0) {
        n.steps = steps_later(r, key, (double)mixture_steps(c, r->loader, key, d->epochs));
    } else if (d->epochs > 0) {
        const LoaderState *s = &r->state.loader;
        const uint64_t epoch = loader_steps(r->loader, 0);
        const double all = d->epochs * (double)epoch;
        const double done =
            ((double)s->epoch + 1) * (double)epoch - (double)loader_steps(r->loader, s->instance);
        if (all < 1)
            die("%s is less than one step: an epoch of these data has %llu steps of %d sequences",
                key, (unsigned long long)epoch, c->global_train_batch_size);
        n.steps = steps_later(r, key, fmax(all - done, 0));
    }
    const double more = schedule_tokens(c, r->state.step, n.steps);
    check_countable(key, (double)r->state.tokens + more);
    n.tokens = d->tokens > 0 ? d->tokens : r->state.tokens + (long)more;
    return n;
}

/* Tells the loader the batch sizes of the next steps. */
static void set_batches(Run *r)
{
    const Config *c = r->config;
    uint64_t until[MOST_DOUBLINGS] = { 0 };
    for (int i = 0; i < c->batch_warmup.count; i++)
        until[i] = c->batch_warmup.step[i] > r->state.step
                       ? (uint64_t)(c->batch_warmup.step[i] - r->state.step)
                       : 0;
    loader_double(r->loader, until, c->batch_warmup.count);
}

static void set_lengths(Run *r)
{
    set_batches(r);
    const RunLength stop = run_length(r, "stop_at", &r->config->stop_at);
    r->length = run_length(r, "max_duration", &r->config->max_duration);
    r->last_step = stop.steps > 0 && stop.steps < r->length.steps ? stop.steps : r->length.steps;
}

bool run_is_over(const Run *r)
{
    return r->state.step >= r->last_step;
}

/* Describes how the data of a checkpoint differ from the configured data; NULL: the data are the
 * same. */
static const char *other_data(const TrainState *then, const TrainState *now)
{
    static char text[256];
    const char *source = mixture_other_files(then, now);
    snprintf(
        text, sizeof text,
        "other files of source '%s' of data.mix than the configured ones, or with another value of "
        "model.max_sequence_length, data.packing, data.long_documents or data.document_boundaries",
        source ? source : "");
    if (now->num_mix > 0)
        return source ? text : NULL;
    if (then->fingerprint != now->fingerprint)
        return "other data files than the configured ones, or with another value of "
               "model.max_sequence_length, data.packing, data.long_documents or "
               "data.document_boundaries";
    if (then->content.tokens && then->content.tokens != now->content.tokens)
        return "files of data.paths that had other content than now, with the same names and sizes";
    if (then->content.masks && then->content.masks != now->content.masks)
        return "files of data.label_mask_paths that had other content than now, with the same "
               "names and "
               "sizes";
    return NULL;
}

/* Changes the data positions in the checkpoint's state s to positions in the configured data. Dies
 * if the data differ and restore_dataloader is true. */
static void continue_data(const Run *r, TrainState *s)
{
    const Config *c = r->config;
    const char *other = other_data(s, &r->state);
    if (c->restore_dataloader && other && comm_rank() == 0)
        resume_print(c, c->load_folder);
    if (c->restore_dataloader && other)
        die("%s was trained on %s. --restore_dataloader=false continues with the configured data, "
            "--reset_trainer_state (with another "
            "--save_folder) starts a run at step 0",
            c->load_folder, other);
    if (!c->restore_dataloader && (!c->continues || (other && r->state.num_mix == 0)))
        s->loader = (LoaderState){ 0 };
    const TrainState then = *s;
    s->fingerprint = r->state.fingerprint;
    s->content = r->state.content;
    s->num_mix = r->state.num_mix;
    memcpy(s->mix, r->state.mix, sizeof s->mix);
    if (s->num_mix > 0)
        mixture_continue(s, &then);
}

/* Loads weights from a checkpoint or a Hugging Face folder, or initializes them. reset_* only apply
 * to load_path. */
static void load_or_initialize(Run *r)
{
    const Config *c = r->config;
    const char *folder = c->load_folder;
    const bool resets = !c->continues;
    const bool new_optimizer = resets && c->reset_optimizer_state,
               new_trainer = resets && c->reset_trainer_state;
    watchdog_wait_for(WORKER_DATA);
    r->state = (TrainState){ .fingerprint = loader_fingerprint(r->loader),
                             .content = loader_content(r->loader) };
    mixture_describe(&r->state, c, r->loader);
    watchdog_wait_for(NO_WORKER);
    comm_agree("contents of data files", r->state.content.tokens ^ r->state.content.masks);
    if (!folder) {
        store_init(&r->store, &c->model, c->seed);
        if (c->num_trainable > 0)
            warn("nothing is loaded, so tensors that `trainable` does not name keep their random "
                 "values: is load_path missing?");
        if (comm_rank() == 0)
            printf("initialized with seed %llu\n", (unsigned long long)c->seed);
        return;
    }
    TrainState s = r->state;
    const bool ours = checkpoint_load(folder, c, &r->store, &s, !new_optimizer);
    r->state.base_fingerprint = s.base_fingerprint;
    r->state.router_bias = s.router_bias;
    r->state.router_biases = s.router_biases;
    router_load_bias(&r->model.text, &s, folder);
    if (ours && !new_trainer) {
        continue_data(r, &s);
        r->state = s;
        loader_seek(r->loader, s.loader);
        set_lengths(r);
    }
    if (comm_rank() != 0)
        return;
    if (ours && !new_trainer) {
        printf("continuing %s, at step %ld of %ld%s\n", folder, r->state.step, r->last_step,
               run_is_over(r) ? ": complete, nothing is left to train" : "");
        resume_print(c, folder);
    } else
        printf("loaded %s, beginning at step 0\n", folder);
}

/* Checks the learning rate of a resumed run. Another max_duration moves the end of the schedule,
 * and changes the rate of the next step. A higher rate undoes the gain of the decay. With wsd this
 * is an error, because --extend continues from before the decay; other schedules have no such
 * checkpoint. */
static void check_rate(const Run *r)
{
    const Config *c = r->config;
    const TrainState *s = &r->state;
    if (s->step == 0 || run_is_over(r))
        return;
    const Config was = extend_with_schedule_of(c->load_folder, c);
    const Run then = { .config = &was, .state = *s, .loader = r->loader };
    const RunLength length = run_length(&then, "max_duration", &was.max_duration);
    const long step = s->step + 1,
               tokens = s->tokens + (long)schedule_batch(c, step) * c->model.max_sequence_length;
    const double rate = schedule_lr(c, r->length, step, tokens),
                 planned = schedule_lr(&was, length, step, tokens);
    const double last = schedule_lr(&was, length, s->step, s->tokens);
    const double end = schedule_end(&was, was.scheduler.in_tokens ? length.tokens : length.steps);
    const double at = was.scheduler.in_tokens ? s->tokens : s->step;
    const char *name = strrchr(c->load_folder, '/');
    if (was.scheduler.name == WSD && at > end - (double)was.scheduler.t_decay && rate > planned)
        die("%s was saved in the decay of its run, which lasts from %.0f to %.0f %s. The learning "
            "rate of step %ld would rise from %.3g to %.3g. To train longer, give --extend=%.*s "
            "and another save_folder: that continues the run from its last checkpoint before the "
            "decay",
            c->load_folder, end - (double)was.scheduler.t_decay, end,
            was.scheduler.in_tokens ? "tokens" : "steps", step, planned, rate,
            name ? (int)(name - c->load_folder) : 1, name ? c->load_folder : ".");
    if (rate > 1.01 * fmax(planned, last))
        warn("the learning rate of step %ld is %.3g; with the schedule of %s it would be %.3g. The "
             "lines 'resume:' say what "
             "differs; --scheduler.t_max=%.0f keeps the end of that schedule",
             step, rate, c->load_folder, planned, end);
}

/* Prints the gain over padding, in which each document (or piece of a long document) would be a
 * sequence. */
static void print_packing(const Loader *l, int T)
{
    const PackedData p = loader_packed(l);
    const double sequences = (double)loader_instances(l), each = (double)p.pieces / sequences;
    if (p.pieces > 0)
        printf("packing: %llu documents, %.2f in a sequence: %.2f times as fast as padding\n"
               "  each to %d tokens; %.2f %% of the positions are tokens,\n"
               "  %.2f %% of the tokens are labels\n",
               (unsigned long long)p.documents, each, each, T,
               100 * (double)p.tokens / (sequences * T), 100 * (double)p.labels / (double)p.tokens);
}

static void print_data(const Run *r)
{
    const Config *c = r->config;
    if (comm_rank() != 0)
        return;
    if (r->length.steps == 1 && schedule_lr(c, r->length, 1, r->length.tokens) == 0)
        warn("the run has one step, its last, whose learning rate is 0: nothing is learned. Use "
             "more "
             "epochs, a smaller global_train_batch_size, or set scheduler.alpha_f above 0");
    const int files = loader_files(r->loader);
    const int own =
        c->global_train_batch_size / comm_group_size(RANKS_DATA) / c->device_train_microbatch_size;
    printf("data: %llu tokens in %llu instances of %d from %d file%s\n",
           (unsigned long long)loader_tokens(r->loader),
           (unsigned long long)loader_instances(r->loader), c->model.max_sequence_length, files,
           files > 1 ? "s" : "");
    print_packing(r->loader, c->model.max_sequence_length);
    mixture_print(c, &r->state, r->loader, r->last_step);
    fputs(r->validation, stdout);
    printf("run: %ld step%s of %d x %d tokens; ", r->length.steps, r->length.steps == 1 ? "" : "s",
           c->global_train_batch_size, c->model.max_sequence_length);
    if (comm_size() > 1)
        printf("each of %d ranks: ", comm_size());
    printf("%d micro-batch%s of %d\n", own, own > 1 ? "es" : "", c->device_train_microbatch_size);
    for (int i = 0; i < c->batch_warmup.count; i++)
        printf("  %d sequences up to step %ld\n", schedule_batch(c, c->batch_warmup.step[i]),
               c->batch_warmup.step[i]);
    fflush(stdout);
}

/* Checks that the sources of a mixture suffice for the remaining steps, from the position in
 * r->state on. If no checkpoint is loaded, the position is known before loading. */
static void check_mix(const Run *r)
{
    if (r->config->data.num_mix > 0 && !run_is_over(r))
        mixture_check(r->loader, r->last_step - r->state.step);
}

static void open_all_data(Run *r)
{
    const Config *c = r->config;
    r->loader = open_data(NULL, c, NULL);
    comm_agree("data files", loader_fingerprint(r->loader));
    r->validation = evaluate_check(c);
    r->samples = samples_open(c);
    set_lengths(r);
    if (!c->load_folder)
        check_mix(r);
}

void run_check_device(const Config *c)
{
    const Recipe *r = &c->recipe;
    const bool operand = format_is_fp8(r->operand),
               head = format_is_fp8(r->head) && !config_forward_only(c);
    if ((operand || head) && !device_has_fp8())
        die("recipe %s multiplies in %s (%s), which this %s cannot do: FP8 needs compute "
            "capability 8.9 "
            "or later (L40S, "
            "RTX 40, H100 and newer). %s",
            r->name, format_name(operand ? r->operand : r->head),
            operand ? "format.operand" : "format.head", device_name(),
            operand ? "--recipe=bf16 runs here, and so does --recipe=coat-opt: FP8 only in the "
                      "optimizer"
                    : xasprintf("--format.head=%s runs here", format_name(r->residual)));
}

/* `where`: name of the device. */
static void print_settings(const Config *c, const char *where)
{
    if (comm_rank() != 0)
        return;
    if (c->dry_run)
        printf("coat.c %s, dry run for %s; settings that are not the defaults:\n%s\n", COAT_VERSION,
               where, c->changes);
    else {
        printf("coat.c %s, ", COAT_VERSION);
        if (comm_size() > 1)
            printf("%d x ", comm_size());
        printf("%s; recipe %s%s", where, c->recipe.name,
               recipe_is_changed(&c->recipe) ? " (changed)" : "");
        printf(config_forward_only(c) ? "\n" : ", optimizer %s\n", c->optimizer.name);
    }
    if (c->model.lora.rank > 0) {
        char *adapters = adapter_describe(c);
        puts(adapters);
        free(adapters);
    }
}

void run_plan(const Config *c)
{
    Model m;
    ParamStore store;
    if (c->load_folder && !c->continues)
        loadable_check(NULL, c->load_folder);
    if (c->device_memory == 0 && device_count() == 0)
        die("dry_run: this host has no GPU; give the memory of the planned GPU in GiB: "
            "--device_memory=80");
    if (c->device_memory == 0 && c->ranks != comm_size() && strcmp(device_build(), "cpu") == 0)
        die("dry_run: this build has no GPU support. To plan for %d ranks (%d started), give the "
            "memory of a GPU in GiB: --device_memory=80. Without --ranks, the plan is for this "
            "host",
            c->ranks, comm_size());
    if (c->device_memory == 0)
        device_init(comm_local_rank());
    print_settings(c, c->device_memory == 0 ? device_name() : "devices elsewhere");
    memory_plan_stage(&m, &store, c, pipeline_print_stages(c));
    memory_print(&m, &store, c);
    model_free(&m, &store);
    error_hold_warnings(false);
    plan_time_print(c);
    if (c->mesh_auto && !config_forward_only(c))
        mesh_search_print(c);
    memory_fit_print(c);
}

/* Also prints the settings and the memory plan. */
static void plan_and_place(Run *r)
{
    const Config *c = r->config;
    print_settings(c, device_name());
    memory_plan(&r->model, &r->store, c);
    memory_print(&r->model, &r->store, c);
    pipeline_print(&r->store);
    memory_check_host(&r->model, &r->store, c);
    model_alloc(&r->model, &r->store, c);
}

/* Does the rest of run_open for eval_only and score: opens no training data, continues no run, and writes
 * only results to the folder. */
static void open_to_evaluate(Run *r)
{
    const Config *c = r->config;
    const char *folder = c->load_folder;
    if (!folder)
        die("%s: there is no model; give a checkpoint or a Hugging Face folder: "
            "--load_path=FOLDER",
            c->score ? "score" : "eval_only");
    if (c->save_folder && comm_rank() == 0)
        save_folder_make(c->save_folder);
    plan_and_place(r);
    const bool ours = checkpoint_load(folder, c, &r->store, &r->state, false);
    router_load_bias(&r->model.text, &r->state, folder);
    if (comm_rank() == 0)
        printf("loaded %s%s\n%s", folder, ours ? ", a checkpoint of coat.c" : "", r->validation);
    r->log = log_open_eval(c, folder);
}

void run_open(Run *r, const Config *c)
{
    *r = (Run){ .config = c, .saved_step = -1 };
    inputs_agree(c);
    if (c->tokenizer)
        tokenizer_files_replace(c->tokenizer, c->model.vocab_size);
    if (c->load_folder && !c->continues)
        loadable_check(NULL, c->load_folder);
    if (c->eval_only)
        r->validation = evaluate_check(c);
    else if (c->score)
        r->validation = xstrdup("");
    else
        open_all_data(r);
    run_check_device(c);
    if (config_forward_only(c)) {
        open_to_evaluate(r);
        return;
    }
    const bool resumes = save_folder_prepare(c);
    plan_and_place(r);
    load_or_initialize(r);
    check_rate(r);
    const bool saved = resumes && save_folder_has(c, r->state.step);
    check_mix(r);
    if (!run_is_over(r))
        loader_limit(r->loader, (uint64_t)(r->last_step - r->state.step));
    if (c->max_duration.epochs > 0)
        schedule_check(c, c->scheduler.in_tokens ? r->length.tokens : r->length.steps, "");
    print_data(r);
    watchdog_mark("opening metrics.jsonl", -1);
    r->log =
        log_open(c, r->store.shape, r->length, r->last_step, r->state.step, resumes, comm_size());
    save_folder_begin(c, resumes, r->state.step, saved);
    if (saved)
        r->saved_step = r->state.step;
    r->first_step = r->state.step;
    trace_open(c->save_folder, comm_rank());
    r->telemetry = telemetry_open(c, &r->model, &r->store, r->log);
    r->health = gpu_health_open(r->log, c->console_log_interval, r->state.step, r->state.tokens, 1);
}

void run_close(Run *r)
{
    gpu_health_close(r->health);
    telemetry_close(r->telemetry);
    samples_close(r->samples);
    trace_close();
    log_close(r->log);
    free(r->validation);
    free(r->begins);
    free(r->state.router_bias);
    if (r->loader)
        loader_close(r->loader);
    model_free(&r->model, &r->store);
}
