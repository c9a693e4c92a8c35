/* Every recipe against f32 on the same weights and tokens: errors of the loss and of each gradient.
 *
 * A format with a mantissa of p bits rounds by at most 2^-(p+1) of a value: u = 2^-9 for BF16, 2^-4
 * for E4M3, 2^-3 for E5M2; the root mean square over many values is u / sqrt(3). Each GEMM
 * multiplies two rounded operands; the squared errors of all roundings of a gradient and of
 * activations along the chain add. In a block these are about 8 operands, in two blocks and the
 * head 16: expected errors are up to sqrt(16 (2^-4^2 + 2^-3^2) / 3) = 0.32 for the first block's
 * gradients, and less for later ones. With BF16 it is sqrt(16 * 2 * 2^-18 / 3) = 0.0064, plus 4 *
 * 2^-9 = 0.0078 of the probabilities from rounded logits, which are up to 4. OLMo-2 and OLMo-3,
 * with four more norms per block, have twice as many roundings, Qwen3 with two more norms one and a
 * half times as many; YaRN makes scores and their errors (0.1 ln 4 + 1)^2 = 1.30 times as large. A
 * root mean square over 64 tokens varies by 1/sqrt(2 * 64) = 9 %, the worst of 30 tensors by twice
 * that. */
#include "model/block/block.h"
#include "model/plan_model.h"
#include "tests/test.h"
#include "tests/recipe_runs.h"

/* The columns of each recipe in recipe.h's order. COAT [fig. 1, sec. 4-5]: activations and weights
 * are multiplied in E4M3, gradients in E5M2, non-linear layers keep E4M3 in groups of 16, moments
 * are E4M3 in groups of 128, expanded. */
TEST(test_table)
{
    static const struct {
        const char *name, *columns;
    } rows[] = {
        { "f32", "f32 f32 f32 f32 f32 f32 f32 f32 | all saved none micro-batch | "
                 "f32 f32 f32 f32 f32" },
        { "bf16", "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16 | all saved none micro-batch | "
                  "f32 bf16 f32 f32 bf16" },
        { "fp8", "bf16 bf16 bf16 bf16 bf16 e4m3 e5m2 bf16 | all saved forward micro-batch | "
                 "f32 bf16 f32 f32 bf16" },
        { "fp8-lm", "bf16 bf16 bf16 bf16 bf16 e4m3 e5m2 bf16 | all saved forward micro-batch | "
                    "bf16 bf16 e4m3/128 bf16 bf16" },
        { "coat-act", "bf16 e4m3/16 bf16 bf16 e4m3/16 e4m3 e5m2 e5m2 | inputs exact all step | "
                      "f32 bf16 f32 f32 bf16" },
        { "coat-opt", "bf16 bf16 bf16 bf16 bf16 bf16 bf16 bf16 | all saved none micro-batch | "
                      "bf16 bf16 e4m3/128+ e4m3/128+ bf16" },
        { "coat", "bf16 e4m3/16 bf16 bf16 e4m3/16 e4m3 e5m2 e5m2 | inputs exact all step | "
                  "bf16 bf16 e4m3/128+ e4m3/128+ bf16" },
        { "coat-lean", "bf16 e4m3/16 e4m3/16 e4m3 e4m3/16 e4m3 e5m2 e5m2 | inputs exact all step | "
                       "bf16 bf16 e4m3/128+ e4m3/128+ bf16" },
    };
    static const char *const keep[] = { [KEEP_ALL] = "all",
                                        [KEEP_INPUTS] = "inputs",
                                        [KEEP_ATTENTION] = "attention",
                                        [KEEP_BLOCK] = "block" };
    static const char *const fast[] = {
        [FAST_NONE] = "none", [FAST_FORWARD] = "forward", [FAST_ALL] = "all"
    };
    static const char *const forward[] = { [FROM_SAVED] = "saved", [FROM_EXACT] = "exact" };
    static const char *const scales[] = { [PER_MICROBATCH] = "micro-batch", [PER_STEP] = "step" };
    size_t i = 0;
    for (const Recipe *r = recipes; r->name; r++, i++) {
        char columns[256];
        snprintf(columns, sizeof columns, "%s %s %s %s %s %s %s %s | %s %s %s %s | %s %s %s %s %s",
                 format_name(r->residual), format_name(r->saved_norm_input),
                 format_name(r->saved_qkv), format_name(r->saved_attention),
                 format_name(r->saved_mlp), format_name(r->operand), format_name(r->gradient),
                 format_name(r->head), keep[r->keep], forward[r->forward], fast[r->fast],
                 scales[r->scales], format_name(r->master), format_name(r->grads),
                 format_name(r->moment1), format_name(r->moment2), format_name(r->frozen));
        assert_in_range(i, 0, sizeof rows / sizeof rows[0] - 1);
        assert_string_equal(r->name, rows[i].name);
        assert_string_equal(columns, rows[i].columns);
    }
    assert_int_equal(i, sizeof rows / sizeof rows[0]);
}

static Result run_exact(const ModelConfig *m)
{
    return run(m, "f32", KEEP_ALL, true);
}

static void check_recipe(const char *name, const ModelConfig *m, const Result *exact,
                         const char *recipe, bool saved_forward, double loss_bound, double bound)
{
    Result found = run(m, recipe, recipe_find(recipe)->keep, saved_forward);
    const char *where;
    int unit;
    const double worst = worst_distance(&found, exact, &unit, &where);
    printf("%-10s %-10s loss %.6f (f32 %.6f), worst gradient %.4f (%s of unit %d)\n", name, recipe,
           found.loss, exact->loss, worst, where, unit);
    assert_true(fabs(found.loss - exact->loss) <= loss_bound * exact->loss);
    if (!(worst <= bound))
        fail_msg("%s, %s: %s of unit %d is off by %.4f, bound %.4f", name, recipe, where, unit,
                 worst, bound);
    free_result(&found);
}

TEST(test_bf16_and_fp8)
{
    static const char *const recipes[] = { "fp8", "coat-act", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const double roundings = a == OLMO2 || a == OLMO3   ? 32
                                 : a == QWEN3 || a == OLMOE ? 24
                                                            : 16,
                     scores = a == OLMO3 ? 1.30 : 1;
        const ModelConfig m = wide(a);
        Result exact = run_exact(&m);
        check_recipe(architecture_name(a), &m, &exact, "bf16", true, 0.001,
                     1.18 * scores * sqrt(roundings * 2 * 0x1p-18 / 3) + 4 * 0x1p-9);
        for (int r = 0; r < 4; r++)
            for (int saved = 0; saved < 2; saved++)
                check_recipe(architecture_name(a), &m, &exact, recipes[r], saved, 0.01, 0.32);
        free_result(&exact);
    }
}

/* Adapters against those of f32 on the same base, as decoded from its codes. Every rounding counts
 * once. BF16. A block's forward writes h, qkv, its rotation, the mix, the stream, h, gate and up,
 * act, the stream, and reads 4 matrices; backward writes dact, dgate_up, dh, the stream, datt,
 * dqkv, its rotation, dh, the stream, and reads 4 matrices: 26, and on a GPU attention rounds
 * probabilities twice and the scores' gradients. Four more norms write 8 more. In each of the 8
 * products A, B, the product with A and the sum with the base's GEMM, where the residual is rounded
 * again, are 4. Two blocks and 6 of the head: 2 (26 + 3 + 8 + 8 * 4) + 6 = 144. FP8. Roundings to
 * BF16 do not count. The 16 GEMMs of two blocks read 24 operands in E4M3 and 8 in E5M2, and in
 * COAT's recipes the head's gradient is the product of one more of each. An adapter's gradient is
 * that of a block's tokens times RANK = 8 random numbers. If the tokens' gradients are alike, their
 * root mean square varies by 1/sqrt(2 * 8), in addition to that of 64 tokens: together 27 %, the
 * worst tensor by twice that. */
TEST(test_adapters)
{
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    const double scatter = 1 + 2 * sqrt(1.0 / (2 * 64) + 1.0 / (2 * RANK));
    const double bf16 = scatter * sqrt(144 * 0x1p-18 / 3) + 4 * 0x1p-9;
    for (int i = 0; i < NUM_ADAPTED; i++) {
        const ModelConfig m = adapted_model(i);
        const char *name = architecture_name(adapted[i].model);
        Result exact = run_exact(&m);
        check_recipe(name, &m, &exact, "bf16", false, 0.001, bf16);
        for (int r = 0; r < 3; r++)
            check_recipe(name, &m, &exact, recipes[r], false, 0.01,
                         scatter *
                             sqrt((24 * 0x1p-8 + 8 * 0x1p-6 + (r > 0) * (0x1p-8 + 0x1p-6)) / 3));
        free_result(&exact);
    }
}

/* With a z-loss, the gradient of a logit is (1 + 2 w z) p - [target], times a scale. Here, with w =
 * 3 and z = 5, it is up to 31 p. A range for gradients without z-loss would saturate them. */
TEST(test_z_loss)
{
    static const char *const recipes[] = { "coat-act", "coat", "coat-lean" };
    for (int r = 0; r < 3; r++)
        for (int tied = 0; tied < 2; tied++) {
            const ModelConfig m = wide(tied ? LLAMA_GQA : LLAMA);
            Config c, f32;
            model_config(&c, &m, recipes[r], B);
            model_config(&f32, &m, "f32", B);
            Result without = run_config(f32, 1, 0);
            c.z_loss = f32.z_loss = 3;
            Result exact = run_config(f32, 1, 0), found = run_config(c, 1, 0);
            const char *where;
            int unit;
            const double worst = worst_distance(&found, &exact, &unit, &where);
            printf("%-10s %-10s with z-loss: worst gradient %.4f (%s of unit %d)\n",
                   architecture_name(tied ? LLAMA_GQA : LLAMA), recipes[r], worst, where, unit);
            assert_true(worst <= 0.32);
            /* otherwise z-loss has no effect here */
            assert_true(worst_distance(&without, &exact, &unit, &where) > 0.9);
            free_result(&exact), free_result(&found), free_result(&without);
        }
}

static void check_same(const ModelConfig *m, const char *recipe, Keep one, Keep other)
{
    check_same_as(m, recipe, (How){ one, true, 1, PER_MICROBATCH },
                  (How){ other, true, 1, PER_MICROBATCH });
}

/* Recomputation uses the same values and scales, so it gives the same bits. Whole blocks are
 * recomputed only if the stream is kept. Otherwise the residual is added in place, for which a GEMM
 * library may choose another algorithm. */
TEST(test_recomputation)
{
    for (int i = -1; i < NUM_ADAPTED; i++) {
        const ModelConfig m = i < 0 ? wide(LLAMA_GQA) : adapted_model(i);
        check_same(&m, "bf16", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "bf16", KEEP_ALL, KEEP_ATTENTION);
        check_same(&m, "bf16", KEEP_ALL, KEEP_BLOCK);
        check_same(&m, "fp8", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "fp8", KEEP_ALL, KEEP_ATTENTION);
        check_same(&m, "fp8", KEEP_ALL, KEEP_BLOCK);
        check_same(&m, "coat-act", KEEP_ALL, KEEP_INPUTS);
        check_same(&m, "coat-lean", KEEP_ALL, KEEP_INPUTS);
    }
}

/* Tensors that no gradient reads are not kept: with adapters only on q, the inputs of the MLP's
 * layers are not kept. */
TEST(test_kept)
{
    static const char *const recipes[] = { "bf16", "fp8" };
    const ModelConfig of_all = with_adapters(wide(LLAMA), RANK, ALL_MODULES, BASE_AS_FROZEN);
    const ModelConfig of_q = with_adapters(wide(LLAMA), RANK, 1 << LORA_Q, BASE_AS_FROZEN);
    for (int r = 0; r < 2; r++) {
        Config all, q;
        Model most, least;
        ParamStore store, other;
        model_config(&all, &of_all, recipes[r], B);
        model_config(&q, &of_q, recipes[r], B);
        model_create(&most, &store, &all);
        model_create(&least, &other, &q);
        const size_t inputs = (size_t)(of_q.d_model + of_q.mlp_width) * (size_t)most.text.N *
                              dtype_size(q.recipe.operand.dtype);
        assert_true(most.bytes.blocks >= least.bytes.blocks + (size_t)most.text.L * inputs);
        model_free(&most, &store);
        model_free(&least, &other);
    }
}

/* If an attention output is saved in the format of its operand, it is saved once; coat saves it in
 * bf16. */
TEST(test_shared_operand)
{
    static const char *const recipes[] = { "coat", "coat-lean" };
    const ModelConfig m = wide(LLAMA);
    for (int r = 0; r < 2; r++) {
        Config c;
        Model model;
        ParamStore store;
        model_config(&c, &m, recipes[r], B);
        model_create(&model, &store, &c);
        const Acts *a = model.acts;
        assert_int_equal(a[1].attn_operand.data == a[1].attn_saved.data, r == 1);
        assert_int_equal(a[1].attn_operand.data == a[0].attn_operand.data, r == 0);
        assert_int_equal(a[1].attn_operand.scale == a[1].attn_saved.scale, r == 1);
        assert_ptr_equal(a[1].attn_operand.data_t, a[0].attn_operand.data_t);
        model_free(&model, &store);
    }
}

/* A sharded E4M3 base is gathered from its stored codes directly to the operands of GEMMs: the
 * codes of two blocks, and the embedding or the head. Every rank has the norm weights and adapters,
 * which need no memory for gathering. */
TEST(test_gathered)
{
    const ModelConfig m = with_adapters(wide(LLAMA), RANK, ALL_MODULES, BASE_E4M3);
    Config c;
    Model model;
    ParamStore store;
    model_config(&c, &m, "coat", B);
    c.strategy.shard_ranks = 2;
    model_plan(&model, &store, &c, (ShardChoice){ 2, 0, true });
    const size_t codes = store.shape[1].numel[QUANTIZED], embedding = store.shape[0].numel[FROZEN],
                 head = store.shape[store.num_units - 1].numel[FROZEN];
    assert_int_equal(store.gathered.used, 2 * codes + 2 * (embedding > head ? embedding : head));
    model_free(&model, &store);
}

/* ---- one block ------------------------------------------------------------------------------- */

/* Forward and backward of a Llama block on normal inputs and output gradients, weights with std
 * 0.02. */
typedef struct {
    float *branches, *dx, *dw;
    size_t n;
    UnitLayout shape;
} BlockResult;

static BlockResult run_block(const char *recipe)
{
    ModelConfig m = architecture(LLAMA);
    m.d_model = 512, m.head_dim = 64, m.n_heads = m.n_kv_heads = 8, m.mlp_width = 1408,
    m.max_sequence_length = 128;
    m.n_layers = 1, m.init_std = 0.02;
    Config c;
    Model model;
    ParamStore store;
    model_config(&c, &m, recipe, 4);
    c.recipe.grads = (Format){ F32, 0 };
    model_create(&model, &store, &c);
    store_init(&store, &m, 3);
    Acts *a = &model.acts[0];
    init_normal(a->attn_res, 1, 0, 4, 0);
    float *in = as_floats(a->attn_res);
    fsdp_gather(&store, 1, FOR_FORWARD);
    const UnitTensors *w = fsdp_acquire(&store, 1);
    block_forward(&model.text, w, a, &model.acts[1]);
    BlockResult r = { .branches = as_floats(model.acts[1].attn_res),
                      .n = tensor_numel(a->attn_res) };
    for (size_t i = 0; i < r.n; i++)
        r.branches[i] -= in[i];
    init_normal(model.text.work.dres, 1, 0, 5, 0);
    model.text.work.dres_amax = NULL; /* the maximum is unknown */
    fsdp_gather(&store, 1, FOR_BACKWARD);
    block_backward(&model.text, w, fsdp_grads(&store, 1), a, &model.acts[1],
                   (BackwardStep){ .needs_dx = true });
    r.dx = as_floats(model.text.work.dres);
    r.dw = as_floats(store.shard[1].grad);
    unit_shape(&r.shape, &m, 1, 1);
    fsdp_release(&store, 1);
    free(in);
    model_free(&model, &store);
    return r;
}

static void free_block(BlockResult *r)
{
    free(r->branches), free(r->dx), free(r->dw), free(r->shape.param);
}

/* COAT's own code, measured on one Llama-2-7B layer: errors are 8 % for the output, 10 to 17 % for
 * weight gradients. Here the output excludes the residual stream, which would hide the error. */
TEST(test_block)
{
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    BlockResult exact = run_block("f32");
    for (int r = 0; r < 3; r++) {
        BlockResult found = run_block(recipes[r]);
        const double y = distance(found.branches, exact.branches, exact.n),
                     dx = distance(found.dx, exact.dx, exact.n);
        printf("one block, %-10s output %.4f, input gradient %.4f, weight gradients", recipes[r], y,
               dx);
        double worst = 0;
        for (int i = 0; i < exact.shape.num_params; i++) {
            const Param *p = &exact.shape.param[i];
            const double d =
                distance(found.dw + p->offset, exact.dw + p->offset, (size_t)p->rows * p->cols);
            printf(" %s %.4f", p->name, d);
            worst = d > worst ? d : worst;
        }
        printf("\n");
        assert_true(y <= 0.08);
        assert_true(worst <= 0.17);
        free_block(&found);
    }
    free_block(&exact);
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
