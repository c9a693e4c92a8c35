/* Patterns match the names of tensors in a checkpoint, so they mean the same as in other
 * programs. */
#include "model/shape/trainable.h"

#include <fnmatch.h>

#include "kernels/runtime/error.h"
#include "model/shape/units.h"

static bool is_trained(const Config *c, const HfTensor *t)
{
    if (config_forward_only(c))
        return false;
    if (c->model.lora.rank > 0)
        return t->adapter || t->with_adapter;
    if (c->num_trainable == 0)
        return true;
    for (int i = 0; i < c->num_trainable; i++)
        if (fnmatch(c->trainable[i], t->name, 0) == 0)
            return true;
    return false;
}

UnitLayout *trainable_shapes(const Config *c, const HfTensor *tensor, int count)
{
    const int units = unit_count(&c->model);
    UnitLayout *shape = xcalloc((size_t)units, sizeof *shape);
    size_t first = 0;
    for (int u = 0; u < units; u++) {
        unit_shape(&shape[u], &c->model, u, 1);
        shape[u].first = first;
        first += unit_numbers(&shape[u]);
    }
    for (const HfTensor *t = tensor; t < tensor + count; t++) {
        Param *p = &shape[t->unit].param[t->param];
        const Region region = p->is_operand && c->model.lora.base != BASE_AS_FROZEN ? QUANTIZED
                              : is_trained(c, t)                                    ? TRAINED
                                                                                    : FROZEN;
        CHECK(!t->joined || region == shape[t->unit].param[t[-1].param].region,
              "%s and %s are one matrix, but only one of them is trained", t[-1].name, t->name);
        p->region = region;
    }
    return shape;
}

char *trainable_split(const Config *c, const HfTensor *tensor, int count)
{
    for (const HfTensor *t = tensor; t < tensor + count; t++)
        if (t->joined && is_trained(c, t) != is_trained(c, t - 1))
            return xasprintf("%s is %s and %s is %s", t[-1].name,
                             is_trained(c, t - 1) ? "trained" : "frozen", t->name,
                             is_trained(c, t) ? "trained" : "frozen");
    return NULL;
}

const char *trainable_unknown(const Config *c, const HfTensor *tensor, int count)
{
    for (int i = 0; i < c->num_trainable; i++) {
        int k = 0;
        while (k < count && fnmatch(c->trainable[i], tensor[k].name, 0) != 0)
            k++;
        if (k == count)
            return c->trainable[i];
    }
    return NULL;
}
