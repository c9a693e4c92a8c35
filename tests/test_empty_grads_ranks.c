/* The first micro-batch of a step overwrites gradients in memory with any contents. The result,
 * with padding and with the sums of later micro-batches, equals the result of adding to zeros.
 * Every recipe, adapters, frozen parameters, every strategy, a head in chunks, and a first
 * micro-batch without labels. On 1, 2 and 4 ranks. */
#include "tests/test.h"
#include "tests/ranks_case.h"

enum {
    MICRO = 2,
    MOST_PARTS = 3,
    MAX_UNITS = 5,
    SOME_MODULES = 1 << LORA_K | 1 << LORA_UP | 1 << LORA_DOWN
};

static const Strategy ways[] = {
    { 1, GATHER_OFTEN, SUM_OFTEN }, { 4, GATHER_OFTEN, SUM_OFTEN }, { 4, GATHER_OFTEN, SUM_ONCE },
    { 4, GATHER_ONCE, SUM_OFTEN },  { 2, GATHER_OFTEN, SUM_OFTEN }, { 2, GATHER_ONCE, SUM_ONCE },
};

// clang-format off
static const Case cases[] = {
    { "f32", LLAMA },      { "bf16", OLMO2 },      { "fp8", LLAMA_GQA },      { "fp8-lm", QWEN3 },
    { "coat-act", OLMO3 }, { "coat-opt", OLMO },   { "coat", LLAMA },      { "coat-lean", OLMO2 },
    { "f32", LLAMA_GQA, .trainable = { "model.layers.*.mlp.*" } },  { "bf16", OLMO2, .trainable = { "*norm*" } },
    { "coat", QWEN2 },     { "bf16", QWEN2, .trainable = { "*_proj.bias" } },
    { "bf16", QWEN3, ALL_MODULES },     { "coat", OLMO, SOME_MODULES },
};
// clang-format on

static void open_run(Run *r, const Case *k, Strategy strategy)
{
    /* units share a buffer, so that it is used twice */
    const ModelConfig m = with_sizes(architecture(k->model), 64, 16, 80, MAX_UNITS - 2);
    configure(r, k, m, strategy);
    if (strcmp(k->recipe, "fp8-lm") == 0)
        r->config.recipe.head = (Format){ E5M2, 0 };
    r->config.device_train_microbatch_size = MICRO;
    r->config.loss_chunk = m.max_sequence_length * MICRO / 2;
    r->config.global_train_batch_size = MICRO * MOST_PARTS * comm_size();
    place_run(r);
}

/* Runs a step of `parts` micro-batches. If there are several, the first has no labels. */
static void add_up(Run *r, int parts)
{
    static int tokens[MOST_TOKENS], targets[MOST_TOKENS];
    const int N = r->model.text.N;
    assert_true(N <= MOST_TOKENS);
    for (int i = 0; i < parts; i++) {
        fill_tokens(tokens, targets, (size_t)((comm_rank() * parts + i) * N), N,
                    r->config.model.vocab_size);
        if (parts > 1 && i == 0)
            memset(targets, 0xff, sizeof targets);
        model_micro_batch(&r->model, &r->store, tokens, targets, NULL, 1.0f / (float)N, 0,
                          i == parts - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
    take_loss(r);
}

/* Fills the memory of all gradients with bytes of zeros or NaNs. */
static void fill_grads(const ParamStore *store, int byte)
{
    for (int u = 0; u < store->num_units; u++)
        if (store->shard[u].slice[TRAINED].count)
            fill_bytes(store->shard[u].grad, byte);
    for (int i = 0; i < num_buffers(store); i++)
        if (tensor_numel(store->grad_buffer[i].elements) > 0)
            fill_bytes(store->grad_buffer[i].elements, byte);
}

/* Returns the sums of `parts` micro-batches. The first adds to zeros, or overwrites NaNs. */
static void sum_up(Run *r, int parts, bool empty, double *sum[MAX_UNITS])
{
    ParamStore *store = &r->store;
    fill_grads(store, empty ? 0xff : 0);
    if (empty)
        fsdp_empty_grads(store);
    add_up(r, parts);
    for (int u = 0; u < store->num_units; u++)
        sum[u] = store->shard[u].slice[TRAINED].count ? values(store->shard[u].grad) : NULL;
}

/* The run that adds to zeros comes first, in a model whose gradients were never marked empty. */
static void check_case(Run *r, const char *what)
{
    static const int parts[] = { 1, MOST_PARTS };
    double *added[2][MAX_UNITS], *written[MAX_UNITS];
    char text[160];
    for (int k = 0; k < 2; k++)
        sum_up(r, parts[k], false, added[k]);
    for (int k = 0; k < 2; k++) {
        sum_up(r, parts[k], true, written);
        snprintf(text, sizeof text, "%s, %d micro-batches", what, parts[k]);
        for (int u = 0; u < r->store.num_units; u++)
            if (written[u])
                check_same_values(text, written[u], added[k][u],
                                  r->store.shard[u].slice[TRAINED].count);
    }
}

TEST(test_steps)
{
    for (size_t s = 0; s < sizeof ways / sizeof ways[0]; s++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0] && ways[s].shard_ranks <= comm_size();
             i++) {
            /* to save time, each of the other strategies runs a third of the cases */
            if (s > 0 && (s + i) % 3)
                continue;
            char what[128];
            Run r;
            open_run(&r, &cases[i], ways[s]);
            snprintf(what, sizeof what, "%s, %s, case %zu, groups of %d, gathering %d, grad_sum %d",
                     cases[i].recipe, architecture_name(cases[i].model), i, ways[s].shard_ranks,
                     ways[s].gathering, ways[s].grad_sum);
            check_case(&r, what);
            release();
            close_run(&r);
        }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
