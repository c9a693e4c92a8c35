#include "model/config/check_policy.h"

#include "kernels/runtime/error.h"

static void check_data(const Reader *r, const char *loss)
{
    static const char KEY[] = "policy.loss";
    const Config *c = &r->s->c;
    if (c->preference.kind != PREFERENCE_NONE || c->distill.kind != DISTILL_NONE)
        reader_refuse(r, KEY, loss, "and preference.loss or distill.loss are both given; use one");
    if (context_ranks(&c->strategy) > 1 || tensor_ranks(&c->strategy) > 1)
        reader_refuse(r, KEY, loss,
                      "does not support parallelism.context and parallelism.tensor: a rank needs "
                      "whole documents; use parallelism.shard, parallelism.replicate or "
                      "parallelism.pipeline");
    if (c->data.num_mix > 0)
        reader_refuse(r, KEY, loss, "does not support data.mix; list all data in data.paths");
    if (c->data.files.packing != PACK_BEST_FIT || c->data.long_documents == LONG_SPLIT)
        reader_refuse(r, KEY, loss,
                      "needs whole documents: --data.packing=best_fit and "
                      "--data.long_documents=truncate");
    if (c->model.image.feature_size > 0)
        reader_refuse(r, KEY, loss, "does not support models with images");
    if (c->z_loss > 0)
        reader_refuse(r, KEY, loss, "has no z-loss; use --softmax_auxiliary_loss=false");
    if (c->length_warmup.steps > 0)
        reader_refuse(r, KEY, loss,
                      "does not support sequence_length_warmup, which would cut documents");
}

void check_policy(Reader *r)
{
    Policy *p = &r->s->c.policy;
    const PolicyDefaults *d = policy_defaults(p->kind);
    if (!d) {
        if (reader_given(r, "policy.denominator") || reader_given(r, "policy.clip_low") ||
            reader_given(r, "policy.clip_high"))
            reader_note(r, "policy.* (policy.loss is none)");
        return;
    }
    check_data(r, d->name);
    p->denominator = p->denominator == PER_DEFAULT ? d->denominator : p->denominator;
    p->clip_low = p->clip_low >= 0 ? p->clip_low : d->clip_low;
    p->clip_high = p->clip_high >= 0 ? p->clip_high : d->clip_high;
}
