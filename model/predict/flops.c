#include "model/predict/flops.h"

#include "kernels/runtime/device.h"
#include "model/shape/units.h"

/* Mean number of keys per query in block l, over a sequence of T tokens: T/2. With a window w, the
 * number grows up to w and then stays w. */
static double mean_keys(const ModelConfig *c, int l)
{
    const double T = c->max_sequence_length,
                 w = layer_slides(c, l) && c->sliding_window < T ? c->sliding_window : T;
    return w * (1 - w / (2 * T));
}

/* Numbers of weights in a unit's matrices, over all tensor ranks: all weights, and trained weights.
 * `trains`: whether any parameter is trained. */
typedef struct {
    double all, trained;
    bool trains;
} UnitWeights;

static UnitWeights weights_of(const UnitLayout *shape)
{
    UnitWeights w = { 0 };
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        const double n = p->is_vector ? 0 : param_active(shape, p) * p->tensor_ranks;
        w.all += n;
        w.trained += p->region == TRAINED ? n : 0;
        w.trains |= p->region == TRAINED;
    }
    return w;
}

/* FLOPs per token. A weight takes 2 in forward, 2 for the gradient of its input, and 2 for its own
 * gradient if it is trained. Attention takes 2 products with the keys in forward and 4 in backward.
 * Backward ends at the first unit with a trained parameter. */
TokenFlops token_flops(const Config *c, const UnitLayout *shape)
{
    const ModelConfig *m = &c->model;
    const int head_unit = unit_count(m) - 1;
    const double HD = (double)m->n_heads * m->head_dim;
    TokenFlops f = { 0 };
    int first = 0;
    while (first < head_unit && !weights_of(&shape[first]).trains)
        first++;
    for (int u = 0; u < head_unit; u++) {
        if (!unit_reads_stream(shape[u].kind))
            continue;
        const UnitWeights w = weights_of(&shape[u]);
        const bool backward = first <= u;
        f.linear += 2 * (w.all + (backward ? w.all : 0) + w.trained);
        f.attention +=
            shape[u].kind->is_layer ? (backward ? 12 : 4) * HD * mean_keys(m, shape[u].number) : 0;
    }
    const UnitWeights head = weights_of(&shape[unit_of_head_matrix(m)]);
    f.head_forward = 2 * head.all;
    f.head = 2 * (head.all + (first < head_unit ? head.all : 0) + head.trained);
    return f;
}

static int bits_of(Format operand)
{
    return 8 * (int)dtype_size(operand.dtype);
}

double speed_of_light(const Config *c, const UnitLayout *shape)
{
    return speed_at_peak(c, shape, device_peak_flops);
}

double speed_at_peak(const Config *c, const UnitLayout *shape, double (*peak)(int bits))
{
    TokenFlops f = token_flops(c, shape);
    double operand = peak(bits_of(c->recipe.operand)), stream = peak(bits_of(c->recipe.residual));
    if (operand <= 0 || stream <= 0)
        return 0;
    const double faster =
        format_is_fp8(c->recipe.head) ? 1 / stream - 1 / peak(bits_of(c->recipe.head)) : 0;
    return 1 / (f.linear / operand + (f.head + f.attention) / stream -
                (f.head - f.head_forward) * faster);
}
