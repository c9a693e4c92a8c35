/* Rules about several values that hold for the keys model.* and for a config.json. where: for
 * messages. */
#pragma once
#include "model/shape/config.h"

/* For messages: names of keys, and positions (file:line) of the keys of the heads. */
typedef struct {
    const char *width;
    struct {
        const char *name, *where;
    } heads, kv_heads, head_dim;
} HeadKeys;

void model_rules_heads(ModelConfig *m, const HeadKeys *keys);
/* the same dense blocks always give the same LayerTypes */
void model_rules_experts(ModelConfig *m, const char *where);
void model_rules_rope(const ModelConfig *m, const char *where);
/* the same windows always give the same LayerTypes */
void model_rules_windows(ModelConfig *m, const char *where);
