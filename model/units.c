/* Which units a model has, and what they are called. */
#include "model/units.h"

#include <stdio.h>

#include "kernels/runtime/error.h"

/* In the order of a model's units. */
enum { MAX_KINDS = 8 };
static const UnitKind *kinds[MAX_KINDS] = { &embedding_kind, &projector_kind, &block_kind,
                                            &head_kind };
static int num_kinds = 4;

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
