/* Names are those of the tensors in a checkpoint, so that a pattern means the same here as in other programs. */
#include "model/trainable.h"

#include <fnmatch.h>

#include "kernels/error.h"
#include "model/architecture.h"

static bool is_trained(const Config *c, const char *name)
{
    if (c->num_trainable == 0)
        return true;
    for (int i = 0; i < c->num_trainable; i++)
        if (fnmatch(c->trainable[i], name, 0) == 0)
            return true;
    return false;
}

void trainable_mark(UnitShape *u, const Config *c, int unit)
{
    HfTensor tensor[HF_TENSORS];
    const int count = hf_tensors(tensor, &c->model, u, unit);
    for (int i = 0, k = 0; i < u->num_params; i++) {
        Param *p = &u->param[i];
        const size_t end = p->offset + (size_t)p->rows * (size_t)p->cols;
        const HfTensor *first = &tensor[k];
        const bool trained = is_trained(c, first->name);
        for (; k < count && tensor[k].first < end; k++)
            if (is_trained(c, tensor[k].name) != trained)
                die("trainable: %s is %s and %s is %s, but they are one matrix here; train both or none", first->name,
                    trained ? "trained" : "frozen", tensor[k].name, trained ? "frozen" : "trained");
        p->region = trained ? TRAINED : FROZEN;
    }
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
