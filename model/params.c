/* Which parameters a model has, unit by unit, and the values they start from. */
#include "model/params.h"

#include <assert.h>
#include <math.h>

#include "kernels/error.h"

/* ---- the table -------------------------------------------------------------------------------------------- */

typedef enum { EMBEDDING, BLOCK, HEAD } UnitKind;
typedef enum { ALWAYS, WITH_NORM_WEIGHTS, WITH_QK_NORM, UNTIED } Condition;
typedef enum { ONE, D_MODEL, Q_WIDTH, Q_NORM, K_NORM, QKV_WIDTH, MLP, MLP_TWICE, VOCABULARY } Size;
typedef enum { ONES, STD_EMBEDDING, STD_IN, STD_ATTENTION_OUT, STD_MLP_OUT, STD_HEAD } Init;

/* In the order of a unit's flat buffer. */
typedef struct {
    UnitKind    unit;
    const char *name;
    size_t      place;      /* in Unit */
    Size        rows, cols;
    Init        init;
    Condition   condition;
} Row;

#define FIELD(name) #name, offsetof(Unit, name)
static const Row rows[] = {
    { EMBEDDING, FIELD(embed),   VOCABULARY, D_MODEL, STD_EMBEDDING,     ALWAYS },
    { BLOCK,     FIELD(norm0),   ONE,        D_MODEL, ONES,              WITH_NORM_WEIGHTS },
    { BLOCK,     FIELD(qkv),     QKV_WIDTH,  D_MODEL, STD_IN,            ALWAYS },
    { BLOCK,     FIELD(qnorm),   ONE,        Q_NORM,  ONES,              WITH_QK_NORM },
    { BLOCK,     FIELD(knorm),   ONE,        K_NORM,  ONES,              WITH_QK_NORM },
    { BLOCK,     FIELD(out),     D_MODEL,    Q_WIDTH, STD_ATTENTION_OUT, ALWAYS },
    { BLOCK,     FIELD(norm1),   ONE,        D_MODEL, ONES,              WITH_NORM_WEIGHTS },
    { BLOCK,     FIELD(gate_up), MLP_TWICE,  D_MODEL, STD_IN,            ALWAYS },
    { BLOCK,     FIELD(down),    D_MODEL,    MLP,     STD_MLP_OUT,       ALWAYS },
    { HEAD,      FIELD(norm),    ONE,        D_MODEL, ONES,              WITH_NORM_WEIGHTS },
    { HEAD,      FIELD(head),    VOCABULARY, D_MODEL, STD_HEAD,          UNTIED },
};
static_assert(sizeof rows / sizeof rows[0] == NUM_PARAMS && sizeof(Unit) == NUM_PARAMS * sizeof(Tensor),
              "a parameter is a field of Unit and a row");

static bool exists(Condition condition, const ModelConfig *c)
{
    return condition == WITH_NORM_WEIGHTS ? c->norm_affine : condition == WITH_QK_NORM ? c->qk_norm
         : condition == UNTIED ? !c->weight_tying : true;
}

static int size_of(Size size, const ModelConfig *c)
{
    const int q = c->n_heads * c->head_dim, k = c->n_kv_heads * c->head_dim;
    switch (size) {
    case D_MODEL:    return c->d_model;
    case Q_WIDTH:    return q;
    case Q_NORM:     return c->qk_norm == QK_NORM_HEAD ? c->head_dim : q;
    case K_NORM:     return c->qk_norm == QK_NORM_HEAD ? c->head_dim : k;
    case QKV_WIDTH:  return q + 2 * k;
    case MLP:        return c->mlp_width;
    case MLP_TWICE:  return 2 * c->mlp_width;
    case VOCABULARY: return c->embedding_size;
    default:         return 1;
    }
}

/* Standard deviations of initial weights, l = number of the block from 0.
 * mitchell: 1/sqrt(fan in), output projections shrunk by the depth reached [OLMo, init_fn: mitchell].
 * full_megatron: init_std; output projections / sqrt(2L), head 1/sqrt(d).  normal: init_std everywhere. */
static double init_std(Init init, const ModelConfig *c, int l)
{
    const double d = c->d_model, s = c->init_std;
    const bool out = init == STD_ATTENTION_OUT || init == STD_MLP_OUT;
    if (init == ONES)
        return 0;
    switch (c->init_fn) {
    case INIT_MITCHELL:
        return !out ? 1 / sqrt(d) : 1 / sqrt((init == STD_ATTENTION_OUT ? 2 * d : 2.0 * c->mlp_width) * (l + 1));
    case INIT_FULL_MEGATRON:
        return out ? s / sqrt(2.0 * c->n_layers) : init == STD_HEAD ? 1 / sqrt(d) : s;
    default:
        return s;
    }
}

/* ---- units ------------------------------------------------------------------------------------------------ */

void unit_shape(UnitShape *u, const ModelConfig *c, int unit, int world)
{
    const UnitKind kind = unit == 0 ? EMBEDDING : unit <= c->n_layers ? BLOCK : HEAD;
    *u = (UnitShape){ 0 };
    for (const Row *r = rows; r < rows + NUM_PARAMS; r++) {
        if (r->unit != kind || !exists(r->condition, c))
            continue;
        const Param p = {
            .name = r->name, .id = (int)(r->place / sizeof(Tensor)), .rows = size_of(r->rows, c), .cols = size_of(r->cols, c),
            .region = TRAINED, .number = unit_numbers(u), .is_norm = r->init == ONES, .is_embedding = kind == EMBEDDING,
            .is_operand = kind == BLOCK && r->init != ONES, .has_padding = r->rows == VOCABULARY,
            .init_std = (float)init_std(r->init, c, unit - 1) };
        u->param[u->num_params++] = p;
    }
    unit_lay_out(u, world);
}

void unit_lay_out(UnitShape *u, int world)
{
    const size_t step = (size_t)PARAM_ALIGN * (size_t)world;
    u->numel[TRAINED] = u->numel[FROZEN] = 0;
    for (int i = 0; i < u->num_params; i++) {
        Param *p = &u->param[i];
        p->offset = u->numel[p->region];
        u->numel[p->region] = param_align(p->offset + (size_t)p->rows * (size_t)p->cols);
    }
    for (int r = 0; r < NUM_REGIONS; r++)
        u->numel[r] = (u->numel[r] + step - 1) / step * step;
}

size_t unit_numbers(const UnitShape *u)
{
    if (u->num_params == 0)
        return 0;
    const Param *last = &u->param[u->num_params - 1];
    return param_align(last->number + (size_t)last->rows * (size_t)last->cols);
}

Tensor param_view(const Param *p, void *region, Format f)
{
    return tensor_at((char *)region + p->offset * dtype_size(f.dtype), f, p->rows, p->cols);
}

Unit unit_views(const UnitShape *u, void *data, Format f)
{
    Unit v = { 0 };
    for (int i = 0; i < u->num_params; i++)
        if (u->param[i].region == TRAINED)
            v.tensor[u->param[i].id] = param_view(&u->param[i], data, f);
    return v;
}
