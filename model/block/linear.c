#include "model/block/linear.h"

static const Tensor NONE = { 0 };
static const LoraProduct NO_PRODUCT = { 0 };

Tensor linear_rows(Tensor t)
{
    t.data_t = NULL;
    return t;
}

Tensor linear_transpose(Tensor t)
{
    if (t.data_t)
        t.data = NULL;
    return t;
}

static bool is_trained(Tensor dw)
{
    return dw.data != NULL;
}

static LinearParams params_of(const Block *b, const UnitTensors *w, Linear l)
{
    const Tensor matrix[NUM_LINEARS] = { w->qkv, w->out, w->gate_up, w->down },
                 adapter_a[NUM_LINEARS] = { w->qkv_a, w->out_a, w->gate_up_a, w->down_a },
                 adapter_b[NUM_LINEARS] = { w->qkv_b, w->out_b, w->gate_up_b, w->down_b };
    LinearParams p = {
        .matrix = matrix[l],
        .bias = l == LINEAR_QKV ? w->qkv_bias : NONE,
        .a = { .w = adapter_a[l],
               .num_projections = 1,
               .projection = { { 0, adapter_a[l].cols } } },
        .b = adapter_projections(b->stream->config, b->a->layer, l),
    };
    p.b.w = adapter_b[l];
    return p;
}

/* With tensor ranks, the dxa of both layers of a branch exist at the same time, in separate
 * memory. */
static Tensor dxa_of(const Block *b, Linear l)
{
    const Tensor all = b->work->dxa, xa = acts_xa(b->a, l);
    const bool second = b->stream->tensor_ranks > 1 && (l == LINEAR_OUT || l == LINEAR_DOWN);
    const size_t first =
        second ? (size_t)all.rows * (size_t)(all.cols / (LORA_PROJECTIONS + 1) * LORA_PROJECTIONS)
               : 0;
    return tensor_at((char *)all.data + first * dtype_size(all.format.dtype), all.format, xa.rows,
                     xa.cols);
}

bool linear_has_adapter(const LinearLayer *l)
{
    return l->xa.data != NULL;
}

LinearLayer linear_layer(const Block *b, Linear l)
{
    LinearLayer layer = { .w = params_of(b, b->w, l),
                          .xa = acts_xa(b->a, l),
                          .scale = b->stream->lora_scale,
                          .folded = b->stream->down_folded };
    if (b->dw) {
        layer.dw = params_of(b, b->dw, l);
        layer.dxa = linear_has_adapter(&layer) ? dxa_of(b, l) : NONE;
    }
    return layer;
}

bool linear_trains_matrix(const LinearLayer *l)
{
    return is_trained(l->dw.matrix);
}

/* The matrix in the form that forward multiplies. */
static Tensor forward_matrix(const LinearLayer *l, Tensor x)
{
    if (!x.channel)
        return l->w.matrix;
    fold_channels(l->folded, linear_rows(l->w.matrix), x.channel);
    return l->folded;
}

void linear_recompute_xa(const LinearLayer *l, Tensor x)
{
    if (linear_has_adapter(l))
        lora_narrow(l->xa, x, l->w.a, l->scale);
}

/* The adapter's product is written first, and the base's GEMM adds to it. In the other order,
 * lora_widen would have to read y; a GEMM reads its addend while it multiplies. */
void linear(const LinearLayer *l, Tensor y, Tensor x, Tensor add)
{
    if (linear_has_adapter(l)) {
        linear_recompute_xa(l, x);
        lora_widen(y, l->xa, l->w.b, add);
        add = y;
    }
    matmul(y, x, forward_matrix(l, x), add);
}

LoraProduct linear_defer_adapter(const LinearLayer *l, Tensor y, Tensor x)
{
    linear_recompute_xa(l, x);
    matmul(y, x, l->w.matrix, l->w.bias);
    return linear_has_adapter(l) ? (LoraProduct){ l->xa, l->w.b } : NO_PRODUCT;
}

Tensor linear_input(const LinearLayer *l, Tensor x)
{
    return is_trained(l->dw.matrix) ? linear_transpose(x)
           : is_trained(l->dw.a.w)  ? linear_rows(x)
                                    : NONE;
}

void linear_dxa(const LinearLayer *l, Tensor dy)
{
    if (linear_has_adapter(l))
        lora_narrow(l->dxa, dy, l->w.b, l->scale);
}

void linear_dx(const LinearLayer *l, Tensor dx, Tensor dy, bool accumulate)
{
    linear_dxa(l, dy);
    if (linear_has_adapter(l)) {
        lora_widen(dx, l->dxa, l->w.a, accumulate ? dx : NONE);
        accumulate = true;
    }
    matmul_dx(dx, dy, l->w.matrix, accumulate);
}

LoraProduct linear_dx_defer_adapter(const LinearLayer *l, Tensor dx, Tensor dy)
{
    linear_dxa(l, dy);
    matmul_dx(dx, dy, l->w.matrix, false);
    return linear_has_adapter(l) ? (LoraProduct){ l->dxa, l->w.a } : NO_PRODUCT;
}

void linear_dw(LinearGrad g)
{
    matmul_dw(g.l->dw.matrix, g.dy, g.x);
    matmul_db(g.l->dw.bias, g.dy);
    if (is_trained(g.l->dw.a.w)) {
        lora_dw(g.l->dw.b, g.l->xa, g.dy);
        lora_dw(g.l->dw.a, g.l->dxa, g.x);
    }
}
