/* Checks the recipe, which is a row of the table, chosen by name, with changed columns. Checks the
 * optimizer, which reads the columns of moments. As in check_model.c, every message names a key
 * with file and line, and possible values. */
#include "model/config/check_recipe.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/config/changes.h"
#include "model/keys/key.h"
#include "model/shape/optimizer_table.h"
#include "model/shape/params.h"

/* ---- the optimizer --------------------------------------------------------------------------- */

/* Notes keys that this optimizer does not read. Keys with their default values are no error,
 * because the config.yaml of a run has all keys. */
static void note_unread(Reader *r, const Optimizer *o)
{
    const bool m = optimizer_reads(o, MOMENT1), v = optimizer_reads(o, MOMENT2);
    const struct {
        const char *key;
        bool read;
    } keys[] = {
        { "optimizer.betas", o->has & HAS_BETAS },
        { "optimizer.eps", o->has & HAS_EPS },
        { "optimizer.weight_decay", o->has & HAS_WEIGHT_DECAY },
        { "optimizer.decay_norm_and_bias", o->has & HAS_WEIGHT_DECAY },
        { "optimizer.decay_embeddings", o->has & HAS_WEIGHT_DECAY },
        { "format.moment1", m },
        { "format.moment2", v },
        { "optimizer.momentum", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.nesterov", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.ns_steps", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.ns_eps", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.adjust_lr_fn", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.per_head", o->has & HAS_NEWTON_SCHULZ },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!keys[i].read && reader_given(r, keys[i].key) &&
            !changes_is_default(r, key_find(keys[i].key)))
            reader_note(r, "%s (optimizer %s does not read this key)", keys[i].key, o->name);
}

/* Refuses what Muon does not support: it reads whole matrices, so adapters and matrices in host
 * memory are impossible. */
static void check_muon(Reader *r)
{
    const Config *c = &r->s->c;
    const struct {
        const char *key;
        HostUse use;
    } host[] = { { "offload.optimizer", c->offload.optimizer },
                 { "offload.master", c->offload.master } };
    if (c->model.lora.rank > 0)
        die("%s: optimizer.name is muon and lora.rank is %d; Muon orthogonalizes the blocks' "
            "matrices, not adapters: use "
            "--optimizer.name=adamw, or train all weights with --lora.rank=null",
            reader_where(r, "lora.rank"), c->model.lora.rank);
    for (int i = 0; i < 2; i++)
        if (host[i].use == HOST_ALL)
            die("%s: optimizer.name is muon and %s is all; the states and master weights of Muon "
                "are on the device: use "
                "--%s=never, or --optimizer.name=adamw",
                reader_where(r, host[i].key), host[i].key, host[i].key);
}

void check_recipe_optimizer(Reader *r)
{
    const char *name = r->s->c.optimizer.name;
    const Optimizer *o = optimizer_find(name);
    char known[512] = "";
    for (int i = 0; !o && optimizer_at(i); i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 optimizer_at(i)->name);
    if (!o)
        die("%s: optimizer.name: this program has no optimizer '%s'; it has %s",
            reader_where(r, "optimizer.name"), name, known);
    note_unread(r, o);
    if (o->orthogonalizes)
        check_muon(r);
}

/* ---- the recipe ------------------------------------------------------------------------------ */

static const Recipe *find_recipe(Reader *r, const char *name)
{
    const Recipe *found = recipe_find(name);
    if (found)
        return found;
    char known[512] = "";
    for (const Recipe *k = recipes; k->name; k++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s",
                 k == recipes ? "" : ", ", k->name);
    die("%s: this build has no recipe '%s'; it has %s; --recipe=bf16 replaces the recipe of this "
        "file",
        reader_where(r, "recipe"), name, known);
}

/* Checks a column: its group size must divide `size`. A group size of 0 means one scale for the
 * tensor. */
static void check_groups(Reader *r, const char *name, Format f, int size)
{
    bool moment = strncmp(name, "format.moment", strlen("format.moment")) == 0;
    const bool own = reader_given(r, name);
    char *recipe = xasprintf("%s: recipe %s", reader_where(r, "recipe"), r->s->recipe);
    const char *where = own ? reader_where(r, name) : recipe;
    if (format_is_dynamic8(f))
        die("%s: %s cannot be %s: only the moments of --optimizer.name=adamw8bit have this format",
            where, name, format_name(f));
    if (f.expand && !moment)
        die("%s: %s cannot be %s: only moments are expanded, leave out the +", where, name,
            format_name(f));
    if (f.group && !size)
        die("%s: %s cannot be %s: a GEMM operand has one scale, use e4m3 or e5m2", where, name,
            format_name(f));
    if (f.group && size % f.group != 0)
        die("%s: %s is %s, but %s of %d cannot be split into groups of %d; use groups of a "
            "divisor of this number, or bf16",
            where, name, format_name(f), moment ? "a block" : "a row", size, f.group);
    if (moment && format_is_fp8(f) && !f.group)
        die("%s: %s cannot be %s: FP8 moments have a scale per group, as in %s/128", where, name,
            format_name(f), format_name(f));
    if (f.group && !knows_group(f.group, moment))
        die("%s: %s cannot be %s: the CUDA kernels only support groups of %d; the CPU back end "
            "(make BACKEND=cpu) supports all",
            where, name, format_name(f), moment ? 128 : 16);
    free(recipe);
}

/* NOTE: without dynamic range expansion (k), a group's scale is BF16, rounded up: if amax decreases
 * by less than 2^-8 in a step, the scale does not change. With stationary gradients, v is 1.2 times
 * too large for beta2 = 0.99, and 5 times for 0.999, which halves updates. A BF16 v is rounded to
 * nearest: v never decreases if 1 - beta2 is less than half of v's last place, which is 2^-8 to
 * 2^-9 of v. For a v that is rounded to 0 see "Moments of rare gradients" in model/README.md. */
static void check_coarseness(Reader *r)
{
    const Format v = r->s->c.recipe.moment2;
    const double beta2 = r->s->c.optimizer.beta2;
    const char *where = reader_where(r, "optimizer.betas");
    if (format_is_fp8(v) && !v.expand && beta2 > 0.98)
        warn("%s: FP8 moments without expansion are too coarse for a beta2 of %g: updates are too "
             "small. Use 0.95, or "
             "--format.moment2=e4m3/128+",
             where, beta2);
    if (format_is_fp8(v) && !v.expand)
        warn("%s: in %s, the v of weights with rare gradients, such as the embedding of a rare "
             "token, is rounded to 0, and the updates may become hundreds of times too large. Use "
             "--format.moment2=%s+",
             reader_where(r, "format.moment2"), format_name(v), format_name(v));
    if (v.dtype == BF16 && 1 - beta2 < 0x1p-8)
        warn("%s: a v in bf16 is too coarse for a beta2 of %g: it does not decay. Use 0.95, or "
             "--format.moment2=f32",
             where, beta2);
}

static void check_down_scales(Reader *r)
{
    const Recipe *c = &r->s->c.recipe;
    const char *key = "fp8.down_scales";
    if (c->down_scales == DOWN_TENSOR)
        return;
    if (!format_is_fp8(c->operand))
        reader_note(r, "%s (format.operand is %s, which needs no scales)", key,
                    format_name(c->operand));
    else if (r->s->c.model.lora.rank)
        die("%s: %s=channel does not support adapters (lora.rank is %d), which read down_proj's "
            "input, too; use --%s=tensor",
            reader_where(r, key), key, r->s->c.model.lora.rank, key);
}

/* Checks the formats of moments that the optimizer reads. */
static void check_moments(Reader *r)
{
    const Config *c = &r->s->c;
    const Optimizer *o = optimizer_find(c->optimizer.name);
    if (optimizer_reads(o, MOMENT1))
        check_groups(r, "format.moment1", c->recipe.moment1, PARAM_ALIGN);
    if (!optimizer_reads(o, MOMENT2))
        return;
    check_groups(r, "format.moment2", c->recipe.moment2, PARAM_ALIGN);
    check_coarseness(r);
}

static void check_columns(Reader *r)
{
    const ModelConfig *m = &r->s->c.model;
    const int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    const Recipe *c = &r->s->c.recipe;
    const struct {
        const char *name;
        Format format;
    } wide[] = { { "format.residual", c->residual },
                 { "format.master", c->master },
                 { "format.grads", c->grads },
                 { "format.frozen", c->frozen } };
    for (int i = 0; i < 4; i++)
        if (format_has_scales(wide[i].format))
            die("%s: %s cannot be %s; use bf16 or f32", reader_where(r, wide[i].name), wide[i].name,
                format_name(wide[i].format));
    check_groups(r, "format.saved_norm_input", c->saved_norm_input, m->d_model);
    check_groups(r, "format.saved_qkv", c->saved_qkv, q + 2 * kv);
    check_groups(r, "format.saved_attention", c->saved_attention, q);
    check_groups(r, "format.saved_mlp", c->saved_mlp, 2 * m->mlp_width);
    if (m->experts.dense_width > 0)
        check_groups(r, "format.saved_mlp", c->saved_mlp, 2 * m->experts.dense_width);
    check_groups(r, "format.operand", c->operand, 0);
    check_groups(r, "format.gradient", c->gradient, 0);
    const char *given = reader_given(r, "format.gradient") ? "format.gradient" : "format.operand";
    if (format_is_fp8(c->operand) != format_is_fp8(c->gradient))
        die("%s: format.operand is %s and format.gradient %s; GPUs multiply FP8 only by FP8: make "
            "both FP8 or neither",
            reader_where(r, given), format_name(c->operand), format_name(c->gradient));
    check_groups(r, "format.head", c->head, 0);
    if (reader_given(r, "format.head") && !format_is_fp8(c->head) &&
        !format_equal(c->head, c->residual))
        die("%s: format.head is %s and format.residual %s; the head's GEMMs are in FP8 or in the "
            "format of the residual stream: use e5m2 or %s",
            reader_where(r, "format.head"), format_name(c->head), format_name(c->residual),
            format_name(c->residual));
    check_moments(r);
    check_down_scales(r);
}

void check_recipe(Reader *r)
{
    Settings *s = r->s;
    if (!s->recipe)
        s->recipe = xstrdup(s->c.eval_only || s->c.generate ? "bf16" : "coat");
    s->c.recipe = *find_recipe(r, s->recipe);
    static const char *const sections[] = { "format", "activations", "fp8" };
    for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++) {
        YamlNode *columns = yaml_find(r->root, sections[i]);
        if (columns)
            reader_apply(r, columns, sections[i], s);
    }
    if (s->c.recipe.recompute && s->c.recipe.keep == KEEP_BLOCK)
        reader_note(r, "activations.recompute (activations.keep is block: all blocks recompute)");
    if (config_forward_only(&s->c) && !reader_given(r, "format.frozen"))
        s->c.recipe.frozen = recipe_forward_weights(&s->c.recipe);
    check_columns(r);
}
