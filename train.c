/* coat.c: mpirun ./train config.yaml [--a.b=c ...]
 *
 * Every rank: read the configuration, place the model in memory, then for each step
 *     zero the gradients; forward and backward of each micro-batch; sum gradients over ranks;
 *     clip; update; log; now and then evaluate and save. */
#include <math.h>
#include <signal.h>
#include <stdio.h>

#include "data/loader.h"
#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/trace.h"
#include "kernels/watchdog.h"
#include "model/checkpoint/checkpoint.h"
#include "model/config/load.h"
#include "model/run/evaluate.h"
#include "model/run/log.h"
#include "model/run/run.h"
#include "model/schedule.h"
#include "model/update.h"

static volatile sig_atomic_t asked_to_stop;

/* A second Ctrl-C ends what cannot stop, as a rank that waits for a file server. Batch systems may send theirs twice. */
static void on_signal(int number)
{
    asked_to_stop = 1;
    if (number == SIGINT)
        signal(SIGINT, SIG_DFL);
}

/* Labels of the global batch; also whether any rank was asked to stop, so that all stop at the same step. */
static double global_labels(const Batch *b, bool *stop)
{
    double x[2] = { b->labels, asked_to_stop };
    comm_sum(x, 2);
    *stop = x[1] > 0;
    return x[0];
}

/* Forward and backward of this rank's part of the batch; returns means per label over all ranks. */
static Losses forward_backward(Run *r, const Batch *b, double labels)
{
    const Config *c = r->config;
    int B = r->model.attn.B, T = r->model.attn.T;
    fsdp_zero_grads(&r->fsdp);
    for (int i = 0; i < b->sequences; i += B) {
        const bool last = i + B >= b->sequences;
        watchdog_mark("forward and backward", -1);
        model_step(&r->model, &r->fsdp, b->tokens + (size_t)i * T, b->targets + (size_t)i * T,
                   (float)(1 / labels), (float)c->z_loss, last ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
    watchdog_mark_together("reading the losses", -1);
    Losses s = model_losses(&r->model);
    double x[2] = { s.loss / labels, s.zloss / labels };
    comm_sum(x, 2);
    return (Losses){ x[0], x[1] };
}

/* One step. A loss or gradient that is not finite changes nothing but the count of skipped steps. */
static StepStats train_step(Run *r, bool *stop)
{
    const Config *c = r->config;
    TrainState *s = &r->state;
    Batch b;
    watchdog_set_step(s->step + 1);
    watchdog_mark("reading tokens", -1);
    loader_next(r->loader, &b);
    trace_step(s->step + 1, s->step - r->first_step >= 2 && s->step - r->first_step < 2 + c->profile);
    double labels = global_labels(&b, stop);
    if (labels == 0 && comm_rank() == 0)
        warn("step %ld: no token of the batch has a label; only weight decay changes the weights (data.label_mask_paths?)",
             s->step + 1);
    labels = fmax(labels, 1);
    telemetry_watch(r->telemetry, s->step + 1);
    Losses loss = forward_backward(r, &b, labels);
    watchdog_mark_together("reading the gradient norm", -1);
    double norm = optimizer_grad_norm(&r->fsdp), exposed = trace_step_end();

    s->step++;
    s->tokens += (long)c->global_train_batch_size * c->model.max_sequence_length;
    s->loader = loader_state(r->loader);
    double max_norm = schedule_max_grad_norm(c, s->step, s->tokens);
    StepStats t = { .step = s->step, .tokens = s->tokens, .loss = loss.loss, .zloss = loss.zloss, .grad_norm = norm,
                    .exposed_ms = exposed, .clip = max_norm > 0 ? fmin(1, max_norm / (norm + 1e-6)) : 1,
                    .lr = schedule_lr(c, r->length, s->step, s->tokens), .skipped = !isfinite(loss.loss) || !isfinite(norm) };
    if (!t.skipped) {
        watchdog_mark("the optimizer", -1);
        s->updates++;
        telemetry_write(r->telemetry, s->updates, t.clip);
        optimizer_step(&r->fsdp, c, s->step, s->updates, t.lr, t.clip);
    }
    return t;
}

/* Waits until a save that is under way is complete. */
static void finish_saving(void)
{
    watchdog_set_patient(true);
    watchdog_mark_together("waiting for the checkpoint", -1);
    checkpoint_finish();
    watchdog_set_patient(false);
}

/* True if the run was asked to stop and this has ended early. */
static bool evaluate_all(Run *r)
{
    bool cut = false;
    log_pause(r->log);
    for (int i = 0; i < r->config->num_eval && !cut; i++) {
        EvalResult e = evaluate(r->config, i, &r->model, &r->fsdp, &asked_to_stop);
        cut = e.cut;
        if (!cut)
            log_eval(r->log, r->state.step, &e);
    }
    log_resume(r->log);
    return cut;
}

/* As OLMo: save_num_checkpoints_to_keep 0 leaves only those of save_interval_unsharded, which stay for ever, and the newest of
 * save_interval_ephemeral; and where it is not 0, the end of training is saved whatever the intervals are. */
static bool is_saved(const Config *c, long step, bool last)
{
    const bool some = c->save_num_checkpoints_to_keep != 0;
    return is_due(step, c->save_interval_unsharded) || (last && c->save_interval_unsharded > 0)
        || is_due(step, c->save_interval_ephemeral) || (some && (last || is_due(step, c->save_interval)));
}

/* Starts to save; it goes on beside the next steps. */
static void save(Run *r)
{
    if (r->saved_step == r->state.step)
        return;
    log_pause(r->log);
    watchdog_set_patient(true);
    watchdog_mark("saving", -1);
    checkpoint_begin(r->config, &r->fsdp, &r->state, CHECKPOINT_FILE_BYTES);
    watchdog_set_patient(false);
    log_resume(r->log);
    r->saved_step = r->state.step;
}

static bool evaluates_here(const Run *r)
{
    const long interval = r->config->eval_interval;
    return is_due(r->state.step, interval) || (interval > 0 && run_is_over(r));
}

/* True if a run goes on from a checkpoint whose evaluation it did not come to. */
static bool owes_evaluation(const Run *r)
{
    double has_eval = log_has_eval(r->log);         /* rank 0 knows */
    comm_max(&has_eval, 1);
    return r->saved_step == r->state.step && evaluates_here(r) && !has_eval;
}

static void train(Run *r)
{
    const Config *c = r->config;
    bool stop = false;
    int skipped_in_a_row = 0;
    if (c->eval_on_load || owes_evaluation(r))
        stop = evaluate_all(r);
    while (!stop && !run_is_over(r)) {
        StepStats t = train_step(r, &stop);
        log_step(r->log, &t);
        health_step(r->health, t.step, t.tokens);
        watchdog_set_patient(true);
        checkpoint_poll();
        watchdog_set_patient(false);
        skipped_in_a_row = t.skipped ? skipped_in_a_row + 1 : 0;
        if (skipped_in_a_row == 3) {
            save(r);
            finish_saving();
            die("step %ld: the third step in a row whose loss or gradient is not finite; the model as it was before them is "
                "in %s/step%ld. %s", t.step, c->save_folder, t.step, t.step - r->first_step == 3
                ? "No step of this run was finite: look at what it has loaded and at its data"
                : "Lower optimizer.learning_rate or look at the data of these steps");
        }
        if (is_saved(c, t.step, run_is_over(r)))
            save(r);
        if (run_is_over(r))         /* what ends an evaluation, as a file that is gone, must not take the last checkpoint along */
            finish_saving();
        if (evaluates_here(r))
            stop |= evaluate_all(r);
    }
    if (stop && comm_rank() == 0)
        printf("asked to stop at step %ld\n", r->state.step);
    if (stop || is_saved(c, r->state.step, true))
        save(r);
    finish_saving();
}

int main(int argc, char **argv)
{
    signal(SIGTERM, on_signal);
    signal(SIGUSR1, on_signal);         /* this and the next mpirun hands on without killing the ranks a second later */
    signal(SIGUSR2, on_signal);
    signal(SIGINT, on_signal);
    comm_start(&argc, &argv);
    Config *c = config_load(argc, argv, comm_size(), checkpoint_latest);
    if (!c) {
        comm_finish();
        return 0;
    }
    comm_divide(c->strategy.shard_ranks);
    watchdog_start(c->timeout_seconds, c->model.n_layers + 2);
    watchdog_mark("starting the device", -1);
    device_init(comm_local_rank());
    watchdog_mark_together("connecting the devices", -1);
    comm_init();

    Run r;
    watchdog_set_patient(true);
    watchdog_mark("opening data and model", -1);
    if (run_open(&r, c)) {
        watchdog_set_patient(false);
        train(&r);
    }
    watchdog_set_patient(true);
    run_close(&r);
    watchdog_stop();
    config_free(c);
    comm_finish();
    return 0;
}
