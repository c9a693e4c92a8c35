/* Every recipe against f32 on the same weights and tokens: how far the loss and each gradient are off.
 *
 * A format with a mantissa of p bits rounds by at most 2^-(p+1) of a value: u = 2^-9 for BF16, 2^-4 for E4M3, 2^-3 for E5M2;
 * the root mean square over many values is u / sqrt(3). Each GEMM multiplies two rounded operands; a gradient has come
 * through as many roundings of its own and of the activations as the chain is deep, which adds their squares. In a block
 * these are about 8 operands, in two blocks and the head 16: errors up to sqrt(16 (2^-4^2 + 2^-3^2) / 3) = 0.32 are explained
 * for the first block's gradients and less for later ones. Larger ones are not. BF16 explains sqrt(16 * 2 * 2^-18 / 3) = 0.0064,
 * and its rounded logits, which are up to 4, another 4 * 2^-9 = 0.0078 of the probabilities. OLMo-2 and OLMo-3, with their four
 * more norms a block, have twice as many roundings, Qwen3 with two more norms one and a half times as many; YaRN makes scores and
 * with them their errors (0.1 ln 4 + 1)^2 = 1.30 times as large. A root mean square over 64 tokens scatters by 1/sqrt(2 * 64) =
 * 9 %, the worst of 30 tensors by twice that. */
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/device.h"
#include "model/block.h"
#include "model/plan.h"
#include "tests/models.h"

enum { B = 4, MAX_TOKENS = 128 };

typedef struct { double loss; UnitShape shape[16]; float *gradient[16]; size_t count[16]; int units; } Result;

static ModelConfig wide(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.d_model = 128;
    m.head_dim = 32;
    m.mlp_width = 256;
    m.clip_qkv = 0;
    m.init_fn = INIT_FULL_MEGATRON;
    m.init_std = 0.05;
    return m;
}

static float *as_floats(Tensor t)
{
    size_t n = tensor_numel(t);
    float *x = malloc(sizeof(float) * n);
    if (t.format.dtype == F32) {
        device_get(x, t.data, sizeof(float) * n);
        return x;
    }
    uint16_t *h = malloc(sizeof(uint16_t) * n);
    device_get(h, t.data, sizeof(uint16_t) * n);
    for (size_t i = 0; i < n; i++) {
        union { uint32_t bits; float value; } v = { .bits = (uint32_t)h[i] << 16 };
        x[i] = v.value;
    }
    free(h);
    return x;
}

/* A step of B sequences in so many micro-batches, of which the first has no labels if there are several; perhaps behind another. */
typedef struct { Keep keep; bool saved_forward; int parts; ScalesOf scales; bool behind; } How;

static void step(Model *model, Fsdp *fsdp, int parts, uint64_t seed)
{
    const int N = model->N * parts, labels = parts > 1 ? N - model->N : N;
    int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    for (int n = 0; n < N; n++)
        tokens[n] = test_token(seed, n, model->config->vocab_size);
    for (int n = 0; n < N; n++)
        targets[n] = (n + 1) % model->attn.T && n >= N - labels ? tokens[n + 1] : -1;
    for (int n = 0; n < N; n += model->N)
        model_step(model, fsdp, tokens + n, targets + n, NULL, 1.0f / (float)labels, 0,
                   n + model->N < N ? PASS_ACCUMULATE : PASS_COMPLETE);
}

/* Of a step in so many micro-batches; behind: another step. */
static Result run_config(Config c, int parts, bool behind)
{
    const ModelConfig *m = &c.model;
    Model model;
    Fsdp fsdp;
    c.recipe.grads = (Format){ F32, 0 };
    model_create(&model, &fsdp, &c);
    fsdp_init(&fsdp, m, 3);
    test_fill_adapters(&fsdp, 9);
    if (behind) {
        step(&model, &fsdp, parts, 2);
        model_losses(&model);
        fsdp_zero_grads(&fsdp);
    }
    step(&model, &fsdp, parts, 1);
    Result r = { .loss = model_losses(&model).loss / model.N, .units = fsdp.num_units };
    for (int u = 0; u < r.units; u++) {
        r.shape[u] = fsdp.shape[u];
        r.count[u] = fsdp.shard[u].count;
        r.gradient[u] = r.count[u] ? as_floats(fsdp.shard[u].grad) : NULL;
    }
    model_free(&model, &fsdp);
    return r;
}

static Result run_as(const ModelConfig *m, const char *recipe, How how)
{
    Config c;
    model_config(&c, m, recipe, B / how.parts);
    c.recipe.keep = how.keep;
    c.recipe.scales = how.scales;
    if (how.saved_forward)
        c.recipe.forward = FROM_SAVED;
    return run_config(c, how.parts, how.behind);
}

static Result run(const ModelConfig *m, const char *recipe, Keep keep, bool saved_forward)
{
    return run_as(m, recipe, (How){ keep, saved_forward, 1, OF_MICROBATCH });
}

static void free_result(Result *r)
{
    for (int u = 0; u < r->units; u++)
        free(r->gradient[u]);
}

static double distance(const float *x, const float *y, size_t n)
{
    double e = 0, s = 0;
    for (size_t i = 0; i < n; i++) {
        e += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        s += (double)y[i] * y[i];
    }
    return sqrt(e / s);
}

/* Relative error of the gradients of parameter i of unit u; 0 if it is frozen. */
static double param_distance(const Result *x, const Result *y, int u, int i)
{
    const Param *p = &x->shape[u].param[i];
    if (p->region != TRAINED)
        return 0;
    return distance(x->gradient[u] + p->offset, y->gradient[u] + p->offset, (size_t)p->rows * p->cols);
}

/* The worst tensor of `found`, with its unit and name. */
static double worst_distance(const Result *found, const Result *exact, int *unit, const char **where)
{
    double worst = 0;
    *unit = 0, *where = "";
    for (int u = 0; u < exact->units; u++)
        for (int i = 0; i < exact->shape[u].num_params; i++) {
            double d = param_distance(found, exact, u, i);
            if (!(d <= worst))
                worst = d, *where = exact->shape[u].param[i].name, *unit = u;
        }
    return worst;
}

static void check_recipe(const char *name, const ModelConfig *m, const char *recipe, bool saved_forward, double loss_bound,
                         double bound)
{
    Result exact = run(m, "f32", KEEP_ALL, true), found = run(m, recipe, recipe_find(recipe)->keep, saved_forward);
    const char *where;
    int unit;
    const double worst = worst_distance(&found, &exact, &unit, &where);
    printf("%-10s %-10s loss %.6f (f32 %.6f), worst gradient %.4f (%s of unit %d)\n", name, recipe, found.loss, exact.loss, worst,
           where, unit);
    assert_true(fabs(found.loss - exact.loss) <= loss_bound * exact.loss);
    if (!(worst <= bound))
        fail_msg("%s, %s: %s of unit %d is off by %.4f, bound %.4f", name, recipe, where, unit, worst, bound);
    free_result(&exact);
    free_result(&found);
}

static void test_bf16(void **state)
{
    (void)state;
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const double roundings = a == OLMO2 || a == OLMO3 ? 32 : a == QWEN3 ? 24 : 16, scores = a == OLMO3 ? 1.30 : 1;
        const ModelConfig m = wide(a);
        check_recipe(architecture_name(a), &m, "bf16", true, 0.001, 1.18 * scores * sqrt(roundings * 2 * 0x1p-18 / 3) + 4 * 0x1p-9);
    }
}

static void test_fp8(void **state)
{
    (void)state;
    static const char *const recipes[] = { "fp8", "coat-act", "coat", "coat-lean" };
    for (int r = 0; r < 4; r++)
        for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
            for (int saved = 0; saved < 2; saved++) {
                const ModelConfig m = wide(a);
                check_recipe(architecture_name(a), &m, recipes[r], saved, 0.01, 0.32);
            }
}

/* Adapters against those of f32 on the same base, as it is read from its codes. Here every rounding is counted, once.
 * BF16. A block's forward writes h, qkv, its rotation, the mix, the stream, h, gate and up, act, the stream, and reads 4 matrices;
 * backward writes dact, dgate_up, dh, the stream, datt, dqkv, its rotation, dh, the stream, and reads 4 matrices: 26, and on a GPU
 * attention rounds probabilities twice and the scores' gradients. Four more norms write 8 more. In each of the 8 products an
 * adapter's A, B, low product and what the base's GEMM adds to, in which the residual is rounded once more, are 4. Two blocks and 6
 * of the head: 2 (26 + 3 + 8 + 8 * 4) + 6 = 144.
 * FP8. What is rounded to BF16 does not count. The 16 GEMMs of two blocks read 24 operands in E4M3 and 8 in E5M2.
 * Of a gradient of a block's tokens an adapter's has RANK = 8 products with random numbers. Where the tokens' gradients are alike,
 * their root mean square scatters by 1/sqrt(2 * 8), beside that of 64 tokens: both are 27 %, the worst tensor by twice that. */
static const struct { SmallModel model; unsigned modules; BaseFormat base; } adapted[] = {
    { LLAMA_GQA, ALL_MODULES, BASE_AS_FROZEN },
    { OLMO2, 1 << LORA_Q | 1 << LORA_V | 1 << LORA_O | 1 << LORA_GATE, BASE_NF4 },
    { QWEN3, ALL_MODULES, BASE_E4M3 },
};
enum { NUM_ADAPTED = sizeof adapted / sizeof adapted[0], RANK = 8 };

static ModelConfig adapted_model(int i)
{
    return with_adapters(wide(adapted[i].model), RANK, adapted[i].modules, adapted[i].base);
}

static void test_adapters(void **state)
{
    (void)state;
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    const double scatter = 1 + 2 * sqrt(1.0 / (2 * 64) + 1.0 / (2 * RANK));
    const double bf16 = scatter * sqrt(144 * 0x1p-18 / 3) + 4 * 0x1p-9, fp8 = scatter * sqrt((24 * 0x1p-8 + 8 * 0x1p-6) / 3);
    for (int i = 0; i < NUM_ADAPTED; i++) {
        const ModelConfig m = adapted_model(i);
        check_recipe(architecture_name(adapted[i].model), &m, "bf16", false, 0.001, bf16);
        for (int r = 0; r < 3; r++)
            check_recipe(architecture_name(adapted[i].model), &m, recipes[r], false, 0.01, fp8);
    }
}

/* The head's backward in FP8, in chunks of 48 and 16 tokens: its two GEMMs read E5M2 and E4M3, which adds their squares to what
 * bf16 or fp8 operands explain, in the head's weight directly, in all that is below through the gradient of its input. The same
 * numbers, were they all just below a power of two, would round to E5M2 with 2^-4 / sqrt(3) = 3.6 %: where nothing is off by half
 * of that, the GEMMs were not in FP8. */
static void check_head(const ModelConfig *m, const char *recipe, char *trainable, double bound)
{
    Config c, f32;
    model_config(&c, m, recipe, B);
    model_config(&f32, m, "f32", B);
    c.recipe.head = (Format){ E5M2, 0 };
    c.loss_chunk = 48;
    if (trainable) {
        c.trainable = f32.trainable = &trainable;
        c.num_trainable = f32.num_trainable = 1;
    }
    Result found = run_config(c, 1, false), exact = run_config(f32, 1, false);
    const char *where;
    int unit;
    const double worst = worst_distance(&found, &exact, &unit, &where);
    printf("head in FP8, %-10s %-10s worst gradient %.4f (%s of unit %d), bound %.4f\n", trainable ? trainable : "", recipe, worst,
           where, unit, bound);
    assert_true(fabs(found.loss - exact.loss) <= 0.01 * exact.loss);
    if (!(worst <= bound && worst >= 0.018))
        fail_msg("%s: %s of unit %d is off by %.4f, expected 0.018 .. %.4f", recipe, where, unit, worst, bound);
    free_result(&found);
    free_result(&exact);
}

static void test_head(void **state)
{
    (void)state;
    const double e4m3 = 0x1p-8 / 3, e5m2 = 0x1p-6 / 3;
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const double roundings = a == OLMO2 || a == OLMO3 ? 32 : a == QWEN3 ? 24 : 16, scores = a == OLMO3 ? 1.30 : 1;
        const double bf16 = 1.18 * scores * sqrt(roundings * 2 * 0x1p-18 / 3 + e4m3 + e5m2) + 4 * 0x1p-9;
        const ModelConfig m = wide(a);
        check_head(&m, "bf16", NULL, bf16);
        check_head(&m, "coat", NULL, sqrt(17 * (e4m3 + e5m2)));
        if (!m.weight_tying)
            check_head(&m, "bf16", "lm_head.weight", bf16);
        check_head(&m, "bf16", "model.layers.*.mlp.*", bf16);
    }
    const ModelConfig m = adapted_model(0);
    const double scatter = 1 + 2 * sqrt(1.0 / (2 * 64) + 1.0 / (2 * RANK));
    check_head(&m, "bf16", NULL, scatter * sqrt(144 * 0x1p-18 / 3 + e4m3 + e5m2) + 4 * 0x1p-9);
}

static void check_same_as(const ModelConfig *m, const char *recipe, How one, How other)
{
    Result x = run_as(m, recipe, one), y = run_as(m, recipe, other);
    for (int u = 0; u < x.units; u++)
        for (size_t i = 0; i < x.count[u]; i++)
            if (x.gradient[u][i] != y.gradient[u][i])
                fail_msg("%s, unit %d, element %zu: %.9g and %.9g", recipe, u, i, x.gradient[u][i], y.gradient[u][i]);
    free_result(&x);
    free_result(&y);
}

static void check_same(const ModelConfig *m, const char *recipe, Keep one, Keep other)
{
    check_same_as(m, recipe, (How){ one, true, 1, OF_MICROBATCH }, (How){ other, true, 1, OF_MICROBATCH });
}

/* What backward makes again it makes from the same values with the same scales: the same bits. Whole blocks only where
 * the stream is kept: else the residual is added in place, for which a GEMM library may choose another algorithm. */
static void test_recomputation(void **state)
{
    (void)state;
    for (int i = -1; i < NUM_ADAPTED; i++) {
        const ModelConfig m = i < 0 ? wide(LLAMA_GQA) : adapted_model(i);
        check_same(&m, "bf16", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "bf16", KEEP_ALL, KEEP_BLOCK);
        check_same(&m, "fp8", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "fp8", KEEP_ALL, KEEP_BLOCK);
        check_same(&m, "coat-act", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "coat-lean", KEEP_ALL, KEEP_INPUTS);
    }
}

/* ---- scales of the step --------------------------------------------------------------------------------------- */

/* Root mean square of the errors of all gradients. */
static double mean_distance(const Result *x, const Result *exact, double *worst)
{
    double sum = 0;
    int count = 0;
    *worst = 0;
    for (int u = 0; u < exact->units; u++)
        for (int i = 0; i < exact->shape[u].num_params; i++) {
            const double d = param_distance(x, exact, u, i);
            *worst = d > *worst ? d : *worst;
            sum += d * d;
            count++;
        }
    return sqrt(sum / count);
}

static const char *const step_recipes[] = { "fp8", "coat-act", "coat-lean" };
enum { STEP_RECIPES = sizeof step_recipes / sizeof step_recipes[0] };

/* error[r][scales]: of recipe r, added up over the models. */
static void add_errors(SmallModel a, double error[STEP_RECIPES][2])
{
    const ModelConfig m = wide(a);
    Result exact = run_as(&m, "f32", (How){ KEEP_ALL, true, B, OF_MICROBATCH });
    for (int r = 0; r < STEP_RECIPES; r++) {
        double found[2], worst[2];
        for (ScalesOf s = OF_MICROBATCH; s <= OF_STEP; s++) {
            Result x = run_as(&m, step_recipes[r], (How){ recipe_find(step_recipes[r])->keep, false, B, s });
            error[r][s] += found[s] = mean_distance(&x, &exact, &worst[s]);
            free_result(&x);
        }
        printf("%-10s %-10s gradients off by %.4f with scales of the micro-batch, %.4f of the step; worst %.4f, %.4f\n",
               architecture_name(a), step_recipes[r], found[0], found[1], worst[0], worst[1]);
        assert_true(worst[1] <= 0.32);
        assert_true(found[0] != found[1]);
    }
    free_result(&exact);
}

/* Headroom costs no digits, so on the mean errors are those of measured scales. One model's scatter by 9 % as above, the mean of
 * eight by 3.2 %, the difference of two such by 4.5 %: at most twice that. The first micro-batch's gradients are 0, whose ranges
 * leave the second no room. */
static void test_step_scales(void **state)
{
    (void)state;
    double error[STEP_RECIPES][2] = { 0 };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        add_errors(a, error);
    for (int r = 0; r < STEP_RECIPES; r++)
        assert_true(error[r][OF_STEP] <= error[r][OF_MICROBATCH] * 1.09);
}

/* A block that is run again finds the ranges as its forward pass left them, and makes the same codes. */
static void test_step_recomputation(void **state)
{
    (void)state;
    for (int i = -1; i < NUM_ADAPTED; i++) {
        const ModelConfig m = i < 0 ? wide(LLAMA_GQA) : adapted_model(i);
        const How all = { KEEP_ALL, true, B, OF_STEP }, inputs = { KEEP_INPUTS, true, B, OF_STEP };
        check_same_as(&m, "fp8", all, inputs);
        check_same_as(&m, "fp8", all, (How){ KEEP_BLOCK, true, B, OF_STEP });
        check_same_as(&m, "coat-lean", all, inputs);
    }
}

/* Of a pass without backward, in the middle of a step. */
static double forward_loss(const ModelConfig *m, ScalesOf scales)
{
    Config c;
    Model model;
    Fsdp fsdp;
    int tokens[MAX_TOKENS];
    model_config(&c, m, "coat", 1);
    c.recipe.scales = scales;
    model_create(&model, &fsdp, &c);
    fsdp_init(&fsdp, m, 3);
    for (int i = 0; i < 2 * model.N; i++)
        tokens[i] = test_token(1, i, m->vocab_size);
    model_step(&model, &fsdp, tokens, tokens, NULL, 1, 0, PASS_ACCUMULATE);
    model_losses(&model);
    model_step(&model, &fsdp, tokens + model.N, tokens + model.N, NULL, 1, 0, PASS_FORWARD);
    const double loss = model_losses(&model).loss;
    model_free(&model, &fsdp);
    return loss;
}

/* Ranges do not outlive their step: behind another one a step gives the same bits. Nor does a pass without backward read them. */
static void test_step_ends(void **state)
{
    (void)state;
    const ModelConfig m = wide(OLMO2);
    check_same_as(&m, "coat", (How){ KEEP_INPUTS, false, B, OF_STEP, false }, (How){ KEEP_INPUTS, false, B, OF_STEP, true });
    assert_true(forward_loss(&m, OF_MICROBATCH) == forward_loss(&m, OF_STEP));
}

/* What no gradient reads is not kept: with adapters on q alone that is what goes into the MLP's layers. */
static void test_kept(void **state)
{
    (void)state;
    static const char *const recipes[] = { "bf16", "fp8" };
    const ModelConfig of_all = with_adapters(wide(LLAMA), RANK, ALL_MODULES, BASE_AS_FROZEN);
    const ModelConfig of_q = with_adapters(wide(LLAMA), RANK, 1 << LORA_Q, BASE_AS_FROZEN);
    for (int r = 0; r < 2; r++) {
        Config all, q;
        Model most, least;
        Fsdp f, g;
        model_config(&all, &of_all, recipes[r], B);
        model_config(&q, &of_q, recipes[r], B);
        model_create(&most, &f, &all);
        model_create(&least, &g, &q);
        const size_t inputs = (size_t)(of_q.d_model + of_q.mlp_width) * (size_t)most.N * dtype_size(q.recipe.operand.dtype);
        assert_true(most.bytes.block >= least.bytes.block + inputs);
        model_free(&most, &f);
        model_free(&least, &g);
    }
}

/* An attention output that is saved as the operand it will be is saved once; coat saves it in bf16. */
static void test_shared_operand(void **state)
{
    (void)state;
    static const char *const recipes[] = { "coat", "coat-lean" };
    const ModelConfig m = wide(LLAMA);
    for (int r = 0; r < 2; r++) {
        Config c;
        Model model;
        Fsdp f;
        model_config(&c, &m, recipes[r], B);
        model_create(&model, &f, &c);
        const Acts *a = model.acts;
        assert_int_equal(a[1].att_op.data == a[1].att.data, r == 1);
        assert_int_equal(a[1].att_op.data == a[0].att_op.data, r == 0);
        assert_int_equal(a[1].att_op.scale == a[1].att.scale, r == 1);
        assert_ptr_equal(a[1].att_op.data_t, a[0].att_op.data_t);
        model_free(&model, &f);
    }
}

/* A sharded base in E4M3 is gathered from where it is stored to where GEMMs read it: two blocks' codes, the embedding or the head,
 * and this rank's slice of either. Norm weights and adapters are on every rank, and take no room there. */
static void test_gathered(void **state)
{
    (void)state;
    const ModelConfig m = with_adapters(wide(LLAMA), RANK, ALL_MODULES, BASE_E4M3);
    Config c;
    Model model;
    Fsdp f;
    model_config(&c, &m, "coat", B);
    c.strategy.shard_ranks = 2;
    model_plan(&model, &f, &c, (Placement){ 2, 0, true });
    const size_t codes = f.shape[1].numel[BASE], embedding = f.shape[0].numel[FROZEN], head = f.shape[m.n_layers + 1].numel[FROZEN];
    assert_int_equal(f.gathered.used, 2 * codes + 3 * (embedding > head ? embedding : head));
    model_free(&model, &f);
}

/* ---- one block ------------------------------------------------------------------------------------------------ */

/* Forward and backward of a Llama block on normal inputs and output gradients, weights with std 0.02. */
typedef struct { float *branches, *dx, *dw; size_t n; UnitShape shape; } Layer;

static Layer run_block(const char *recipe)
{
    ModelConfig m = architecture(LLAMA);
    m.d_model = 512, m.head_dim = 64, m.n_heads = m.n_kv_heads = 8, m.mlp_width = 1408, m.max_sequence_length = 128;
    m.n_layers = 1, m.init_std = 0.02;
    Config c;
    Model model;
    Fsdp fsdp;
    model_config(&c, &m, recipe, 4);
    c.recipe.grads = (Format){ F32, 0 };
    model_create(&model, &fsdp, &c);
    fsdp_init(&fsdp, &m, 3);
    Acts *a = &model.acts[0];
    init_normal(a->res0, 1, 0, 4, 0);
    float *in = as_floats(a->res0);
    fsdp_gather(&fsdp, 1, FOR_FORWARD);
    const Unit *w = fsdp_acquire(&fsdp, 1);
    block_forward(&model, w, a, &model.acts[1]);
    Layer r = { .branches = as_floats(model.acts[1].res0), .n = tensor_numel(a->res0) };
    for (size_t i = 0; i < r.n; i++)
        r.branches[i] -= in[i];
    init_normal(model.work.dres, 1, 0, 5, 0);
    model.work.dres_amax = NULL;        /* nothing has looked for its maximum */
    fsdp_gather(&fsdp, 1, FOR_BACKWARD);
    block_backward(&model, w, fsdp_grads(&fsdp, 1), a, true);
    r.dx = as_floats(model.work.dres);
    r.dw = as_floats(fsdp.shard[1].grad);
    unit_shape(&r.shape, &m, 1, 1);
    fsdp_release(&fsdp, 1);
    free(in);
    model_free(&model, &fsdp);
    return r;
}

static void free_layer(Layer *r)
{
    free(r->branches), free(r->dx), free(r->dw);
}

/* COAT's own code, measured on one Llama-2-7B layer: the output is off by 8 %, weight gradients by 10 to 17 %. Here the output
 * is counted without the residual stream, which would hide the error. */
static void test_block(void **state)
{
    (void)state;
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    Layer exact = run_block("f32");
    for (int r = 0; r < 3; r++) {
        Layer found = run_block(recipes[r]);
        const double y = distance(found.branches, exact.branches, exact.n), dx = distance(found.dx, exact.dx, exact.n);
        printf("one block, %-10s output %.4f, input gradient %.4f, weight gradients", recipes[r], y, dx);
        double worst = 0;
        for (int i = 0; i < exact.shape.num_params; i++) {
            const Param *p = &exact.shape.param[i];
            const double d = distance(found.dw + p->offset, exact.dw + p->offset, (size_t)p->rows * p->cols);
            printf(" %s %.4f", p->name, d);
            worst = d > worst ? d : worst;
        }
        printf("\n");
        assert_true(y <= 0.08);
        assert_true(worst <= 0.17);
        free_layer(&found);
    }
    free_layer(&exact);
}

int main(void)
{
    device_init(0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16), cmocka_unit_test(test_fp8), cmocka_unit_test(test_adapters), cmocka_unit_test(test_head),
        cmocka_unit_test(test_recomputation), cmocka_unit_test(test_step_scales), cmocka_unit_test(test_step_recomputation),
        cmocka_unit_test(test_step_ends), cmocka_unit_test(test_kept), cmocka_unit_test(test_shared_operand),
        cmocka_unit_test(test_gathered), cmocka_unit_test(test_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
