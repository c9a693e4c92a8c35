/* Tensor ranks compute what one rank computes. In f32: losses of tokens, gradients, their norm, and
 * the weights after steps. Codes of FP8 operands are the same bit for bit before the first sum over
 * ranks. If ranks share the maxima of all operands, later FP8 results are the same, except for
 * codes that a sum in another order moves across a midpoint. Also logits while generating. On 1, 2
 * and 4 ranks.
 *
 * Each case runs on one of the meshes. With EVERY=1 in the environment, each case runs on all
 * meshes, which takes minutes. */
#include "tests/test.h"
#include "tests/expert_unit.h"
#include "tests/ranks_parts.h"

enum { T = 40 }; /* no weight has as many rows as a micro-batch */

/* ---- comparisons ----------------------------------------------------------------------------- */

static ModelConfig model_of(const Case *k)
{
    ModelConfig m = without_wide_norms(architecture(k->model));
    const bool nf4 = k->base == BASE_NF4; /* slices on four ranks have whole blocks */
    m.n_kv_heads = m.n_kv_heads == m.n_heads ? 8 : 4;
    m.n_heads = 8;
    m.max_sequence_length = T;
    m.head_dim = nf4 ? 32 : m.head_dim;
    m.mlp_width = nf4 ? 256 : 128;
    m.sliding_window *= 5;
    return m;
}

/* Runs case `number` on this mesh, counted among the meshes with tensor ranks. */
static void check_mesh(int number, const Case *k, double loss, double grads)
{
    Strategy all[16];
    int count = 0;
    for (int tensor = 2; tensor <= comm_size(); tensor *= 2)
        for (int shard = 1; shard * tensor <= comm_size(); shard *= 2)
            for (int context = 1; context <= shard; context *= 2)
                all[count++] = (Strategy){ .shard_ranks = shard,
                                           .context_ranks = context,
                                           .tensor_ranks = tensor };
    for (int i = 0; i < count; i++)
        if (i == number % count || getenv("EVERY"))
            check_parts(k, model_of(k), &all[i], 1, (Bounds){ loss, grads },
                        strcmp(k->recipe, "f32") == 0);
}

/* Sums of up to 384 terms in another order: each has an error of some 2^-24 of its size, through
 * two blocks and back. What backward recomputes, it gathers again. */
TEST(test_f32)
{
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

/* Partial sums are rounded to BF16, by 2^-9, and the FP8 operands made from them by 2^-4. */
TEST(test_bf16)
{
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

/* With F32 sums, few codes change, often none. */
TEST(test_fp8)
{
    if (!__real_scale_within_range)
        skip();
    check_mesh(0, &(Case){ "fp8", OLMO2, .wide = true }, 0x1p-4, 0x1p-3);
    check_mesh(3, &(Case){ "coat", LLAMA_GQA, .documents = true, .wide = true }, 0x1p-4, 0x1p-3);
}

/* A block whose gradient comes from another kind of layer. */
TEST(test_kinds_of_layers)
{
    const Case k = { "f32", LLAMA };
    ModelConfig m = model_of(&k);
    m.architecture = &with_experts;
    m.n_layers++;
    for (int tensor = 2; tensor <= comm_size(); tensor *= 2)
        check_parts(&k, m, (Strategy[]){ mesh(1, 1, tensor) }, 1, (Bounds){ 2e-6, 2e-6 }, true);
}

/* ---- rounding -------------------------------------------------------------------------------- */

/* BF16 weights of 1 after a decay by half a step: each is rounded up or down, depending on its
 * position in the whole parameter. */
static Whole round_weights(const Case *k, Strategy s)
{
    Run r;
    configure(&r, k, model_of(k), s);
    r.config.recipe.master = (Format){ BF16, 0, false };
    r.config.optimizer.weight_decay = 0x1p-9;
    r.config.optimizer.decay_embeddings = r.config.optimizer.decay_norm_and_bias = true;
    alloc_run(&r);
    store_zero_states(&r.store);
    for (int u = 0; u < r.store.num_units; u++)
        if (r.store.shard[u].slice[TRAINED].count > 0) {
            fill(r.store.shard[u].grad, 1, 0, 0);
            fill(r.store.shard[u].slice[TRAINED].stored, 1, 1, 1);
        }
    optimizer_step(&r.store, &r.config, 1, 1, 1);
    const Whole weights = take_whole(&r, WEIGHTS);
    close_run(&r);
    return weights;
}

TEST(test_rounding)
{
    static const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN2 };
    for (int i = 0; i < 3; i++)
        for (int tensor = 2; tensor <= comm_size(); tensor *= 2) {
            const Case k = { "f32", models[i] };
            const Whole whole = round_weights(&k, ALONE),
                        part = round_weights(&k, mesh(1, 1, tensor));
            check_whole("rounded weights", &part, &whole, 0);
            for (int u = 0; u < whole.units; u++) {
                size_t down = 0, all = 0;
                for (int p = 0; p < NUM_PARAMS; p++)
                    for (size_t n = 0; n < whole.numel[u][p]; n++, all++)
                        down += whole.x[u][p][n] == 1 - 0x1p-8;
                assert_true(down > all / 4 && down < all * 3 / 4);
            }
            release();
        }
}

/* ---- generating ------------------------------------------------------------------------------ */

/* Decodes a prompt, single tokens and several tokens at once. Every rank has the logits of one
 * rank: up to 1e-5 in f32, otherwise up to the roundings of partial sums (test_decode.c). */
TEST(test_decode)
{
    enum { PARTS = 5 };
    static const int counts[PARTS] = { 9, 1, 1, 12, 1 };
    static const struct {
        Case k;
        double bound;
    } cases[] = {
        { { "f32", LLAMA_GQA }, 1e-5 }, { { "f32", MISTRAL, ALL_MODULES, BASE_NF4 }, 1e-5 },
        { { "f32", OLMO3 }, 1e-5 },     { { "bf16", QWEN2 }, 0.018 },
        { { "coat", LLAMA }, 0.29 },    { { "fp8", OLMO2 }, 0.29 },
    };
    static float expected[PARTS][MOST_LOGITS], found[PARTS][MOST_LOGITS];
    for (int i = 0; i < 6; i++)
        for (int tensor = 2; tensor <= comm_size(); tensor *= 2) {
            const Case *k = &cases[i].k;
            Run r;
            configure(&r, k, model_of(k), ALONE);
            decode_text(&r, expected, counts, PARTS);
            configure(&r, k, model_of(k), mesh(1, 1, tensor));
            decode_text(&r, found, counts, PARTS);
            for (int n = 0; n < PARTS; n++) {
                double e = 0, size = 0;
                for (int v = 0; v < r.config.model.vocab_size; v++) {
                    e += pow((double)found[n][v] - expected[n][v], 2);
                    size += pow(expected[n][v], 2);
                }
                if (!(sqrt(e / size) <= cases[i].bound && size > 0))
                    fail_msg("%s, %s, %d tensor ranks: logits after part %d are off by %.2g, at "
                             "most %.2g",
                             k->recipe, architecture_name(k->model), tensor, n, sqrt(e / size),
                             cases[i].bound);
            }
        }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    add_after_architecture();
    architecture_add(&with_experts);
    unit_kind_add(&expert_layer, 3); /* after the block */
    return finish_ranks(run_all_tests(NULL, NULL));
}
