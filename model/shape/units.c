/* The units of a model, and their names. */
#include "model/shape/units.h"

#include <stdio.h>

#include "kernels/runtime/error.h"

/* Kinds in the order of a model's units: first the embedding's, last the head's. */
enum { MAX_KINDS = 8 };
static const UnitKind *kinds[MAX_KINDS];
static int num_kinds;

void unit_kind_add(const UnitKind *k, int at)
{
    CHECK(num_kinds < MAX_KINDS, "%s: there are %d kinds of units already, the maximum", k->name,
          num_kinds);
    for (int i = num_kinds++; i > at; i--)
        kinds[i] = kinds[i - 1];
    kinds[at] = k;
}

static int count_of(const UnitKind *k, const ModelConfig *c)
{
    int left = c->n_layers;
    if (k->count)
        return k->count(c);
    for (int i = 0; i < num_kinds; i++)
        left -= kinds[i]->is_layer && kinds[i]->count ? kinds[i]->count(c) : 0;
    return left;
}

const UnitKind *unit_kind(const ModelConfig *c, int unit)
{
    int i = 0;
    for (; unit >= count_of(kinds[i], c); i++) {
        unit -= count_of(kinds[i], c);
        CHECK(i + 1 < num_kinds, "the model has no such unit");
    }
    return kinds[i];
}

static int first_of(const ModelConfig *c, const UnitKind *k)
{
    int first = 0;
    for (int i = 0; kinds[i] != k; i++)
        first += count_of(kinds[i], c);
    return first;
}

int unit_count(const ModelConfig *c)
{
    return first_of(c, kinds[num_kinds - 1]) + 1;
}

int unit_number(const ModelConfig *c, int unit)
{
    const UnitKind *k = unit_kind(c, unit);
    return unit - (k->is_layer ? unit_of_layer(c, 0) : first_of(c, k));
}

int unit_of_layer(const ModelConfig *c, int layer)
{
    int unit = 0;
    for (int i = 0; !kinds[i]->is_layer || count_of(kinds[i], c) == 0; i++)
        unit += count_of(kinds[i], c);
    return unit + layer;
}

int unit_of_head_matrix(const ModelConfig *c)
{
    return c->weight_tying ? 0 : unit_count(c) - 1;
}

const char *unit_name(const ModelConfig *c, int unit, char text[UNIT_NAME])
{
    const UnitKind *k = unit_kind(c, unit);
    if (k->is_layer)
        snprintf(text, UNIT_NAME, "%s %d", k->name, unit_number(c, unit));
    else
        snprintf(text, UNIT_NAME, "the %s", k->name);
    return text;
}
