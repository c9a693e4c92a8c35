/* The projector: compares its operations with formulas in double, and models with images with
 * models without images. test_gradients.c tests gradients, test_parity.c compares with
 * transformers, test_images_ranks.c tests ranks. */
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"

#include <math.h>
#include <stdlib.h>

#include "model/decode.h"
#include "tests/images.h"

/* ---- operations ------------------------------------------------------------------------------ */

static double gelu(double x)
{
    return x * (1 + erf(x / sqrt(2))) / 2;
}

static double gelu_slope(double x)
{
    return (1 + erf(x / sqrt(2))) / 2 + x * exp(-x * x / 2) / sqrt(2 * M_PI);
}

/* erff has an error of 2 ulp near 1. The sum 1 + erf keeps this as an absolute error. */
TEST(test_gelu)
{
    const int N = 12, C = 40;
    for (int f = 0; f < FORMAT_ROWS; f++) {
        Tensor x = make_filled(format_rows[f].act, N, C, 1, -5, 5),
               dy = make_filled(format_rows[f].act, N, C, 2, -1, 1);
        Tensor y = make(format_rows[f].act, N, C), dx = make(format_rows[f].act, N, C);
        gelu_forward(y, x);
        gelu_backward(dx, dy, x);
        const double *v = values(x), *g = values(dy);
        double *ref = keep(sizeof *ref * (size_t)(N * C)),
               *slope = keep(sizeof *ref * (size_t)(N * C));
        double *bound = keep(sizeof *ref * (size_t)(N * C)),
               *slope_bound = keep(sizeof *ref * (size_t)(N * C));
        for (int i = 0; i < N * C; i++) {
            ref[i] = gelu(v[i]);
            slope[i] = g[i] * gelu_slope(v[i]);
            bound[i] = 8 * U24 * fabs(v[i]);
            slope_bound[i] = 16 * U24 * fabs(g[i]) * (1 + fabs(v[i]));
        }
        check_close("gelu", y, ref, bound);
        check_close("gelu's gradient", dx, slope, slope_bound);
        gelu_backward(dy, dy, x);
        check_close("gelu's gradient in place", dy, slope, slope_bound);
        release();
    }
}

TEST(test_rows)
{
    enum { N = 9, C = 16, R = 5 };
    const int at[R] = { 7, -1, 0, 3, -1 };
    int *places = device_alloc(sizeof at);
    device_put(places, at, sizeof at);
    Tensor y = make_filled((Format){ BF16, 0 }, N, C, 1, -1, 1),
           x = make_filled((Format){ BF16, 0 }, R, C, 2, -1, 1);
    Tensor taken = make_filled((Format){ BF16, 0 }, R, C, 3, -1, 1);
    const double *before = values(y), *rows = values(x);
    place_rows(y, places, x);
    const double *after = values(y);
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            assert_true(after[n * C + c] == (n == 7   ? rows[c]
                                             : n == 0 ? rows[2 * C + c]
                                             : n == 3 ? rows[3 * C + c]
                                                      : before[n * C + c]));
    take_rows(taken, places, y);
    const double *out = values(taken), *left = values(y);
    for (int c = 0; c < C; c++) {
        for (int i = 0; i < R; i++)
            assert_true(out[i * C + c] == (at[i] < 0 ? 0 : rows[i * C + c]));
        for (int n = 0; n < N; n++)
            assert_true(left[n * C + c] == (n == 7 || n == 0 || n == 3 ? 0 : before[n * C + c]));
    }
    device_free(places);
    release();
}

/* ---- models ---------------------------------------------------------------------------------- */

enum { B = 3, T = 16, N = B * T };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Trainer;

static void open_trainer(Trainer *t, const ModelConfig *m, const char *recipe)
{
    *t = (Trainer){ 0 };
    model_config(&t->config, m, recipe, B);
    model_create(&t->model, &t->store, &t->config);
    store_init(&t->store, &t->config.model, 5);
}

static Tensor weight(const Trainer *t, int u, int param)
{
    const Param *p = &t->store.shape[u].param[param];
    return shard_weights(&t->store.shard[u], p, 0, param_numel(p));
}

static void copy_unit(const Trainer *to, int u, const Trainer *from, int v)
{
    for (int i = 0; i < from->store.shape[v].num_params; i++)
        device_copy(weight(to, u, i).data, weight(from, v, i).data,
                    tensor_bytes(weight(from, v, i)));
}

static void fill_tokens(int *tokens, int *targets)
{
    for (int n = 0; n < N; n++)
        tokens[n] = test_token(1, (uint64_t)n, 70);
    for (int n = 0; n < N; n++)
        targets[n] = n % T == T - 1 ? -1 : tokens[n + 1];
}

static double pass(Trainer *t, const int *tokens, const int *targets, const TestImages *images)
{
    fsdp_empty_grads(&t->store);
    if (images)
        model_use_images(&t->model, image_rows(images));
    model_micro_batch(&t->model, &t->store, tokens, targets, NULL, 1.0f / N, 0, PASS_COMPLETE);
    return take_losses(&t->model).loss;
}

static float *gradient(const Trainer *t, int u, size_t *n)
{
    *n = t->store.shard[u].slice[TRAINED].count;
    const size_t bytes = tensor_bytes(t->store.shard[u].grad);
    float *g = keep(bytes);
    device_get(g, t->store.shard[u].grad.data, bytes);
    return g;
}

static void check_same_gradient(const Trainer *a, int u, const Trainer *b, int v)
{
    size_t n, k;
    const void *x = gradient(a, u, &n), *y = gradient(b, v, &k);
    assert_int_equal(tensor_bytes(a->store.shard[u].grad), tensor_bytes(b->store.shard[v].grad));
    assert_memory_equal(x, y, tensor_bytes(a->store.shard[u].grad));
}

/* An identity projector whose features are the embedding's rows of some tokens gives the bits of
 * these tokens. The embedding of the image token has gradient 0, and the gradient of the projector
 * is dy^T x. */
TEST(test_identity)
{
    const ModelConfig plain = architecture(LLAMA);
    ModelConfig m = with_images(plain, PROJECTOR_LINEAR, false);
    enum { C = 64 };
    m.image.feature_size = C;
    Trainer a, b;
    open_trainer(&a, &plain, "f32");
    open_trainer(&b, &m, "f32");
    assert_int_equal(unit_count(&m), 5);
    for (int u = 0; u < 4; u++)
        copy_unit(&b, u ? u + 1 : 0, &a, u);
    float identity[C * C] = { 0 }, table[128 * C];
    for (int c = 0; c < C; c++)
        identity[c * C + c] = 1;
    device_put(weight(&b, 1, 0).data, identity, sizeof identity);
    store_loaded(&b.store);
    device_get(table, weight(&a, 0, 0).data, sizeof table);
    int tokens[N], targets[N], shown[N];
    const void *rows[N] = { 0 };
    fill_tokens(tokens, targets);
    memcpy(shown, tokens, sizeof shown);
    for (int n = 3; n < 11; n++) {
        rows[n] = table + tokens[n] * C;
        shown[n] = IMAGE_TOKEN;
    }
    const double expected = pass(&a, tokens, targets, NULL);
    fsdp_empty_grads(&b.store);
    model_use_images(&b.model, (ImageRows){ rows, F32 });
    model_micro_batch(&b.model, &b.store, shown, targets, NULL, 1.0f / N, 0, PASS_COMPLETE);
    const double loss = take_losses(&b.model).loss;
    assert_memory_equal(&loss, &expected, sizeof loss);
    for (int u = 1; u < 4; u++)
        check_same_gradient(&b, u + 1, &a, u);
    size_t n;
    const float *g = gradient(&b, 0, &n), *whole = gradient(&a, 0, &n), *dw = gradient(&b, 1, &n);
    double sum = 0;
    for (int c = 0; c < C; c++)
        assert_true(g[IMAGE_TOKEN * C + c] == 0);
    for (int i = 0; i < C * C; i++)
        sum += fabs((double)dw[i]);
    assert_true(sum > 0 && whole != g);
    model_free(&a.model, &a.store);
    model_free(&b.model, &b.store);
    release();
}

static const char *const names[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };

/* Without images, the model has the bits of its text model. The projector's gradients are 0,
 * whatever was in their memory. */
TEST(test_text_only)
{
    for (int r = 0; r < 5; r++) {
        const ModelConfig plain = architecture(LLAMA), m = with_images(plain, PROJECTOR_MLP, true);
        Trainer a, b;
        open_trainer(&a, &plain, names[r]);
        open_trainer(&b, &m, names[r]);
        for (int u = 0; u < 4; u++)
            copy_unit(&b, u ? u + 1 : 0, &a, u);
        store_loaded(&b.store);
        int tokens[N], targets[N], shown[N], masked[N];
        TestImages images;
        fill_tokens(tokens, targets);
        memcpy(shown, tokens, sizeof shown);
        memcpy(masked, targets, sizeof masked);
        place_images(&images, shown, masked, B, T, 3);
        /* this pass leaves gradients in memory */
        const double seen = pass(&b, shown, masked, &images);
        const double expected = pass(&a, tokens, targets, NULL),
                     loss = pass(&b, tokens, targets, NULL);
        assert_memory_equal(&loss, &expected, sizeof loss);
        assert_true(isfinite(seen) && seen != loss);
        for (int u = 0; u < 4; u++)
            check_same_gradient(&b, u ? u + 1 : 0, &a, u);
        const Tensor grad = b.store.shard[1].grad;
        const unsigned char *g = keep(tensor_bytes(grad));
        device_get((void *)g, grad.data, tensor_bytes(grad));
        for (size_t i = 0; i < tensor_bytes(grad); i++)
            assert_true(g[i] == 0 || g[i] == 0x80); /* 0 or -0 */
        model_free(&a.model, &a.store);
        model_free(&b.model, &b.store);
        release();
    }
}

/* Other features change the loss; the same features give the same bits. In BF16, features have the
 * values of F32 features, rounded. */
TEST(test_features)
{
    for (int r = 0; r < 5; r++) {
        const ModelConfig m = with_images(architecture(LLAMA), PROJECTOR_MLP, r % 2);
        Trainer t;
        open_trainer(&t, &m, names[r]);
        int tokens[N], targets[N];
        TestImages one, other;
        fill_tokens(tokens, targets);
        place_images(&other, tokens, targets, B, T, 4);
        place_images(&one, tokens, targets, B, T, 3);
        const double first = pass(&t, tokens, targets, &one),
                     second = pass(&t, tokens, targets, &other);
        const double again = pass(&t, tokens, targets, &one);
        assert_true(first != second && isfinite(first));
        if (strcmp(names[r], "coat-lean") != 0)
            assert_memory_equal(&first, &again, sizeof first);
        model_free(&t.model, &t.store);
    }
}

/* ---- generating ------------------------------------------------------------------------------ */

/* tokens of a prompt, and tokens that go through the model at once */
enum { LONG = 600, ONCE = 512 };

/* Returns the logits after a prompt with two images. The prompt is given in pieces of up to `most`
 * tokens, with the rows of each piece. */
static float *logits_after(int most)
{
    ModelConfig m = with_images(architecture(LLAMA), PROJECTOR_MLP, true);
    Trainer t = { 0 };
    int tokens[LONG];
    float features[2 * IMAGE_ROWS][FEATURE_SIZE],
        *logits = keep(sizeof *logits * (size_t)m.vocab_size);
    const void *rows[LONG] = { NULL };
    for (int n = 0; n < LONG; n++)
        tokens[n] = test_token(3, (uint64_t)n, 70);
    for (int i = 0; i < 2 * IMAGE_ROWS; i++) {
        const int n = (i < IMAGE_ROWS ? 5 : ONCE + 30) + i % IMAGE_ROWS;
        tokens[n] = IMAGE_TOKEN;
        rows[n] = features[i];
        for (int c = 0; c < FEATURE_SIZE; c++)
            features[i][c] = 2 * test_uniform(4, (uint64_t)(i * FEATURE_SIZE + c));
    }
    m.max_sequence_length = LONG;
    model_config(&t.config, &m, "f32", 1);
    t.config.generate = "prompts";
    model_create(&t.model, &t.store, &t.config);
    store_init(&t.store, &m, 5);
    assert_int_equal(t.model.text.N, ONCE);
    decode_begin(&t.model);
    for (int done = 0; done < LONG; done += most) {
        model_use_images(&t.model, (ImageRows){ rows + done, F32 });
        decode_append(&t.model, &t.store, tokens + done, LONG - done < most ? LONG - done : most);
    }
    decode_logits(&t.model, &t.store, logits);
    model_free(&t.model, &t.store);
    return logits;
}

TEST(test_long_prompt)
{
    const float *whole = logits_after(LONG), *pieces = logits_after(ONCE);
    check_same_bytes("logits", whole, pieces,
                     sizeof *whole * (size_t)architecture(LLAMA).vocab_size);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
