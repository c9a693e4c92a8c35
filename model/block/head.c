/* The last unit: final norm, head and loss. */
#include "model/block/head.h"

#include "kernels/runtime/trace.h"
#include "model/block/branch.h"
#include "model/block/policy.h"
#include "model/block/preference.h"
#include "model/parallel/tensor_ranks.h"
#include "model/shape/units.h"

static const Tensor NONE = { 0 };

/* As below, for soft labels. Its divergence has derivatives of at most 1 or, if reverse, of sums of
 * q log(q / t): larger values than REVERSE saturate. */
static float largest_soft_dlogit(Distillation d, float scale)
{
    const float REVERSE = 16;
    return scale * (d.ce + d.kl * d.temperature * (d.reverse ? REVERSE : 1));
}

/* An upper bound of a logit's gradient, scale / temperature * |(1 + 2 z_weight z) p - [target]|, for
 * |z| <= 1024, where z is the log of the softmax's denominator. */
static float largest_dlogit(float temperature, float scale, float z_weight)
{
    return scale / temperature * (1 + 2 * z_weight * 1024);
}

/* The losses of a chunk, and the gradient of its logits: absent, the logits themselves, or FP8. */
static void chunk_losses(Model *m, int n, Tensor gradient, Tensor logits, const float *label_weight,
                         float largest, float scale, float z_weight)
{
    const SoftBuffers *s = &m->soft;
    const int vocab = m->text.config->vocab_size, *targets = m->targets + n;
    float *losses = m->losses + n, *others = losses + m->text.N;
    if (s->given) {
        const size_t at = (size_t)n * (size_t)s->k;
        const SoftLabels labels = { s->k, s->column + at, s->probability + at, s->tail + n };
        distill(gradient, largest_soft_dlogit(s->loss, scale), logits, losses, others, targets,
                labels, s->loss, vocab, scale);
    } else if (gradient.data && format_is_fp8(gradient.format))
        cross_entropy_codes(gradient, largest_dlogit(m->temperature, scale * largest, z_weight),
                            logits, losses, others, targets, label_weight, vocab, m->temperature,
                            scale, z_weight);
    else
        cross_entropy(logits, losses, others, targets, label_weight, vocab, m->temperature, scale,
                      z_weight, gradient.data != NULL);
}

/* Scoring: chooses columns of a chunk for soft labels. */
static void choose_columns(Model *m, int n, Tensor logits)
{
    SoftBuffers *s = &m->soft;
    const size_t at = (size_t)n * (size_t)s->k;
    const int vocab = m->text.config->vocab_size;
    if (s->choice == CHOOSE_TOP)
        top_columns(s->column + at, s->probability + at, logits, m->targets + n, vocab,
                    s->loss.temperature, s->k);
    else
        draw_columns(s->column + at, s->probability + at, logits, m->targets + n, vocab,
                     s->loss.temperature, s->k, s->seed++);
}

/* Loss and gradients of a chunk with FP8 operands. The transposed gradient overwrites the logits.
 * Padding has no gradient. label_weight: factors of the rows' gradients, at most `largest`; or
 * NULL. */
static void chunk_backward_fp8(Model *m, int n, Tensor logits, Tensor h, Tensor dweight,
                               const float *label_weight, float largest, float scale,
                               float z_weight, bool needs_dx)
{
    Tensor dlogits = m->dlogits, transposed = dlogits, head_h = m->head_h;
    dlogits.rows = transposed.rows = head_h.rows = fp8_padded(logits.rows);
    dlogits.data_t = transposed.data = NULL;
    chunk_losses(m, n, dlogits, logits, label_weight, largest, scale, z_weight);
    /* not fast: a sum over the vocabulary has too many terms for short accumulators */
    if (needs_dx)
        matmul_dx(tensor_rows(own_rows(&m->text, m->text.work.dh), n, logits.rows),
                  tensor_rows(dlogits, 0, logits.rows), m->head_w, false);
    if (!dweight.data)
        return;
    quantize_codes(transposed, dlogits);
    quantize_scale(head_h, h);
    quantize_codes(head_h, h);
    transposed.data = dlogits.data;
    transposed.cols = dweight.rows;
    transposed.fast = m->text.recipe.fast == FAST_ALL;
    matmul_dw(dweight, transposed, head_h);
}

/* Computes the cross entropy of all labels, and from it the labels' weights. Returns the largest
 * weight. If the logits are a single chunk, they stay valid; else they are computed again. For N
 * tokens, C = d_model and a vocabulary of V, this takes 2 N C V FLOPs in addition to the 6 N C V of
 * the head, and no memory but the weights. In Llama-3-8B, C V is 0.53 of the 7.5 billion weights in
 * GEMMs, so a step takes 1/3 x 0.53 / 7.5 = 2.3 % more FLOPs, not counting attention. The
 * alternative, to scale the rows of dLoss/d(final_h) afterwards, takes neither FLOPs nor memory, but
 * works only for a frozen head: the gradient of the head's weight sums over rows, so it would need
 * the gradients of all logits, 2 N V bytes: 4.2 GB for 16,384 tokens. With adapters, a step has 4
 * x 7.5 parts, of which it would save 2 x 0.53, or 3.5 %. */
static float weigh_labels(Model *m, Tensor weight)
{
    const bool policy = m->policy.kind != POLICY_NONE;
    for (int n = 0, chunk = m->logits.rows; n < m->text.N; n += chunk) {
        const int rows = m->text.N - n < chunk ? m->text.N - n : chunk;
        Tensor logits = tensor_rows(m->logits, 0, rows);
        matmul(logits, tensor_rows(m->final_h, n, rows), weight, NONE);
        cross_entropy(logits, m->losses + n, m->losses + m->text.N + n, m->targets + n, NULL,
                      m->text.config->vocab_size, m->temperature, 1, 0, false);
        if (policy)
            row_entropy(m->losses + m->text.N + n, logits, m->targets + n,
                        m->text.config->vocab_size, m->temperature);
    }
    return policy ? policy_weigh(m) : preference_weigh(m);
}

/* Final norm, head and loss, a chunk of tokens at a time, so that the logits (N, V) of all tokens
 * never exist together. With `backward`, the gradient of a chunk overwrites the chunk's logits, and
 * work.dh gets dLoss/d(final_h). The gradients of preference pairs and of a policy need
 * log-probabilities of labels: a first pass over the chunks computes the weight of each label. */
void head_losses(Model *m, ParamStore *store, float scale, float z_weight, bool backward)
{
    const bool tied = m->text.config->weight_tying;
    const int last = store->num_units - 1, head_unit = unit_of_head_matrix(m->text.config),
              chunk = m->logits.rows;
    fsdp_gather(store, last, FOR_FORWARD);
    const UnitTensors *w = fsdp_acquire(store, last);
    if (tied)
        fsdp_gather(store, head_unit, FOR_FORWARD | FOR_BACKWARD);
    const UnitTensors *hw = fsdp_acquire(store, head_unit);
    UnitTensors none = { 0 }, *dw = backward ? fsdp_grads(store, head_unit) : &none,
                *dnorm = backward ? fsdp_grads(store, last) : &none;
    Tensor weight = tied ? hw->embed : hw->head, *dweight = tied ? &dw->embed : &dw->head;
    /* a unit below the head is trained */
    const bool needs_dx = backward && (store->first_trained < last || dnorm->norm.data);
    const bool fp8 = backward && format_is_fp8(m->text.recipe.head);

    trace_begin("head", head_unit);
    Tensor x = m->unit_acts[last].attn_res;
    norm_forward(m->final_h, x, m->final_stats, x, w->norm, NONE, m->text.config->norm, FROM_SAVED);
    if (fp8 && needs_dx) {
        quantize_scale(m->head_w, weight);
        quantize_codes(m->head_w, weight);
    }
    const bool weighs = m->weighed.weight && (backward || m->weighed.targets);
    const float largest = weighs ? weigh_labels(m, weight) : 1;
    for (int n = 0; n < m->text.N && (backward || !weighs); n += chunk) {
        int rows = m->text.N - n < chunk ? m->text.N - n : chunk;
        const float *label_weight = weighs ? m->weighed.weight + n : NULL;
        Tensor h = tensor_rows(m->final_h, n, rows), logits = tensor_rows(m->logits, 0, rows);
        if (!weighs || m->text.N > chunk)
            matmul(logits, h, weight, NONE);
        if (m->soft.chooses)
            choose_columns(m, n, logits);
        if (fp8)
            chunk_backward_fp8(m, n, logits, h, *dweight, label_weight, largest, scale, z_weight,
                               needs_dx);
        else {
            chunk_losses(m, n, backward ? logits : NONE, logits, label_weight, largest, scale,
                         z_weight);
            if (needs_dx)
                matmul_dx(tensor_rows(own_rows(&m->text, m->text.work.dh), n, rows), logits, weight,
                          false);
            if (backward)
                matmul_dw(*dweight, logits, h);
        }
        /* the next chunk adds to the gradient, and so does a tied embedding */
        dweight->empty = false;
    }
    if (needs_dx)
        branch_norm_backward(&m->text, &m->text.work, dnorm->norm, x, m->final_stats, w->norm,
                             false);
    trace_end();
    fsdp_release(store, last);
    if (tied)
        fsdp_release(store, head_unit);
    sum_values(&m->sums[0], m->losses, m->text.N);
    sum_values(&m->sums[1], m->losses + m->text.N, m->text.N);
}

void head_logits(Model *m, ParamStore *store, int row)
{
    const bool tied = m->text.config->weight_tying;
    const int last = store->num_units - 1, head_unit = unit_of_head_matrix(m->text.config);
    fsdp_gather(store, last, FOR_FORWARD);
    const UnitTensors *w = fsdp_acquire(store, last);
    if (tied)
        fsdp_gather(store, head_unit, FOR_FORWARD);
    const UnitTensors *hw = fsdp_acquire(store, head_unit);
    Tensor x = tensor_rows(m->unit_acts[last].attn_res, row, 1), h = tensor_rows(m->final_h, 0, 1);
    norm_forward(h, x, m->final_stats, x, w->norm, NONE, m->text.config->norm, FROM_SAVED);
    matmul(tensor_rows(m->logits, 0, 1), h, tied ? hw->embed : hw->head, NONE);
    fsdp_release(store, last);
    if (tied)
        fsdp_release(store, head_unit);
}
