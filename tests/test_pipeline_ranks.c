/* Pipeline stages compute the bits of the same micro-batches without stages: losses of tokens,
 * gradients, their norm, and weights after updates, of every schedule; and the logits of a text
 * that grows. On 2, 4 and 8 ranks. */
#include <math.h>
#include <string.h>

#include "model/plan_model.h"
#include "model/store/param_store_sizes.h"
#include "tests/kit.h"

#include "kernels/runtime/operations.h"
#include "model/decode.h"
#include "model/store/offload.h"
#include "model/predict/memory.h"
#include "model/update/update.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

/* FP8 GEMMs of a GPU take whole sixteens of tokens, of each of two context ranks. */
enum {
    LAYERS = 8,
    MICRO_BATCHES = 8,
    T = 32,
    MICRO = 1,
    TOKENS = MICRO * T,
    STEPS = 2,
    MAX_UNITS = LAYERS + 2
};

typedef struct {
    const char *recipe;
    SmallModel model;
    bool documents;
    unsigned modules; /* with adapters on these */
    BaseFormat base;
    int keep; /* instead of the recipe's, unless 0 */
    int recompute;
    const char *trainable; /* NULL: all */
    bool tied;
    int steps; /* 0: STEPS */
} Case;

typedef struct {
    int stages, chunks;
    PipelineSchedule schedule;
} Stages;

/* Shards of weights, as this rank has them at its place of its stage. */
typedef struct {
    double loss, zloss, evaluation, norm[STEPS];
    size_t first[MAX_UNITS], count[MAX_UNITS];
    double *grad[MAX_UNITS], *weights[MAX_UNITS];
} Result;

static ModelConfig model_of(const Case *k)
{
    ModelConfig m = architecture(k->model);
    m.n_layers = LAYERS;
    m.max_sequence_length = T;
    m.weight_tying = k->tied;
    return k->modules ? with_adapters(m, 4, k->modules, k->base) : m;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Collectives of weights and gradients that have begun. */
static int collectives;

static bool count(void *counter, const Operation *o)
{
    int *n = counter;
    *n += strcmp(o->name, "comm_reduce_scatter") == 0 || strcmp(o->name, "comm_all_gather") == 0;
    return true;
}

/* Without stages, each group of a mesh with stages has the whole model: its norm, which
 * optimizer_grad_norm adds for all groups. */
static double norm_of_group(const ParamStore *store)
{
    float own;
    device_get(&own, store->square_sum, sizeof own);
    double sum = own;
    comm_sum_over(&sum, 1, RANKS_SHARD);
    return sqrt(sum);
}

/* Micro-batches of very different size: FP8 ranges grow within a step. */
static void run_step(Model *m, ParamStore *store, const Config *c, int step, Result *s)
{
    static int tokens[MICRO_BATCHES * TOKENS], targets[MICRO_BATCHES * TOKENS];
    static uint8_t begins[MICRO_BATCHES * TOKENS];
    const int own = comm_group_rank(RANKS_DATA), groups = comm_group_size(RANKS_DATA),
              V = c->model.vocab_size;
    const float scale = 1 / ((float)(MICRO_BATCHES * TOKENS) * (float)groups);
    for (int i = 0; i < MICRO_BATCHES * TOKENS; i++) {
        const uint64_t at = (uint64_t)((step * groups + own) * MICRO_BATCHES * TOKENS + i);
        tokens[i] = test_token(11, at, i / TOKENS % 3 == 0 ? 3 : V);
        targets[i] = at % 7 == 3 ? -1 : test_token(11, at + 1, V);
        begins[i] = i % T == 0 || at % 41 == 20;
    }
    fsdp_empty_grads(store);
    model_zero_losses(m);
    if (store->pipe.stages > 1) {
        collectives = 0;
        model_micro_batches(m, store, tokens, targets, begins, MICRO_BATCHES, scale, 1e-3f,
                            PASS_COMPLETE);
        /* once per step, not with every micro-batch */
        assert_in_range(collectives, 0, (NUM_REGIONS + 1) * store->num_units);
    }
    for (int i = 0; i < MICRO_BATCHES && store->pipe.stages == 1; i++)
        model_micro_batch(m, store, tokens + i * TOKENS, targets + i * TOKENS, begins + i * TOKENS,
                          scale, 1e-3f, i < MICRO_BATCHES - 1 ? PASS_ACCUMULATE : PASS_COMPLETE);
    s->loss = model_losses(m).loss;
    s->zloss = model_losses(m).zloss;
    s->norm[step] = optimizer_grad_norm(store);
    if (store->pipe.stages == 1)
        s->norm[step] = norm_of_group(store);
    for (int u = 0; u < store->num_units; u++)
        s->grad[u] = store->shard[u].slice[TRAINED].count ? values(store->shard[u].grad) : NULL;
    optimizer_step(store, c, step + 1, 1e-2, fmin(1, 1 / s->norm[step]));
    model_zero_losses(m);
    model_micro_batch(m, store, tokens, targets, begins, 0, 0, PASS_FORWARD);
    s->evaluation = model_losses(m).loss;
}

/* The first and the last stage have the same bits of what both have. */
static void check_copies(const ParamStore *store)
{
    const Shard *own = &store->shard[0];
    const Tensor t[] = { own->slice[TRAINED].stored, own->grad, own->state[0], own->state[1] };
    uint64_t hash = 0, all[8];
    for (int i = 0; i < 4 && own->slice[TRAINED].count; i++) {
        const double *x = values(t[i]);
        for (size_t j = 0; j < own->slice[TRAINED].count; j++) {
            uint64_t bits;
            memcpy(&bits, &x[j], sizeof bits);
            hash = random_bits(hash, bits);
        }
    }
    comm_gather(all, &hash, sizeof hash, RANKS_PIPELINE);
    for (int stage = 1; stage < store->pipe.stages - 1; stage++)
        assert_int_equal(all[stage], 0);
    assert_int_equal(all[0], all[store->pipe.stages - 1]);
}

/* Device memory in GiB with which about half of the activations that can be on the host are
 * there. */
static double half_fits(Config c)
{
    double bytes = 0;
    c.device_memory = 1; /* as if it were a GPU */
    for (int i = 0; i < 2; i++) {
        Model m;
        ParamStore store;
        c.host.activations = i ? HOST_ALL : HOST_NEVER;
        memory_plan(&m, &store, &c);
        bytes += (double)model_planned_bytes(&m, &store) / 2;
        model_free(&m, &store);
    }
    return (bytes + memory_allowance(&c)) / (1 << 30);
}

static void run(Result *s, const Case *k, Stages p, bool whole, int shard_ranks, int context,
                HostUse on_host)
{
    const ModelConfig mc = model_of(k);
    const int steps = k->steps ? k->steps : STEPS;
    Config c;
    Model m = { 0 };
    ParamStore store = { 0 };
    char *patterns[1] = { (char *)k->trainable };
    model_config(&c, &mc, k->recipe, MICRO);
    divide_in_stages(p.stages, shard_ranks, context);
    c.global_train_batch_size = MICRO * MICRO_BATCHES * comm_group_size(RANKS_DATA);
    c.data.generate_doc_lengths = k->documents;
    c.recipe.keep = k->keep ? (Keep)k->keep : c.recipe.keep;
    c.recipe.recompute = k->recompute;
    c.recipe.grads = k->tied ? (Format){ F32, 0, false } : c.recipe.grads;
    c.host.activations = on_host;
    c.host.moments = c.host.master = on_host == HOST_ALL ? HOST_ALL : HOST_NEVER;
    c.trainable = patterns;
    c.num_trainable = k->trainable ? 1 : 0;
    c.strategy = (Strategy){ .shard_ranks = shard_ranks,
                             .context_ranks = context,
                             .gathering = GATHER_ONCE,
                             .grad_sum = SUM_ONCE,
                             .pipeline_stages = whole ? 1 : p.stages,
                             .pipeline_chunks = p.chunks,
                             .pipeline_schedule = p.schedule };
    c.device_memory = on_host == HOST_AUTO ? half_fits(c) : 0;
    memory_plan(&m, &store, &c);
    model_alloc(&m, &store, &c);
    if (!k->trainable) /* frozen blocks never leave */
        assert_int_equal(offload_host_bytes(&m) > 0,
                         on_host != HOST_NEVER && m.offload.pieces > offload_least_slots(&m));
    store_init(&store, &mc, 5);
    test_fill_adapters(&store, 6);
    for (int step = 0; step < steps; step++)
        run_step(&m, &store, &c, step, s);
    for (int u = 0; u < store.num_units; u++) {
        s->first[u] = store.shard[u].slice[TRAINED].first;
        s->count[u] = store.shard[u].slice[TRAINED].count;
        s->weights[u] = s->count[u] ? values(store.shard[u].slice[TRAINED].stored) : NULL;
    }
    if (k->tied)
        check_copies(&store);
    model_free(&m, &store);
}

/* ---- comparisons ----------------------------------------------------------------------------- */

static const char *name_of(const Case *k, Stages p, int shard_ranks, int context)
{
    static char text[256];
    snprintf(text, sizeof text,
             "%s, %s, documents %d, modules %#x, base %d, keep %d, %s; schedule %d, %d stages of "
             "%d ranks, "
             "%d chunks, %d context ranks",
             k->recipe, architecture_name(k->model), k->documents, k->modules, (int)k->base,
             k->keep, k->trainable ? k->trainable : "all", (int)p.schedule, p.stages, shard_ranks,
             p.chunks, context);
    return text;
}

/* Stages add the gradients of a tied embedding in another order. */
static bool is_exact(const Case *k)
{
    return !k->tied || k->trainable;
}

/* The head's sums of all micro-batches and the tokens of a row, in two orders: as many roundings of
 * partial sums that grow up to sqrt(C), since a token's term is its share of the batch times a
 * normalized row. */
static void compare_tied(const Result *a, const Result *b, const Case *k, const char *name)
{
    const double bound = MICRO_BATCHES * (1 + TOKENS) * U24 * sqrt(model_of(k).d_model);
    double largest = 0;
    for (size_t i = 0; i < b->count[0]; i++) {
        largest = fmax(largest, fabs(a->grad[0][i]));
        if (!(fabs(a->grad[0][i] - b->grad[0][i]) <= bound))
            fail_msg(
                "%s: the embedding, element %zu: gradient %.9g, expected %.9g, at most %.3g apart",
                name, i, b->grad[0][i], a->grad[0][i], bound);
    }
    assert_true(b->count[0] == 0 || largest > 10 * bound);
    if (!(fabs(b->norm[0] / a->norm[0] - 1) <= 1e-6))
        fail_msg("%s: gradient norm %.9g, expected %.9g", name, b->norm[0], a->norm[0]);
}

static void compare_units(const Result *a, const Result *b, const Case *k, const char *name)
{
    double units = 0;
    for (int u = 0; u < MAX_UNITS; u++) {
        if (b->count[u] == 0)
            continue;
        units++;
        assert_int_equal(a->first[u], b->first[u]);
        assert_int_equal(a->count[u], b->count[u]);
        for (size_t i = 0; i < b->count[u] && (u > 0 || is_exact(k)); i++)
            if (a->grad[u][i] != b->grad[u][i] ||
                (is_exact(k) && a->weights[u][i] != b->weights[u][i]))
                fail_msg("%s: unit %d, element %zu: gradient %.9g, expected %.9g; weight %.9g, "
                         "expected %.9g",
                         name, u, i, b->grad[u][i], a->grad[u][i], b->weights[u][i],
                         a->weights[u][i]);
    }
    comm_sum_over(&units, 1, RANKS_PIPELINE);
    assert_true(units > 0);
}

static void compare(const Result *a, const Result *b, const Case *k, const char *name,
                    bool has_head)
{
    compare_units(a, b, k, name);
    if (!is_exact(k))
        compare_tied(a, b, k, name);
    for (int step = 0; step < STEPS && is_exact(k); step++)
        if (a->norm[step] != b->norm[step])
            fail_msg("%s: step %d: gradient norm %.17g, expected %.17g", name, step, b->norm[step],
                     a->norm[step]);
    const double loss = has_head ? a->loss : 0, zloss = has_head ? a->zloss : 0,
                 evaluation = has_head ? a->evaluation : 0;
    if (b->loss != loss || b->zloss != zloss || (is_exact(k) && b->evaluation != evaluation))
        fail_msg("%s: losses %.9g, %.9g, in evaluation %.9g; expected %.9g, %.9g, %.9g", name,
                 b->loss, b->zloss, b->evaluation, loss, zloss, evaluation);
}

/* All these schedules, against one run without stages of the same micro-batches. */
static void check_in(const Case *k, const Stages *p, int count, int shard_ranks, int context,
                     HostUse on_host)
{
    static Result whole, part;
    whole = (Result){ 0 };
    run(&whole, k, p[0], true, shard_ranks, context, HOST_NEVER);
    for (int i = 0; i < count; i++) {
        part = (Result){ 0 };
        run(&part, k, p[i], false, shard_ranks, context, on_host);
        compare(&whole, &part, k, name_of(k, p[i], shard_ranks, context),
                comm_group_rank(RANKS_PIPELINE) == p[i].stages - 1);
    }
    release();
}

/* With `least` stages and more. Fewer stages than ranks have shards inside. */
static void check(const Case *k, int least)
{
    for (int n = least; n > 1 && n <= comm_size(); n *= 2) {
        const int chunks = LAYERS / n;
        const Stages p[] = { { n, 1, PIPELINE_1F1B },
                             { n, 1, PIPELINE_ONE },
                             { n, chunks, PIPELINE_INTERLEAVED } };
        check_in(k, p, chunks > 1 ? 3 : 2, comm_size() / n, 1, HOST_NEVER);
    }
}

static void test_recipes(void **state)
{
    (void)state;
    static const char *const recipes[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (int r = 0; r < 5; r++)
        check(&(Case){ recipes[r], r % 2 ? OLMO2 : LLAMA_GQA, r % 2 }, 2);
}

/* Blocks that are run again, whose operands are made with the ranges of their forward pass. */
static void test_kept(void **state)
{
    (void)state;
    static const Keep keeps[] = { KEEP_ALL, KEEP_INPUTS, KEEP_BLOCK, KEEP_ATTENTION };
    for (int i = 0; i < 4; i++)
        check(&(Case){ i % 2 ? "coat" : "coat-lean", LLAMA, true, .keep = (int)keeps[i] },
              comm_size());
    check(&(Case){ "coat", LLAMA, true, .recompute = 3 }, comm_size());
}

static void test_adapters(void **state)
{
    (void)state;
    check(&(Case){ "coat", LLAMA_GQA, true, ALL_MODULES, BASE_NF4 }, 2);
    check(&(Case){ "bf16", QWEN3, false, ALL_MODULES, BASE_E4M3 }, 2);
}

/* Stages without anything to train, which need no gradients. */
static void test_frozen(void **state)
{
    (void)state;
    check(&(Case){ "coat", LLAMA, false, .trainable = "model.layers.6.*" }, comm_size());
    check(&(Case){ "bf16", LLAMA, false, .trainable = "lm_head.weight" }, comm_size());
    check(&(Case){ "f32", LLAMA, false, .trainable = "model.embed_tokens.weight" }, comm_size());
}

static void test_with_context(void **state)
{
    (void)state;
    for (int stages = 2; 2 * stages <= comm_size(); stages *= 2)
        check_in(&(Case){ "coat", LLAMA_GQA, true }, &(Stages){ stages, 1, PIPELINE_1F1B }, 1,
                 comm_size() / stages, 2, HOST_NEVER);
}

static void test_replicas(void **state)
{
    (void)state;
    for (int stages = 2; 2 * stages <= comm_size(); stages *= 2)
        check_in(&(Case){ "coat", LLAMA, true }, &(Stages){ stages, 1, PIPELINE_1F1B }, 1, 1, 1,
                 HOST_NEVER);
}

/* One matrix on the first and the last stage: in the first step nothing but its own gradient
 * differs from that without stages. */
static void test_tied(void **state)
{
    (void)state;
    check(&(Case){ "f32", LLAMA_GQA, true, .tied = true, .steps = 1 }, 2);
    check(&(Case){ "coat", LLAMA, .tied = true, .steps = 1 }, comm_size());
    check(&(Case){ "f32", LLAMA, .tied = true, .trainable = "model.layers.3.*" }, comm_size());
}

/* Several micro-batches in flight share a few slots for their activations; with memory for more of
 * them, some never leave. */
static void test_host(void **state)
{
    (void)state;
    const int n = comm_size(), chunks = LAYERS / n;
    const Stages p[] = { { n, 1, PIPELINE_1F1B },
                         { n, chunks, chunks > 1 ? PIPELINE_INTERLEAVED : PIPELINE_ONE } };
    check_in(&(Case){ "coat", LLAMA, true }, p, 2, 1, 1, HOST_AUTO);
    check_in(&(Case){ "coat-lean", OLMO2, .keep = KEEP_BLOCK, .trainable = "model.layers.[3-7].*" },
             p, 2, 1, 1, HOST_ALL);
    check_in(&(Case){ "bf16", LLAMA_GQA, .modules = ALL_MODULES, .base = BASE_NF4 }, &p[chunks > 1],
             1, 1, 1, HOST_ALL);
}

/* ---- decoding -------------------------------------------------------------------------------- */

enum { TEXT = 12, PROMPT = 5, VOCABULARY = 128 };

/* Logits after a prompt, and after each later token, on the ranks that have the head; whether this
 * one does. */
static bool continue_text(float *logits, const Case *k, Stages p, bool whole)
{
    const ModelConfig mc = model_of(k);
    Config c;
    Model m = { 0 };
    ParamStore store = { 0 };
    int tokens[TEXT];
    model_config(&c, &mc, k->recipe, 1);
    divide_in_stages(p.stages, comm_size() / p.stages, 1);
    c.generate = "prompts";
    c.strategy = (Strategy){ .shard_ranks = comm_size() / p.stages,
                             .gathering = GATHER_ONCE,
                             .pipeline_chunks = p.chunks,
                             .pipeline_stages = whole ? 1 : p.stages,
                             .pipeline_schedule = p.schedule };
    memory_plan(&m, &store, &c);
    model_alloc(&m, &store, &c);
    store_init(&store, &mc, 5);
    test_fill_adapters(&store, 6);
    for (int i = 0; i < TEXT; i++)
        tokens[i] = test_token(11, (uint64_t)i, mc.vocab_size);
    decode_begin(&m);
    for (int done = 0, count = PROMPT; done < TEXT;
         done += count, count = 1, logits += VOCABULARY) {
        decode_append(&m, &store, tokens + done, count);
        if (m.has_head)
            decode_logits(&m, &store, logits);
    }
    const bool has_head = m.has_head;
    model_free(&m, &store);
    return has_head;
}

/* The key-value caches are on the stages of their blocks. */
static void test_decode(void **state)
{
    (void)state;
    static const Case cases[] = { { "f32", LLAMA_GQA, .tied = true },
                                  { "coat", OLMO2 },
                                  { "bf16", QWEN3, .modules = ALL_MODULES, .base = BASE_NF4 } };
    static float expected[TEXT][VOCABULARY], found[TEXT][VOCABULARY];
    for (int i = 0; i < 3; i++)
        for (int stages = 2; stages <= comm_size(); stages *= 2) {
            const int chunks = LAYERS / stages;
            const Stages p = { stages, chunks, chunks > 1 ? PIPELINE_INTERLEAVED : PIPELINE_1F1B };
            memset(expected, 0, sizeof expected);
            memset(found, 0, sizeof found);
            assert_in_range(model_of(&cases[i]).vocab_size, 1, VOCABULARY);
            continue_text(expected[0], &cases[i], p, true);
            if (continue_text(found[0], &cases[i], p, false))
                check_same_bytes(name_of(&cases[i], p, comm_size() / stages, 1), expected, found,
                                 sizeof found);
        }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recipes),      cmocka_unit_test(test_kept),
        cmocka_unit_test(test_adapters),     cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_with_context), cmocka_unit_test(test_host),
        cmocka_unit_test(test_decode),       cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_tied),
    };
    const Watch watch = { .begin = count, .watcher = &collectives };
    start_ranks(&argc, &argv);
    update_part = 4 * PARAM_ALIGN; /* a tied matrix is summed in several parts */
    operations_watch(&watch);
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
