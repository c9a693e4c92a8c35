/* Ranks that compute layers together compute what one rank computes: losses of tokens, gradients,
 * their norm and the weights after steps, in f32; codes of FP8 operands, bit for bit where nothing
 * was summed over ranks before; and FP8 results, if ranks share the maxima of all operands, up to
 * codes that a sum in another order moves across the border between two; and logits while
 * generating. On 1, 2 and 4 ranks.
 *
 * Each case is on one of the meshes. With EVERY=1 in the environment each is on all of them: by
 * hand, in minutes. */
#include <math.h>
#include <string.h>

#include "model/store/param_store_sizes.h"
#include "tests/kit.h"

#include "kernels/backend.h"
#include "kernels/runtime/error.h"
#include "model/decode.h"
#include "model/predict/memory.h"
#include "model/update/update.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

/* The rows of a micro-batch are those of no weight. */
enum { SEQUENCES = 4, MICRO = 2, T = 40, WIDTH = 64, TOKENS = SEQUENCES * T, STEPS = 1 };
/* Numbers of a unit's parameters; those of adapters follow those of others. */
enum { MAX_UNITS = 4, OTHERS = 1 << 17, ALL = OTHERS + (1 << 15) };

/* ---- maxima of all ranks --------------------------------------------------------------------- */

static int shared_rows; /* of operands whose maxima are shared; 0: none */

/* not on a GPU */
extern float __real_scale_within_range(Tensor t, float amax) __attribute__((weak));
float __wrap_scale_within_range(Tensor t, float amax);

float __wrap_scale_within_range(Tensor t, float amax)
{
    if (t.rows == shared_rows)
        backend_comm_all_reduce_max(tensor_at(&amax, (Format){ F32, 0 }, 1, 1), RANKS_STAGE);
    return __real_scale_within_range(t, amax);
}

/* ---- steps ----------------------------------------------------------------------------------- */

typedef struct {
    int shard, context, tensor;
} Ways;

typedef struct {
    const char *recipe;
    SmallModel model;
    bool documents;
    unsigned modules; /* with adapters on these */
    int keep;         /* instead of the recipe's, unless 0 */
    bool wide;        /* the stream is F32, so that sums err less than codes */
    BaseFormat base;  /* of the matrices under adapters */
} Case;

/* grad, weight: of parameters as they are whole; weight NULL: no steps. codes: of the first block's
 * operand, turned, with its scale; none unless the recipe keeps it. */
typedef struct {
    double loss[TOKENS], norm, *grad[MAX_UNITS], *weight[MAX_UNITS];
    int units;
    uint8_t codes[WIDTH * MICRO * T];
    float scale;
} Result;

static ModelConfig model_of(const Case *k)
{
    ModelConfig m = architecture(k->model);
    m.n_kv_heads = m.n_kv_heads == m.n_heads ? 8 : 4;
    m.n_heads = 8;
    m.max_sequence_length = T;
    m.mlp_width = 128;
    assert_int_equal(m.d_model, WIDTH);
    m = without_wide_norms(m);
    if (m.sliding_window > 0)
        m.sliding_window *= 5;
    if (k->base == BASE_NF4) { /* parts on four ranks have whole blocks */
        m.head_dim = 32;
        m.mlp_width = 256;
    }
    return k->modules ? with_adapters(m, 6, k->modules, k->base) : m;
}

static void run_micro_batches(Model *m, ParamStore *store, Result *s)
{
    run_same_sequences(m, store, s->loss, TOKENS, MICRO);
    /* each has those of its tokens, and zeros */
    comm_sum_over(s->loss, TOKENS, RANKS_STAGE);
    for (int i = 0; i < TOKENS; i++)
        s->loss[i] /= comm_group_size(RANKS_STAGE) /
                      (comm_group_size(RANKS_CONTEXT) * comm_group_size(RANKS_TENSOR));
    s->norm = optimizer_grad_norm(store);
}

/* The whole parameters of a unit from all ranks of a copy, at their numbers; those of adapters come
 * after the others. */
static double *whole_unit(const ParamStore *store, int u, bool grads)
{
    const UnitLayout *shape = &store->shape[u];
    double *x = xcalloc(ALL, sizeof *x);
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        const bool copy = shape->tensor_ranks > 1 && p->tensor_ranks == 1 && store->tensor_rank > 0;
        size_t first, whole,
            n = p->region == TRAINED && !copy ? shard_part(&store->shard[u], p, &first) : 0;
        if (n == 0)
            continue;
        const double *found = values(grads ? slice_view(&store->shard[u].slice[TRAINED],
                                                        store->shard[u].grad, p->offset + first, n)
                                           : shard_weights(&store->shard[u], p, first, n));
        for (size_t k = 0; k < n; k++) {
            param_run(p, first + k, &whole);
            const size_t at = p->number + whole + (p->is_adapter ? OTHERS : 0);
            assert_true(at < ALL);
            x[at] = found[k];
        }
    }
    comm_sum_over(x, ALL, RANKS_STAGE);
    return x;
}

static void run_steps(Result *s, const Case *k, Ways w, bool shares)
{
    const ModelConfig m = model_of(k);
    Config c;
    Model model = { 0 };
    ParamStore store = { 0 };
    model_config(&c, &m, k->recipe, MICRO);
    c.data.generate_doc_lengths = k->documents;
    c.recipe.keep = k->keep ? (Keep)k->keep : c.recipe.keep;
    if (k->wide)
        c.recipe.stream = c.recipe.qkv = c.recipe.att = c.recipe.grads = (Format){ F32, 0, false };
    c.strategy =
        (Strategy){ .shard_ranks = w.shard, .context_ranks = w.context, .tensor_ranks = w.tensor };
    divide_in_tensor(1, w.shard, w.context, w.tensor);
    memory_plan(&model, &store, &c);
    model_alloc(&model, &store, &c);
    store_init(&store, &m, 5);
    test_fill_adapters(&store, 6);
    store_zero_states(&store);
    shared_rows = shares ? model.rows : 0;
    run_micro_batches(&model, &store, s);
    s->units = store.num_units;
    for (int u = 0; u < s->units; u++)
        s->grad[u] = whole_unit(&store, u, true);
    const Tensor h = model.acts[0].attn_h;
    if (h.data_t && c.recipe.keep == KEEP_ALL) {
        device_get(s->codes, h.data_t, sizeof s->codes);
        device_get(&s->scale, h.scale, sizeof s->scale);
    }
    const bool steps = store.recipe.master.dtype == F32 && strcmp(k->recipe, "f32") == 0;
    for (int i = 0; i < STEPS && steps; i++) {
        Result next;
        optimizer_step(&store, &c, i + 1, 1e-3, 1);
        run_micro_batches(&model, &store, &next);
        memcpy(s->loss, next.loss, sizeof next.loss);
    }
    shared_rows = 0;
    for (int u = 0; u < s->units; u++)
        s->weight[u] = steps ? whole_unit(&store, u, false) : NULL;
    model_free(&model, &store);
}

/* ---- comparisons ----------------------------------------------------------------------------- */

/* |part - whole| / |whole| of all units' values. */
static double difference(double *const *whole, double *const *part, const Result *s)
{
    double x[2] = { 0 };
    for (int u = 0; u < s->units; u++)
        for (size_t i = 0; i < ALL && part[u]; i++) {
            x[0] += pow(part[u][i] - whole[u][i], 2);
            x[1] += pow(whole[u][i], 2);
        }
    return x[1] > 0 ? sqrt(x[0] / x[1]) : part[0] ? INFINITY : 0;
}

static void free_result(Result *s)
{
    for (int u = 0; u < s->units; u++)
        free(s->grad[u]), free(s->weight[u]);
}

static void check(const Case *k, Ways w, double loss_bound, double grad_bound)
{
    static Result whole, part;
    memset(&whole, 0, sizeof whole);
    memset(&part, 0, sizeof part);
    run_steps(&whole, k, (Ways){ 1, 1, 1 }, false);
    run_steps(&part, k, w, true);
    double worst = 0;
    for (int i = 0; i < TOKENS; i++)
        worst = fmax(worst, fabs(part.loss[i] - whole.loss[i]) / fmax(1, whole.loss[i]));
    const double grads = difference(whole.grad, part.grad, &part),
                 norm = fabs(part.norm / whole.norm - 1);
    const double weights = difference(whole.weight, part.weight, &part);
    if (!(worst <= loss_bound && grads <= grad_bound && norm <= grad_bound &&
          weights <= grad_bound))
        fail_msg("%s, %s, documents %d, modules %#x, base %d, keep %d, %d shards, %d context and "
                 "%d tensor ranks: losses differ by "
                 "%.3g (bound %.3g), gradients by %.3g, their norm by %.3g, weights by %.3g (bound "
                 "%.3g)",
                 k->recipe, architecture_name(k->model), k->documents, k->modules, k->base, k->keep,
                 w.shard, w.context, w.tensor, worst, loss_bound, grads, norm, weights, grad_bound);
    if (w.context == 1) {
        check_same_bytes("codes", part.codes, whole.codes, sizeof part.codes);
        check_same_bytes("scale", &part.scale, &whole.scale, sizeof part.scale);
    }
    free_result(&whole);
    free_result(&part);
    release();
}

/* Case number `number`, on the mesh of this number among those with tensor ranks. */
static void check_mesh(int number, const Case *k, double loss_bound, double grad_bound)
{
    Ways all[16];
    int count = 0;
    for (int tensor = 2; tensor <= comm_size(); tensor *= 2)
        for (int shard = 1; shard * tensor <= comm_size(); shard *= 2)
            for (int context = 1; context <= shard; context *= 2)
                all[count++] = (Ways){ shard, context, tensor };
    for (int i = 0; i < count; i++)
        if (i == number % count || getenv("EVERY"))
            check(k, all[i], loss_bound, grad_bound);
}

/* Sums of up to 384 terms in another order: each errs by some 2^-24 of its size, through two blocks
 * and back. What backward makes again it gathers again. */
static void test_f32(void **state)
{
    (void)state;
    static const Case cases[] = {
        { "f32", LLAMA_GQA, .documents = true, .keep = KEEP_INPUTS },
        { "f32", QWEN3, .modules = ALL_MODULES },
        { "f32", OLMO2, .keep = KEEP_BLOCK },
        { "f32", QWEN2, .documents = true, .keep = KEEP_ATTENTION },
        { "f32", OLMO },
        { "f32", OLMO3, .modules = ALL_MODULES },
        { "f32", MISTRAL, .modules = ALL_MODULES, .base = BASE_NF4 },
        { "f32", LLAMA, .modules = 1 << LORA_V | 1 << LORA_DOWN, .base = BASE_E4M3 },
    };
    for (int i = 0; i < 8; i++)
        check_mesh(i, &cases[i], 2e-6, 2e-6);
}

/* Partial sums are rounded to BF16, 2^-9, and FP8 operands behind them to 2^-4. */
static void test_bf16(void **state)
{
    (void)state;
    if (!__real_scale_within_range)
        skip();
    check_mesh(0, &(Case){ "bf16", LLAMA_GQA }, 0x1p-5, 0x1p-5);
    /* a stream in F32, operands in BF16 */
    check_mesh(0, &(Case){ "bf16", LLAMA_GQA, .wide = true }, 0x1p-5, 0x1p-5);
    check_mesh(0, &(Case){ "bf16", OLMO2, .wide = true }, 0x1p-5, 0x1p-5);
    check_mesh(1, &(Case){ "fp8", LLAMA, .keep = KEEP_ALL }, 0x1p-2, 0x1p-2);
    check_mesh(
        2,
        &(Case){ "coat-lean", QWEN3, .documents = true, .modules = ALL_MODULES, .base = BASE_NF4 },
        0x1p-2, 0x1p-2);
}

/* With sums in F32 few codes become others, and often none. */
static void test_fp8(void **state)
{
    (void)state;
    if (!__real_scale_within_range)
        skip();
    check_mesh(0, &(Case){ "fp8", OLMO2, .wide = true }, 0x1p-4, 0x1p-3);
    check_mesh(3, &(Case){ "coat", LLAMA_GQA, .documents = true, .wide = true }, 0x1p-4, 0x1p-3);
}

/* ---- rounding -------------------------------------------------------------------------------- */

/* Weights of 1 in BF16 after a decay by half a step: each is rounded up or down, by where it is in
 * the whole parameter. */
static void round_weights(double **weight, const Case *k, Ways w)
{
    const ModelConfig m = model_of(k);
    Config c;
    Model model = { 0 };
    ParamStore store = { 0 };
    model_config(&c, &m, "f32", MICRO);
    c.recipe.master = (Format){ BF16, 0, false };
    c.optimizer.weight_decay = 0x1p-9;
    c.optimizer.decay_embeddings = c.optimizer.decay_norm_and_bias = true;
    c.strategy =
        (Strategy){ .shard_ranks = w.shard, .context_ranks = w.context, .tensor_ranks = w.tensor };
    divide_in_tensor(1, w.shard, w.context, w.tensor);
    memory_plan(&model, &store, &c);
    model_alloc(&model, &store, &c);
    store_zero_states(&store);
    for (int u = 0; u < store.num_units; u++)
        if (store.shard[u].slice[TRAINED].count > 0) {
            fill(store.shard[u].grad, 1, 0, 0);
            fill(store.shard[u].slice[TRAINED].stored, 1, 1, 1);
        }
    optimizer_step(&store, &c, 1, 1, 1);
    for (int u = 0; u < store.num_units; u++)
        weight[u] = whole_unit(&store, u, false);
    model_free(&model, &store);
}

static void test_rounding(void **state)
{
    (void)state;
    static const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN2 };
    for (int i = 0; i < 3; i++)
        for (int tensor = 2; tensor <= comm_size(); tensor *= 2) {
            double *whole[MAX_UNITS] = { NULL }, *part[MAX_UNITS] = { NULL };
            const Case k = { "f32", models[i] };
            round_weights(whole, &k, (Ways){ 1, 1, 1 });
            round_weights(part, &k, (Ways){ comm_size() / tensor, 1, tensor });
            for (int u = 0; u < MAX_UNITS && whole[u]; u++) {
                size_t down = 0, all = 0;
                for (size_t n = 0; n < ALL; n++) {
                    assert_true(whole[u][n] == part[u][n]);
                    down += whole[u][n] == 1 - 0x1p-8;
                    all += whole[u][n] != 0;
                }
                assert_true(down > all / 4 && down < all * 3 / 4);
                free(whole[u]), free(part[u]);
            }
            release();
        }
}

/* ---- generating ------------------------------------------------------------------------------ */

/* Logits after a prompt, single tokens and several at once, of a model that generates. */
static void last_logits(float *logits, const Case *k, Ways w)
{
    static const int counts[] = { 9, 1, 1, 12, 1 };
    const ModelConfig m = model_of(k);
    Config c;
    Model model = { 0 };
    ParamStore store = { 0 };
    int tokens[T];
    model_config(&c, &m, k->recipe, 1);
    c.generate = "prompts";
    c.strategy = (Strategy){ .shard_ranks = w.shard, .context_ranks = 1, .tensor_ranks = w.tensor };
    divide_in_tensor(1, w.shard, 1, w.tensor);
    memory_plan(&model, &store, &c);
    model_alloc(&model, &store, &c);
    store_init(&store, &m, 5);
    test_fill_adapters(&store, 6);
    for (int i = 0; i < T; i++)
        tokens[i] = test_token(11, (uint64_t)i, m.vocab_size);
    decode_begin(&model);
    for (int i = 0, done = 0; i < 5; done += counts[i++])
        decode_append(&model, &store, tokens + done, counts[i]);
    decode_logits(&model, &store, logits);
    model_free(&model, &store);
}

/* Every rank has the logits of one rank: up to 1e-5 in f32, else up to the roundings of partial
 * sums (test_decode.c). */
static void test_decode(void **state)
{
    (void)state;
    static const struct {
        Case k;
        double bound;
    } cases[] = {
        { { "f32", LLAMA_GQA }, 1e-5 },
        { { "f32", MISTRAL, .modules = ALL_MODULES, .base = BASE_NF4 }, 1e-5 },
        { { "f32", OLMO3 }, 1e-5 },
        { { "bf16", QWEN2 }, 0.018 },
        { { "coat", LLAMA }, 0.29 },
        { { "fp8", OLMO2 }, 0.29 },
    };
    for (int i = 0; i < 6; i++)
        for (int tensor = 2; tensor <= comm_size(); tensor *= 2) {
            float expected[128], found[128];
            double e = 0, size = 0;
            last_logits(expected, &cases[i].k, (Ways){ 1, 1, 1 });
            last_logits(found, &cases[i].k, (Ways){ comm_size() / tensor, 1, tensor });
            for (int v = 0; v < architecture(cases[i].k.model).vocab_size; v++) {
                e += pow((double)found[v] - expected[v], 2);
                size += pow(expected[v], 2);
            }
            if (!(sqrt(e / size) <= cases[i].bound && size > 0))
                fail_msg("%s, %s, %d tensor ranks: logits are off by %.2g, at most %.2g",
                         cases[i].k.recipe, architecture_name(cases[i].k.model), tensor,
                         sqrt(e / size), cases[i].bound);
            release();
        }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_f32), cmocka_unit_test(test_bf16),
                                        cmocka_unit_test(test_fp8), cmocka_unit_test(test_rounding),
                                        cmocka_unit_test(test_decode) };
    start_ranks(&argc, &argv);
    add_after_architecture();
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
