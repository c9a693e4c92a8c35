/* Decoding with a cache against the model's forward pass over the whole text, and memory of a model
 * that is not trained.
 *
 * Bound. Both sides round every operation to u = 2^-24 and differ in the order of sums. A logit has
 * some 60 roundings in 2 layers of sums over up to 96 products, a random walk of sqrt(60 * 96) u =
 * 4.5e-6 of the largest: 1e-5. */
#include <math.h>
#include <stddef.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/values.h"
#include "model/checkpoint/load.h"
#include "model/decode.h"
#include "model/formats/hf.h"
#include "model/sampling.h"
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/models.h"

/* Longer than a window, longer than the original length of scaled rotary frequencies and, in one
 * case, longer than a pass over the prompt. */
enum { TEXT = 48, LONG_TEXT = 700, SOME_MODULES = 1 << LORA_Q | 1 << LORA_V | 1 << LORA_DOWN };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    const char *name;
} Setup;

/* Returns a model with the widths that FP8 operands need on GPUs, and with adapters on these
 * modules. */
static ModelConfig model_of(SmallModel a, const char *recipe, unsigned modules)
{
    ModelConfig m = architecture(a);
    if (modules)
        m = with_adapters(m, 5, modules, BASE_NF4);
    if (format_is_fp8(recipe_find(recipe)->operand)) {
        m.d_model = 128;
        m.head_dim = 32;
        m.mlp_width = 256;
    }
    return m;
}

static void open_setup(Setup *s, SmallModel a, const char *recipe, unsigned modules, int length,
                       bool generates)
{
    ModelConfig m = model_of(a, recipe, modules);
    s->name = architecture_name(a);
    m.max_sequence_length = length;
    model_config(&s->config, &m, recipe, 1);
    s->config.loss_chunk = length;
    s->config.generate = generates ? "prompts" : NULL;
    model_create(&s->model, &s->store, &s->config);
    store_init(&s->store, &s->config.model, 3);
    test_fill_adapters(&s->store, 4);
}

static void close_setup(Setup *s)
{
    model_free(&s->model, &s->store);
}

static int *text(int length, int vocab)
{
    int *tokens = xmalloc(sizeof *tokens * (size_t)length);
    for (int i = 0; i < length; i++)
        tokens[i] = test_token(11, (uint64_t)i, vocab);
    return tokens;
}

/* Returns the logits (length, embedding_size) of the whole text, computed at once. */
static float *all_logits(SmallModel a, const char *recipe, unsigned modules, const int *tokens,
                         int length)
{
    Setup s;
    open_setup(&s, a, recipe, modules, length, false);
    int *targets = xmalloc(sizeof *targets * (size_t)length);
    memset(targets, 0xff, sizeof *targets * (size_t)length);
    model_micro_batch(&s.model, &s.store, tokens, targets, NULL, 0, 0, PASS_FORWARD);
    Tensor stored = s.model.logits;
    float *logits = xmalloc(sizeof *logits * tensor_numel(stored));
    stored.data = xmalloc(tensor_bytes(stored));
    device_get(stored.data, s.model.logits.data, tensor_bytes(stored));
    tensor_load(logits, stored, 0, tensor_numel(stored));
    free(stored.data);
    free(targets);
    close_setup(&s);
    return logits;
}

static void check_logits(Setup *s, const float *all, int position)
{
    const int vocab = s->config.model.vocab_size;
    const float *expected = all + (size_t)position * (size_t)s->config.model.embedding_size;
    float *found = xmalloc(sizeof *found * (size_t)vocab);
    double largest = 0, worst = 0;
    decode_logits(&s->model, &s->store, found);
    for (int v = 0; v < vocab; v++) {
        largest = fmax(largest, fabs(expected[v]));
        worst = fmax(worst, fabs((double)found[v] - expected[v]));
    }
    if (!(worst <= 1e-5 * largest && largest > 0))
        fail_msg("%s, logits at %d: off by %.2g of the largest, %g; at most 1e-5", s->name,
                 position, worst / largest, largest);
    free(found);
}

/* Decodes a prompt, single tokens, several tokens at once, and single tokens again; then another
 * sequence with the same caches. */
static void check_architecture(SmallModel a, unsigned modules, int length, const int *counts,
                               int num_counts)
{
    Setup s;
    const ModelConfig m = architecture(a);
    int *tokens = text(length, m.vocab_size);
    float *expected = all_logits(a, "f32", modules, tokens, length);
    open_setup(&s, a, "f32", modules, length, true);
    for (int again = 0; again < 2; again++) {
        decode_begin(&s.model);
        for (int i = 0, done = 0; done < length; i++) {
            const int count = i < num_counts ? counts[i] : 1;
            decode_append(&s.model, &s.store, tokens + done, count);
            done += count;
            check_logits(&s, expected, done - 1);
        }
    }
    close_setup(&s);
    free(expected);
    free(tokens);
}

TEST(test_same_logits)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        check_architecture(a, 0, TEXT, (const int[]){ 9, 1, 1, 1, 12, 1, 2 }, 7);
    check_architecture(OLMO2, SOME_MODULES, TEXT, (const int[]){ 9, 1, 1, 1, 12, 1, 2 }, 7);
}

/* More tokens than a pass takes. */
TEST(test_long_prompt)
{
    check_architecture(MISTRAL, ALL_MODULES, LONG_TEXT, (const int[]){ LONG_TEXT - 3 }, 1);
    check_architecture(LLAMA_GQA, 0, LONG_TEXT, (const int[]){ 1, LONG_TEXT - 4 }, 2);
}

/* The allowed distance of two computations that differ in the order of sums and, with FP8 operands,
 * in the scales of each pass. With some 32 roundings on each side, u = 2^-9 in BF16 and 2^-4 in
 * E4M3, the root mean square is sqrt(2 * 32 / 3) u = 0.9 % and 29 %. In BF16 a token of a model of
 * 64 columns may have twice that, since a GPU has more roundings than a CPU: sums with a residual
 * are rounded twice. */
static double rounding_of(const Recipe *r)
{
    return r->operand.dtype == F32 ? 1e-5 : r->operand.dtype == BF16 ? 0.018 : 0.29;
}

/* In other recipes, a cache changes the rounding errors, but not their number. */
static void check_recipe(SmallModel a, unsigned modules, const char *recipe)
{
    Setup s;
    const ModelConfig m = model_of(a, recipe, modules);
    int *tokens = text(TEXT, m.vocab_size);
    float *all = all_logits(a, recipe, modules, tokens, TEXT), found[128];
    const float *expected = all + (size_t)(TEXT - 1) * (size_t)m.embedding_size;
    double e = 0, size = 0;
    open_setup(&s, a, recipe, modules, TEXT, true);
    decode_begin(&s.model);
    decode_append(&s.model, &s.store, tokens, TEXT - 2);
    decode_append(&s.model, &s.store, tokens + TEXT - 2, 1);
    decode_append(&s.model, &s.store, tokens + TEXT - 1, 1);
    decode_logits(&s.model, &s.store, found);
    for (int v = 0; v < m.vocab_size; v++) {
        e += pow((double)found[v] - expected[v], 2);
        size += pow(expected[v], 2);
    }
    if (!(sqrt(e / size) <= rounding_of(&s.config.recipe)))
        fail_msg("%s, %s: logits are off by %.2g", s.name, recipe, sqrt(e / size));
    close_setup(&s);
    free(all);
    free(tokens);
}

TEST(test_recipes)
{
    const char *const names[] = { "bf16", "fp8", "coat" };
    for (int r = 0; r < 3; r++) {
        for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
            check_recipe(a, 0, names[r]);
        check_recipe(LLAMA_GQA, ALL_MODULES, names[r]);
    }
}

/* ---- transformers ---------------------------------------------------------------------------- */

/* Reads a list of the folder's continuation.json, which scripts/reference_golden.py recorded. */
static int read_list(int *x, int most, const json_t *o, const char *name)
{
    const json_t *list = json_object_get(o, name);
    const int n = (int)json_array_size(list);
    assert_in_range(n, 1, most);
    for (int i = 0; i < n; i++)
        x[i] = (int)json_integer_value(json_array_get(list, (size_t)i));
    return n;
}

/* Greedy tokens equal those of transformers' generate: the margins of these tokens are a hundred
 * times the rounding errors. */
static void continues(void **state)
{
    Setup s = { .name = *state };
    ModelConfig m = { .init_std = 0.02 };
    char folder[128], path[160];
    int prompt[64], expected[64];
    float logits[128];
    const Sampling greedy = { .temperature = 0, .top_p = 1 };
    snprintf(folder, sizeof folder, "tests/golden/%s", s.name);
    snprintf(path, sizeof path, "%s/continuation.json", folder);
    json_t *o = json_load_file(path, 0, NULL);
    const int length = read_list(prompt, 64, o, "prompt"),
              count = read_list(expected, 64, o, "tokens");
    assert_true(json_number_value(json_object_get(o, "margin")) >= 1e-3);
    hf_read(&m, folder);
    m.max_sequence_length = length + count;
    model_config(&s.config, &m, "f32", 1);
    s.config.generate = path;
    model_create(&s.model, &s.store, &s.config);
    checkpoint_load(folder, &s.config, &s.store, NULL, false);
    decode_begin(&s.model);
    decode_append(&s.model, &s.store, prompt, length);
    for (int i = 0; i < count; i++) {
        decode_logits(&s.model, &s.store, logits);
        const int token = sample_token(logits, m.vocab_size, &greedy, 0);
        if (token != expected[i])
            fail_msg("%s: token %d of the continuation is %d, by transformers %d", s.name, i, token,
                     expected[i]);
        decode_append(&s.model, &s.store, &token, 1);
    }
    json_decref(o);
    close_setup(&s);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static double loss_of(const Config *c, PlanBytes *bytes, size_t others[3])
{
    Model m;
    ParamStore store;
    int *tokens = text(c->model.max_sequence_length, c->model.vocab_size);
    model_create(&m, &store, c);
    store_init(&store, &c->model, 3);
    model_micro_batch(&m, &store, tokens, tokens, NULL, 0, 0, PASS_FORWARD);
    const double loss = take_losses(&m).loss;
    *bytes = m.bytes;
    others[0] = store_grad_bytes(&store), others[1] = store_state_bytes(&store), others[2] = 0;
    for (int u = 0; u < store.num_units; u++)
        others[2] += tensor_bytes(store.shard[u].slice[TRAINED].stored);
    model_free(&m, &store);
    free(tokens);
    return loss;
}

/* A model that is not trained has no gradients, moments, master weights or activations. On a CPU
 * the loss has the same bits. On a GPU, the algorithm of a GEMM, and so the order of its sums,
 * depends on the alignment of the operands, and the addresses differ; with 64 columns the loss may
 * differ. */
TEST(test_forward_only)
{
    const bool on_cpu = strcmp(device_name(), "cpu") == 0;
    for (const Recipe *r = recipes; r->name; r++)
        for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
            const ModelConfig m = model_of(a, r->name, 0);
            Config c;
            PlanBytes trains, evaluates;
            size_t others[3];
            model_config(&c, &m, r->name, 1);
            const double expected = loss_of(&c, &trains, others);
            assert_true(others[0] > 0 && others[1] > 0 && others[2] > 0 && trains.blocks > 0 &&
                        trains.work > 0);
            c.eval_only = true;
            c.recipe.frozen = recipe_forward_weights(&c.recipe);
            const double found = loss_of(&c, &evaluates, others);
            if (!(fabs(found - expected) <= (on_cpu ? 0 : rounding_of(r)) * expected))
                fail_msg("%s, %s: loss %.17g, in training %.17g", architecture_name(a), r->name,
                         found, expected);
            assert_true(others[0] == 0 && others[1] == 0 && others[2] == 0 &&
                        evaluates.blocks == 0);
            assert_true(evaluates.total < trains.total / 2);
        }
}

/* In bf16 and f32 there is only one copy of the weights. */
TEST(test_one_copy)
{
    const char *const names[] = { "f32", "bf16" };
    for (int i = 0; i < 2; i++) {
        Setup s;
        size_t numel = 0;
        open_setup(&s, LLAMA, names[i], 0, TEXT, true);
        for (int u = 0; u < s.store.num_units; u++)
            numel += s.store.shape[u].numel[FROZEN];
        assert_int_equal(store_weight_bytes(&s.store), 0);
        assert_in_range(s.model.bytes.units, numel * (i ? 2 : 4), numel * (i ? 2 : 4) + 4096);
        assert_int_equal(s.model.bytes.cache, 2 * 2 * (size_t)TEXT * 64 * (i ? 2 : 4));
        close_setup(&s);
    }
}

static int start(void **state)
{
    (void)state;
    device_init(0);
    return 0;
}

int main(void)
{
    static const char *const folders[] = {
        "llama",        "llama-gqa-tied", "llama-head-dim", "olmo",  "olmo2",         "mistral",
        "mistral-full", "qwen3",          "qwen3-tied",     "olmo3", "olmo3-default", "ministral",
        "qwen2",        "qwen2-tied",     "smollm3",        "olmoe", "qwen3-moe",
    };
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        add_test(folders[i], continues, (void *)folders[i]);
    return run_all_tests(start, NULL);
}
