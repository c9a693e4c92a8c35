/* Checks of data: files, boundaries of documents, and packing. */
#include "model/config/check_data.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/check_local.h"
#include "model/config/data_mixture.h"

/* ---- files ----------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const NamedPaths *)a)->name, ((const NamedPaths *)b)->name);
}

static void use_datasets(Settings *s)
{
    TokenFiles *f = &s->c.data.files;
    if (s->num_datasets > 0)
        qsort(s->datasets, s->num_datasets, sizeof *s->datasets, compare_names);
    for (int i = 0; i < s->num_datasets; i++) {
        NamedPaths *set = &s->datasets[i];
        f->paths = xrealloc(f->paths, (f->num_paths + set->num_paths + 1) * sizeof *f->paths);
        for (int k = 0; k < set->num_paths; k++)
            f->paths[f->num_paths++] = set->paths[k];
        set->num_paths = 0; /* data.paths owns these texts now */
    }
}

/* ---- documents ------------------------------------------------------------------------------- */

/* Dies unless documents end with an eos, which `key` at `where` needs. */
static void need_eos(const Config *c, const char *where, const char *key)
{
    if (c->model.eos_token_id < 0)
        die("%s: %s needs model.eos_token_id: it ends a document", where, key);
}

/* NOTE: Llama's tokenizers have no padding token; pad_token_id is often set to the eos. */
static void check_padding(Reader *r)
{
    const ModelConfig *m = &r->s->c.model;
    if (!r->s->c.data.mask_padding)
        return;
    if (m->pad_token_id < 0)
        die("%s: data.generate_attention_mask needs model.pad_token_id",
            reader_where(r, "data.generate_attention_mask"));
    if (m->pad_token_id == m->eos_token_id)
        warn("%s: data.generate_attention_mask removes pad_token_id from the targets, and the eos "
             "is the same token (%d): "
             "the model does not learn to end a text. Label masks and best_fit packing need no "
             "such mask",
             reader_where(r, "data.generate_attention_mask"), m->pad_token_id);
}

static void complete_documents(Reader *r)
{
    Config *c = &r->s->c;
    check_padding(r);
    const bool packs = c->data.files.packing == PACK_BEST_FIT,
               by_eos = c->data.files.boundaries == BOUNDARIES_EOS;
    if (by_eos && packs)
        need_eos(c, reader_where(r, "data.packing"),
                 "data.packing=best_fit without data.document_boundaries=metadata");
    if (by_eos && c->data.generate_doc_lengths)
        need_eos(c, reader_where(r, "data.generate_doc_lengths"), "data.generate_doc_lengths");
    if (packs && reader_given(r, "data.generate_doc_lengths") && !c->data.generate_doc_lengths)
        reader_note(r,
                    "data.generate_doc_lengths=false (data.packing=best_fit always keeps attention "
                    "inside documents)");
    c->data.generate_doc_lengths |= packs;
    if (!packs && c->data.long_documents != LONG_TRUNCATE)
        reader_note(r, "data.long_documents (only data.packing=best_fit reads this key)");
    if (!by_eos && !c->data.generate_doc_lengths) {
        reader_note(r, "data.document_boundaries (only data.packing=best_fit and "
                       "data.generate_doc_lengths need documents)");
        c->data.files.boundaries = BOUNDARIES_EOS; /* metadata is not needed */
    }
}

void check_data_eval_documents(const Config *c, const EvalSet *set)
{
    if (set->files.packing == PACK_BEST_FIT && !c->data.generate_doc_lengths)
        die("%s: packing best_fit needs a model whose attention stays inside documents: "
            "--data.generate_doc_lengths, or train with "
            "data.packing=best_fit, too",
            set->where);
    if (set->files.packing == PACK_BEST_FIT && set->files.boundaries == BOUNDARIES_EOS)
        need_eos(c, set->where, "packing best_fit without document_boundaries metadata");
}

void check_data(Reader *r)
{
    Config *c = &r->s->c;
    bool both = c->data.files.num_paths > 0 && r->s->num_datasets > 0;
    if (both)
        die("%s: give data.paths or data.datasets, not both (--data.datasets=null drops the "
            "datasets)",
            reader_where(r, "data.datasets"));
    data_mixture_read(r);
    const char *key = r->s->num_datasets > 0 ? "data.datasets" : "data.paths";
    use_datasets(r->s);
    /* all other runs need training data */
    if (c->data.files.num_paths == 0 && c->data.num_mix == 0 && !c->dry_run &&
        !config_forward_only(c))
        die("%s: no training data: give data.paths, a list of token shards, as in "
            "--data.paths='[shards/*.npy]', or data.mix",
            reader_where(r, "data.paths"));
    check_local(r, key, c->data.files.paths, c->data.files.num_paths);
    check_local(r, "data.label_mask_paths", c->data.files.label_mask_paths,
                c->data.files.num_label_mask_paths);
    c->data.files.itemsize = r->s->memmap_dtype;
    if (!reader_given(r, "data.seed"))
        c->data.seed = c->seed;
    complete_documents(r);

    const YamlNode *filter = yaml_find(r->root, "data.instance_filter");
    if (filter && filter->kind == YAML_MAP && !yaml_find(filter, "repetition_max_count"))
        c->data.instance_filter.max_count = 32;
    if (c->data.instance_filter.min_period > c->data.instance_filter.max_period)
        die("%s: repetition_min_period %d is above repetition_max_period %d",
            reader_where(r, "data.instance_filter"), c->data.instance_filter.min_period,
            c->data.instance_filter.max_period);
}
