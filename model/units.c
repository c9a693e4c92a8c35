/* The kinds of units, row by row: parameters, buffers, forward and backward. */
#include "model/units.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>

#include "kernels/runtime/error.h"
#include "model/block.h"

/* ---- parameters ------------------------------------------------------------------------------------------------ */

#define FIELD(name) #name, offsetof(Unit, name)
static const ParamRow of_embedding[] = {
    { FIELD(embed),     VOCABULARY, D_MODEL, SPLIT_ROWS,    STD_EMBEDDING,     ALWAYS },
};
static const ParamRow of_block[] = {
    { FIELD(norm0),     ONE,        D_MODEL, SPLIT_NONE,    ONES,              WITH_NORM_WEIGHTS },
    { FIELD(qkv),       OUTPUTS,    D_MODEL, SPLIT_ROWS,    STD_IN,            ALWAYS, LINEAR_QKV },
    { FIELD(qnorm),     ONE,        Q_NORM,  SPLIT_COLUMNS, ONES,              WITH_QK_NORM },
    { FIELD(knorm),     ONE,        K_NORM,  SPLIT_COLUMNS, ONES,              WITH_QK_NORM },
    { FIELD(out),       OUTPUTS,    Q_WIDTH, SPLIT_COLUMNS, STD_ATTENTION_OUT, ALWAYS, LINEAR_OUT },
    { FIELD(norm1),     ONE,        D_MODEL, SPLIT_NONE,    ONES,              WITH_NORM_WEIGHTS },
    { FIELD(gate_up),   OUTPUTS,    D_MODEL, SPLIT_ROWS,    STD_IN,            ALWAYS, LINEAR_GATE_UP },
    { FIELD(down),      OUTPUTS,    MLP,     SPLIT_COLUMNS, STD_MLP_OUT,       ALWAYS, LINEAR_DOWN },
    { FIELD(qkv_a),     LORA_RANKS,      D_MODEL, SPLIT_NONE,    STD_ADAPTER,       ADAPTED, LINEAR_QKV },
    { FIELD(qkv_b),     OUTPUTS,    LORA_RANK,    SPLIT_ROWS,    ZEROS,             ADAPTED, LINEAR_QKV },
    { FIELD(out_a),     LORA_RANKS,      Q_WIDTH, SPLIT_COLUMNS, STD_ADAPTER,       ADAPTED, LINEAR_OUT },
    { FIELD(out_b),     OUTPUTS,    LORA_RANK,    SPLIT_NONE,    ZEROS,             ADAPTED, LINEAR_OUT },
    { FIELD(gate_up_a), LORA_RANKS,      D_MODEL, SPLIT_NONE,    STD_ADAPTER,       ADAPTED, LINEAR_GATE_UP },
    { FIELD(gate_up_b), OUTPUTS,    LORA_RANK,    SPLIT_ROWS,    ZEROS,             ADAPTED, LINEAR_GATE_UP },
    { FIELD(down_a),    LORA_RANKS,      MLP,     SPLIT_COLUMNS, STD_ADAPTER,       ADAPTED, LINEAR_DOWN },
    { FIELD(down_b),    OUTPUTS,    LORA_RANK,    SPLIT_NONE,    ZEROS,             ADAPTED, LINEAR_DOWN },
};
static const ParamRow of_head[] = {
    { FIELD(norm),      ONE,        D_MODEL, SPLIT_NONE,    ONES,              WITH_NORM_WEIGHTS },
    { FIELD(head),      VOCABULARY, D_MODEL, SPLIT_ROWS,    STD_HEAD,          UNTIED },
};
#define COUNT(rows) (sizeof (rows) / sizeof (rows)[0])
static_assert(COUNT(of_embedding) + COUNT(of_block) + COUNT(of_head) == NUM_PARAMS && sizeof(Unit) == NUM_PARAMS * sizeof(Tensor),
              "a parameter is a field of Unit and a row");

/* ---- forward and backward -------------------------------------------------------------------------------------- */

static void embed(Model *m, const Unit *w, int u)
{
    embedding_forward(m->unit_acts[u + 1].res0, m->sorted, w->embed);
}

static void embed_backward(Model *m, const Unit *w, Unit *dw, int u, bool goes_on)
{
    (void)w, (void)u, (void)goes_on;
    embedding_backward(dw->embed, m->sorted, m->work.dres);
}

static void block(Model *m, const Unit *w, int u)
{
    block_forward(m, w, &m->unit_acts[u], &m->unit_acts[u + 1]);
}

static int block_uses(const Model *m, int u)
{
    return m->unit_acts[u].keep == KEEP_BLOCK ? FOR_FORWARD | FOR_BACKWARD : FOR_BACKWARD;
}

static void block_back(Model *m, const Unit *w, Unit *dw, int u, bool goes_on)
{
    if (m->unit_acts[u].keep == KEEP_BLOCK)
        block(m, w, u);
    block_backward(m, w, dw, &m->unit_acts[u], goes_on);
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

static int one(const ModelConfig *c)
{
    (void)c;
    return 1;
}

static int layers(const ModelConfig *c)
{
    return c->n_layers;
}

static const UnitKind
    embedding_kind = { "embedding", one,    false, of_embedding, COUNT(of_embedding), NULL, embed, NULL, embed_backward },
    block_kind     = { "block",     layers, true,  of_block,     COUNT(of_block),     plan_block, block, block_uses, block_back },
    head_kind      = { "head",      one,    false, of_head,      COUNT(of_head),      plan_head_input, NULL, NULL, NULL };

/* In the order of a model's units. */
enum { MAX_KINDS = 8 };
static const UnitKind *kinds[MAX_KINDS] = { &embedding_kind, &block_kind, &head_kind };
static int num_kinds = 3;

void unit_kind_add(const UnitKind *k)
{
    CHECK(num_kinds < MAX_KINDS, "%s: there are %d kinds of units already", k->name, num_kinds);
    for (int i = num_kinds++; i > 1; i--)
        kinds[i] = kinds[i - 1];
    kinds[1] = k;
}

const UnitKind *unit_kind(const ModelConfig *c, int unit)
{
    int i = 0;
    for (; unit >= kinds[i]->count(c); i++) {
        unit -= kinds[i]->count(c);
        CHECK(i + 1 < num_kinds, "the model has no such unit");
    }
    return kinds[i];
}

int unit_first(const ModelConfig *c, const UnitKind *k)
{
    int first = 0;
    for (int i = 0; kinds[i] != k; i++)
        first += kinds[i]->count(c);
    return first;
}

int unit_count(const ModelConfig *c)
{
    return unit_first(c, &head_kind) + 1;
}

int unit_of_layer(const ModelConfig *c, int layer)
{
    return unit_first(c, &block_kind) + layer;
}

int unit_of_head_matrix(const ModelConfig *c)
{
    return unit_first(c, c->weight_tying ? &embedding_kind : &head_kind);
}

const char *unit_name(const ModelConfig *c, int unit, char text[UNIT_NAME])
{
    const UnitKind *k = unit_kind(c, unit);
    if (k->is_layer)
        snprintf(text, UNIT_NAME, "%s %d", k->name, unit - unit_first(c, k));
    else
        snprintf(text, UNIT_NAME, "the %s", k->name);
    return text;
}
