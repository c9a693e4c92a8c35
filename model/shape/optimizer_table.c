/* The table of optimizers. */
#include "model/shape/optimizer_table.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/shape/params.h"

/* Kernels compute in F32. The bias corrections are computed from the exact hyper-parameters. */
static AdamW adamw_arguments(const StepParams *p)
{
    return (AdamW){ .lr = (float)p->lr,
                    .beta1 = (float)p->beta1,
                    .beta2 = (float)p->beta2,
                    .eps = (float)p->eps,
                    .weight_decay = (float)p->weight_decay,
                    .correction1 = (float)(1 - pow(p->beta1, (double)p->update)),
                    .correction2 = (float)(1 - pow(p->beta2, (double)p->update)),
                    .grad_scale = (float)p->grad_scale,
                    .seed = p->seed,
                    .numbering = p->numbering };
}

static void step_adamw(Tensor w, const Tensor *state, Tensor grad, const StepParams *p,
                       uint64_t first)
{
    adamw(w, state[0], state[1], grad, adamw_arguments(p), first);
}

/* Moments outside blocks are F32: in 8 bits, v of a row with rare gradients would be rounded to 0,
 * but m would not ("Moments of rare gradients" in model/README.md). DIFFERS: Hugging Face's Trainer
 * keeps only the moments of embeddings in F32, and bitsandbytes those of tensors with fewer than
 * 4096 values. */
static void step_adamw8bit(Tensor w, const Tensor *state, Tensor grad, const StepParams *p,
                           uint64_t first)
{
    (format_is_dynamic8(state[0].format) ? adamw8bit : adamw)(w, state[0], state[1], grad,
                                                              adamw_arguments(p), first);
}

/* Updates all parameters except matrices; muon_step.c updates matrices. */
static void step_others(Tensor w, const Tensor *state, Tensor grad, const StepParams *p,
                        uint64_t first)
{
    adamw(w, state[1], state[2], grad, adamw_arguments(p), first);
}

#define DYNAMIC(dtype) OWN_FORMATS, { dtype, DYNAMIC8_GROUP, false }, .elsewhere = { F32, 0, false }

static const Optimizer rows[] = {
    { "adamw",
      2,
      { { "exp_avg", "m", MOMENT1 }, { "exp_avg_sq", "v", MOMENT2 } },
      HAS_BETAS | HAS_EPS | HAS_WEIGHT_DECAY,
      .is_adam = true,
      .step = step_adamw },
    { "adamw8bit",
      2,
      { { "exp_avg", "m", DYNAMIC(DYNAMIC8) }, { "exp_avg_sq", "v", DYNAMIC(UDYNAMIC8) } },
      HAS_BETAS | HAS_EPS | HAS_WEIGHT_DECAY,
      .is_adam = true,
      .step = step_adamw8bit },
    { "muon",
      3,
      { { "momentum_buffer", "momentum", MOMENT1, .of = STATE_OF_MATRICES },
        { "exp_avg", "m", MOMENT1, .of = STATE_OF_OTHERS },
        { "exp_avg_sq", "v", MOMENT2, .of = STATE_OF_OTHERS } },
      HAS_BETAS | HAS_EPS | HAS_WEIGHT_DECAY | HAS_NEWTON_SCHULZ,
      .orthogonalizes = true,
      .step = step_others },
};

enum { NUM_ROWS = sizeof rows / sizeof rows[0], MAX_ADDED = 8, MAX_STATE_NAME = 32 };
static const Optimizer *added[MAX_ADDED];

const Optimizer *optimizer_at(int i)
{
    return i < NUM_ROWS ? &rows[i] : i < NUM_ROWS + MAX_ADDED ? added[i - NUM_ROWS] : NULL;
}

const Optimizer *optimizer_find(const char *name)
{
    const Optimizer *o;
    for (int i = 0; (o = optimizer_at(i)); i++)
        if (strcmp(o->name, name) == 0)
            return o;
    return NULL;
}

Format optimizer_format(const Optimizer *o, int state, const Recipe *r, bool in_layer)
{
    const OptimizerState *s = &o->state[state];
    return format_of_moment(s->from == MOMENT1                    ? r->moment1
                            : s->from == MOMENT2                  ? r->moment2
                            : s->from == OWN_FORMATS && !in_layer ? s->elsewhere
                                                                  : s->own);
}

bool optimizer_reads(const Optimizer *o, StateFormat column)
{
    for (int i = 0; i < o->num_states; i++)
        if (o->state[i].from == column)
            return true;
    return false;
}

const Optimizer *optimizer_averaged(const Optimizer *o)
{
    static Optimizer averaged;
    CHECK(o->num_states < MAX_STATES,
          "optimizer %s has %d states, there is no space for an average", o->name, o->num_states);
    averaged = *o;
    averaged.state[averaged.num_states++] = (OptimizerState){
        AVERAGE_STATE, "average", OWN_FORMAT, { F32, 0, false }, .of = STATE_OF_ALL
    };
    return &averaged;
}

void optimizer_add(const Optimizer *row)
{
    int n = 0;
    while (optimizer_at(n))
        n++;
    CHECK(!optimizer_find(row->name), "there is an optimizer %s already", row->name);
    CHECK(n < NUM_ROWS + MAX_ADDED, "optimizer %s: at most %d optimizers can be added", row->name,
          MAX_ADDED);
    CHECK(row->num_states >= 0 && row->num_states <= MAX_STATES && row->step,
          "optimizer %s has %d states, of at most %d, and %s step", row->name, row->num_states,
          MAX_STATES, row->step ? "a" : "no");
    for (int i = 0; i < row->num_states; i++) {
        const OptimizerState *s = &row->state[i];
        const Format f[2] = { s->own, s->elsewhere };
        CHECK(strlen(s->name) <= MAX_STATE_NAME,
              "optimizer %s: the name %s has more than %d characters", row->name, s->name,
              MAX_STATE_NAME);
        for (int k = 0; k < (s->from == OWN_FORMAT ? 1 : s->from == OWN_FORMATS ? 2 : 0); k++)
            CHECK(!f[k].group || PARAM_ALIGN % f[k].group == 0,
                  "optimizer %s: %s is %s; groups must divide %d", row->name, s->name,
                  format_name(f[k]), PARAM_ALIGN);
    }
    added[n - NUM_ROWS] = row;
}
