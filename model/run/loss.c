#include "model/run/loss.h"

#include <math.h>

#include "model/evaluate/open_data.h"
#include "model/run/distill.h"
#include "model/run/pairs.h"
#include "model/run/policy.h"

void loss_open(Run *r)
{
    pairs_open(r);
    distill_open(r);
}

double loss_terms(Run *r, double labels)
{
    if (r->config->policy.kind != POLICY_NONE)
        return policy_step_terms(r);
    return pairs_count(r) ? fmax(r->pairs.pairs, 1) : labels;
}

void loss_use(Run *r, const Batch *b)
{
    const bool policy = r->config->policy.kind != POLICY_NONE;
    model_use_images(&r->model, batch_images(b, 0, r->model.text.T));
    model_use_weights(&r->model, policy ? policy_rows(r, b) : pairs_rows(r, b));
    model_use_soft_labels(&r->model, distill_rows(r, b));
}

double loss_of_step(Run *r, Losses s)
{
    const Config *c = r->config;
    if (c->preference.kind != PREFERENCE_NONE)
        return pairs_step(r);
    return c->policy.kind != POLICY_NONE ? policy_step(r) : distill_loss(c, s);
}
