#include "model/run/distill.h"

#include "model/evaluate/soft_labels.h"

void distill_open(Run *r)
{
    if (r->config->distill.kind != DISTILL_NONE)
        r->soft_entries = soft_labels_use(r->loader, r->config);
}

SoftRows distill_rows(const Run *r, const Batch *b)
{
    if (r->config->distill.kind == DISTILL_NONE)
        return (SoftRows){ 0 };
    return (SoftRows){ b->values, r->soft_entries };
}

double distill_loss(const Config *c, Losses s)
{
    const Distill *d = &c->distill;
    if (d->kind == DISTILL_NONE)
        return s.loss;
    return d->ce_weight * s.loss + (1 - d->ce_weight) * d->temperature * d->temperature * s.zloss;
}
