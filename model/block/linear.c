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

/* The matrix of a linear layer, and its adapter's; of weights or of gradients. */
static Tensor matrix(const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv, w->out, w->gate_up, w->down };
    return of[l];
}

static Tensor bias(const UnitTensors *w, Linear l)
{
    return l == LINEAR_QKV ? w->qkv_bias : NONE;
}

static LoraMatrix adapter_a(const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv_a, w->out_a, w->gate_up_a, w->down_a };
    return (LoraMatrix){ .w = of[l], .num_parts = 1, .part = { { 0, of[l].cols } } };
}

static LoraMatrix adapter_b(const Model *m, const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv_b, w->out_b, w->gate_up_b, w->down_b };
    LoraMatrix b = adapter_parts(m->config, l);
    b.w = of[l];
    return b;
}

bool linear_has_adapter(const Block *b, Linear l)
{
    return acts_xa(b->a, l).data != NULL;
}

bool linear_trains_matrix(const Block *b, Linear l)
{
    return is_trained(matrix(b->dw, l));
}

/* The matrix as forward multiplies it. */
static Tensor forward_matrix(const Block *b, Linear l)
{
    const Tensor x = b->a->swiglu_operand;
    if (l != LINEAR_DOWN || !x.channel)
        return matrix(b->w, l);
    fold_channels(b->m->down_folded, linear_rows(b->w->down), x.channel);
    return b->m->down_folded;
}

void linear_recompute_xa(const Block *b, Linear l, Tensor x)
{
    if (linear_has_adapter(b, l))
        lora_narrow(acts_xa(b->a, l), x, adapter_a(b->w, l), b->m->lora_scale);
}

/* The adapter's part is written first, and the base's GEMM adds to it. In the other order
 * lora_widen would read y; a GEMM reads what it adds while it multiplies. */
void linear(const Block *b, Linear l, Tensor y, Tensor x, Tensor add)
{
    if (linear_has_adapter(b, l)) {
        linear_recompute_xa(b, l, x);
        lora_widen(y, acts_xa(b->a, l), adapter_b(b->m, b->w, l), add);
        add = y;
    }
    matmul(y, x, forward_matrix(b, l), add);
}

LoraProduct linear_defer_adapter(const Block *b, Linear l, Tensor y, Tensor x)
{
    linear_recompute_xa(b, l, x);
    matmul(y, x, matrix(b->w, l), bias(b->w, l));
    return linear_has_adapter(b, l) ? (LoraProduct){ acts_xa(b->a, l), adapter_b(b->m, b->w, l) }
                                    : NO_PRODUCT;
}

/* With tensor ranks those of a branch's two layers exist at the same time. */
static Tensor dxa(const Block *b, Linear l)
{
    const Tensor all = b->work->dxa, xa = acts_xa(b->a, l);
    const bool second = b->m->tensor_ranks > 1 && (l == LINEAR_OUT || l == LINEAR_DOWN);
    const size_t first =
        second ? (size_t)all.rows * (size_t)(all.cols / (LORA_PARTS + 1) * LORA_PARTS) : 0;
    return tensor_at((char *)all.data + first * dtype_size(all.format.dtype), all.format, xa.rows,
                     xa.cols);
}

Tensor linear_input(const Block *b, Linear l, Tensor x)
{
    return is_trained(matrix(b->dw, l))        ? linear_transpose(x)
           : is_trained(adapter_a(b->dw, l).w) ? linear_rows(x)
                                               : NONE;
}

void linear_dxa(const Block *b, Linear l, Tensor dy)
{
    if (linear_has_adapter(b, l))
        lora_narrow(dxa(b, l), dy, adapter_b(b->m, b->w, l), b->m->lora_scale);
}

void linear_dx(const Block *b, Linear l, Tensor dx, Tensor dy, bool accumulate)
{
    linear_dxa(b, l, dy);
    if (linear_has_adapter(b, l)) {
        lora_widen(dx, dxa(b, l), adapter_a(b->w, l), accumulate ? dx : NONE);
        accumulate = true;
    }
    matmul_dx(dx, dy, matrix(b->w, l), accumulate);
}

LoraProduct linear_dx_defer_adapter(const Block *b, Linear l, Tensor dx, Tensor dy)
{
    linear_dxa(b, l, dy);
    matmul_dx(dx, dy, matrix(b->w, l), false);
    return linear_has_adapter(b, l) ? (LoraProduct){ dxa(b, l), adapter_a(b->w, l) } : NO_PRODUCT;
}

void linear_dw(const Block *b, LinearGrad g)
{
    matmul_dw(matrix(b->dw, g.l), g.dy, g.x);
    matmul_db(bias(b->dw, g.l), g.dy);
    if (is_trained(adapter_a(b->dw, g.l).w)) {
        lora_dw(adapter_b(b->m, b->dw, g.l), acts_xa(b->a, g.l), g.dy);
        lora_dw(adapter_a(b->dw, g.l), dxa(b, g.l), g.x);
    }
}
