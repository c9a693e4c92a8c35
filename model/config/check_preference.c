#include "model/config/check_preference.h"

#include "kernels/runtime/error.h"

/* The head sees all labels of a pair at once, so ranks must not divide a sequence. */
static void check_sequences(const Reader *r, const char *loss)
{
    const Config *c = &r->s->c;
    if (context_ranks(&c->strategy) > 1 || tensor_ranks(&c->strategy) > 1)
        reader_refuse(
            r, "preference.loss", loss,
            "does not support parallelism.context and parallelism.tensor: a rank needs both "
            "sides of a pair; use parallelism.shard, parallelism.replicate or "
            "parallelism.pipeline");
    if (c->data.num_mix > 0)
        reader_refuse(r, "preference.loss", loss,
                      "does not support data.mix; list all pairs in data.paths");
    if (c->data.files.packing != PACK_BEST_FIT || c->data.files.boundaries != BOUNDARIES_METADATA)
        reader_refuse(
            r, "preference.loss", loss,
            "needs --data.packing=best_fit and --data.document_boundaries=metadata, as in the "
            "preference.yaml of scripts/make_pair_shards.py");
    if (c->model.image.feature_size > 0)
        reader_refuse(r, "preference.loss", loss, "does not support models with images");
    if (c->z_loss > 0)
        reader_refuse(r, "preference.loss", loss,
                      "has no z-loss; use --softmax_auxiliary_loss=false");
    if (c->length_warmup.steps > 0)
        reader_refuse(r, "preference.loss", loss,
                      "does not support sequence_length_warmup, which would cut pairs");
}

static void check_ignored(Reader *r, const PreferenceLoss *l)
{
    const Preference *p = &r->s->c.preference;
    if (p->label_smoothing > 0 && !l->smooths)
        die("%s: preference.loss %s has no label smoothing; use --preference.label_smoothing=0",
            reader_where(r, "preference.label_smoothing"), l->name);
    if (p->gamma > 0 && p->kind != PREFERENCE_SIMPO)
        die("%s: only preference.loss simpo has a margin; use --preference.gamma=0",
            reader_where(r, "preference.gamma"));
    if (p->reference && !l->reference && !r->s->c.score)
        reader_note(r, "preference.reference (preference.loss %s has no reference model)", l->name);
}

/* Replaces nulls by the defaults of the loss. */
static void complete(Preference *p, const PreferenceLoss *l)
{
    p->beta = p->beta > 0 ? p->beta : l->beta;
    p->gamma = p->gamma >= 0 ? p->gamma : l->gamma;
    p->sft_weight = p->sft_weight >= 0 ? p->sft_weight : l->sft_weight;
}

void check_preference(Reader *r)
{
    Config *c = &r->s->c;
    const PreferenceLoss *l = preference_loss(c->preference.kind);
    if (!l) {
        if (reader_given(r, "preference.beta") || reader_given(r, "preference.gamma") ||
            reader_given(r, "preference.sft_weight") || reader_given(r, "preference.reference"))
            reader_note(r, "preference.* (preference.loss is none)");
        return;
    }
    check_sequences(r, l->name);
    check_ignored(r, l);
    complete(&c->preference, l);
    if (c->eval_only && l->reference && !c->preference.reference)
        reader_refuse(r, "preference.loss", l->name,
                      "with eval_only needs the log-probabilities of the reference model: "
                      "--preference.reference=FOLDER, which ./train --score=FOLDER writes");
}
