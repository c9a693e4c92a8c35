#include "model/config/check_distill.h"

#include "kernels/runtime/error.h"

static void check_score(const Reader *r)
{
    const Config *c = &r->s->c;
    if (!c->score)
        return;
    if (c->eval_only || c->generate)
        reader_refuse(r, "score", c->score,
                      "and eval_only or generate are both given; use one of them");
    if (c->data.files.num_paths == 0)
        reader_refuse(r, "score", c->score, "needs data.paths");
    if (c->data.num_mix > 0)
        reader_refuse(r, "score", c->score, "needs data.paths instead of data.mix");
    if (c->top_k > c->model.vocab_size && c->choice == CHOOSE_TOP)
        die("%s: top_k is %d; the vocabulary has %d ids", reader_where(r, "top_k"), c->top_k,
            c->model.vocab_size);
}

void check_distill(Reader *r)
{
    static const char KEY[] = "distill.loss";
    Config *c = &r->s->c;
    check_score(r);
    if (c->distill.kind == DISTILL_NONE) {
        if (c->distill.targets)
            reader_note(r, "distill.* (distill.loss is none)");
        return;
    }
    const char *loss = c->distill.kind == DISTILL_FORWARD ? "forward_kl" : "reverse_kl";
    c->top_k = c->top_k > 0 || c->score ? c->top_k : 64;
    if (c->preference.kind != PREFERENCE_NONE)
        reader_refuse(r, KEY, loss, "and preference.loss are both given; use one of them");
    if (!c->distill.targets && !config_forward_only(c))
        reader_refuse(r, KEY, loss,
                      "needs soft labels: --distill.targets=FOLDER, which ./train --score=FOLDER "
                      "--top_k=K writes with the teacher");
    if (c->data.num_mix > 0)
        reader_refuse(r, KEY, loss, "does not support data.mix; list all data in data.paths");
    if (c->model.image.feature_size > 0)
        reader_refuse(r, KEY, loss, "does not support models with images");
    if (c->z_loss > 0)
        reader_refuse(r, KEY, loss, "has no z-loss; use --softmax_auxiliary_loss=false");
    if (c->loss_temperature != 1)
        reader_refuse(r, KEY, loss, "has its own distill.temperature; use --loss_temperature=1");
    if (c->length_warmup.steps > 0)
        reader_refuse(r, KEY, loss,
                      "does not support sequence_length_warmup: the teacher read "
                      "whole sequences");
}
