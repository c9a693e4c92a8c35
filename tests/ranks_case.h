/* A case of a test on ranks is a row: a model and a recipe with settings; and a strategy, which
 * says how ranks divide the run.
 *
 *     Run r;
 *     configure(&r, &(Case){ "coat", OLMO2, .modules = ALL_MODULES, .base = BASE_NF4 }, model, (Strategy){ .shard_ranks = 2 });
 *     place_run(&r);
 *     const double norm = train_step(&r, 0);
 *     close_run(&r);
 *
 * Weights and batches are the same in each call and for any number of ranks. ranks_state.h compares
 * what runs have computed. */
#pragma once
#include <math.h>

#include "kernels/random.h"
#include "model/decode.h"
#include "model/predict/memory.h"
#include "model/update/update.h"
#include "tests/kit.h"
#include "tests/models.h"
#include "tests/ranks.h"

/* A member that is 0 or NULL is not set: the architecture or the recipe then decides. */
typedef struct {
    const char *recipe;
    SmallModel model;
    unsigned modules; /* adapters are on these matrices ... */
    BaseFormat base;  /* ... on a base in this format */
    bool plain_nf4;
    int lora_rank;            /* 0: 6 */
    const char *trainable[2]; /* patterns of trained parameters; NULL: all parameters are trained */
    const char *optimizer;
    int keep, recompute; /* keep: a Keep */
    bool documents, tied;
    bool wide; /* the stream is F32, so that the errors of sums are smaller than those of codes */
} Case;

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Run;

/* Returns the model with these sizes and the same number of heads. */
static inline ModelConfig with_sizes(ModelConfig m, int d_model, int head_dim, int mlp_width,
                                     int n_layers)
{
    m.d_model = d_model;
    m.head_dim = head_dim;
    m.mlp_width = mlp_width;
    m.n_layers = n_layers;
    return m;
}

/* Sets r->config. A micro-batch is one sequence, and a step is one micro-batch of each rank, unless
 * the test changes r->config. *k must live as long as r. */
static inline void configure(Run *r, const Case *k, ModelConfig m, Strategy s)
{
    Config *c = &r->config;
    *r = (Run){ 0 };
    if (k->modules)
        m = with_adapters(m, k->lora_rank ? k->lora_rank : 6, k->modules, k->base);
    m.lora.plain_nf4 = k->plain_nf4;
    m.weight_tying |= k->tied;
    model_config(c, &m, k->recipe, 1);
    c->global_train_batch_size = data_ranks(&s, comm_size());
    c->strategy = s;
    c->data.generate_doc_lengths = k->documents;
    c->recipe.keep = k->keep ? (Keep)k->keep : c->recipe.keep;
    c->recipe.recompute = k->recompute;
    if (k->wide)
        c->recipe.residual = c->recipe.saved_qkv = c->recipe.saved_attention = c->recipe.grads =
            (Format){ F32, 0, false };
    c->optimizer.name = k->optimizer ? (char *)k->optimizer : c->optimizer.name;
    c->trainable = (char **)k->trainable;
    while (c->num_trainable < 2 && k->trainable[c->num_trainable])
        c->num_trainable++;
    divide(s);
}

/* Plans and places the model; its weights are still undefined. */
static inline void alloc_run(Run *r)
{
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
}

static inline void place_run(Run *r)
{
    alloc_run(r);
    store_init(&r->store, &r->config.model, 5);
    test_fill_adapters(&r->store, 6);
}

static inline void close_run(Run *r)
{
    model_free(&r->model, &r->store);
}

/* Opens and places a run of this configuration, but with this strategy and micro-batch. */
static inline void open_as(Run *r, const Config *c, Strategy s, int micro)
{
    *r = (Run){ .config = *c };
    r->config.strategy = s;
    r->config.device_train_microbatch_size = micro;
    divide(s);
    place_run(r);
}

/* ---- strategies and meshes ------------------------------------------------------------------- */

/* groups: how many copies of the model there are; 0: one per rank. */
enum {
    FULL_SHARD,
    FULL_SHARD_ONE_SUM,
    SHARD_GRAD_OP,
    HYBRID_SHARD,
    NO_SHARD,
    HYBRID_SHARD_ZERO2,
    NUM_STRATEGIES
};
static const struct {
    const char *name;
    int groups;
    Gathering gathering;
    GradSum sum;
} strategies[NUM_STRATEGIES] = {
    [FULL_SHARD] = { "full_shard", 1, GATHER_OFTEN, SUM_OFTEN },
    [FULL_SHARD_ONE_SUM] = { "full_shard, one sum", 1, GATHER_OFTEN, SUM_ONCE },
    [SHARD_GRAD_OP] = { "shard_grad_op", 1, GATHER_ONCE, SUM_OFTEN },
    [HYBRID_SHARD] = { "hybrid_shard", 2, GATHER_OFTEN, SUM_OFTEN },
    [NO_SHARD] = { "no_shard", 0, GATHER_OFTEN, SUM_OFTEN },
    [HYBRID_SHARD_ZERO2] = { "hybrid_shard_zero2", 2, GATHER_ONCE, SUM_ONCE_IF_FITS },
};

/* Sets *s to the strategy of row i. Returns false if the strategy needs more ranks, or if there is
 * one rank and another row does the same. */
static inline bool use_strategy(Strategy *s, int i)
{
    const int groups = strategies[i].groups ? strategies[i].groups : comm_size();
    *s = (Strategy){ comm_size() / groups, strategies[i].gathering, strategies[i].sum };
    return comm_size() > 1 ? comm_size() % groups == 0
                           : strategies[i].groups == 1 && strategies[i].sum == SUM_OFTEN;
}

/* Calls `check` for each rank alone, and for meshes of all ranks: with only shards, and with two
 * context ranks, two tensor ranks or two stages. */
static inline void on_meshes(void (*check)(Strategy s, const char *name))
{
    check(ALONE, "unsharded");
    check(mesh(1, 1, 1), "sharded");
    if (comm_size() == 1)
        return;
    check(mesh(1, 2, 1), "two ranks share sequences");
    check(mesh(1, 1, 2), "two ranks compute layers together");
    check(mesh(2, 1, 1), "two stages");
}

/* ---- steps ----------------------------------------------------------------------------------- */

enum { MOST_TOKENS = 4096 };

/* Sets `tokens` to n tokens of a text, from number `at` on, and `targets` to the token after each
 * of them. */
static inline void fill_tokens(int *tokens, int *targets, size_t at, int n, int vocab)
{
    for (int i = 0; i < n; i++) {
        tokens[i] = test_token(11, at + (size_t)i, vocab);
        targets[i] = test_token(11, at + (size_t)i + 1, vocab);
    }
}

/* Computes the gradients of `share` sequences of each rank, in micro-batches of one sequence. */
static inline void forward_backward(Run *r, int step, int share)
{
    static int tokens[MOST_TOKENS], targets[MOST_TOKENS];
    const int T = r->config.model.max_sequence_length, batch = r->config.global_train_batch_size;
    assert_true(T <= MOST_TOKENS);
    fsdp_empty_grads(&r->store);
    model_begin_step(&r->model, batch);
    for (int i = 0; i < share; i++) {
        const int sequence = step * batch + comm_group_rank(RANKS_DATA) * share + i;
        fill_tokens(tokens, targets, (size_t)(sequence * T), T, r->config.model.vocab_size);
        model_micro_batch(&r->model, &r->store, tokens, targets, NULL, 1.0f / (float)(batch * T), 0,
                          i == share - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
}

/* Runs a whole step, with the update. Returns the gradient norm. */
static inline double train_step(Run *r, int step)
{
    forward_backward(r, step, r->config.global_train_batch_size / comm_group_size(RANKS_DATA));
    const double norm = optimizer_grad_norm(&r->store);
    optimizer_step(&r->store, &r->config, step + 1, r->config.optimizer.lr, fmin(1, 1 / norm));
    return norm;
}

/* Returns the loss of this rank's tokens since the last call. */
static inline double take_loss(Run *r)
{
    return take_losses(&r->model).loss;
}

/* Returns the loss of an evaluation, with the same tokens on all ranks. */
static inline double evaluation_loss(Run *r)
{
    static int tokens[MOST_TOKENS];
    assert_true(r->model.text.N <= MOST_TOKENS);
    for (int n = 0; n < r->model.text.N; n++)
        tokens[n] = test_token(7, (uint64_t)n, r->config.model.vocab_size);
    model_micro_batch(&r->model, &r->store, tokens, tokens, NULL, 1, 0, PASS_FORWARD);
    return take_loss(r);
}

/* Length of the documents in run_same_sequences; 0: documents have 41 tokens and are cut where a
 * sequence ends. */
static int document_length;

/* Runs forward and backward of `count` tokens with documents, in micro-batches of r->config's size.
 * Some tokens have no label. All groups have the same sequences, so that operands have the same
 * ranges everywhere. loss (count): the losses of this rank's tokens, and zeros for other tokens. */
static inline void run_same_sequences(Run *r, double *loss, int count)
{
    static int tokens[MOST_TOKENS], targets[MOST_TOKENS];
    static uint8_t begins[MOST_TOKENS];
    static float losses[MOST_TOKENS];
    const int T = r->config.model.max_sequence_length,
              n = r->config.device_train_microbatch_size * T;
    const float scale = 1 / ((float)count * (float)comm_group_size(RANKS_DATA));
    assert_true(n <= MOST_TOKENS);
    fsdp_empty_grads(&r->store);
    model_begin_step(&r->model, count / T * comm_group_size(RANKS_DATA));
    for (int first = 0; first < count; first += n) {
        fill_tokens(tokens, targets, (size_t)first, n, r->config.model.vocab_size);
        for (int i = 0; i < n; i++) {
            targets[i] = (first + i) % 7 == 3 ? -1 : targets[i];
            begins[i] = i % T == 0 ||
                        (document_length ? i % T % document_length == 0 : (first + i) % 41 == 20);
        }
        model_micro_batch(&r->model, &r->store, tokens, targets, begins, scale, 1e-3f,
                          first + n < count ? PASS_ACCUMULATE : PASS_COMPLETE);
        model_token_losses(&r->model, losses);
        for (int i = 0; i < n; i++)
            loss[first + i] = losses[i];
    }
}

/* ---- generating ------------------------------------------------------------------------------ */

enum { MOST_LOGITS = 128 };

/* Appends parts of a text, of tokens_of[i] tokens each. On ranks that have the head, sets row i of
 * `logits` to the logits after part i. Returns true if this rank has the head. Closes the run. */
static inline bool decode_text(Run *r, float (*logits)[MOST_LOGITS], const int *tokens_of,
                               int parts)
{
    static int tokens[MOST_TOKENS], targets[MOST_TOKENS];
    const int vocab = r->config.model.vocab_size;
    assert_in_range(vocab, 1, MOST_LOGITS);
    r->config.generate = "prompts";
    place_run(r);
    fill_tokens(tokens, targets, 0, r->config.model.max_sequence_length, vocab);
    decode_begin(&r->model);
    for (int i = 0, done = 0; i < parts; done += tokens_of[i++]) {
        decode_append(&r->model, &r->store, tokens + done, tokens_of[i]);
        if (r->model.has_head)
            decode_logits(&r->model, &r->store, logits[i]);
    }
    const bool has_head = r->model.has_head;
    close_run(r);
    return has_head;
}
