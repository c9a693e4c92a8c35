/* One small base model, and the changes that each architecture makes to it. Values and tokens
 * depend only on a seed. */
#include "tests/models.h"

#include <stdlib.h>

#include "kernels/random.h"
#include "kernels/runtime/error.h"
#include "kernels/values.h"
#include "model/plan_model.h"
#include "model/store/param_store_sizes.h"

// clang-format off
static const char *const names[NUM_ARCHITECTURES] = {
    "llama",   "llama-gqa", "llama-head", "olmo",  "olmo2",
    "mistral", "qwen3",     "olmo3",      "qwen2", "smollm3",
    "olmoe",
};
// clang-format on

const char *architecture_name(SmallModel a)
{
    return names[a];
}

ModelConfig architecture(SmallModel a)
{
    ModelConfig m = {
        .d_model = 64,
        .n_layers = 2,
        .n_heads = 4,
        .n_kv_heads = 4,
        .head_dim = 16,
        .mlp_width = 96,
        .max_sequence_length = 16,
        .vocab_size = 90,
        .embedding_size = 128,
        .eos_token_id = 0,
        .pad_token_id = -1,
        .norm = { RMS_NORM, 1e-5f },
        .norm_affine = true,
        .rope_theta = 10000,
        .init_fn = INIT_NORMAL,
        .init_std = 0.1,
        .init_cutoff_factor = 3,
    };
    switch (a) {
    case MISTRAL:
        m.n_kv_heads = 2;
        m.sliding_window = 5;
        break;
    case QWEN3:
        m.n_kv_heads = 2;
        m.head_dim = 24;
        m.norm.eps = 1e-6f;
        m.qk_norm = QK_NORM_HEAD;
        m.weight_tying = true;
        m.sliding_window = 7;
        m.layer_types = (LayerTypes){ 2, { false, true } };
        break;
    case QWEN2:
        m.n_kv_heads = 2;
        m.norm.eps = 1e-6f;
        m.qkv_bias = true;
        m.weight_tying = true;
        m.rope_theta = 1000000;
        break;
    case SMOLLM3:
        m.n_kv_heads = 2;
        m.norm.eps = 1e-6f;
        m.weight_tying = true;
        m.no_rope_interval = 2;
        break;
    case OLMOE:
        m.qk_norm = QK_NORM_WIDTH;
        m.mlp_width = 48;
        m.experts =
            (Experts){ 6, 2, .balance = BALANCE_MICRO_BATCH, .balance_coef = 0.1, .z_coef = 0.01 };
        break;
    case LLAMA_GQA:
        m.n_kv_heads = 2;
        m.weight_tying = true;
        m.rope_scaling.type = ROPE_LLAMA3, m.rope_scaling.factor = 8,
        m.rope_scaling.original_length = 8;
        m.rope_scaling.low_freq_factor = 1, m.rope_scaling.high_freq_factor = 4;
        break;
    case LLAMA_HEAD:
        m.n_kv_heads = 1;
        m.head_dim = 24;
        break;
    case OLMO:
        m.norm.kind = LAYER_NORM;
        m.norm_affine = false;
        m.clip_qkv = 2;
        m.weight_tying = true;
        m.init_fn = INIT_MITCHELL;
        break;
    case OLMO3:
        m.sliding_window = 6;
        m.layer_types = (LayerTypes){ 2, { true, false } };
        m.rope_scaling.type = ROPE_YARN, m.rope_scaling.factor = 4,
        m.rope_scaling.full_attn_layers_only = true;
        m.rope_scaling.beta_fast = 2, m.rope_scaling.beta_slow = 0.5,
        m.rope_scaling.original_length = 64;
        /* fall through */
    case OLMO2:
        m.n_kv_heads = 2;
        m.norm.eps = 1e-6f;
        m.norm_after = true;
        m.qk_norm = QK_NORM_WIDTH;
        m.rope_theta = 500000;
        m.init_fn = INIT_FULL_MEGATRON;
        break;
    default: break;
    }
    return m;
}

ModelConfig with_adapters(ModelConfig m, int rank, unsigned modules, BaseFormat base)
{
    m.lora = (Lora){ .rank = rank, .alpha = 1.5 * rank, .base = base };
    for (int i = 0; i < NUM_LORA_MODULES; i++)
        m.lora.target[i] = modules >> i & 1 && (m.experts.count == 0 || i < LORA_GATE);
    return m;
}

ModelConfig without_wide_norms(ModelConfig m)
{
    m.qk_norm = m.qk_norm == QK_NORM_WIDTH ? QK_NORM_NONE : m.qk_norm;
    return m;
}

void add_after_architecture(void)
{
    static Architecture after;
    after = *architecture_find("Olmo2ForCausalLM");
    after.class = "AfterForCausalLM";
    after.model_type = "after";
    after.qk_norm = QK_NORM_NONE;
    after.windows = WINDOW_BY_LAYER;
    after.rope_types = ~0u;
    after.full_attn_scaled_only = true;
    architecture_add(&after);
}

void model_config(Config *c, const ModelConfig *m, const char *recipe, int B)
{
    const Recipe *r = recipe_find(recipe);
    CHECK(r, "no recipe %s", recipe);
    *c = (Config){ .model = *m,
                   .recipe = *r,
                   .seed = 6198,
                   .global_train_batch_size = B,
                   .device_train_microbatch_size = B,
                   .optimizer = { .name = "adamw",
                                  .lr = 1e-2,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-5,
                                  .weight_decay = 0.1,
                                  .momentum = 0.95,
                                  .nesterov = true,
                                  .ns_steps = 5,
                                  .ns_eps = 1e-7 },
                   .scheduler = { .name = CONSTANT },
                   .max_grad_norm = 1,
                   .eval_subset_num_batches = -1,
                   .device_eval_batch_size = B,
                   .speed_window = 1,
                   .console_log_interval = 1 };
}

void model_create(Model *m, ParamStore *store, const Config *c)
{
    model_plan(
        m, store, c,
        (ShardChoice){ 1, 0, c->strategy.grad_sum != SUM_OFTEN, .tile = c->tiled_mlp_tokens });
    model_alloc(m, store, c);
}

void model_create_apart(Model *m, ParamStore *store, const Config *c)
{
    size_t bytes = 0;
    model_plan(
        m, store, c,
        (ShardChoice){ 1, 0, c->strategy.grad_sum != SUM_OFTEN, .tile = c->tiled_mlp_tokens });
    for (int b = 0; b < NUM_BUFFERS; b++) {
        m->shared[b].at = bytes;
        bytes += m->shared[b].bytes;
    }
    model_alloc_shared(m, store, c, bytes);
}

void model_alloc_shared(Model *m, ParamStore *store, const Config *c, size_t bytes)
{
    m->bytes.total += bytes - m->shared_bytes;
    m->shared_bytes = bytes;
    model_alloc(m, store, c);
}

/* Sets elements of a parameter from element `first` on. Each element has the value that it has in
 * the whole parameter. */
static void fill(Tensor t, const Param *p, uint64_t seed, size_t first)
{
    const size_t n = tensor_numel(t);
    float *x = xcalloc(n, sizeof *x);
    Tensor host = t;
    host.data = xcalloc(n, dtype_size(t.format.dtype));
    for (size_t i = 0, whole; i < n; i++) {
        param_run(p, first + i, &whole);
        x[i] = 0.3f * test_uniform(seed, whole);
    }
    tensor_store(host, 0, x, n);
    device_put(t.data, host.data, tensor_bytes(t));
    free(host.data), free(x);
}

void test_fill_adapters(ParamStore *store, uint64_t seed)
{
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            size_t first, n = shard_part(&store->shard[u], p, &first);
            if ((p->is_b || (p->is_vector && !p->is_norm)) && n > 0)
                fill(shard_weights(&store->shard[u], p, first, n), p,
                     seed + (uint64_t)(u * NUM_PARAMS + p->id), first);
        }
    store_loaded(store);
}

float test_uniform(uint64_t seed, uint64_t i)
{
    return (float)((double)(random_bits(seed, i) >> 11) * 0x1p-52 - 1);
}

int test_token(uint64_t seed, uint64_t i, int below)
{
    return (int)(random_bits(seed, i) % (uint64_t)below);
}
