/* Shared by tests of training on ranks: groups, and steps on batches that are the same for any
 * number of ranks. */
#pragma once
#include <math.h>

#include "kernels/collectives.h"
#include "model/update/update.h"
#include "tests/models.h"

/* NOTE: NCCL takes a second per communicator, so tests should rarely change groups. */
static inline void divide_in_tensor(int stages, int shard_ranks, int context, int tensor)
{
    if (comm_group_size(RANKS_PIPELINE) == stages && comm_group_size(RANKS_SHARD) == shard_ranks &&
        comm_group_size(RANKS_CONTEXT) == context && comm_group_size(RANKS_TENSOR) == tensor)
        return;
    comm_device_finish();
    comm_set_mesh(mesh_of_tensor(comm_size(), stages, shard_ranks, context, tensor));
    comm_init();
}

static inline void divide_in_stages(int stages, int shard_ranks, int context)
{
    divide_in_tensor(stages, shard_ranks, context, 1);
}

static inline void divide_in_context(int shard_ranks, int context)
{
    divide_in_stages(1, shard_ranks, context);
}

static inline void divide(int shard_ranks)
{
    divide_in_context(shard_ranks, 1);
}

/* The gradients of `share` sequences per rank, in micro-batches of one. */
static inline void forward_backward(Model *m, ParamStore *store, const Config *c, int step,
                                    int share)
{
    enum { MAX_TOKENS = 4096 };
    static int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    const int T = c->model.max_sequence_length, vocab = c->model.vocab_size,
              batch = c->global_train_batch_size;
    assert_true(T <= MAX_TOKENS);
    fsdp_empty_grads(store);
    for (int i = 0; i < share; i++) {
        const int sequence = (step * batch + comm_rank() * share + i) * T;
        for (int t = 0; t < T; t++) {
            tokens[t] = test_token(11, (uint64_t)(sequence + t), vocab);
            targets[t] = test_token(11, (uint64_t)(sequence + t + 1), vocab);
        }
        model_micro_batch(m, store, tokens, targets, NULL, 1.0f / (float)(batch * T), 0,
                          i == share - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
}

/* Of the documents of run_same_sequences; 0: some of 41 tokens, cut where a sequence ends. */
static int document_length;

/* A step of `count` tokens in micro-batches of `micro` sequences, some without labels, with
 * documents. All groups have the same sequences, so that operands have the same ranges everywhere.
 * loss (count): those of this rank's tokens, and zeros. */
static inline void run_same_sequences(Model *m, ParamStore *store, double *loss, int count,
                                      int micro)
{
    enum { MAX_TOKENS = 4096 };
    static int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    static uint8_t begins[MAX_TOKENS];
    static float losses[MAX_TOKENS];
    const int T = m->config->max_sequence_length, n = micro * T, vocab = m->config->vocab_size;
    const float scale = 1 / ((float)count * (float)comm_group_size(RANKS_DATA));
    assert_true(n <= MAX_TOKENS);
    fsdp_empty_grads(store);
    for (int first = 0; first < count; first += n) {
        for (int i = 0; i < n; i++) {
            tokens[i] = test_token(11, (uint64_t)(first + i), vocab);
            targets[i] =
                (first + i) % 7 == 3 ? -1 : test_token(11, (uint64_t)(first + i + 1), vocab);
            begins[i] = i % T == 0 ||
                        (document_length ? i % T % document_length == 0 : (first + i) % 41 == 20);
        }
        model_micro_batch(m, store, tokens, targets, begins, scale, 1e-3f,
                          first + n < count ? PASS_ACCUMULATE : PASS_COMPLETE);
        model_token_losses(m, losses);
        for (int i = 0; i < n; i++)
            loss[first + i] = losses[i];
    }
}

/* Steps first .. first + count - 1; the sum of the losses of this rank's tokens. */
static inline double train_steps(Model *m, ParamStore *store, const Config *c, int first, int count)
{
    for (int s = first; s < first + count; s++) {
        forward_backward(m, store, c, s, c->global_train_batch_size / comm_size());
        const double norm = optimizer_grad_norm(store);
        optimizer_step(store, c, s + 1, 1e-2, fmin(1, 1 / norm));
    }
    return take_losses(m).loss;
}
