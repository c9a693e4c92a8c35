/* The rows of config_keys.c for models with experts. Only config_keys.c includes this file. */
#pragma once

#define EXPERT_MODEL_ROWS \
    OPTION("model.num_experts", INT, "null", 0, 2, 256, C(model.experts.count), \
           "experts of each block; null: each block has one MLP. The width of an expert is " \
           "intermediate_size, half of mlp_hidden_size"), \
        NUMBER("model.num_experts_per_tok", INT, "8", 1, 16, C(model.experts.top_k), \
               "experts that compute each token: those with the largest router probabilities"), \
        WORD("model.mlp_layer_types", LAYER_TYPES, "null", \
             WORDS({ "sparse", false }, { "dense", true }), C(model.experts.dense), \
             "MLP of each block: sparse has experts, dense is one MLP. A shorter list repeats. " \
             "Default: " \
             "all blocks have experts"), \
        OPTION( \
            "model.dense_intermediate_size", INT, "null", 0, 1, 1 << 24, \
            C(model.experts.dense_width), \
            "width of gate, and of up, in dense blocks (intermediate_size in their config.json)"), \
        OTHER("model.norm_topk_prob", BOOL, "false", C(model.experts.normalize), \
              "divide the weights of a token's experts by their sum (OLMoE: false, Qwen3: true)"), \
        WORD("model.router_aux_loss", CHOICE, "micro_batch", \
             WORDS({ "none", BALANCE_NONE }, { "micro_batch", BALANCE_MICRO_BATCH }, \
                   { "sequence", BALANCE_SEQUENCE }, { "pooled", BALANCE_POOLED }), \
             C(model.experts.balance), \
             "load-balancing loss. micro_batch: over the tokens of a micro-batch, for each block " \
             "(OLMo-core); sequence: over each sequence, for each block; pooled: over the tokens " \
             "of a micro-batch and all blocks together (transformers). Default for load_path: " \
             "pooled if its config.json has output_router_logits: true, else none"), \
        NUMBER("model.router_aux_loss_coef", DOUBLE, "0.01", 0, 1e6, \
               C(model.experts.balance_coef), "factor of the load-balancing loss"), \
        NUMBER("model.router_z_loss_coef", DOUBLE, "0", 0, 1e6, C(model.experts.z_coef), \
               "factor of the router's z-loss, the mean square of log sum exp of its logits " \
               "(OLMoE: 0.001)"), \
        OPTION("model.bias_gamma", DOUBLE, "null", 0, TINY, 1, C(model.experts.bias_gamma), \
               "balance the experts without a loss: each step adds this to a bias of the experts " \
               "with fewer tokens than the mean, and subtracts it for those with more. The bias " \
               "changes which experts compute a token, not their weights (OLMo-core). null: no " \
               "bias")
