/* Adapters: the keys lora.*, the folder of adapters that a run goes on with, and the base that they stand beside. */
#include "model/config/table.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/adapter.h"
#include "model/config/quantized.h"

/* ---- where the base is ------------------------------------------------------------------------------------ */

static _Noreturn void say_no_base(const char *source)
{
    die("%s/adapter_config.json: base_model_name_or_path names no model; say where the base of these adapters is: "
        "--lora.base_path=FOLDER", source);
}

/* What is configured counts, then what the adapters' file says. Of a run that goes on load_path may be what it began with. */
void config_find_base(Reader *r)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    const char *source = c->source;
    if (!source || !adapter_is(source))
        return;
    char *where = l->base_path ? xasprintf("%s: lora.base_path %s", config_where(r, "lora.base_path"), l->base_path) : NULL;
    if (!l->base_path && c->continues && c->load_path && !adapter_is(c->load_path)) {
        l->base_path = xstrdup(c->load_path);
        where = xasprintf("%s: load_path %s", config_where(r, "load_path"), l->base_path);
    }
    if (!l->base_path) {
        l->base_path = adapter_base(source);
        if (!l->base_path)
            say_no_base(source);
        where = xasprintf("%s/adapter_config.json: base_model_name_or_path %s", source, l->base_path);
        YamlNode *n = yaml_new(YAML_SCALAR, NULL, l->base_path, source, 0);
        config_check_texts(n, "lora.base_path");
        yaml_free(n);
    }
    config_check_base(where, l->base_path);
    free(where);
}

/* Adapters want ten times the rate of full training, by QLoRA's [Dettmers et al. 2023, arXiv 2305.14314, table 9] and others'
 * settings; a run without a file that was given none has this. */
void config_choose_adapter_rate(Reader *r)
{
    const char *source = r->s->c.source;
    const YamlNode *n = yaml_find(r->root, "optimizer.learning_rate");
    const bool given = n && strncmp(n->file, "--", 2) == 0;
    if (!given && (config_given(r, "lora.rank") || (source && adapter_is(source))))
        yaml_override(r->root, "--optimizer.learning_rate=2e-4");
}

/* ---- what the adapters are -------------------------------------------------------------------------------- */

static void read_targets(Reader *r)
{
    Lora *l = &r->s->c.model.lora;
    for (int i = 0; i < r->s->num_lora_modules; i++) {
        const char *name = r->s->lora_modules[i];
        const bool all = strcmp(name, "all-linear") == 0;
        const LoraModule module = adapter_module(name);
        if (!all && module == NUM_LORA_MODULES)
            die("%s: lora.target_modules: expected q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj or all-linear, "
                "found '%s'", config_where(r, "lora.target_modules"), name);
        for (int k = 0; k < NUM_LORA_MODULES; k++)
            l->target[k] |= all || k == (int)module;
    }
    if (r->s->num_lora_modules == 0)
        die("%s: lora.target_modules is empty; all-linear names all seven", config_where(r, "lora.target_modules"));
}

/* As the resolved configuration has them. */
static void write_targets(Settings *s)
{
    const Lora *l = &s->c.model.lora;
    value_free(s, config_key("lora.target_modules"));
    s->lora_modules = xcalloc(NUM_LORA_MODULES, sizeof *s->lora_modules);
    for (int k = 0; k < NUM_LORA_MODULES; k++)
        if (l->target[k])
            s->lora_modules[s->num_lora_modules++] = xstrdup(adapter_module_name((LoraModule)k));
    if (s->num_lora_modules == NUM_LORA_MODULES) {
        value_free(s, config_key("lora.target_modules"));
        value_default(s, config_key("lora.target_modules"));
    }
}

static void must_agree(const Reader *r, const char *source, const char *key, bool same)
{
    if (config_given(r, key) && !same)
        die("%s: %s is another one than that of the adapters in %s; --%s=null takes it from there", config_where(r, key), key,
            source, key);
}

/* What the folder says counts, and what was given besides may not contradict it. */
static void take_adapter(Reader *r, const char *source)
{
    Lora *l = &r->s->c.model.lora, there = *l;
    double dropout;
    adapter_read(&there, &dropout, source, &r->s->c.model);
    must_agree(r, source, "lora.rank", l->rank == there.rank);
    must_agree(r, source, "lora.alpha", l->alpha == there.alpha);
    must_agree(r, source, "lora.use_rslora", l->use_rslora == there.use_rslora);
    must_agree(r, source, "lora.target_modules", memcmp(l->target, there.target, sizeof l->target) == 0);
    *l = there;
    if (dropout > 0)
        config_note(r, "lora_dropout %g of %s (there is no dropout)", dropout, source);
    char *base = config_given(r, "lora.base") ? NULL : config_trained_with(source, "lora.base");
    if (base)
        value_parse_text(r->s, config_key("lora.base"), base, source);
    free(base);
}

/* ---- checks ----------------------------------------------------------------------------------------------- */

/* source: the adapters that are continued; NULL: they are new. */
static void check_rank(const Reader *r, const char *source)
{
    char *file = source ? xasprintf("%s/adapter_config.json", source) : NULL;
    const ModelConfig *m = &r->s->c.model;
    const int C = m->d_model, q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim, F = m->mlp_width;
    const int in[NUM_LORA_MODULES] = { C, C, C, q, C, C, F }, out[NUM_LORA_MODULES] = { q, kv, kv, C, F, F, C };
    for (int k = 0; k < NUM_LORA_MODULES; k++) {
        const int most = in[k] < out[k] ? in[k] : out[k];
        if (m->lora.target[k] && m->lora.rank > most)
            die("%s: lora.rank %d is above %d, the rank of %s, which is %d x %d; %s", file ? file : config_where(r, "lora.rank"),
                m->lora.rank, most, adapter_module_name((LoraModule)k), out[k], in[k],
                file ? "such adapters are only merged, by --export" : "take a smaller one");
    }
    free(file);
}

/* Without adapters, what is said about them says nothing. */
static void note_idle(Reader *r)
{
    const Settings *s = r->s;
    const struct { const char *key; bool says; } keys[] = {
        { "lora.alpha", config_given(r, "lora.alpha") },
        { "lora.use_rslora", s->c.model.lora.use_rslora },
        { "lora.target_modules", s->num_lora_modules != 1 || strcmp(s->lora_modules[0], "all-linear") != 0 },
        { "lora.base", config_given(r, "lora.base") },
        { "lora.base_path", config_given(r, "lora.base_path") },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (keys[i].says)
            config_note(r, "%s (there is no lora.rank, so there are no adapters)", keys[i].key);
    value_free(r->s, config_key("lora.base_path"));
}

/* In which format the base is stored. Where nothing is trained all that is not in E4M3 or NF4 is as rounded as in training, so that
 * adapters give what they gave there: recipe_forward_weights may say otherwise. */
static void settle_base(Reader *r)
{
    Settings *s = r->s;
    Format *frozen = &s->c.recipe.frozen;
    bool nested = true;
    if (s->c.model.lora.base_path && quantized_in_4_bits(s->c.model.lora.base_path, &nested) && s->lora_base == NOT_GIVEN)
        s->lora_base = BASE_NF4;
    const bool given = config_given(r, "format.frozen"), bf16 = s->lora_base == BASE_AS_FROZEN;
    s->c.model.lora.base = s->lora_base == NOT_GIVEN ? BASE_AS_FROZEN : (BaseFormat)s->lora_base;
    s->c.model.lora.plain_nf4 = s->lora_base == BASE_NF4 && !nested;
    if (bf16 && given && frozen->dtype != BF16)
        die("%s: lora.base bf16 and format.frozen %s both say how frozen weights are stored; leave one of them out",
            config_where(r, "lora.base"), format_name(*frozen));
    if (bf16 || (config_forward_only(&s->c) && !given && s->c.recipe.stream.dtype == BF16))
        *frozen = (Format){ BF16, 0, false };
}

/* New adapters stand beside the model of load_path. */
static void settle_base_path(Reader *r, const char *source)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    if (l->base_path && (!source || strcmp(l->base_path, source) != 0))
        die("%s: lora.base_path is the base of adapters that load_path names; new ones have it as load_path: --load_path=%s "
            "--lora.base_path=null", config_where(r, "lora.base_path"), l->base_path);
    if (!source && !c->dry_run)
        warn("adapters beside random weights learn nothing of use: the base is missing (load_path?)");
    if (source && !l->base_path)
        l->base_path = xstrdup(source);
}

/* Files made for training all weights have a tenth of what adapters want. */
static void check_rate(Reader *r)
{
    const Config *c = &r->s->c;
    if (!config_forward_only(c) && c->optimizer.lr < 5e-5)
        warn("%s: a rate of %g hardly moves adapters, which want about ten times that of full training: "
             "--optimizer.learning_rate=2e-4", config_where(r, "optimizer.learning_rate"), c->optimizer.lr);
}

void config_check_lora(Reader *r)
{
    Config *c = &r->s->c;
    Lora *l = &c->model.lora;
    const char *source = c->source;
    const bool continued = source && adapter_is(source);
    if (l->rank == 0 && !continued) {
        note_idle(r);
        return;
    }
    if (!continued && config_forward_only(c))
        config_note(r, "lora.rank (%s has no adapters, and new ones add nothing)", source ? source : "the model");
    if (l->rank > 0 && !continued && c->continues)
        die("%s: lora.rank: %s, which the run would go on with, has no adapters; begin with it in another save_folder: "
            "--load_path=%s --try_load_latest_save=false --save_folder=...", config_where(r, "lora.rank"), source, source);
    if (l->alpha == 0 && !continued)
        l->alpha = l->rank;
    read_targets(r);
    if (continued)
        take_adapter(r, source);
    else
        settle_base_path(r, source);
    if (c->num_trainable > 0)
        die("%s: trainable: with adapters (lora.rank %d) nothing else is trained; leave one of them out: --trainable=[] or "
            "--lora.rank=null", config_where(r, "trainable"), l->rank);
    write_targets(r->s);
    check_rank(r, continued ? source : NULL);
    check_rate(r);
    settle_base(r);
}
