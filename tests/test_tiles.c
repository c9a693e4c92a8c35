/* Compares the MLP in tiles of tokens with the MLP of all tokens at once.
 *
 * Every row of a tile is computed as without tiles, but a GEMM of other sizes may add in another
 * order, and a gradient of the MLP is a sum over tiles: differences are roundings. In f32 an error
 * is about K u, where K = 32 is the root of the ~1000 roundings between a token and its loss. In
 * bf16 sums are in f32, and few of them round to another bf16 number: the gradient's own rounding
 * remains, once for each of TILES and once for all. In FP8 the same is true where all tiles have
 * the same tokens, so that scales are the same. NOTE: an amax that rounds to another number changes
 * all codes of a tensor; with these initial weights none does. */
#include <math.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "kernels/runtime/error.h"
#include "kernels/values.h"
#include "model/plan_model.h"
#include "tests/models.h"

enum { B = 3, T = 16, N = B * T, TILES = 3 };

typedef struct {
    float loss[2 * N];
    float *grad;
    size_t count, work;
} Result;

static void take_gradients(const ParamStore *store, Result *r)
{
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            Tensor t = store->dunit[u].tensor[p->id];
            if (p->region != TRAINED)
                continue;
            const size_t n = tensor_numel(t);
            void *stored = xmalloc(tensor_bytes(t));
            device_get(stored, t.data, tensor_bytes(t));
            t.data = stored;
            r->grad = xrealloc(r->grad, sizeof *r->grad * (r->count + n));
            tensor_load(r->grad + r->count, t, 0, n);
            r->count += n;
            free(stored);
        }
}

/* Tiles do not use scales of the step: no operation writes these ranges. */
static const float unwritten = -1;

static void check_ranges(const Model *m, bool after)
{
    const Tensor t[] = { m->acts[0].mlp_h, m->acts[0].swiglu_operand, m->acts[0].dgate_up };
    for (int i = 0; i < 3; i++) {
        float range = unwritten;
        if (!t[i].scale_amax)
            continue;
        if (after)
            device_get(&range, t[i].scale_amax, sizeof range);
        else
            device_put(t[i].scale_amax, &unwritten, sizeof unwritten);
        assert_true(range == unwritten);
    }
}

static int stats_interval; /* quant_stats_interval of the next step */

/* Runs a step of `passes` micro-batches and returns the losses of the last one. The sequences are
 * all the same, or differ. */
static Result step(const ModelConfig *m, const char *recipe, Keep keep, int tile, bool same,
                   int passes)
{
    Config c;
    Model model;
    ParamStore store;
    Result r = { 0 };
    int tokens[N], targets[N];
    model_config(&c, m, recipe, B);
    c.strategy.grad_sum = SUM_ONCE;
    c.recipe.keep = keep;
    c.tiled_mlp_tokens = tile;
    c.quant_stats_interval = stats_interval;
    model_create(&model, &store, &c);
    assert_int_equal(model.text.N, N);
    store_init(&store, &c.model, 8);
    test_fill_adapters(&store, 9);
    fsdp_empty_grads(&store);
    if (model.text.tile < N && keep_recomputes(keep))
        check_ranges(&model, false);
    for (int pass = 0; pass < passes; pass++) {
        for (int n = 0; n < N; n++)
            tokens[n] = test_token((uint64_t)pass, (uint64_t)(same ? n % T : n), m->vocab_size);
        for (int n = 0; n < N; n++)
            targets[n] = n % T == T - 1 ? -1 : tokens[n + 1];
        model_micro_batch(&model, &store, tokens, targets, NULL, 1, 0,
                          pass == passes - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
    if (model.text.tile < N && keep_recomputes(keep))
        check_ranges(&model, true);
    device_get(r.loss, model.losses, sizeof r.loss);
    take_gradients(&store, &r);
    r.work = model.bytes.work;
    model_free(&model, &store);
    return r;
}

static ModelConfig model_of(int i, bool adapters)
{
    ModelConfig m = architecture((SmallModel)(i % NUM_ARCHITECTURES));
    m.d_model = 32;
    m.head_dim = 16;
    m.mlp_width = 160;
    m.max_sequence_length = T;
    return adapters ? with_adapters(m, 4, ALL_MODULES, BASE_AS_FROZEN) : m;
}

static double distance(const Result *a, const Result *b)
{
    double d = 0, length = 0;
    for (size_t i = 0; i < a->count; i++) {
        d += ((double)a->grad[i] - b->grad[i]) * ((double)a->grad[i] - b->grad[i]);
        length += (double)b->grad[i] * b->grad[i];
    }
    return sqrt(d / length);
}

static void check_near(const char *what, const Result *whole, const Result *tiled, double loss,
                       double grad)
{
    assert_int_equal(whole->count, tiled->count);
    for (int n = 0; n < N; n++)
        if (!(fabs(whole->loss[n] - tiled->loss[n]) <= loss * whole->loss[n]))
            fail_msg("%s: the loss of token %d is %.9g, in tiles %.9g", what, n, whole->loss[n],
                     tiled->loss[n]);
    const double d = distance(tiled, whole);
    if (!(d <= grad))
        fail_msg("%s: gradients differ by %g", what, d);
}

/* Tiles of 16 tokens, and of 32 with a smaller last one. */
TEST(test_bits)
{
    enum { K = 32, ROUNDINGS = TILES + 1 };
    static const struct {
        const char *name;
        double u;
        bool same;
        int factor;
    } rows[] = {
        { "f32", U24, false, K },
        { "bf16", 0x1p-8, false, ROUNDINGS },
        { "fp8", 0x1p-8, true, ROUNDINGS },
        { "coat", 0x1p-8, true, ROUNDINGS },
        { "coat-lean", 0x1p-8, true, ROUNDINGS },
    };
    for (int a = 0; a < NUM_ARCHITECTURES; a++)
        for (int i = 0; i < 5; i++) {
            const ModelConfig m = model_of(a, (a + i) % 3 == 0);
            const Keep keep = (a + i) % 2 ? KEEP_BLOCK : KEEP_ATTENTION;
            char what[64];
            snprintf(what, sizeof what, "%s %s", architecture_name((SmallModel)a), rows[i].name);
            Result whole = step(&m, rows[i].name, keep, 0, rows[i].same, 1);
            Result tiled =
                step(&m, rows[i].name, keep, a % 2 && !rows[i].same ? 32 : 16, rows[i].same, 1);
            check_near(what, &whole, &tiled, rows[i].factor * rows[i].u,
                       rows[i].factor * rows[i].u);
            free(whole.grad);
            free(tiled.grad);
        }
}

/* If each tile has other tokens, its FP8 scales differ from those of all tokens. Gradients are then
 * as far from f32 as without tiles, up to the scatter of rounding, for which half of the error is
 * allowed. In the second micro-batch, scales of the step would be in use. */
TEST(test_scales)
{
    static const char *const names[] = { "fp8", "coat", "coat-lean" };
    for (int i = 0; i < 3; i++)
        for (int a = 0; a < 2; a++) {
            const ModelConfig m = model_of(a ? OLMO2 : LLAMA, false);
            Result truth = step(&m, "f32", KEEP_BLOCK, 0, false, 2),
                   whole = step(&m, names[i], KEEP_BLOCK, 0, false, 2);
            Result tiled = step(&m, names[i], KEEP_BLOCK, 16, false, 2);
            const double error = distance(&tiled, &truth), before = distance(&whole, &truth);
            if (!(error <= 1.5 * before) || memcmp(tiled.loss, whole.loss, sizeof whole.loss) == 0)
                fail_msg("%s: gradients are %g from f32, without tiles %g", names[i], error,
                         before);
            free(truth.grad), free(whole.grad), free(tiled.grad);
        }
}

/* Tiles need a block that backward recomputes, more tokens than a tile has, and no statistics,
 * because statistics cover all tokens. */
TEST(test_none)
{
    const ModelConfig m = model_of(LLAMA, false);
    for (int i = 0; i < 4; i++) {
        const Keep keep = i >= 2 ? KEEP_BLOCK : (Keep)i;
        stats_interval = i == 3;
        Result whole = step(&m, "coat", keep, 0, false, 2),
               tiled = step(&m, "coat", keep, i == 2 ? N : 16, false, 2);
        assert_int_equal(whole.work, tiled.work);
        assert_memory_equal(whole.loss, tiled.loss, sizeof whole.loss);
        assert_memory_equal(whole.grad, tiled.grad, sizeof *whole.grad * whole.count);
        free(whole.grad), free(tiled.grad);
    }
    stats_interval = 0;
}

static size_t work_bytes(const char *recipe, Keep keep, int tile)
{
    ModelConfig m = model_of(LLAMA, false);
    Config c;
    Model model;
    ParamStore store;
    m.mlp_width = 16384;
    model_config(&c, &m, recipe, B);
    c.recipe.keep = keep;
    model_plan(&model, &store, &c, (ShardChoice){ 1, 0, true, .tile = tile });
    const size_t bytes = model.bytes.work;
    model_free(&model, &store);
    return bytes;
}

/* If the MLP takes nearly all memory, a third of the tokens at once takes a third of the memory,
 * plus at most an eighth for what has no tiles. */
TEST(test_bytes)
{
    static const char *const names[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (int i = 0; i < 5; i++)
        for (Keep k = KEEP_ATTENTION; k <= KEEP_BLOCK; k++) {
            const size_t whole = work_bytes(names[i], k, 0), tiled = work_bytes(names[i], k, 16);
            if (tiled > whole / 3 + whole / 8)
                fail_msg("%s: %zu bytes of work, in tiles %zu", names[i], whole, tiled);
        }
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
