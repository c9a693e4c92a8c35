/* Small models of every architecture, for tests. */
#pragma once
#include "model/model.h"

/* LLAMA: without options. LLAMA_GQA: GQA, tied, llama3 rope. LLAMA_HEAD: head_dim != C/H. OLMO:
 * LayerNorm without weights, clip, tied. OLMO2: norms on the branch outputs, QK-norm, GQA. MISTRAL:
 * a window in all blocks. QWEN3: QK-norm per head, head_dim != C/H, tied, a window in the second
 * block. OLMO3: OLMO2 with a window in the first block, YaRN in the second. QWEN2: biases of q, k
 * and v, tied, GQA. SMOLLM3: tied, GQA, no rotation in the second block. OLMOE: QK-norm, 6 experts,
 * 2 of them per token, with both losses of the router. */
typedef enum {
    LLAMA,
    LLAMA_GQA,
    LLAMA_HEAD,
    OLMO,
    OLMO2,
    MISTRAL,
    QWEN3,
    OLMO3,
    QWEN2,
    SMOLLM3,
    OLMOE,
    NUM_ARCHITECTURES
} SmallModel;
ModelConfig architecture(SmallModel a);
const char *architecture_name(SmallModel a);

/* Returns the model with adapters on the matrices whose bits, one for each LoraModule, are set.
 * alpha is 3/2 of the rank. */
enum { ALL_MODULES = (1 << NUM_LORA_MODULES) - 1 };
ModelConfig with_adapters(ModelConfig m, int rank, unsigned modules, BaseFormat base);

/* For tests of tensor ranks: without_wide_norms returns the model without norms over all heads,
 * because no tensor rank has all heads. add_after_architecture registers the architecture of such
 * models. */
ModelConfig without_wide_norms(ModelConfig m);
void add_after_architecture(void);

/* Sets *c to the configuration of a run of one rank with micro-batches of B sequences, without
 * files on disk. */
void model_config(Config *c, const ModelConfig *m, const char *recipe, int B);

/* Returns the sums of the losses since the last call. */
static inline Losses take_losses(Model *m)
{
    const Losses l = model_losses(m);
    model_zero_losses(m);
    return l;
}

/* plans and places the model, for one rank */
void model_create(Model *m, ParamStore *store, const Config *c);

/* As model_create, with separate memory for each buffer, so that all results can be read. */
void model_create_apart(Model *m, ParamStore *store, const Config *c);

/* Places a planned model in `bytes` bytes, after the shared buffers were planned again. */
void model_alloc_shared(Model *m, ParamStore *store, const Config *c, size_t bytes);

/* Fills every B of the adapters, because A has no gradient if B = 0. Also fills every bias. */
void test_fill_adapters(ParamStore *store, uint64_t seed);

/* Values that depend only on (seed, i): uniform in [-1, 1), and token ids below `below`. */
float test_uniform(uint64_t seed, uint64_t i);
int test_token(uint64_t seed, uint64_t i, int below);
