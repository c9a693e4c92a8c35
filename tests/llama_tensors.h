/* Tensor names of a Llama, for classes of tests that have further tensors. */
#pragma once

// clang-format off
#define LLAMA_TENSORS                                                                                          \
    { "embed",     { "model.embed_tokens.weight" } },                                                          \
    { "attn_norm", { "input_layernorm.weight" } },                                                             \
    { "qkv",       { "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight" } },      \
    { "out",       { "self_attn.o_proj.weight" } },                                                            \
    { "mlp_norm",  { "post_attention_layernorm.weight" } },                                                    \
    { "gate_up",   { "mlp.gate_proj.weight", "mlp.up_proj.weight" } },                                         \
    { "down",      { "mlp.down_proj.weight" } },                                                               \
    { "norm",      { "model.norm.weight" } },                                                                  \
    { "head",      { "lm_head.weight" } }
// clang-format on
