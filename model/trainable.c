/* Names are those of the tensors in a checkpoint, so that a pattern means the same here as in other programs. */
#include "model/trainable.h"

#include <fnmatch.h>

#include "kernels/error.h"
#include "model/architecture.h"

static bool is_trained(const Config *c, const HfTensor *t)
{
    if (config_forward_only(c))
        return false;
    if (c->model.lora.rank > 0)
        return t->adapter;
    if (c->num_trainable == 0)
        return true;
    for (int i = 0; i < c->num_trainable; i++)
        if (fnmatch(c->trainable[i], t->name, 0) == 0)
            return true;
    return false;
}

/* The tensors of parameter p, of `count` in the unit's order from *k on, which moves behind them. Returns the first that is trained
 * where that one is not, or the reverse; NULL: all are as the first. */
static const HfTensor *find_split(const Config *c, const Param *p, const HfTensor *tensor, int count, int *k)
{
    const size_t end = p->offset + (size_t)p->rows * (size_t)p->cols;
    const bool trained = is_trained(c, &tensor[*k]);
    const HfTensor *other = NULL;
    for (; *k < count && tensor[*k].first < end; ++*k)
        if (!other && is_trained(c, &tensor[*k]) != trained)
            other = &tensor[*k];
    return other;
}

void trainable_mark(UnitShape *u, const Config *c, int unit)
{
    HfTensor tensor[HF_TENSORS];
    const int count = hf_tensors(tensor, &c->model, u, unit);
    for (int i = 0, k = 0; i < u->num_params; i++) {
        const HfTensor *first = &tensor[k], *other = find_split(c, &u->param[i], tensor, count, &k);
        CHECK(!other, "%s and %s are one matrix", first->name, other->name);
        u->param[i].region = is_trained(c, first) ? TRAINED : FROZEN;
        if (u->param[i].is_operand && c->model.lora.base != BASE_AS_FROZEN)
            u->param[i].region = BASE;
    }
}

char *trainable_split(const Config *c)
{
    for (int unit = 0; unit <= c->model.n_layers + 1; unit++) {
        UnitShape shape;
        HfTensor tensor[HF_TENSORS];
        unit_shape(&shape, &c->model, unit, 1);
        const int count = hf_tensors(tensor, &c->model, &shape, unit);
        for (int i = 0, k = 0; i < shape.num_params; i++) {
            const HfTensor *first = &tensor[k], *other = find_split(c, &shape.param[i], tensor, count, &k);
            if (other)
                return xasprintf("%s is %s and %s is %s", first->name, is_trained(c, first) ? "trained" : "frozen", other->name,
                                 is_trained(c, other) ? "trained" : "frozen");
        }
    }
    return NULL;
}

int trainable_count(const Config *c, const char *pattern)
{
    int found = 0;
    for (int unit = 0; unit <= c->model.n_layers + 1; unit++) {
        UnitShape shape;
        HfTensor tensor[HF_TENSORS];
        unit_shape(&shape, &c->model, unit, 1);
        const int count = hf_tensors(tensor, &c->model, &shape, unit);
        for (int i = 0; i < count; i++)
            found += fnmatch(pattern, tensor[i].name, 0) == 0;
    }
    return found;
}
