/* Which parameters an architecture has, unit by unit, and the values they start from. */
#include "model/params.h"

#include <math.h>

#include "kernels/error.h"

/* Standard deviations of initial weights, l = number of the block from 0.
 * mitchell: 1/sqrt(fan in), output projections shrunk by the depth reached [OLMo, init_fn: mitchell].
 * full_megatron: init_std; output projections / sqrt(2L), head 1/sqrt(d).  normal: init_std everywhere. */
typedef struct { double embed, in, att_out, mlp_out, head; } Stds;

static Stds init_stds(const ModelConfig *c, int l)
{
    double d = c->d_model, s = c->init_std;
    switch (c->init_fn) {
    case INIT_MITCHELL: {
        double in = 1 / sqrt(d);
        return (Stds){ in, in, 1 / sqrt(2 * d * (l + 1)), 1 / sqrt(2.0 * c->mlp_width * (l + 1)), in };
    }
    case INIT_FULL_MEGATRON:
        return (Stds){ s, s, s / sqrt(2.0 * c->n_layers), s / sqrt(2.0 * c->n_layers), 1 / sqrt(d) };
    default:
        return (Stds){ s, s, s, s, s };
    }
}

static Param *add(UnitShape *u, int id, const char *name, int rows, int cols, double std)
{
    CHECK(u->num_params < MAX_PARAMS, "too many parameters");
    Param *p = &u->param[u->num_params++];
    *p = (Param){ .name = name, .id = id, .rows = rows, .cols = cols, .offset = u->numel, .is_norm = rows == 1,
                  .init_std = std };
    u->numel = param_align(u->numel + (size_t)rows * cols);
    return p;
}

#define SLOT(field) ((int)(offsetof(Unit, field) / sizeof(Tensor)))

static void block_shape(UnitShape *u, const ModelConfig *c, int l)
{
    Stds s = init_stds(c, l);
    int C = c->d_model, F = c->mlp_width, HD = c->n_heads * c->head_dim, KD = c->n_kv_heads * c->head_dim;

    if (c->norm_affine)
        add(u, SLOT(norm0), "norm0", 1, C, 0);
    add(u, SLOT(qkv), "qkv", HD + 2 * KD, C, s.in);
    if (c->qk_norm) {
        bool head = c->qk_norm == QK_NORM_HEAD;
        add(u, SLOT(qnorm), "qnorm", 1, head ? c->head_dim : HD, 0);
        add(u, SLOT(knorm), "knorm", 1, head ? c->head_dim : KD, 0);
    }
    add(u, SLOT(out), "out", C, HD, s.att_out);
    if (c->norm_affine)
        add(u, SLOT(norm1), "norm1", 1, C, 0);
    add(u, SLOT(gate_up), "gate_up", 2 * F, C, s.in);
    add(u, SLOT(down), "down", C, F, s.mlp_out);
    for (int i = 0; i < u->num_params; i++)
        u->param[i].is_operand = !u->param[i].is_norm;
}

void unit_shape(UnitShape *u, const ModelConfig *c, int unit, int world)
{
    *u = (UnitShape){ 0 };
    int C = c->d_model, V = c->embedding_size, L = c->n_layers;
    if (unit == 0) {
        Param *p = add(u, SLOT(embed), "embed", V, C, init_stds(c, 0).embed);
        p->is_embedding = p->has_padding = true;
    } else if (unit <= L)
        block_shape(u, c, unit - 1);
    else {
        if (c->norm_affine)
            add(u, SLOT(norm), "norm", 1, C, 0);
        if (!c->weight_tying)
            add(u, SLOT(head), "head", V, C, init_stds(c, 0).head)->has_padding = true;
    }
    size_t step = (size_t)PARAM_ALIGN * world;
    u->numel = (u->numel + step - 1) / step * step;
}

Tensor param_view(const Param *p, void *data, Format f)
{
    return tensor_at((char *)data + p->offset * dtype_size(f.dtype), f, p->rows, p->cols);
}

Unit unit_views(const UnitShape *u, void *data, Format f)
{
    Unit v = { 0 };
    for (int i = 0; i < u->num_params; i++)
        v.tensor[u->param[i].id] = param_view(&u->param[i], data, f);
    return v;
}
