/* Compares ranks that share sequences or layers with one rank that has all: losses of tokens,
 * gradients and their norm, weights, codes. The test is linked with --wrap=scale_within_range, so
 * that ranks share the maxima of FP8 operands. */
#pragma once
#include "kernels/backend.h"
#include "tests/ranks_state.h"

enum { SEQUENCES = 4, MICRO = 2 };

/* ---- maxima of all ranks --------------------------------------------------------------------- */

static int shared_rows; /* operands with this number of rows share their maxima; 0: no operand
                         * does */

/* NULL in the CUDA build */
extern float __real_scale_within_range(Tensor t, float amax) __attribute__((weak));
float __wrap_scale_within_range(Tensor t, float amax);

float __wrap_scale_within_range(Tensor t, float amax)
{
    if (t.rows == shared_rows)
        backend_comm_all_reduce_max(tensor_at(&amax, (Format){ F32, 0 }, 1, 1), RANKS_STAGE);
    return __real_scale_within_range(t, amax);
}

/* ---- one step -------------------------------------------------------------------------------- */

/* How far results may differ from the results of one rank. loss: for each token's loss, relative if
 * the loss is above 1. grads: for gradients, their norm and weights, relative. */
typedef struct {
    double loss, grads;
} Bounds;

/* codes: transposed codes and scale of the first block's attn_h, if the recipe keeps all
 * activations; else NULL. All members are valid until release(). */
typedef struct {
    double *loss, norm;
    Whole grads, weights;
    char *codes;
    size_t bytes;
} Result;

/* Runs one step. Each rank first has the losses of its own tokens, and zeros for other tokens; the
 * sum over ranks gives all losses. */
static inline void run_step(Run *r, Result *s, int tokens)
{
    run_same_sequences(r, s->loss, tokens);
    comm_sum_over(s->loss, tokens, RANKS_STAGE);
    for (int i = 0; i < tokens; i++)
        s->loss[i] /= comm_group_size(RANKS_STAGE) /
                      (comm_group_size(RANKS_CONTEXT) * comm_group_size(RANKS_TENSOR));
    s->norm = optimizer_grad_norm(&r->store);
}

/* updates: also runs an update and a second step; the losses are then those of the second step, and
 * the updated weights are compared too. */
static inline Result run_parts(const Case *k, ModelConfig m, Strategy w, bool shares, bool updates)
{
    const int tokens = SEQUENCES * m.max_sequence_length;
    Result s = { .loss = keep(sizeof *s.loss * (size_t)tokens) };
    Run r;
    configure(&r, k, m, w);
    r.config.device_train_microbatch_size = MICRO;
    place_run(&r);
    store_zero_states(&r.store);
    shared_rows = shares ? r.model.text.rows : 0;
    run_step(&r, &s, tokens);
    s.grads = take_whole(&r, GRADIENTS);
    const Tensor h = r.model.acts[0].attn_h;
    if (h.data_t && r.config.recipe.keep == KEEP_ALL) {
        s.bytes = tensor_numel(h) + sizeof(float);
        s.codes = keep(s.bytes);
        device_get(s.codes, h.data_t, tensor_numel(h));
        device_get(s.codes + tensor_numel(h), h.scale, sizeof(float));
    }
    if (updates) {
        Result next = { .loss = s.loss };
        optimizer_step(&r.store, &r.config, 1, 1e-3, 1);
        run_step(&r, &next, tokens);
        s.weights = take_whole(&r, WEIGHTS);
    }
    shared_rows = 0;
    close_run(&r);
    return s;
}

static inline void compare_parts(const Case *k, int tokens, Strategy w, const Result *part,
                                 const Result *whole, Bounds most)
{
    double loss = 0;
    for (int i = 0; i < tokens; i++)
        loss = fmax(loss, fabs(part->loss[i] - whole->loss[i]) / fmax(1, whole->loss[i]));
    const double grads = whole_difference(&part->grads, &whole->grads),
                 norm = fabs(part->norm / whole->norm - 1),
                 weights =
                     part->weights.units ? whole_difference(&part->weights, &whole->weights) : 0;
    if (!(loss <= most.loss && grads <= most.grads && norm <= most.grads && weights <= most.grads))
        fail_msg("%s, %s, documents %d, modules %#x, base %d, keep %d, %d shards, %d context and "
                 "%d tensor ranks: losses differ by "
                 "%.3g (bound %.3g), gradients by %.3g, their norm by %.3g, weights by %.3g (bound "
                 "%.3g)",
                 k->recipe, architecture_name(k->model), k->documents, k->modules, k->base, k->keep,
                 w.shard_ranks, context_ranks(&w), tensor_ranks(&w), loss, most.loss, grads, norm,
                 weights, most.grads);
    if (context_ranks(&w) == 1 && whole->codes)
        check_same_bytes("codes", part->codes, whole->codes, whole->bytes);
}

/* Runs the case with each of these strategies, and compares each result with the result of one
 * rank. */
static inline void check_parts(const Case *k, ModelConfig m, const Strategy *ways, int count,
                               Bounds most, bool updates)
{
    const int tokens = SEQUENCES * m.max_sequence_length;
    const Result whole = run_parts(k, m, ALONE, false, updates);
    const int mark = num_kept;
    for (int i = 0; i < count; i++) {
        const Result part = run_parts(k, m, ways[i], true, updates);
        compare_parts(k, tokens, ways[i], &part, &whole, most);
        release_from(mark);
    }
    release();
}
