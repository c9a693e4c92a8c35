/* Adapters: the keys lora.*, the folder of adapters that a run continues, and the base model of
 * adapters. */
#include "model/config/check_lora.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/load_folder.h"
#include "model/formats/adapter.h"
#include "model/formats/loadable.h"
#include "model/formats/quantized.h"
#include "model/keys/key.h"
#include "model/keys/value.h"

/* ---- where the base is ----------------------------------------------------------------------- */

static _Noreturn void die_no_base(const char *folder)
{
    die("%s/adapter_config.json: base_model_name_or_path names no model; give the folder of the "
        "base model: "
        "--lora.base_path=FOLDER",
        folder);
}

/* Finds the folder of the base. The configured folder comes first, then the folder that the
 * adapters' file names. If a run continues, load_path may be the base of the adapters that it
 * saved. */
void check_lora_find_base(Reader *r)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    const char *folder = c->load_folder;
    if (!folder || !adapter_is(folder))
        return;
    char *where = l->base_path ? xasprintf("%s: lora.base_path %s",
                                           reader_where(r, "lora.base_path"), l->base_path)
                               : NULL;
    if (!l->base_path && c->continues && c->load_path && !adapter_is(c->load_path)) {
        l->base_path = xstrdup(c->load_path);
        where = xasprintf("%s: load_path %s", reader_where(r, "load_path"), l->base_path);
    }
    if (!l->base_path) {
        l->base_path = adapter_base(folder);
        if (!l->base_path)
            die_no_base(folder);
        where =
            xasprintf("%s/adapter_config.json: base_model_name_or_path %s", folder, l->base_path);
        YamlNode *n = yaml_new(YAML_SCALAR, NULL, l->base_path, folder, 0);
        reader_check_texts(n, "lora.base_path");
        yaml_free(n);
    }
    loadable_check_base(where, l->base_path);
    free(where);
}

/* Sets the default learning rate of a run without a configuration file: adapters need ten times the
 * rate of full training [Dettmers et al. 2023, arXiv 2305.14314, table 9]. */
void check_lora_choose_rate(Reader *r)
{
    const char *folder = r->s->c.load_folder;
    const YamlNode *n = yaml_find(r->root, "optimizer.learning_rate");
    const bool given = n && strncmp(n->file, "--", 2) == 0;
    if (!given && (reader_given(r, "lora.rank") || (folder && adapter_is(folder))))
        yaml_override(r->root, "--optimizer.learning_rate=2e-4");
}

/* ---- what the adapters are ------------------------------------------------------------------- */

static void read_targets(Reader *r)
{
    Lora *l = &r->s->c.model.lora;
    for (int i = 0; i < r->s->num_lora_modules; i++) {
        const char *name = r->s->lora_modules[i];
        const bool all = strcmp(name, "all-linear") == 0;
        const LoraModule module = adapter_module(name);
        if (!all && module == NUM_LORA_MODULES)
            die("%s: lora.target_modules: expected q_proj, k_proj, v_proj, o_proj, gate_proj, "
                "up_proj, down_proj or all-linear, "
                "found '%s'",
                reader_where(r, "lora.target_modules"), name);
        for (int k = 0; k < NUM_LORA_MODULES; k++)
            l->target[k] |= all || k == (int)module;
    }
    if (r->s->num_lora_modules == 0)
        die("%s: lora.target_modules is empty; all-linear names all seven matrices",
            reader_where(r, "lora.target_modules"));
}

/* Writes lora.target_modules as the resolved configuration shows it. */
static void write_targets(Settings *s)
{
    const Lora *l = &s->c.model.lora;
    value_free(s, key_find("lora.target_modules"));
    s->lora_modules = xcalloc(NUM_LORA_MODULES, sizeof *s->lora_modules);
    for (int k = 0; k < NUM_LORA_MODULES; k++)
        if (l->target[k])
            s->lora_modules[s->num_lora_modules++] = xstrdup(adapter_module_name((LoraModule)k));
    if (s->num_lora_modules == NUM_LORA_MODULES) {
        value_free(s, key_find("lora.target_modules"));
        value_default(s, key_find("lora.target_modules"));
    }
}

static void must_agree(const Reader *r, const char *folder, const char *key, bool same)
{
    if (reader_given(r, key) && !same)
        die("%s: %s differs from the value of the adapters in %s; --%s=null uses the value of the "
            "adapters",
            reader_where(r, key), key, folder, key);
}

/* Takes the settings of adapters from their folder. Keys that were given must not contradict these
 * settings. */
static void take_adapter(Reader *r, const char *folder)
{
    Lora *l = &r->s->c.model.lora, there = *l;
    double dropout;
    adapter_read(&there, &dropout, folder, &r->s->c.model);
    must_agree(r, folder, "lora.rank", l->rank == there.rank);
    must_agree(r, folder, "lora.alpha", l->alpha == there.alpha);
    must_agree(r, folder, "lora.use_rslora", l->use_rslora == there.use_rslora);
    must_agree(r, folder, "lora.projector", l->projector == there.projector);
    must_agree(r, folder, "lora.target_modules",
               memcmp(l->target, there.target, sizeof l->target) == 0);
    *l = there;
    if (dropout > 0)
        reader_note(r, "lora_dropout %g of %s (dropout is not supported)", dropout, folder);
    char *base =
        reader_given(r, "lora.base") ? NULL : load_folder_trained_with(folder, "lora.base");
    if (base)
        value_parse_text(r->s, key_find("lora.base"), base, folder);
    free(base);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* folder: the adapters that are continued; NULL: adapters are new. */
static void check_lora_rank(const Reader *r, const char *folder)
{
    char *file = folder ? xasprintf("%s/adapter_config.json", folder) : NULL;
    const ModelConfig *m = &r->s->c.model;
    const int C = m->d_model, q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim,
              F = m->mlp_width;
    const int in[NUM_LORA_MODULES] = { C, C, C, q, C, C, F },
              out[NUM_LORA_MODULES] = { q, kv, kv, C, F, F, C };
    for (int k = 0; k < NUM_LORA_MODULES; k++) {
        const int most = in[k] < out[k] ? in[k] : out[k];
        if (m->lora.target[k] && m->lora.rank > most)
            die("%s: lora.rank %d is above %d, the rank of %s, which is %d x %d; %s",
                file ? file : reader_where(r, "lora.rank"), m->lora.rank, most,
                adapter_module_name((LoraModule)k), out[k], in[k],
                file ? "such adapters can only be merged, by --export" : "use a smaller lora.rank");
    }
    free(file);
}

/* Without adapters the keys lora.* have no effect. */
static void note_idle(Reader *r)
{
    const Settings *s = r->s;
    const struct {
        const char *key;
        bool says;
    } keys[] = {
        { "lora.alpha", reader_given(r, "lora.alpha") },
        { "lora.use_rslora", s->c.model.lora.use_rslora },
        { "lora.target_modules",
          s->num_lora_modules != 1 || strcmp(s->lora_modules[0], "all-linear") != 0 },
        { "lora.projector", !s->c.model.lora.projector },
        { "lora.base", reader_given(r, "lora.base") },
        { "lora.base_path", reader_given(r, "lora.base_path") },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (keys[i].says)
            reader_note(r, "%s (there is no lora.rank, so there are no adapters)", keys[i].key);
    value_free(r->s, key_find("lora.base_path"));
}

/* Sets the format of the base. A run that trains nothing must round the base as training did.
 * recipe_forward_weights might choose another format for a base that is neither E4M3 nor NF4. A run
 * that trains nothing stores adapters in the format of the base. If that is BF16 and training
 * computed adapters in F32, the base is rounded to BF16 and stored in F32. */
static void complete_base(Reader *r)
{
    Settings *s = r->s;
    Format *frozen = &s->c.recipe.frozen;
    bool nested = true;
    if (s->c.model.lora.base_path && quantized_in_4_bits(s->c.model.lora.base_path, &nested) &&
        s->lora_base == NOT_GIVEN)
        s->lora_base = BASE_NF4;
    const bool given = reader_given(r, "format.frozen"), bf16 = s->lora_base == BASE_AS_FROZEN;
    s->c.model.lora.base = s->lora_base == NOT_GIVEN ? BASE_AS_FROZEN : (BaseFormat)s->lora_base;
    s->c.model.lora.plain_nf4 = s->lora_base == BASE_NF4 && !nested;
    s->c.model.lora.rounds_base = bf16 && config_forward_only(&s->c) && frozen->dtype == F32 &&
                                  s->c.recipe.residual.dtype == F32;
    if (s->c.model.lora.rounds_base)
        return;
    if (bf16 && given && frozen->dtype != BF16)
        die("%s: lora.base bf16 and format.frozen %s both set the format of frozen weights; leave "
            "one of them out",
            reader_where(r, "lora.base"), format_name(*frozen));
    if (bf16 || (config_forward_only(&s->c) && !given && s->c.recipe.residual.dtype == BF16))
        *frozen = (Format){ BF16, 0, false };
}

/* New adapters use the model of load_path as base. */
static void complete_base_path(Reader *r, const char *folder)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    if (l->base_path && (!folder || strcmp(l->base_path, folder) != 0))
        die("%s: lora.base_path is only for adapters in load_path; for new adapters give their "
            "base as load_path: --load_path=%s "
            "--lora.base_path=null",
            reader_where(r, "lora.base_path"), l->base_path);
    if (!folder && !c->dry_run)
        warn("LoRA on randomly initialized weights learns nothing useful: is load_path missing?");
    if (folder && !l->base_path)
        l->base_path = xstrdup(folder);
}

/* Configuration files for full training have a tenth of the learning rate that adapters need. */
static void check_rate(Reader *r)
{
    const Config *c = &r->s->c;
    if (!config_forward_only(c) && c->optimizer.lr < 5e-5)
        warn("%s: a learning rate of %g is low for adapters, which need about ten times the rate "
             "of full training: "
             "--optimizer.learning_rate=2e-4",
             reader_where(r, "optimizer.learning_rate"), c->optimizer.lr);
}

void check_lora(Reader *r)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    const char *folder = c->load_folder;
    const bool continued = folder && adapter_is(folder);
    if (l->rank == 0 && !continued) {
        note_idle(r);
        return;
    }
    if (!continued && config_forward_only(c))
        reader_note(r, "lora.rank (%s has no adapters, and new adapters do not change the output)",
                    folder ? folder : "the model");
    if (l->rank > 0 && !continued && c->continues)
        die("%s: lora.rank: the run would continue %s, which has no adapters; start from that "
            "checkpoint in another save_folder: "
            "--load_path=%s --try_load_latest_save=false --save_folder=...",
            reader_where(r, "lora.rank"), folder, folder);
    if (l->alpha == 0 && !continued)
        l->alpha = l->rank;
    read_targets(r);
    if (continued)
        take_adapter(r, folder);
    else
        complete_base_path(r, folder);
    if (c->num_trainable > 0)
        die("%s: trainable: with adapters (lora.rank %d) no other tensor is trained; leave out "
            "trainable or lora.rank: --trainable=[] or --lora.rank=null",
            reader_where(r, "trainable"), l->rank);
    if (!l->projector && c->model.image.feature_size == 0)
        reader_note(r, "lora.projector (a model that reads only text has no projector)");
    write_targets(r->s);
    check_lora_rank(r, continued ? folder : NULL);
    check_rate(r);
    complete_base(r);
}
