/* The parameters of a model, unit by unit, and the standard deviations of their initial values. */
#include "model/shape/params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* Sets the rows of each tensor of a linear layer's matrix. Returns the number of tensors. */
static int linear_projections(int rows[MAX_PROJECTIONS], const ModelConfig *c, int layer,
                              Linear linear)
{
    const int q = c->n_heads * c->head_dim, k = c->n_kv_heads * c->head_dim, C = c->d_model,
              F = layer_mlp_width(c, layer);
    const int widths[NUM_LINEARS][MAX_PROJECTIONS] = { [LINEAR_QKV] = { q, k, k },
                                                       [LINEAR_OUT] = { C },
                                                       [LINEAR_GATE_UP] = { F, F },
                                                       [LINEAR_DOWN] = { C } };
    int count = 0;
    for (; count < MAX_PROJECTIONS && widths[linear][count] > 0; count++)
        rows[count] = widths[linear][count];
    return count;
}

/* Whether the i-th module of `linear` has an adapter. */
static bool is_targeted(const ModelConfig *c, Linear linear, int i)
{
    static const LoraModule first_module[NUM_LINEARS] = { LORA_Q, LORA_O, LORA_GATE, LORA_DOWN };
    return c->lora.rank > 0 && c->lora.target[first_module[linear] + i];
}

LoraMatrix adapter_projections(const ModelConfig *c, int layer, Linear linear)
{
    int rows[MAX_PROJECTIONS];
    const int count = linear_projections(rows, c, layer, linear);
    LoraMatrix b = { .is_b = true };
    for (int i = 0, first = 0; i < count; first += rows[i++])
        if (is_targeted(c, linear, i)) {
            b.projection[b.num_projections].first = first;
            b.projection[b.num_projections++].width = rows[i];
        }
    return b;
}

static bool has_second_layer(const ModelConfig *c)
{
    return c->image.projector == PROJECTOR_MLP;
}

static bool exists(const ParamRow *r, const ModelConfig *c, int layer)
{
    return r->condition == WITH_NORM_WEIGHTS         ? c->norm_affine
           : r->condition == WITH_QKV_BIAS           ? c->qkv_bias
           : r->condition == WITH_QK_NORM            ? c->qk_norm
           : r->condition == WITH_EXPERTS            ? layer_experts(c, layer) > 0
           : r->condition == WITH_PROJECTOR_BIAS     ? c->image.bias
           : r->condition == WITH_PROJECTOR_OUT      ? has_second_layer(c)
           : r->condition == WITH_PROJECTOR_OUT_BIAS ? has_second_layer(c) && c->image.bias
           : r->condition == UNTIED                  ? !c->weight_tying
           : r->condition == ADAPTED ? adapter_projections(c, layer, r->linear).num_projections > 0
                                     : true;
}

static int size_of(Size size, const ModelConfig *c, int layer)
{
    const int q = c->n_heads * c->head_dim, k = c->n_kv_heads * c->head_dim;
    switch (size) {
    case SIZE_MODEL: return c->d_model;
    case SIZE_Q: return q;
    case SIZE_Q_NORM: return c->qk_norm == QK_NORM_HEAD ? c->head_dim : q;
    case SIZE_K_NORM: return c->qk_norm == QK_NORM_HEAD ? c->head_dim : k;
    case SIZE_MLP: return layer_mlp_width(c, layer);
    case SIZE_EXPERTS: return layer_experts(c, layer);
    case SIZE_VOCABULARY: return c->embedding_size;
    case SIZE_LORA_RANK: return c->lora.rank;
    case SIZE_FEATURE: return c->image.feature_size;
    default: return 1;
    }
}

/* Sets p's rows and projections. */
static void divide(Param *p, const ParamRow *r, const ModelConfig *c, int layer)
{
    int rows[MAX_PROJECTIONS] = { r->rows == SIZE_VOCABULARY ? c->vocab_size
                                                             : size_of(r->rows, c, layer) };
    const int count = r->rows == SIZE_OUTPUTS || r->rows == SIZE_LORA_RANKS
                          ? linear_projections(rows, c, layer, r->linear)
                          : 1;
    for (int i = 0; i < count; i++) {
        if (p->is_adapter && !is_targeted(c, r->linear, i))
            continue;
        p->projection[p->num_projections] =
            (Projection){ p->rows, r->rows == SIZE_LORA_RANKS ? c->lora.rank : rows[i], i };
        p->rows += p->projection[p->num_projections++].rows;
    }
    if (p->has_padding)
        p->rows = size_of(r->rows, c, layer);
}

/* Standard deviations of initial weights, l = number of the block from 0.
 * mitchell: 1/sqrt(fan in), output projections divided by sqrt(2(l + 1)) [OLMo, init_fn: mitchell].
 * full_megatron: init_std; output projections / sqrt(2L), head 1/sqrt(d).  normal: always init_std.
 * Adapters and the projector: A and the projector's matrices have the variance of a uniform
 * distribution in +-1/sqrt(fan in), as in PEFT and PyTorch. DIFFERS: our distribution is normal. */
static double init_std(Init init, const ModelConfig *c, int l, int fan_in)
{
    const double d = c->d_model, s = c->init_std;
    const bool out = init == STD_ATTENTION_OUT || init == STD_MLP_OUT;
    if (init == ONES || init == ZEROS)
        return 0;
    if (init == STD_ADAPTER)
        return 1 / sqrt(3.0 * fan_in);
    switch (c->init_fn) {
    case INIT_MITCHELL:
        return !out ? 1 / sqrt(d)
                    : 1 / sqrt((init == STD_ATTENTION_OUT ? 2 * d : 2.0 * layer_mlp_width(c, l)) *
                               (l + 1));
    case INIT_FULL_MEGATRON:
        return out ? s / sqrt(2.0 * c->n_layers) : init == STD_HEAD ? 1 / sqrt(d) : s;
    default: return s;
    }
}

/* ---- units ----------------------------------------------------------------------------------- */

/* The number of the next parameter. Adapters are counted separately, so that they do not change the
 * numbers of other parameters. */
static size_t next_number(const UnitLayout *u, bool adapter)
{
    for (const Param *p = u->param + u->num_params; p > u->param; p--)
        if (p[-1].is_adapter == adapter)
            return param_align(p[-1].number + param_numel(&p[-1]));
    return 0;
}

void unit_shape(UnitLayout *u, const ModelConfig *c, int unit, int world)
{
    *u = (UnitLayout){ .kind = unit_kind(c, unit), .number = unit_number(c, unit) };
    for (const ParamRow *r = u->kind->params; r < u->kind->params + u->kind->num_params; r++) {
        if (!exists(r, c, u->number))
            continue;
        const bool adapter = r->condition == ADAPTED,
                   each_head = r->condition == WITH_QK_NORM && c->qk_norm == QK_NORM_HEAD;
        const bool vector = r->rows == SIZE_ONE || r->cols == SIZE_ONE;
        const int cols = size_of(r->cols, c, u->number);
        Param p = { .name = r->name,
                    .id = (int)(r->offset / sizeof(Tensor)),
                    .items = r->count ? r->count(c, u->number) : 1,
                    .cols = cols,
                    .split = each_head ? SPLIT_NONE : r->split,
                    .region = TRAINED,
                    .is_norm = r->init == ONES,
                    .is_embedding = r->init == STD_EMBEDDING,
                    .is_vector = vector,
                    .is_adapter = adapter,
                    .is_b = adapter && r->rows == SIZE_OUTPUTS,
                    .linear = r->linear,
                    .is_operand = u->kind->is_layer && !vector && !adapter && !r->in_stream_format,
                    .has_padding = r->rows == SIZE_VOCABULARY,
                    .init_std = (float)init_std(r->init, c, u->number, cols),
                    .tensor_ranks = 1 };
        divide(&p, r, c, u->number);
        u->param = xrealloc(u->param, (size_t)(u->num_params + p.items) * sizeof p);
        for (; p.item < p.items; p.item++) {
            p.number = next_number(u, adapter);
            u->param[u->num_params++] = p;
        }
    }
    u->config = c;
    u->tensor_ranks = 1;
    unit_lay_out(u, world);
}

void units_free(UnitLayout *u, int count)
{
    for (int i = 0; i < count; i++)
        free(u[i].param);
    free(u);
}

double param_active(const UnitLayout *u, const Param *p)
{
    const Experts *e = &u->config->experts;
    return (double)param_numel(p) *
           (p->items > 1 && e->count > 0 ? (double)e->top_k / e->count : 1);
}

Param param_stack(const Param *p)
{
    Param stack = *p;
    stack.rows *= p->items;
    stack.stored *= (size_t)p->items;
    stack.num_projections = 0;
    return stack;
}

Tensor param_tensor(const UnitTensors *u, const Param *p)
{
    return tensor_item(u->tensor[p->id], p->item, p->items);
}

void unit_check_size(const UnitLayout *u, int unit)
{
    char name[UNIT_NAME];
    for (const Param *p = u->param; p < u->param + u->num_params; p++) {
        const Param read = p->region == QUANTIZED ? param_whole(p) : *p;
        if (param_numel(&read) > INT32_MAX - PARAM_ALIGN)
            die("%s: %s has %d x %d numbers; a matrix can have at most %d. Use a smaller %s",
                unit_name(u->config, unit, name), p->name, read.rows, read.cols,
                INT32_MAX - PARAM_ALIGN,
                p->is_adapter ? "lora.rank"
                              : "model.d_model, "
                                "model.mlp_hidden_size or vocabulary");
        if (p->items > 1 && param_numel(p) % PARAM_ALIGN != 0)
            die("%s: each of %d %s has %d x %d numbers; expected a multiple of %d in each",
                unit_name(u->config, unit, name), p->items, p->name, p->rows, p->cols, PARAM_ALIGN);
    }
}

static void cut_rows(Param *p, int ranks)
{
    p->rows = 0;
    for (Projection *projection = p->projection; projection < p->projection + p->num_projections;
         projection++) {
        CHECK(projection->rows % ranks == 0, "%d rows of %s cannot be divided among %d ranks",
              projection->rows, p->name, ranks);
        projection->rows /= ranks;
        projection->first = p->rows;
        p->rows += projection->rows;
    }
}

void unit_cut(UnitLayout *u, int ranks, int rank, int world)
{
    u->tensor_ranks = ranks;
    for (Param *p = u->param; p < u->param + u->num_params; p++) {
        if (p->split == SPLIT_NONE)
            continue;
        CHECK(p->tensor_ranks == 1 && !p->has_padding, "%s is cut already, or has padding",
              p->name);
        p->tensor_ranks = ranks;
        p->tensor_rank = rank;
        if (p->split == SPLIT_ROWS)
            cut_rows(p, ranks);
        else {
            CHECK(p->cols % ranks == 0, "%d columns of %s cannot be divided among %d ranks",
                  p->cols, p->name, ranks);
            p->cols /= ranks;
        }
    }
    unit_lay_out(u, world);
}

Param param_whole(const Param *p)
{
    Param whole = *p;
    whole.tensor_ranks = 1;
    if (p->split == SPLIT_COLUMNS)
        whole.cols *= p->tensor_ranks;
    else {
        whole.rows *= p->tensor_ranks;
        for (Projection *projection = whole.projection;
             projection < whole.projection + whole.num_projections; projection++) {
            projection->first *= p->tensor_ranks;
            projection->rows *= p->tensor_ranks;
        }
    }
    return whole;
}

size_t param_run(const Param *p, size_t i, size_t *whole)
{
    const size_t cols = (size_t)p->cols, row = i / cols, ranks = (size_t)p->tensor_ranks,
                 rank = (size_t)p->tensor_rank;
    *whole = i;
    if (p->tensor_ranks == 1)
        return p->stored - i;
    if (p->split == SPLIT_COLUMNS) {
        *whole = (row * ranks + rank) * cols + i % cols;
        return cols - i % cols;
    }
    const Projection *projection = p->projection;
    while (row >= (size_t)(projection->first + projection->rows))
        projection++;
    const size_t first = (size_t)projection->first, rows = (size_t)projection->rows;
    *whole = (first * ranks + rank * rows) * cols + i - first * cols;
    return (first + rows) * cols - i;
}

bool unit_plain_nf4(const UnitLayout *u)
{
    return u->config->lora.plain_nf4 || u->tensor_ranks > 1;
}

size_t param_nf4_groups(const Param *p)
{
    size_t groups = 0;
    for (int i = 0; i < p->num_projections; i++)
        groups += nf4_groups((size_t)p->projection[i].rows, (size_t)p->cols);
    return groups;
}

Nf4 param_nf4(const Param *p, const void *groups, bool plain)
{
    Nf4 x = { .group = plain ? NULL : groups,
              .plain = plain ? groups : NULL,
              .num_tensors = p->num_projections };
    for (int i = 0; i < p->num_projections; i++)
        x.rows[i] = p->projection[i].rows;
    return x;
}

/* A rank's slice of the region is a multiple of this many elements, so that no optimizer group and
 * no NF4 group is divided among ranks. */
static size_t together(const UnitLayout *u, Region r)
{
    return r == QUANTIZED && u->config->lora.base == BASE_NF4 ? nf4_group_bytes(unit_plain_nf4(u))
                                                              : PARAM_ALIGN;
}

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

int param_class(const UnitLayout *u, const Param *p)
{
    return 2 * (u->tensor_ranks > 1 && p->tensor_ranks == 1) +
           (u->matrices_first && !p->is_operand);
}

/* Places the parameters of a class after the parameters that already have offsets. */
static void place_params(UnitLayout *u, int number)
{
    for (int i = 0; i < u->num_params; i++) {
        Param *p = &u->param[i];
        const bool groups = p->region == QUANTIZED && u->config->lora.base == BASE_NF4;
        if (param_class(u, p) != number)
            continue;
        p->offset = u->numel[p->region];
        p->gathered_at = u->computing[p->region];
        p->stored = groups ? param_nf4_groups(p) * together(u, QUANTIZED) : param_numel(p);
        u->numel[p->region] += round_up(p->stored, together(u, p->region));
        u->computing[p->region] += param_align(param_numel(p));
    }
}

void unit_lay_out(UnitLayout *u, int world)
{
    memset(u->numel, 0, sizeof u->numel);
    memset(u->computing, 0, sizeof u->computing);
    for (int i = 0; i < PARAM_CLASSES; i++) {
        place_params(u, i);
        if (i == 0)
            u->matrices = u->matrices_first ? u->numel[TRAINED] : 0;
        if (i == 1)
            u->cut = u->numel[TRAINED];
    }
    for (int r = 0; r < NUM_REGIONS; r++)
        u->numel[r] = round_up(u->numel[r], together(u, r) * (size_t)world);
}

size_t unit_numbers(const UnitLayout *u)
{
    return next_number(u, false);
}
