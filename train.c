/* coat.c: mpirun ./train config.yaml [--a.b=c ...]
 *
 * Every rank reads the configuration and places the model in memory. Then, for each step:
 *     forward and backward of each micro-batch (the first writes gradients, later ones accumulate);
 *     sum gradients over ranks; clip; update; log; at intervals evaluate and save. */
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/loader.h"
#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/folder.h"
#include "model/config/config_load.h"
#include "model/config/export_options.h"
#include "kernels/runtime/agree.h"
#include "model/run/average.h"
#include "model/run/divergence.h"
#include "model/evaluate/downstream.h"
#include "model/evaluate/evaluate.h"
#include "model/run/export_run.h"
#include "model/run/generate.h"
#include "model/run/log.h"
#include "model/run/loss.h"
#include "model/predict/memory.h"
#include "model/evaluate/open_data.h"
#include "model/run/length_warmup.h"
#include "model/run/pairs.h"
#include "model/run/run.h"
#include "model/update/schedule.h"
#include "model/shape/units.h"
#include "model/run/router_report.h"
#include "model/update/update.h"

/* seconds: default of timeout_seconds, until the configuration is read */
enum { FIRST_TIMEOUT = 600 };

static atomic_int training, asked_to_stop; /* a signal handler may run in any thread */

/* Before the first step, a signal ends the process at once. Nothing is lost: the loaded state is
 * still on disk.
 * NOTE: runs as a signal handler. */
static _Noreturn void end_before_training(int number)
{
    char text[256] = "error: SIG", operation[OPERATION_NAME];
    watchdog_operation(operation);
    const char *const word[] = { sigabbrev_np(number), " while ", operation,
                                 ", before the first step: ended, nothing to save\n" };
    for (size_t i = 0; i < sizeof word / sizeof word[0]; i++)
        strcat(text, word[i]);
    watchdog_end(text, 128 + number);
}

/* A second Ctrl-C kills at once: a rank may be stuck in I/O. A second SIGTERM does not: batch
 * systems may send two. */
static void on_signal(int number)
{
    if (!training)
        end_before_training(number);
    asked_to_stop = number;
    if (number == SIGINT)
        signal(SIGINT, SIG_DFL);
}

/* The signals at which a run saves and ends. */
static const int stopping[] = { SIGTERM, SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGXCPU };
static const size_t nstopping = sizeof stopping / sizeof stopping[0];
static bool ignored[NSIG];

/* A signal that the process ignores when it starts, as SIGHUP under nohup, stays ignored. SIGINT is
 * an exception, because shells let background processes ignore it. */
static void find_ignored_signals(void)
{
    struct sigaction is;
    for (size_t i = 0; i < nstopping; i++)
        ignored[stopping[i]] = stopping[i] != SIGINT && sigaction(stopping[i], NULL, &is) == 0 &&
                               is.sa_handler == SIG_IGN;
}

/* NOTE: mpirun forwards SIGUSR1 and SIGUSR2. After SIGTERM or SIGHUP, mpirun kills the ranks within
 * a second. In a process without mpirun, OpenMPI loads the OpenCL drivers of the GPU, whose LLVM
 * replaces all these handlers. So main calls this function again when all libraries are loaded. */
static void set_signals(void)
{
    for (size_t i = 0; i < nstopping; i++)
        signal(stopping[i], ignored[stopping[i]] ? SIG_IGN : on_signal);
}

/* Reads this rank's part of the next batch. Sets *labels to the number of labels of all ranks. Sets
 * *stop if any rank was asked to stop, so that all ranks stop at the same step. Returns false in
 * two cases. (1) The run stops before this step; only if `may_stop`. (2) A rank has no data:
 * *failed is set on all ranks, and *problem on the rank without data. Ranks that are ready poll for
 * the others, as in checkpoint_finish: a rank may need minutes to shuffle an epoch, or to read from
 * a slow file server. */
static bool next_batch(Run *r, double *labels, bool may_stop, bool *stop, bool *failed,
                       const char **problem)
{
    Batch *b = &r->batch;
    bool ready = false;
    double x[4];
    *problem = NULL;
    watchdog_set_step(r->state.step + 1);
    watchdog_mark("reading tokens", -1);
    do {
        watchdog_wait_for(ready ? NO_WORKER : WORKER_DATA);
        if (!ready && loader_wait(r->loader, 0.5) && !(*problem = loader_problem(r->loader))) {
            ready = loader_next(r->loader, b);
            CHECK(ready, "step %ld: no data", r->state.step + 1);
        }
        /* ranks that share sequences count their labels once */
        x[0] = ready && comm_group_rank(RANKS_SEQUENCE) == 0 ? (double)b->labels : 0;
        x[1] = asked_to_stop != 0;
        x[2] = !ready;
        x[3] = *problem != NULL;
        comm_sum(x, 4);
        *stop = x[1] > 0;
    } while (x[2] > 0 && x[3] == 0 && !(*stop && may_stop));
    watchdog_wait_for(NO_WORKER);
    *failed = x[3] > 0;
    *labels = x[0];
    return x[2] == 0;
}

/* Runs forward and backward on this rank's part of the batch; returns means per label over all
 * ranks. loss.h says which loss is minimized. */
static Losses forward_backward(Run *r, const Batch *b, double labels)
{
    const Config *c = r->config;
    const uint8_t *begins = length_warmup_begins(r, b);
    fsdp_empty_grads(&r->store);
    model_begin_step(&r->model, schedule_batch(c, r->state.step + 1));
    const double terms = loss_terms(r, labels);
    watchdog_mark("forward and backward", -1);
    loss_use(r, b);
    model_micro_batches(&r->model, &r->store, b->tokens, b->targets, begins,
                        b->sequences / r->model.text.attn.B, (float)(1 / terms), (float)c->z_loss,
                        PASS_COMPLETE);
    watchdog_mark_together("reading the losses", -1);
    Losses s = model_losses(&r->model);
    double x[2] = { s.loss / labels, s.zloss / labels };
    comm_sum(x, 2);
    return (Losses){ x[0], x[1] };
}

/* One step. Makes no update if the loss or the gradient is not finite, or at a spike unless
 * `spikes` is `warn`. */
static StepStats train_step(Run *r, double labels)
{
    const Config *c = r->config;
    TrainState *s = &r->state;
    trace_step(s->step + 1,
               s->step - r->first_step >= 2 && s->step - r->first_step < 2 + c->profile);
    if (labels == 0 && comm_rank() == 0)
        warn("step %ld: no token of the batch has a label (check data.label_mask_paths): there is "
             "no loss, and the gradient is 0; "
             "the optimizer's moments and weight decay still change the weights",
             s->step + 1);
    telemetry_watch(r->telemetry, s->step + 1);
    Losses loss = forward_backward(r, &r->batch, fmax(labels, 1));
    watchdog_mark_together("reading the gradient norm", -1);
    double norm = optimizer_grad_norm(&r->store), exposed = trace_step_end();

    const double minimized = loss_of_step(r, loss);
    s->step++;
    s->tokens += (long)schedule_batch(c, s->step) * c->model.max_sequence_length;
    s->loader = loader_state(r->loader);
    double max_norm = schedule_max_grad_norm(c, s->step, s->tokens);
    if (labels == 0) /* without labels there is no mean */
        loss = (Losses){ NAN, NAN };
    double *routed = router_sums(&r->model.text);
    StepStats t = { .step = s->step,
                    .tokens = s->tokens,
                    .share = r->batch.share,
                    .labels = (long)labels,
                    .loss = labels > 0 ? minimized : NAN,
                    .pairs = c->preference.kind != PREFERENCE_NONE ? r->pair_sums : NULL,
                    .policy = c->policy.kind != POLICY_NONE ? r->policy_sums : NULL,
                    .cross_entropy = loss.loss,
                    .zloss = loss.zloss,
                    .grad_norm = norm,
                    .exposed_ms = exposed,
                    .clip = max_norm > 0 ? fmin(1, max_norm / (norm + 1e-6)) : 1,
                    .lr = schedule_lr(c, r->length, s->step, s->tokens),
                    .finite = (labels == 0 || isfinite(minimized)) && isfinite(norm),
                    .scores = { NAN, NAN },
                    .router = router_report(&r->model.text, routed,
                                            is_due(s->step, c->console_log_interval)) };
    if (t.finite && labels > 0)
        t.scores = spikes_add(&s->spikes, t.loss, t.grad_norm);
    t.spike = spikes_exceed(t.scores);
    t.skipped = !t.finite || (t.spike && c->spikes != SPIKES_WARN);
    if (!t.skipped) {
        watchdog_mark("the optimizer", -1);
        telemetry_write(r->telemetry, t.clip);
        optimizer_step(&r->store, c, s->step, t.lr, t.clip);
        router_move_bias(&r->model.text, s, routed);
    }
    free(routed);
    return t;
}

/* Waits until a save in progress is complete. */
static void finish_saving(Run *r)
{
    divergence_check(r);
    watchdog_set_patient(true);
    watchdog_mark_together("waiting for the checkpoint", -1);
    checkpoint_finish();
    watchdog_set_patient(false);
}

/* problem: an error of evaluator i, whose data were valid when the run started; NULL: no error. At
 * an error, training continues without this evaluation, and eval_only dies. */
static void leave_out(const Run *r, int i, char *problem)
{
    if (problem && r->config->eval_only)
        die("%s", problem);
    if (problem)
        warn("step %ld: no evaluation '%s': %s", r->state.step, r->config->eval[i].label, problem);
    free(problem);
}

/* Runs evaluator i; `label` names its metrics. Returns true if the run was asked to stop, so that
 * the evaluation ended early. */
static bool evaluate_by(Run *r, int i, const char *label)
{
    const Config *c = r->config;
    if (c->eval[i].downstream) {
        DownstreamResult d = downstream_evaluate(c, i, &r->model, &r->store, &asked_to_stop);
        d.label = label;
        if (!d.cut && !d.problem)
            log_downstream(r->log, r->state.step, &d);
        leave_out(r, i, d.problem);
        return d.cut;
    }
    EvalResult e = evaluate(c, i, &r->model, &r->store, &asked_to_stop);
    e.label = label;
    if (!e.cut && !e.problem)
        log_eval(r->log, r->state.step, &e);
    leave_out(r, i, e.problem);
    return e.cut;
}

/* Runs all evaluators, or, unless `all`, only those for which an earlier process logged no results
 * at this step. Returns true if the run was asked to stop. */
static bool evaluate_all(Run *r, bool all)
{
    bool cut = false;
    log_pause(r->log);
    for (int i = 0; i < r->config->num_eval && !cut; i++) {
        /* only rank 0 has the log */
        const bool written = agree_any(!all && comm_rank() == 0 && log_evaluated(r->log, i));
        cut = !written && evaluate_by(r, i, r->config->eval[i].label);
    }
    log_resume(r->log);
    return cut;
}

/* Evaluates the average of the weights, if the run evaluates, and writes the average. Returns true
 * if the run was asked to stop. */
static bool use_average(Run *r)
{
    const Config *c = r->config;
    bool cut = false;
    finish_saving(r);
    log_pause(r->log);
    const AverageBackup backup = average_enter(&r->store);
    for (int i = 0; i < c->num_eval && c->eval_interval > 0 && !cut; i++) {
        char *label = xasprintf("average/%s", c->eval[i].label);
        cut = evaluate_by(r, i, label);
        free(label);
    }
    watchdog_set_patient(true);
    watchdog_mark("saving the average", -1);
    checkpoint_write_average(c, &r->store, &r->state, CHECKPOINT_FILE_BYTES);
    watchdog_set_patient(false);
    average_leave(&r->store, backup);
    log_resume(r->log);
    return cut;
}

/* As in OLMo. If save_num_checkpoints_to_keep is 0, a run saves only the permanent checkpoints of
 * save_interval_unsharded and the newest checkpoint of save_interval_ephemeral. Otherwise it also
 * saves the end of training, whatever the intervals are. */
static bool is_saved(const Config *c, long step, bool last)
{
    const bool some = c->save_num_checkpoints_to_keep != 0;
    return is_due(step, c->save_interval_unsharded) || (last && c->save_interval_unsharded > 0) ||
           is_due(step, c->save_interval_ephemeral) ||
           (some && (last || is_due(step, c->save_interval)));
}

/* Starts a save, which overlaps with the next steps. */
static void save(Run *r)
{
    if (r->saved_step == r->state.step)
        return;
    log_pause(r->log);
    watchdog_set_patient(true);
    watchdog_mark("saving", -1);
    checkpoint_begin(r->config, &r->store, &r->state, CHECKPOINT_FILE_BYTES);
    watchdog_set_patient(false);
    log_resume(r->log);
    r->saved_step = r->state.step;
    r->save_is_due = false;
    r->unproven = true;
}

/* A bad update shows in the loss of the next step. So a checkpoint replaces older ones only after a
 * later finite loss, and no save starts at a step that is not finite. */
static void save_and_publish(Run *r, const StepStats *t)
{
    if (!t->finite) {
        r->save_is_due |= is_saved(r->config, t->step, false);
        return;
    }
    r->unproven = false;
    watchdog_set_patient(true);
    checkpoint_poll();
    watchdog_set_patient(false);
    if (r->save_is_due || is_saved(r->config, t->step, run_is_over(r)))
        save(r);
}

static bool evaluates_here(const Run *r)
{
    const long interval = r->config->eval_interval;
    return is_due(r->state.step, interval) || (interval > 0 && run_is_over(r));
}

/* Whether to evaluate before the first step: eval_on_load, or evaluations that an earlier process
 * did not finish. */
static bool evaluates_first(const Run *r)
{
    return r->config->eval_on_load || (r->saved_step == r->state.step && evaluates_here(r));
}

static bool samples_here(const Run *r)
{
    return is_due(r->state.step, r->config->samples.interval) || run_is_over(r);
}

/* Whether the log, which only rank 0 has, lacks the samples of the loaded checkpoint's step. */
static bool samples_owed(const Run *r)
{
    return agree_any(comm_rank() == 0 && r->saved_step == r->state.step && samples_here(r) &&
                     !log_sampled(r->log));
}

/* Saves the state and ends a run whose next step has no data. problem: this rank's error; NULL: the
 * error is on another rank. lost: number of consecutive steps, up to this one, that were not
 * finite. */
static _Noreturn void end_for_data(Run *r, int lost, const char *problem)
{
    const int speaker = agree_first(problem != NULL);
    if (lost > 0) {
        warn("step %ld: %s", r->state.step + 1, agree_problem(problem));
        divergence_end(r, lost);
    }
    if (r->state.step > r->first_step)
        save(r);
    finish_saving(r);
    error_set_status(STATUS_INPUT);
    if (speaker == comm_rank())
        die("%s; step %ld has no data, and %s", problem, r->state.step + 1,
            folder_say_latest(r->config->save_folder));
    while (true)
        comm_barrier(); /* the rank with the error ends all ranks */
}

static void train(Run *r)
{
    const Config *c = r->config;
    /* before this line, a closed stdout ends the process silently, as with --help */
    if (signal(SIGPIPE, on_signal) == SIG_IGN)
        signal(SIGPIPE, SIG_IGN);
    bool stop = evaluates_first(r) && evaluate_all(r, false);
    if (samples_owed(r))
        stop |=
            samples_write(r->samples, &r->model, &r->store, r->log, r->state.step, &asked_to_stop);
    /* an earlier process may have ended before it wrote the average */
    if (average_is_complete(&r->store, c, &r->state) && !average_is_written(c, &r->state))
        stop |= use_average(r);
    int lost = 0;                                    /* consecutive steps that were not finite */
    while (!run_is_over(r) && (!stop || lost > 0)) { /* a run stops only after a finite step */
        const TrainState before = r->state;
        double labels;
        const char *problem;
        bool failed;
        const bool ready = next_batch(r, &labels, lost == 0, &stop, &failed, &problem);
        if (failed)
            end_for_data(r, lost, problem);
        if (!ready)
            break;
        training = 1;
        error_set_status(STATUS_FAULT);
        StepStats t = train_step(r, labels);
        log_step(r->log, &t);
        gpu_health_step(r->health, t.step, t.tokens);
        divergence_warn(r, &t);
        /* the store still has the weights that belong to `before` */
        if (t.spike && c->spikes == SPIKES_STOP)
            divergence_end_spike(r, &before);
        average_step(&r->store, c, t.step);
        lost = t.finite ? 0 : lost + 1;
        if (lost == 3 || (lost > 0 && run_is_over(r)))
            divergence_end(r, lost);
        save_and_publish(r, &t);
        /* save before evaluation: an error there must not lose the checkpoint */
        if (run_is_over(r))
            finish_saving(r);
        if (evaluates_here(r))
            stop |= evaluate_all(r, true);
        if (samples_here(r))
            stop |= samples_write(r->samples, &r->model, &r->store, r->log, t.step, &asked_to_stop);
        if (t.finite && average_is_complete(&r->store, c, &r->state))
            stop |= use_average(r);
    }
    if (stop && comm_rank() == 0)
        printf("asked to stop at step %ld\n", r->state.step);
    if (stop && asked_to_stop == SIGPIPE)
        warn("nothing reads stdout any more (SIGPIPE): the run stops at step %ld", r->state.step);
    if (stop || is_saved(c, r->state.step, true))
        save(r);
    finish_saving(r);
}

/* Dies if stdout is incomplete: the output exists nowhere else. */
static void check_printed(void)
{
    if (comm_rank() == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        die("stdout: cannot write the whole output (closed pipe? disk full?)");
}

static void train_or_evaluate(const Config *c)
{
    Run r;
    watchdog_set_patient(true);
    watchdog_mark("opening data and model", -1);
    run_open(&r, c);
    watchdog_set_patient(false);
    error_hold_warnings(false);
    if (c->eval_only)
        evaluate_all(&r, true);
    else if (c->score)
        pairs_score(&r);
    else {
        loss_open(&r);
        train(&r);
    }
    if (c->eval_only && !c->save_folder)
        check_printed();
    watchdog_set_patient(true);
    run_close(&r);
}

static const ModelConfig *trained_model;
_Static_assert((int)UNIT_NAME == (int)WATCHDOG_UNIT_NAME, "the watchdog names units");

/* Names a unit in messages of the watchdog. */
static void name_unit(int unit, char text[WATCHDOG_UNIT_NAME])
{
    unit_name(trained_model, unit, text);
}

int main(int argc, char **argv)
{
    error_set_status(STATUS_INPUT); /* until the first step */
    /* a write beyond ulimit -f then fails, and a message names the file */
    signal(SIGXFSZ, SIG_IGN);
    if (export_options_asked(argc, argv)) { /* no signal handlers: there is nothing to save */
        comm_start(&argc, &argv);
        export_run(argc, argv);
        comm_finish();
        return 0;
    }
    find_ignored_signals();
    set_signals();
    error_hold_warnings(true);
    comm_start(&argc, &argv);
    watchdog_start(FIRST_TIMEOUT);
    Config *c = config_load(argc, argv, comm_size(), checkpoint_latest);
    if (!c) {
        check_printed();
        watchdog_stop();
        comm_finish();
        return argc < 2 ? STATUS_INPUT : 0;
    }
    watchdog_set_timeout(c->timeout_seconds);
    trained_model = &c->model;
    watchdog_set_names(name_unit);
    if (c->dry_run) {
        watchdog_stop(); /* a plan may take longer than the watchdog's timeout */
        run_plan(c);
        check_printed();
        config_free(c);
        comm_finish();
        return 0;
    }
    comm_set_mesh(memory_mesh(c));
    watchdog_mark("starting the device", -1);
    device_init(comm_local_rank());
    watchdog_mark_together("connecting the devices", -1);
    comm_init();
    set_signals();

    if (c->generate)
        generate(c);
    else
        train_or_evaluate(c);
    watchdog_stop();
    config_free(c);
    comm_finish();
    return 0;
}
