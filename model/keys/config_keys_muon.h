/* The rows of config_keys.c for optimizer.name muon. Only config_keys.c includes this file, after
 * config_keys_rows.h. */
#pragma once
#define MUON_ROWS \
    NUMBER("optimizer.momentum", DOUBLE, "0.95", 0, 0.999999, C(optimizer.momentum), \
           "muon: decay of momentum_buffer"), \
        OTHER("optimizer.nesterov", BOOL, "true", C(optimizer.nesterov), \
              "muon: Nesterov's momentum"), \
        NUMBER("optimizer.ns_steps", INT, "5", 1, 99, C(optimizer.ns_steps), \
               "muon: iterations of Newton-Schulz"), \
        NUMBER("optimizer.ns_eps", DOUBLE, "1e-7", 1e-15, 1, C(optimizer.ns_eps), \
               "muon: minimum of the norm by which a matrix is divided, `eps` of " \
               "torch.optim.Muon"), \
        WORD( \
            "optimizer.adjust_lr_fn", CHOICE, "match_rms_adamw", \
            WORDS({ "match_rms_adamw", ADJUST_MATCH_RMS_ADAMW }, { "original", ADJUST_ORIGINAL }), \
            C(optimizer.adjust_lr), \
            "muon: factor of a matrix's learning rate. match_rms_adamw: 0.2 " \
            "sqrt(max(rows, columns)), for use with AdamW's learning rate and weight " \
            "decay; original: sqrt(max(1, rows / columns))"), \
        OTHER("optimizer.per_head", BOOL, "false", C(optimizer.per_head), \
              "muon: orthogonalize each head of q, k and v as a separate matrix")
