/* A bad update shows one step later: loss and gradient of step N are finite, but with the new
 * weights the loss is not. */
#include "model/run/divergence.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/save.h"
#include "model/evaluate/open_data.h"
#include "model/run/length_warmup.h"
#include "model/run/loss.h"
#include "model/update/update.h"

#define REMEDY \
    "Lower optimizer.learning_rate, clip gradients (max_grad_norm) or look at the data of these " \
    "steps"

void divergence_warn(Run *r, const StepStats *t)
{
    if (t->labels == 0 && t->finite)
        return;
    const double guess = log(r->config->model.vocab_size);
    const bool diverged = t->finite && t->cross_entropy > 2 * guess;
    if (t->spike)
        warn("step %ld: a spike: loss %.4f is %+.1f and gradient norm %.3g is %+.1f standard "
             "deviations from the mean of the last %d "
             "steps%s",
             t->step, t->loss, t->scores.loss, t->grad_norm, t->scores.grad_norm,
             r->state.spikes.count, t->skipped ? "; no update was made" : "");
    if (diverged && (!r->diverged || run_is_over(r)))
        warn("step %ld: the loss is %.4g; the loss of an untrained model is %.4g: this model has "
             "diverged. %s",
             t->step, t->cross_entropy, guess, REMEDY);
    r->diverged = diverged;
}

/* Saves the state and ends the run. what: text for the message, which begins with the step: what
 * has happened. */
static _Noreturn void end(Run *r, long step, const char *what, const char *advice)
{
    const Config *c = r->config;
    char *aside = NULL;
    watchdog_set_patient(true);
    watchdog_mark_together("saving what is left", -1);
    if (r->unproven)
        checkpoint_drop();
    checkpoint_finish();
    if (c->save_num_checkpoints_to_keep != 0)
        aside = checkpoint_set_aside(c, &r->store, &r->state, CHECKPOINT_FILE_BYTES);
    error_set_status(STATUS_DIVERGED);
    die("step %ld: %s; %s%s%s. %s", step, what, folder_say_latest(c->save_folder),
        aside ? "; the state at the end of the run is saved in " : "", aside ? aside : "", advice);
}

/* Tests the current weights on the first micro-batch; later micro-batches may be empty at the end
 * of an epoch. */
static bool gives_finite_step(Run *r)
{
    const Batch *b = &r->batch;
    const float tokens =
        (float)r->model.text.attn.B * (float)r->model.text.T * (float)comm_group_size(RANKS_DATA);
    watchdog_mark("forward and backward after the last update", -1);
    fsdp_empty_grads(&r->store);
    model_zero_losses(&r->model);
    loss_use(r, b);
    model_micro_batch(&r->model, &r->store, b->tokens, b->targets, length_warmup_begins(r, b),
                      1 / tokens, (float)r->config->z_loss, PASS_COMPLETE);
    watchdog_mark_together("reading the loss and gradient norm after the last update", -1);
    double loss = model_losses(&r->model).loss;
    comm_sum(&loss, 1);
    return isfinite(loss) && isfinite(optimizer_grad_norm(&r->store));
}

void divergence_check(Run *r)
{
    static const char what[] =
        "after the update of this step the loss or the gradient norm is not finite";
    if (r->unproven && r->batch.sequences > 0 && !gives_finite_step(r)) {
        warn("step %ld: %s: the run ends", r->state.step, what);
        end(r, r->state.step, what, REMEDY);
    }
    r->unproven = false;
}

void divergence_end(Run *r, int steps)
{
    const bool all = r->state.step - r->first_step == steps;
    char *what = xasprintf("%s whose loss or gradient is not finite",
                           steps == 1   ? "the run ends with a step"
                           : steps == 2 ? "the run ends with two steps"
                                        : "the third step in a row");
    warn("step %ld: %s", r->state.step, what); /* warns now, because the disk may be full */
    end(r, r->state.step, what,
        all ? "No step of this run was finite: check the loaded model and the data" : REMEDY);
}

void divergence_end_spike(Run *r, const TrainState *before)
{
    const long step = r->state.step;
    r->state = *before;
    r->unproven = false; /* a spike's loss is finite */
    end(r, step, "a spike ends the run (spikes=stop)", REMEDY ", or continue with --spikes=skip");
}
