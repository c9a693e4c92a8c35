/* A model is a row of units: the embedding, the blocks, the head. A unit is what is gathered and sharded as a whole. In forward it
 * reads the residual stream and writes it to the next unit, in backward it reads and writes the stream's gradient. */
#pragma once
#include "model/plan.h"

typedef struct UnitKind {
    const char *name;                           /* in messages and traces */
    int  (*count)(const ModelConfig *c);        /* how many a model has, one after the other */
    bool   is_layer;                            /* its matrices are operands of the recipe, and its units share buffers for weights */
    const ParamRow *params;
    int    num_params;

    /* Its buffers: m->unit_acts[u], of which res0 is where the unit reads the stream. NULL: it reads none. */
    void (*plan)(Planner *p, Model *m, int u);

    /* From the stream in unit_acts[u].res0 to unit_acts[u + 1].res0. */
    void (*forward)(Model *m, const Unit *w, int u);

    /* For which uses backward needs the unit's weights; NULL: for none. Then from m->work.dres, the gradient of what it wrote, to
     * that of what it read, unless nothing below is trained: goes_on. */
    int  (*backward_uses)(const Model *m, int u);
    void (*backward)(Model *m, const Unit *w, Unit *dw, int u, bool goes_on);
} UnitKind;

/* The last unit is the head, which has no `forward` and no `backward`: logits exist only between the two, so it makes them at once
 * (head.h). */
const UnitKind *unit_kind (const ModelConfig *c, int unit);
int             unit_first(const ModelConfig *c, const UnitKind *k);            /* the first unit of that kind */
int             unit_count(const ModelConfig *c);                               /* all units of the model */
int             unit_of_layer(const ModelConfig *c, int layer);
int             unit_of_head_matrix(const ModelConfig *c);                      /* the embedding's, if tied */

/* Writes and returns what messages call the unit: "the embedding", "block 3", "the head". */
enum { UNIT_NAME = 32 };
const char     *unit_name (const ModelConfig *c, int unit, char text[UNIT_NAME]);

/* A kind more, between the embedding and the layers; *k must stay. Dies if there are too many. */
void            unit_kind_add(const UnitKind *k);
