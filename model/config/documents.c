/* Checks of what tells documents apart and how they fill sequences. */
#include "model/config/table.h"

#include "kernels/error.h"

/* `key` at `place` has documents, which end at an eos. */
static void need_eos(const Config *c, const char *place, const char *key)
{
    if (c->model.eos_token_id < 0)
        die("%s: %s needs model.eos_token_id: it ends a document", place, key);
}

/* Tokenizers of Llama's kind have no padding of their own, and often the eos named as it. */
static void check_padding(Reader *r)
{
    const ModelConfig *m = &r->s->c.model;
    if (!r->s->c.data.mask_padding)
        return;
    if (m->pad_token_id < 0)
        die("%s: data.generate_attention_mask needs model.pad_token_id", config_where(r, "data.generate_attention_mask"));
    if (m->pad_token_id == m->eos_token_id)
        warn("%s: data.generate_attention_mask takes every pad_token_id out of the targets, and the eos is the same token (%d): "
             "the model does not learn to end a text. Label masks and best_fit packing need no such mask",
             config_where(r, "data.generate_attention_mask"), m->pad_token_id);
}

void config_check_documents(Reader *r)
{
    Config *c = &r->s->c;
    check_padding(r);
    const bool packs = c->data.files.packing == PACK_BEST_FIT, by_eos = c->data.files.boundaries == BOUNDARIES_EOS;
    if (by_eos && packs)
        need_eos(c, config_where(r, "data.packing"), "data.packing=best_fit without data.document_boundaries=metadata");
    if (by_eos && c->data.generate_doc_lengths)
        need_eos(c, config_where(r, "data.generate_doc_lengths"), "data.generate_doc_lengths");
    if (packs && config_given(r, "data.generate_doc_lengths") && !c->data.generate_doc_lengths)
        config_note(r, "data.generate_doc_lengths=false (with best_fit packing attention stays inside documents)");
    c->data.generate_doc_lengths |= packs;
    if (!packs && c->data.long_documents != LONG_TRUNCATE)
        config_note(r, "data.long_documents (only best_fit packing has it)");
    if (!by_eos && !c->data.generate_doc_lengths) {
        config_note(r, "data.document_boundaries (only best_fit packing and data.generate_doc_lengths ask for documents)");
        c->data.files.boundaries = BOUNDARIES_EOS;      /* so that nobody looks for metadata */
    }
}

void config_check_eval_documents(const Config *c, const EvalSet *set)
{
    if (set->files.packing == PACK_BEST_FIT && !c->data.generate_doc_lengths)
        die("%s: packing best_fit needs a model whose attention stays inside documents: --data.generate_doc_lengths, or train with "
            "data.packing=best_fit, too", set->where);
    if (set->files.packing == PACK_BEST_FIT && set->files.boundaries == BOUNDARIES_EOS)
        need_eos(c, set->where, "packing best_fit without document_boundaries metadata");
}
