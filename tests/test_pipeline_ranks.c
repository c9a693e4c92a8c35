/* Pipeline stages compute the bits of the same micro-batches without stages: losses of tokens,
 * gradients, their norm, and weights after updates, with every schedule. Also the logits of a text
 * that grows. On 2, 4 and 8 ranks. */
#include <math.h>
#include <string.h>
#include "model/plan_model.h"
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "kernels/runtime/operations.h"
#include "model/store/offload.h"
#include "tests/ranks_state.h"

/* The FP8 GEMMs of a GPU need multiples of 16 tokens, on each of two context ranks. */
enum { LAYERS = 8, MICRO_BATCHES = 8, T = 32, STEPS = 2 };

/* The results of the last step. */
typedef struct {
    double loss, zloss, evaluation, norm[STEPS];
    Whole grads, weights;
} Result;

/* whole: runs the micro-batches of the same mesh without stages. */
static void open_run(Run *r, const Case *k, Strategy s, bool whole)
{
    ModelConfig m = architecture(k->model);
    m.n_layers = LAYERS;
    m.max_sequence_length = T;
    m.weight_tying = false;
    s.gathering = GATHER_ONCE;
    s.grad_sum = SUM_ONCE;
    configure(r, k, m, s);
    if (whole)
        r->config.strategy.pipeline_stages = 1;
    if (k->tied)
        r->config.recipe.grads = (Format){ F32, 0, false };
    r->config.global_train_batch_size *= MICRO_BATCHES;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Counts the collectives of weights and gradients that have begun. */
static int collectives;

static bool count(void *counter, const Operation *o)
{
    int *n = counter;
    *n += strcmp(o->name, "comm_reduce_scatter") == 0 || strcmp(o->name, "comm_all_gather") == 0;
    return true;
}

/* Returns the norm of one shard group. In a mesh with stages whose model has no stages, each group
 * has the whole model, and optimizer_grad_norm would add the norms of all groups. */
static double norm_of_group(const ParamStore *store)
{
    float own;
    device_get(&own, store->square_sum, sizeof own);
    double sum = own;
    comm_sum_over(&sum, 1, RANKS_SHARD);
    return sqrt(sum);
}

/* Micro-batches of very different sizes, so that FP8 ranges grow within a step. */
static void run_step(Run *r, int step, Result *s)
{
    static int tokens[MICRO_BATCHES * T], targets[MICRO_BATCHES * T];
    static uint8_t begins[MICRO_BATCHES * T];
    Model *m = &r->model;
    ParamStore *store = &r->store;
    const int own = comm_group_rank(RANKS_DATA), groups = comm_group_size(RANKS_DATA),
              vocab = r->config.model.vocab_size;
    const float scale = 1 / ((float)(MICRO_BATCHES * T) * (float)groups);
    for (int i = 0; i < MICRO_BATCHES * T; i++) {
        const uint64_t at = (uint64_t)((step * groups + own) * MICRO_BATCHES * T + i);
        tokens[i] = test_token(11, at, i / T % 3 == 0 ? 3 : vocab);
        targets[i] = at % 7 == 3 ? -1 : test_token(11, at + 1, vocab);
        begins[i] = i % T == 0 || at % 41 == 20;
    }
    fsdp_empty_grads(store);
    model_begin_step(m, MICRO_BATCHES * groups);
    if (store->pipe.stages > 1) {
        collectives = 0;
        model_micro_batches(m, store, tokens, targets, begins, MICRO_BATCHES, scale, 1e-3f,
                            PASS_COMPLETE);
        /* once per step, not once per micro-batch */
        assert_in_range(collectives, 0, (NUM_REGIONS + 1) * store->num_units);
    }
    for (int i = 0; i < MICRO_BATCHES && store->pipe.stages == 1; i++)
        model_micro_batch(m, store, tokens + i * T, targets + i * T, begins + i * T, scale, 1e-3f,
                          i < MICRO_BATCHES - 1 ? PASS_ACCUMULATE : PASS_COMPLETE);
    s->loss = model_losses(m).loss;
    s->zloss = model_losses(m).zloss;
    s->norm[step] = optimizer_grad_norm(store);
    if (store->pipe.stages == 1)
        s->norm[step] = norm_of_group(store);
    s->grads = take_whole(r, GRADIENTS);
    optimizer_step(store, &r->config, step + 1, 1e-2, fmin(1, 1 / s->norm[step]));
    model_zero_losses(m);
    model_micro_batch(m, store, tokens, targets, begins, 0, 0, PASS_FORWARD);
    s->evaluation = model_losses(m).loss;
}

/* The first and the last stage have the same bits of the tensors that both have. */
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

/* Stages add the gradients of a tied embedding in another order, so only the first step is
 * compared. */
static bool is_exact(const Case *k)
{
    return !k->tied || k->trainable[0];
}

/* Returns the device memory in GiB with which about half of the activations that can be offloaded
 * are offloaded. */
static double half_fits(Config c)
{
    double bytes = 0;
    c.device_memory = 1; /* as if it were a GPU */
    for (int i = 0; i < 2; i++) {
        Model m;
        ParamStore store;
        c.offload.activations = i ? HOST_ALL : HOST_NEVER;
        memory_plan(&m, &store, &c);
        bytes += (double)model_planned_bytes(&m, &store) / 2;
        model_free(&m, &store);
    }
    return (bytes + memory_allowance(&c)) / (1 << 30);
}

static Result run(const Case *k, Strategy p, bool whole, HostUse on_host)
{
    Result s = { 0 };
    Run r;
    open_run(&r, k, p, whole);
    r.config.offload.activations = on_host;
    r.config.offload.optimizer = r.config.offload.master =
        on_host == HOST_ALL ? HOST_ALL : HOST_NEVER;
    r.config.device_memory = on_host == HOST_AUTO ? half_fits(r.config) : 0;
    place_run(&r);
    if (!k->trainable[0]) /* frozen blocks are never offloaded */
        assert_int_equal(offload_host_bytes(&r.model) > 0,
                         on_host != HOST_NEVER &&
                             r.model.offload.saves > offload_least_slots(&r.model));
    for (int step = 0; step < (is_exact(k) ? STEPS : 1); step++)
        run_step(&r, step, &s);
    s.weights = take_whole(&r, WEIGHTS);
    if (k->tied)
        check_copies(&r.store);
    close_run(&r);
    return s;
}

/* ---- comparisons ----------------------------------------------------------------------------- */

static const char *name_of(const Case *k, Strategy p)
{
    static char text[256];
    snprintf(text, sizeof text,
             "%s, %s, documents %d, modules %#x, base %d, keep %d, %s; schedule %d, %d stages of "
             "%d ranks, "
             "%d chunks, %d context ranks",
             k->recipe, architecture_name(k->model), k->documents, k->modules, (int)k->base,
             k->keep, k->trainable[0] ? k->trainable[0] : "all", (int)p.pipeline_schedule,
             p.pipeline_stages, p.shard_ranks, p.pipeline_chunks, context_ranks(&p));
    return text;
}

/* Bounds the head's sums over all micro-batches and over the tokens of a row, in two orders: as
 * many roundings of partial sums that grow up to sqrt(C), because the term of a token is its share
 * of the batch times a normalized row. */
static void compare_tied(const Result *a, const Result *b, int width, const char *name)
{
    const double bound = MICRO_BATCHES * (1 + T) * U24 * sqrt(width);
    double largest = 0;
    for (size_t i = 0; i < b->grads.numel[0][0]; i++) {
        const double found = b->grads.x[0][0][i], expected = a->grads.x[0][0][i];
        largest = fmax(largest, fabs(expected));
        if (!(fabs(expected - found) <= bound))
            fail_msg(
                "%s: the embedding, element %zu: gradient %.9g, expected %.9g, at most %.3g apart",
                name, i, found, expected, bound);
    }
    assert_true(b->grads.numel[0][0] == 0 || largest > 10 * bound);
    if (!(fabs(b->norm[0] / a->norm[0] - 1) <= 1e-6))
        fail_msg("%s: gradient norm %.9g, expected %.9g", name, b->norm[0], a->norm[0]);
}

/* The ranks of the last stage have the losses. */
static void compare(const Result *a, Result *b, const Case *k, const char *name, bool has_head)
{
    if (!is_exact(k)) {
        compare_tied(a, b, architecture(k->model).d_model, name);
        b->grads.region[0][0] = FROZEN; /* already compared above */
    }
    double count = (double)check_whole(name, &b->grads, &a->grads, 0);
    comm_sum_over(&count, 1, RANKS_PIPELINE);
    assert_true(count > 0);
    if (is_exact(k))
        check_whole(name, &b->weights, &a->weights, 0);
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

/* Compares all these schedules with one run of the same micro-batches without stages. */
static void check_in(const Case *k, const Strategy *p, int count, HostUse on_host)
{
    const Result whole = run(k, p[0], true, HOST_NEVER);
    for (int i = 0; i < count; i++) {
        Result part = run(k, p[i], false, on_host);
        compare(&whole, &part, k, name_of(k, p[i]),
                comm_group_rank(RANKS_PIPELINE) == p[i].pipeline_stages - 1);
    }
    release();
}

/* Uses this schedule, or the interleaved one if a stage can have chunks. */
static Strategy stages(int n, int shards, int context, PipelineSchedule schedule)
{
    return (Strategy){ .shard_ranks = shards,
                       .context_ranks = context,
                       .pipeline_stages = n,
                       .pipeline_schedule = schedule,
                       .pipeline_chunks = schedule == PIPELINE_INTERLEAVED ? LAYERS / n : 1 };
}

/* Runs with `least` stages and more. If there are fewer stages than ranks, each stage has
 * shards. */
static void check(const Case *k, int least)
{
    for (int n = least; n > 1 && n <= comm_size(); n *= 2) {
        const int shards = comm_size() / n;
        const Strategy p[] = { stages(n, shards, 1, PIPELINE_1F1B),
                               stages(n, shards, 1, PIPELINE_ONE),
                               stages(n, shards, 1, PIPELINE_INTERLEAVED) };
        check_in(k, p, n < LAYERS ? 3 : 2, HOST_NEVER);
    }
}

TEST(test_recipes)
{
    static const char *const recipes[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (int r = 0; r < 5; r++)
        check(&(Case){ recipes[r], r % 2 ? OLMO2 : LLAMA_GQA, .documents = r % 2 }, 2);
}

/* Blocks that are recomputed; their operands are encoded with the ranges of their forward pass. */
TEST(test_kept)
{
    static const Keep keeps[] = { KEEP_ALL, KEEP_INPUTS, KEEP_BLOCK, KEEP_ATTENTION };
    for (int i = 0; i < 4; i++)
        check(&(Case){ i % 2 ? "coat" : "coat-lean", LLAMA, .documents = true,
                       .keep = (int)keeps[i] },
              comm_size());
    check(&(Case){ "coat", LLAMA, .documents = true, .recompute = 3 }, comm_size());
}

/* Routers with losses of their own. */
TEST(test_experts)
{
    check(&(Case){ "f32", OLMOE }, 2);
    check(&(Case){ "coat", OLMOE, .documents = true, .keep = KEEP_BLOCK }, comm_size());
}

TEST(test_adapters)
{
    check(&(Case){ "coat", LLAMA_GQA, ALL_MODULES, BASE_NF4, .documents = true }, 2);
    check(&(Case){ "bf16", QWEN3, ALL_MODULES, BASE_E4M3 }, 2);
}

/* Stages without trained parameters, which need no gradients. */
TEST(test_frozen)
{
    check(&(Case){ "coat", LLAMA, .trainable = { "model.layers.6.*" } }, comm_size());
    check(&(Case){ "bf16", LLAMA, .trainable = { "lm_head.weight" } }, comm_size());
    check(&(Case){ "f32", LLAMA, .trainable = { "model.embed_tokens.weight" } }, comm_size());
}

/* Each stage has two context ranks; then each stage has one rank. */
TEST(test_with_context)
{
    for (int n = 2; 2 * n <= comm_size(); n *= 2) {
        const Strategy p = stages(n, comm_size() / n, 2, PIPELINE_1F1B),
                       replicas = stages(n, 1, 1, PIPELINE_1F1B);
        check_in(&(Case){ "coat", LLAMA_GQA, .documents = true }, &p, 1, HOST_NEVER);
        check_in(&(Case){ "coat", LLAMA, .documents = true }, &replicas, 1, HOST_NEVER);
    }
}

/* The first and the last stage share a matrix. In the first step, only the gradient of this matrix
 * differs from the run without stages. */
TEST(test_tied)
{
    check(&(Case){ "f32", LLAMA_GQA, .documents = true, .tied = true }, 2);
    check(&(Case){ "coat", LLAMA, .tied = true }, comm_size());
    check(&(Case){ "f32", LLAMA, .tied = true, .trainable = { "model.layers.3.*" } }, comm_size());
}

/* Several micro-batches in flight share a few slots for their activations. With memory for more
 * slots, some activations are never offloaded. */
TEST(test_host)
{
    const int n = comm_size();
    const Strategy p[] = { stages(n, 1, 1, PIPELINE_1F1B),
                           stages(n, 1, 1, n < LAYERS ? PIPELINE_INTERLEAVED : PIPELINE_ONE) };
    check_in(&(Case){ "coat", LLAMA, .documents = true }, p, 2, HOST_AUTO);
    check_in(
        &(Case){ "coat-lean", OLMO2, .keep = KEEP_BLOCK, .trainable = { "model.layers.[3-7].*" } },
        p, 2, HOST_ALL);
    check_in(&(Case){ "bf16", LLAMA_GQA, ALL_MODULES, BASE_NF4 }, &p[n < LAYERS], 1, HOST_ALL);
}

/* ---- decoding -------------------------------------------------------------------------------- */

/* Decodes a prompt, then one token at a time. The key-value caches are on the stages of their
 * blocks. */
TEST(test_decode)
{
    enum { PARTS = 8 };
    static const int counts[PARTS] = { 5, 1, 1, 1, 1, 1, 1, 1 };
    static const Case cases[] = { { "f32", LLAMA_GQA, .tied = true },
                                  { "coat", OLMO2 },
                                  { "bf16", QWEN3, ALL_MODULES, BASE_NF4 } };
    static float expected[PARTS][MOST_LOGITS], found[PARTS][MOST_LOGITS];
    for (int i = 0; i < 3; i++)
        for (int n = 2; n <= comm_size(); n *= 2) {
            const Strategy p =
                stages(n, comm_size() / n, 1, n < LAYERS ? PIPELINE_INTERLEAVED : PIPELINE_1F1B);
            Run r;
            open_run(&r, &cases[i], p, true);
            decode_text(&r, expected, counts, PARTS);
            open_run(&r, &cases[i], p, false);
            if (decode_text(&r, found, counts, PARTS))
                check_same_bytes(name_of(&cases[i], p), expected, found, sizeof found);
        }
}

int main(int argc, char **argv)
{
    const Watch watch = { .begin = count, .watcher = &collectives };
    start_ranks(&argc, &argv);
    update_bucket = 4 * PARAM_ALIGN; /* a tied matrix is summed in several buckets */
    operations_watch(&watch);
    return finish_ranks(run_all_tests(NULL, NULL));
}
