/* Gradients of the whole model in f32 against finite differences: every parameter tensor of every
 * architecture, adapters, every loss of preference pairs, soft labels, and a policy.
 *
 * With L(w) the summed loss and r a direction of length 1, D(h) = (L(w + h r) - L(w - h r)) / 2h
 * has an error of c h^2 + e/h, or c h where clamped values cross their limit. So the last two steps
 * of a sequence of halved h bound the first term: max(|D(h) - D(2h)|, |D(2h) - D(4h)| / 2). e is
 * rounding: every token's loss l has an error of about K u |l| with u = 2^-24; these are
 * independent, and K = 32 is the root of the ~1000 roundings. The h with the smallest bound is
 * used; once e/h alone is larger, a smaller h has a larger bound. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "tests/test.h"
#include "tests/images.h"
#include "model/block/preference.h"
#include "tests/mapping_unit.h"
#include "tests/models.h"
#include "tests/router_loss.h"

enum { B = 2, DIRECTIONS = 3, SOFT = 5 };
/* If other experts compute a token, the loss jumps. So the logits of chosen and other experts
 * differ by at least this much, which steps below 0.01 cannot change. */
static const float CLEAR = 0.04f;
static const float Z_WEIGHT = 0.01f;

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    int tokens[64], targets[64];
    uint8_t begins[64];
    float reference[64]; /* log-probabilities of the targets of pairs */
    float values[64 * POLICY_VALUES];
    uint64_t words[64]; /* soft labels */
    uint8_t entries[64 * SOFT_ENTRY * SOFT];
    TestImages images;
} Setup;

static void fill_batch(Setup *s)
{
    int N = s->model.text.N, vocab = s->config.model.vocab_size;
    for (int n = 0; n < N; n++)
        s->tokens[n] = n % 7 == 5 ? s->config.model.eos_token_id : test_token(1, n, vocab);
    for (int n = 0; n < N; n++)
        s->begins[n] = n > 0 && s->tokens[n - 1] == s->config.model.eos_token_id;
    for (int n = 0; n < N; n++)
        s->targets[n] = n % s->model.text.attn.T == s->model.text.attn.T - 1 || n % 9 == 4
                            ? -1
                            : s->tokens[n + 1];
    if (s->config.model.image.feature_size > 0)
        place_images(&s->images, s->tokens, s->targets, B, s->model.text.T, 4);
}

/* Two pairs of documents, in the first sequence followed by padding; a rejected side of one label. */
static void fill_pairs(Setup *s)
{
    enum { PADDING = 13 };
    static const int first[][2] = { { 0, 0 }, { 0, 4 }, { 0, 6 },  { 0, 10 }, { 0, PADDING },
                                    { 1, 0 }, { 1, 5 }, { 1, 10 }, { 1, 13 } };
    const int T = s->model.text.T;
    memset(s->begins, 0, sizeof s->begins);
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++)
        s->begins[first[i][0] * T + first[i][1]] = 1;
    for (int n = 0; n < s->model.text.N; n++) {
        const int t = n % T;
        const bool ends = t == T - 1 || s->begins[n + 1], padding = n / T == 0 && t >= PADDING;
        s->targets[n] = ends || padding || n % 9 == 7 ? -1 : s->tokens[n + 1];
        s->reference[n] = -4 + test_uniform(3, (uint64_t)n);
    }
}

/* Documents as pairs have. Log-probabilities are about -log(vocabulary), so ratios are about 1. */
static void fill_policy(Setup *s)
{
    const float usual = (float)-log(s->config.model.vocab_size);
    fill_pairs(s);
    for (int n = 0; n < s->model.text.N; n++) {
        float *v = s->values + POLICY_VALUES * n;
        v[POLICY_ADVANTAGE] = test_uniform(5, (uint64_t)n);
        v[POLICY_OLD] = usual + 0.5f * test_uniform(6, (uint64_t)n);
        v[POLICY_GENERATOR] =
            n % 5 == 0 ? NAN : v[POLICY_OLD] + 0.5f * test_uniform(7, (uint64_t)n);
        v[POLICY_REFERENCE] = usual + test_uniform(8, (uint64_t)n);
    }
}

/* Some tokens have no soft labels, some fewer than others, with different tails. */
static void fill_soft(Setup *s)
{
    const int vocab = s->config.model.vocab_size;
    for (int n = 0; n < s->model.text.N; n++) {
        const int count = n % 4 ? SOFT - n % 3 : 0;
        const double tail = 0.25 + 0.125 * (n % 2);
        s->words[n] = count ? soft_word((uint64_t)(n * SOFT), count, tail) : 0;
        for (int i = 0; i < count; i++)
            soft_put(s->entries + SOFT_ENTRY * (n * SOFT + i), (uint32_t)((3 * n + i) % vocab),
                     (1 - tail) * (1 + i) / (count * (count + 1) / 2));
    }
}

/* Norm weights start as ones. Other values test whether the weights are used. test_fill_adapters
 * does the same for biases. */
static void perturb_norms(Setup *s)
{
    for (int u = 0; u < s->store.num_units; u++)
        for (int i = 0; i < s->store.shape[u].num_params; i++) {
            const Param *p = &s->store.shape[u].param[i];
            if (!p->is_norm)
                continue;
            float *w = malloc(sizeof(float) * p->cols);
            for (int k = 0; k < p->cols; k++)
                w[k] = 1 + 0.3f * test_uniform(u * 8 + i, k);
            device_put(s->store.unit[u].tensor[p->id].data, w, sizeof(float) * p->cols);
            free(w);
        }
}

typedef struct {
    double loss, magnitude;
} Loss;
static Loss loss_of(Setup *s, bool backward);

/* Tokens of a tile of the MLP. With tiles, backward recomputes blocks. 0: no tiles. */
static int tile;
/* The loss of pairs, and tokens of a chunk of logits; PREFERENCE_NONE: cross entropy. */
static Preference preference;
static int loss_chunk;
static Policy policy;
static Distill distillation;

/* trainable: patterns; NULL: everything is trained */
static void open_model(Setup *s, const ModelConfig *m, char **trainable, bool documents)
{
    model_config(&s->config, m, "f32", B);
    s->config.tiled_mlp_tokens = tile;
    s->config.recipe.keep = tile ? KEEP_BLOCK : KEEP_ALL;
    s->config.trainable = trainable;
    s->config.num_trainable = trainable != NULL;
    s->config.data.generate_doc_lengths = documents;
    s->config.preference = preference;
    s->config.policy = policy;
    s->config.distill = distillation;
    s->config.top_k = SOFT;
    s->config.loss_chunk = loss_chunk;
    model_create(&s->model, &s->store, &s->config);
    fill_batch(s);
    if (preference.kind != PREFERENCE_NONE)
        fill_pairs(s);
    if (policy.kind != POLICY_NONE)
        fill_policy(s);
    fill_soft(s);
    for (uint64_t seed = 7; seed == 7 || router_gap(&s->model) < CLEAR; seed++) {
        store_init(&s->store, &s->config.model, seed);
        perturb_norms(s);
        test_fill_adapters(&s->store, 9);
        loss_of(s, false);
    }
}

/* The summed loss of pairs. The error of a label's loss is multiplied by the label's weight. */
static Loss loss_of_pairs(Setup *s, bool backward)
{
    const int N = s->model.text.N;
    const PairCount n = preference_count(s->targets, s->begins, B, s->model.text.T);
    const double sft = preference.sft_weight * n.pairs / n.labels;
    const double *sum = s->model.pair_sums;
    float l[64], weight[64];
    model_use_weights(&s->model, (WeighedRows){ s->reference, sft, true });
    model_begin_step(&s->model, B);
    model_micro_batch(&s->model, &s->store, s->tokens, s->targets, s->begins, 1, 0,
                      backward ? PASS_COMPLETE : PASS_FORWARD);
    device_get(l, s->model.losses, sizeof(float) * N);
    device_get(weight, s->model.weighed.weight, sizeof(float) * N);
    assert_true(sum[PAIR_COUNT] == 4 && sum[PAIR_LABELS] == n.labels);
    Loss r = { sum[PAIR_LOSS] + sft * sum[PAIR_NLL], 0 };
    for (int i = 0; i < N; i++)
        r.magnitude += (double)weight[i] * weight[i] * l[i] * l[i];
    r.magnitude = sqrt(r.magnitude);
    return r;
}

/* The loss of a policy, times policy_terms. */
static Loss loss_of_policy(Setup *s, bool backward)
{
    const int N = s->model.text.N;
    float l[64], weight[64];
    model_use_weights(&s->model, (WeighedRows){ s->values, 0, true });
    model_begin_step(&s->model, B);
    model_micro_batch(&s->model, &s->store, s->tokens, s->targets, s->begins, 1, 0,
                      backward ? PASS_COMPLETE : PASS_FORWARD);
    device_get(l, s->model.losses, sizeof(float) * N);
    device_get(weight, s->model.weighed.weight, sizeof(float) * N);
    assert_true(s->model.policy_sums[POLICY_CLIPPED_LOW] == 0);
    assert_true(s->model.policy_sums[POLICY_CLIPPED_HIGH] == 0);
    Loss r = { s->model.policy_sums[POLICY_LOSS], 0 };
    for (int i = 0; i < N; i++)
        r.magnitude += (double)weight[i] * weight[i] * l[i] * l[i];
    r.magnitude = sqrt(r.magnitude);
    return r;
}

/* A divergence is a weighted mean of differences of log-probabilities, which are as large as those
 * of the labels. */
static Loss loss_of_soft(Setup *s, bool backward)
{
    const Distill *d = &distillation;
    const int N = s->model.text.N;
    float l[128];
    model_use_soft_labels(&s->model, (SoftRows){ s->words, s->entries });
    model_begin_step(&s->model, B);
    model_micro_batch(&s->model, &s->store, s->tokens, s->targets, s->begins, 1, 0,
                      backward ? PASS_COMPLETE : PASS_FORWARD);
    device_get(l, s->model.losses, sizeof(float) * 2 * N);
    Loss r = { 0 };
    for (int n = 0; n < N; n++) {
        r.loss +=
            d->ce_weight * l[n] + (1 - d->ce_weight) * d->temperature * d->temperature * l[N + n];
        r.magnitude += (double)l[n] * l[n];
    }
    r.magnitude =
        (d->ce_weight + (1 - d->ce_weight) * d->temperature * d->temperature) * sqrt(r.magnitude);
    return r;
}

/* Returns the summed loss with its z-loss and the losses of routers, in double over the tokens' f32
 * losses. */
static Loss loss_of(Setup *s, bool backward)
{
    int N = s->model.text.N;
    float l[128];
    if (preference.kind != PREFERENCE_NONE)
        return loss_of_pairs(s, backward);
    if (policy.kind != POLICY_NONE)
        return loss_of_policy(s, backward);
    if (distillation.kind != DISTILL_NONE)
        return loss_of_soft(s, backward);
    model_use_images(&s->model, image_rows(&s->images));
    model_begin_step(&s->model, B);
    model_micro_batch(&s->model, &s->store, s->tokens, s->targets, s->begins, 1, Z_WEIGHT,
                      backward ? PASS_COMPLETE : PASS_FORWARD);
    device_get(l, s->model.losses, sizeof(float) * 2 * N);
    Loss r = { router_loss(&s->model), 0 };
    for (int n = 0; n < N; n++) {
        r.loss += l[n] + (double)Z_WEIGHT * l[N + n];
        r.magnitude += fabs(l[n]) * fabs(l[n]);
    }
    r.magnitude = sqrt(r.magnitude);
    return r;
}

static double difference(Setup *s, Tensor w, const float *at, const float *direction, double h,
                         double *magnitude)
{
    size_t n = tensor_numel(w);
    float *moved = malloc(sizeof(float) * n);
    double loss[2];
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < n; i++)
            moved[i] = (float)(at[i] + (side ? -h : h) * direction[i]);
        device_put(w.data, moved, sizeof(float) * n);
        Loss l = loss_of(s, false);
        loss[side] = l.loss;
        *magnitude = l.magnitude;
    }
    device_put(w.data, at, sizeof(float) * n);
    free(moved);
    return (loss[0] - loss[1]) / (2 * h);
}

/* Direction 0 is the gradient itself, the others are random signs. */
static void make_direction(float *r, const float *g, size_t n, int which)
{
    double length = 0;
    for (size_t i = 0; i < n; i++) {
        r[i] = which == 0 ? g[i] : test_uniform(which, i) < 0 ? -1 : 1;
        length += (double)r[i] * r[i];
    }
    for (size_t i = 0; i < n; i++)
        r[i] = (float)(r[i] / sqrt(length));
}

static void check_tensor(Setup *s, const char *arch, const Param *p, Tensor w, Tensor dw)
{
    size_t n = tensor_numel(w);
    float *at = malloc(4 * n), *g = malloc(4 * n), *r = malloc(4 * n);
    device_get(at, w.data, 4 * n);
    device_get(g, dw.data, 4 * n);
    for (int which = 0; which <= DIRECTIONS; which++) {
        make_direction(r, g, n, which);
        double expected = 0, found = 0, bound = INFINITY, magnitude;
        for (size_t i = 0; i < n; i++)
            expected += (double)g[i] * r[i];
        double d[3] = { NAN, NAN, NAN };
        for (double h = 0.04, rounding = 0; h > 0.0005 && rounding < bound; h /= 2) {
            d[0] = d[1], d[1] = d[2];
            d[2] = difference(s, w, at, r, h, &magnitude);
            rounding = 32 * 0x1p-24 * magnitude / h;
            const double error = fmax(fabs(d[2] - d[1]), fabs(d[1] - d[0]) / 2) + rounding;
            if (!isnan(d[0]) && error < bound) {
                bound = error;
                found = d[2];
            }
        }
        if (!(fabs(found - expected) <= bound) || (which == 0 && !(bound < 0.05 * expected)))
            fail_msg("%s, %s, direction %d: gradient %.8g, finite difference %.8g, bound %.2g",
                     arch, p->name, which, expected, found, bound);
    }
    free(at), free(g), free(r);
}

static void check_model(const char *name, const ModelConfig *m, char **trainable, bool documents)
{
    Setup s;
    int checked = 0;
    open_model(&s, m, trainable, documents);
    fsdp_empty_grads(&s.store);
    loss_of(&s, true);
    for (int u = 0; u < s.store.num_units; u++)
        for (int i = 0; i < s.store.shape[u].num_params; i++) {
            const Param *p = &s.store.shape[u].param[i];
            if (p->region != TRAINED)
                continue;
            check_tensor(&s, name, p, s.store.unit[u].tensor[p->id],
                         s.store.dunit[u].tensor[p->id]);
            checked++;
        }
    assert_true(checked > 0);
    model_free(&s.model, &s.store);
}

static void check_architecture(SmallModel a, bool documents)
{
    const ModelConfig m = architecture(a);
    check_model(architecture_name(a), &m, NULL, documents);
}

TEST(test_every_architecture)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        check_architecture(a, false);
}

/* Every form of the router's losses, one expert per token, all experts for each token, and frozen
 * experts below trained ones. */
TEST(test_experts)
{
    static char *frozen = "model.layers.*norm.weight";
    ModelConfig m = architecture(OLMOE);
    const Experts forms[] = { { 5, 3, true, BALANCE_SEQUENCE, 0.3, 0 },
                              { 6, 2, false, BALANCE_POOLED, 0.3, 0.02 },
                              { 4, 1, false, BALANCE_MICRO_BATCH, 0.3, 0 },
                              { 4, 4, true, BALANCE_NONE, 0.3, 0.02 } };
    for (int i = 0; i < 4; i++) {
        m.experts = forms[i];
        check_model("experts", &m, NULL, i == 0);
    }
    check_model("frozen experts", &m, &frozen, false);
}

/* Dense blocks among blocks with experts; adapters on all matrices, or on some, of such a model. */
TEST(test_dense_blocks)
{
    const unsigned some = 1 << LORA_K | 1 << LORA_UP | 1 << LORA_DOWN;
    ModelConfig m = architecture(QWEN3_MOE);
    m.n_layers = 3;
    m.experts.balance = BALANCE_POOLED;
    check_model("dense blocks", &m, NULL, false);
    m = with_adapters(m, 16, ALL_MODULES, BASE_NF4);
    check_model("adapters of experts", &m, NULL, false);
    m = with_adapters(m, 16, some, BASE_E4M3);
    check_model("some adapters of experts", &m, NULL, false);
}

/* A unit between the embedding and the blocks. */
TEST(test_added_unit)
{
    ModelConfig m = architecture(LLAMA);
    m.architecture = &mapped;
    check_model(mapped.class, &m, NULL, false);
}

/* A projector, whole or with frozen parts, and with a frozen language model. */
TEST(test_images)
{
    static char *const parts[] = { "multi_modal_projector.*", "multi_modal_projector.linear_2.*",
                                   "language_model.*" };
    for (int i = 0; i < 5; i++) {
        const ModelConfig m = with_images(architecture(i < 3 ? LLAMA_GQA : QWEN3),
                                          i == 1 ? PROJECTOR_LINEAR : PROJECTOR_MLP, i != 2);
        check_model("images", &m, NULL, i == 0);
    }
    for (int i = 0; i < 3; i++) {
        const ModelConfig m = with_images(architecture(LLAMA), PROJECTOR_MLP, true);
        char *trainable = parts[i];
        check_model(trainable, &m, &trainable, false);
    }
}

TEST(test_documents)
{
    check_architecture(LLAMA_GQA, true);
}

/* All logits at once, and in chunks of 10 tokens, which cut sides. */
TEST(test_pairs)
{
    const SmallModel models[] = { LLAMA, OLMO2, LLAMA_GQA };
    for (PreferenceKind kind = PREFERENCE_DPO; kind < NUM_PREFERENCE_LOSSES; kind++) {
        const PreferenceLoss *loss = preference_loss(kind);
        preference =
            (Preference){ kind, loss->beta, loss->gamma, loss->smooths ? 0.1 : 0, 0.5, NULL };
        loss_chunk = kind % 2 ? 10 : 0;
        check_architecture(models[kind % 3], true);
    }
    preference = (Preference){ 0 };
    loss_chunk = 0;
}

/* Without clipping: at its border the loss has no derivative. */
TEST(test_policy)
{
    for (int i = 0; i < 2; i++) {
        policy = (Policy){
            i ? POLICY_DAPO : POLICY_GRPO, i ? PER_TOKEN : PER_SEQUENCE, 0, 1, 100, 1.125, 0.25
        };
        loss_chunk = i ? 10 : 0;
        check_architecture(i ? LLAMA_GQA : LLAMA, true);
    }
    policy = (Policy){ 0 };
    loss_chunk = 0;
}

TEST(test_soft_labels)
{
    for (int i = 0; i < 4; i++) {
        distillation =
            (Distill){ i % 2 ? DISTILL_REVERSE : DISTILL_FORWARD, i < 2 ? 1 : 2, 0.25 * i, NULL };
        loss_chunk = i % 2 ? 10 : 0;
        check_architecture(i < 2 ? LLAMA : OLMO2, true);
    }
    distillation = (Distill){ 0 };
    loss_chunk = 0;
}

/* In the lowest trained block, backward computes only what the block's own gradients need: here the
 * gradients of its norms, of q, k and v. */
TEST(test_parts)
{
    static char *const parts[] = { "model.layers.1.*layernorm.weight",
                                   "model.layers.1.self_attn.[qkv]_*.weight" };
    const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN3 };
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            const ModelConfig m = architecture(models[i]);
            char *trainable = parts[k];
            check_model(architecture_name(models[i]), &m, &trainable, false);
        }
}

/* Adapters on all matrices, or on some ranges of a fused matrix. The base is stored like other
 * weights, or read from codes. Nothing is clamped, because a step of A moves many values of q, k
 * and v, and some of them would always cross the limit (test_parity clamps). */
static ModelConfig adapted_model(SmallModel a)
{
    const unsigned some = 1 << LORA_K | 1 << LORA_V | 1 << LORA_O | 1 << LORA_UP;
    const BaseFormat base[] = { BASE_NF4, BASE_AS_FROZEN, BASE_E4M3 };
    ModelConfig m =
        with_adapters(architecture(a), 3 + a % 2, a % 2 ? ALL_MODULES : some, base[a % 3]);
    m.lora.use_rslora = a % 2;
    m.clip_qkv = 0;
    return m;
}

TEST(test_adapters)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = adapted_model(a);
        check_model(architecture_name(a), &m, NULL, false);
    }
}

/* Three tiles of the MLP, the last one smaller. */
TEST(test_tiles)
{
    tile = 12;
    for (SmallModel a = 0; a < OLMOE; a++) { /* experts have no tiles */
        const ModelConfig m = a % 2 ? adapted_model(a) : architecture(a);
        check_model(architecture_name(a), &m, NULL, a == LLAMA_GQA);
    }
    test_parts(state);
    tile = 0;
}

/* The gradients of one step, of all units one after the other. */
static float *gradients(const ModelConfig *m, Keep keep, int recompute, int chunk, size_t *n)
{
    Setup s;
    model_config(&s.config, m, "f32", B);
    s.config.loss_chunk = chunk;
    s.config.recipe.keep = keep;
    s.config.recipe.recompute = recompute;
    model_create(&s.model, &s.store, &s.config);
    store_init(&s.store, &s.config.model, 7);
    test_fill_adapters(&s.store, 9);
    fill_batch(&s);
    loss_of(&s, true);
    float *g = NULL;
    *n = 0;
    for (int u = 0; u < s.store.num_units; u++) {
        size_t count = s.store.shard[u].slice[TRAINED].count;
        if (count == 0)
            continue; /* a unit without parameters */
        g = realloc(g, sizeof(float) * (*n + count));
        device_get(g + *n, s.store.shard[u].grad.data, sizeof(float) * count);
        *n += count;
    }
    model_free(&s.model, &s.store);
    return g;
}

/* Recomputation uses the same values and operations, so it gives the same bits. */
TEST(test_recomputation)
{
    for (int i = 0; i < 2 * NUM_ARCHITECTURES; i++) {
        const ModelConfig m = i % 2 ? adapted_model(i / 2) : architecture(i / 2);
        size_t n;
        float *all = gradients(&m, KEEP_ALL, 0, 0, &n);
        for (Keep keep = KEEP_ALL; keep <= KEEP_BLOCK; keep++)
            for (int part = 0; part < 3;
                 /* the blocks that backward recomputes: as keep says; also the first; also the
                  * second */
                 part++) {
                float *less = gradients(&m, keep, part == 0 ? 0 : part == 1 ? 2 : -3, 0, &n);
                assert_memory_equal(all, less, sizeof(float) * n);
                free(less);
            }
        free(all);
    }
}

/* The loss in chunks of 5 tokens equals the loss of all tokens, except for the order of sums of the
 * head's gradient. */
TEST(test_loss_chunks)
{
    const ModelConfig m = architecture(LLAMA);
    size_t n;
    float *whole = gradients(&m, KEEP_ALL, 0, 0, &n), *chunks = gradients(&m, KEEP_ALL, 0, 5, &n);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs(whole[i] - chunks[i]));
        largest = fmax(largest, fabs(whole[i]));
    }
    assert_true(largest > 0);
    assert_true(worst <= 64 * 0x1p-24 * largest);
    free(whole), free(chunks);
}

int main(void)
{
    device_init(0);
    architecture_add(&mapped);
    unit_kind_add(&mapping_kind, 1);
    return run_all_tests(NULL, NULL);
}
