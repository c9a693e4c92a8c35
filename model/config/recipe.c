/* The recipe: a row of the table, chosen by name or by COAT's sections, and changes to it; and the
 * optimizer, which reads the columns of moments. As in check_model.c, every message names the place
 * of a key that is involved and values that would work. */
#include "model/config/table.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/optimizer.h"
#include "model/params.h"

/* ---- the optimizer --------------------------------------------------------------------------- */

/* Keys that this optimizer does not read, unless they have their defaults, as in the file of a
 * run. */
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
        { "optimizer.adjust_lr", o->has & HAS_NEWTON_SCHULZ },
        { "optimizer.per_head", o->has & HAS_NEWTON_SCHULZ },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!keys[i].read && config_given(r, keys[i].key) &&
            !config_is_default(r, config_key(keys[i].key)))
            config_note(r, "%s (optimizer %s does not have it)", keys[i].key, o->name);
    if (!m && !v && r->s->quantize_optimizer.method == QUANTIZE_COAT)
        config_note(r, "the formats of quantize_optimizer (optimizer %s has its own)", o->name);
}

/* What Muon cannot do: it reads whole matrices, which are neither adapters nor on the host. */
static void check_muon(Reader *r)
{
    const Config *c = &r->s->c;
    const struct {
        const char *key;
        HostUse use;
    } host[] = { { "host.moments", c->host.moments }, { "host.master", c->host.master } };
    if (c->model.lora.rank > 0)
        die("%s: optimizer.name is muon and lora.rank is %d; Muon orthogonalizes the blocks' "
            "matrices, not adapters: use "
            "--optimizer.name=adamw, or train all weights with --lora.rank=null",
            config_where(r, "lora.rank"), c->model.lora.rank);
    for (int i = 0; i < 2; i++)
        if (host[i].use == HOST_ALL)
            die("%s: optimizer.name is muon and %s is all; the states and master weights of Muon "
                "are on the device: use "
                "--%s=never, or --optimizer.name=adamw",
                config_where(r, host[i].key), host[i].key, host[i].key);
}

void config_check_optimizer(Reader *r)
{
    const char *name = r->s->c.optimizer.name;
    const Optimizer *o = optimizer_find(name);
    char known[512] = "";
    for (int i = 0; !o && optimizer_at(i); i++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 optimizer_at(i)->name);
    if (!o)
        die("%s: optimizer.name: this program has no optimizer '%s'; it has %s",
            config_where(r, "optimizer.name"), name, known);
    note_unread(r, o);
    if (o->orthogonalizes)
        check_muon(r);
}

/* ---- the recipe ------------------------------------------------------------------------------ */

static const Recipe *find_recipe(Reader *r, const char *name, const char *key)
{
    const Recipe *found = recipe_find(name);
    if (found)
        return found;
    char known[512] = "";
    for (const Recipe *k = recipes; k->name; k++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s",
                 k == recipes ? "" : ", ", k->name);
    die("%s: this build has no recipe '%s'; it has %s; --recipe=bf16 runs the rest of this file",
        config_where(r, key), name, known);
}

/* COAT has three formats per direction; here activations, weights and outputs share one. */
static int same_bits(Reader *r, const int bit[3], const char *names)
{
    int chosen = NOT_GIVEN;
    for (int i = 0; i < 3; i++) {
        if (bit[i] != NOT_GIVEN && chosen != NOT_GIVEN && bit[i] != chosen)
            die("%s: %s must be one format; set single tensors by format.operand, format.saved, "
                "format.hidden, "
                "format.gradient",
                config_where(r, "quantize_model"), names);
        if (bit[i] != NOT_GIVEN)
            chosen = bit[i];
    }
    return chosen;
}

/* dtype: E4M3, E5M2 or NOT_GIVEN; group: 0: not given. */
static void set_format(Format *f, int dtype, int group)
{
    if (!format_is_fp8(*f))
        return;
    if (dtype != NOT_GIVEN)
        f->dtype = (DType)dtype;
    if (group > 0 && f->group > 0)
        f->group = group;
}

/* NOTE: COAT's published *-COAT-Both files have `expand`, which COAT's optimizer does not know:
 * only `expansion` and `true` enable expansion, so those runs had none although the file looks as
 * if they had. */
static void apply_blocks(Reader *r, bool model, bool optimizer)
{
    Settings *s = r->s;
    Recipe *recipe = &s->c.recipe;
    if (model) {
        int forward = same_bits(r, s->quantize_model.forward, "fabit, fwbit and fobit");
        int backward = same_bits(r, s->quantize_model.backward, "babit, bwbit and bobit");
        Format *formats[] = { &recipe->saved, &recipe->qkv, &recipe->att, &recipe->hidden,
                              &recipe->operand };
        for (int i = 0; i < 5; i++)
            set_format(formats[i], forward, s->quantize_model.group_size);
        set_format(&recipe->gradient, backward, s->quantize_model.group_size);
    }
    if (!optimizer)
        return;
    const int *expansion = s->quantize_optimizer.expansion;
    set_format(&recipe->moment1, s->quantize_optimizer.bit[0], s->quantize_optimizer.group_size);
    set_format(&recipe->moment2, s->quantize_optimizer.bit[1], s->quantize_optimizer.group_size);
    Format *moment[2] = { &recipe->moment1, &recipe->moment2 };
    for (int i = 0; i < 2; i++)
        if (expansion[i] != NOT_GIVEN)
            moment[i]->expand = expansion[i] != NO_EXPANSION;
    if (expansion[0] == EXPAND || expansion[1] == EXPAND)
        warn("%s: `expand` enables expansion; in COAT's own program only `expansion` and `true` "
             "do, so its run of "
             "this file had no expansion (--format.moment1=e4m3/128 --format.moment2=e4m3/128)",
             config_where(r, "quantize_optimizer.first_order_expansion"));
}

/* Checks a column whose groups must divide `size`; 0: it has one scale. `block`: COAT's key of the
 * size of groups. */
static void check_groups(Reader *r, const char *name, const char *block, Format f, int size)
{
    bool moment = strncmp(name, "format.moment", strlen("format.moment")) == 0;
    const bool own = config_given(r, name);
    char *recipe = xasprintf("%s: recipe %s", config_where(r, "recipe"), r->s->recipe);
    const char *where = own                               ? config_where(r, name)
                        : block && config_given(r, block) ? config_where(r, block)
                                                          : recipe;
    if (format_is_dynamic8(f))
        die("%s: %s cannot be %s, which only the moments of --optimizer.name=adamw8bit are, "
            "whatever the recipe",
            where, name, format_name(f));
    if (f.expand && !moment)
        die("%s: %s cannot be %s: only moments are expanded, leave out the +", where, name,
            format_name(f));
    if (f.group && !size)
        die("%s: %s cannot be %s: a GEMM operand has one scale, use e4m3 or e5m2", where, name,
            format_name(f));
    if (f.group && size % f.group != 0)
        die("%s: %s is %s, but %s of %d cannot be split into groups of %d; use a divisor of it, or "
            "bf16",
            where, name, format_name(f), moment ? "a block" : "a row", size, f.group);
    if (moment && format_is_fp8(f) && !f.group)
        die("%s: %s cannot be %s: FP8 moments have a scale per group, as in %s/128", where, name,
            format_name(f), format_name(f));
    if (f.group && !knows_group(f.group, moment))
        die("%s: %s cannot be %s: the CUDA kernels only support groups of %d; the CPU back end all "
            "(make BACKEND=cpu)",
            where, name, format_name(f), moment ? 128 : 16);
    free(recipe);
}

/* NOTE: without expansion (k) a group's scale is BF16, rounded up: an amax that falls by less than
 * 2^-8 in a step does not fall. With stationary gradients v is 1.2 times too large with beta2 =
 * 0.99, five times with 0.999, which halves updates. A BF16 v is rounded to nearest: it never falls
 * if 1 - beta2 is less than half its last place, which is 2^-8 to 2^-9 of v. For a v that is
 * rounded to 0 see "Moments of rare gradients" in model/README.md. */
static void check_coarseness(Reader *r)
{
    const Format v = r->s->c.recipe.moment2;
    const double beta2 = r->s->c.optimizer.beta2;
    const char *where = config_where(r, "optimizer.betas");
    if (format_is_fp8(v) && !v.expand && beta2 > 0.98)
        warn("%s: FP8 moments without expansion are too coarse for a beta2 of %g: updates are too "
             "small. Use 0.95, or "
             "--format.moment2=e4m3/128+",
             where, beta2);
    if (format_is_fp8(v) && !v.expand)
        warn("%s: a v in %s is rounded to 0 where gradients are rare, as those of rare tokens are, "
             "and updates may become hundreds "
             "of times too large. Use --format.moment2=%s+",
             config_where(r, "format.moment2"), format_name(v), format_name(v));
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
        config_note(r, "%s (format.operand is %s, which needs no scales)", key,
                    format_name(c->operand));
    else if (r->s->c.model.lora.rank)
        die("%s: %s=channel does not support adapters (lora.rank is %d), which read down_proj's "
            "input, too; use --%s=tensor",
            config_where(r, key), key, r->s->c.model.lora.rank, key);
}

/* The columns of moments, as far as the optimizer reads them. */
static void check_moments(Reader *r)
{
    const Config *c = &r->s->c;
    const Optimizer *o = optimizer_find(c->optimizer.name);
    const char *size = "quantize_optimizer.qgroup_size";
    if (optimizer_reads(o, MOMENT1))
        check_groups(r, "format.moment1", size, c->recipe.moment1, PARAM_ALIGN);
    if (!optimizer_reads(o, MOMENT2))
        return;
    check_groups(r, "format.moment2", size, c->recipe.moment2, PARAM_ALIGN);
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
    } wide[] = { { "format.stream", c->stream },
                 { "format.master", c->master },
                 { "format.grads", c->grads },
                 { "format.frozen", c->frozen } };
    for (int i = 0; i < 4; i++)
        if (format_has_scales(wide[i].format))
            die("%s: %s cannot be %s; use bf16 or f32", config_where(r, wide[i].name), wide[i].name,
                format_name(wide[i].format));
    const char *model = "quantize_model.group_size";
    check_groups(r, "format.saved", model, c->saved, m->d_model);
    check_groups(r, "format.qkv", model, c->qkv, q + 2 * kv);
    check_groups(r, "format.att", model, c->att, q);
    check_groups(r, "format.hidden", model, c->hidden, 2 * m->mlp_width);
    check_groups(r, "format.operand", NULL, c->operand, 0);
    check_groups(r, "format.gradient", NULL, c->gradient, 0);
    const char *given = config_given(r, "format.gradient") ? "format.gradient" : "format.operand";
    if (format_is_fp8(c->operand) != format_is_fp8(c->gradient))
        die("%s: format.operand is %s and format.gradient %s; GPUs multiply FP8 only by FP8: make "
            "both FP8 or neither",
            config_where(r, given), format_name(c->operand), format_name(c->gradient));
    check_groups(r, "format.head", NULL, c->head, 0);
    if (config_given(r, "format.head") && !format_is_fp8(c->head) &&
        !format_equal(c->head, c->stream))
        die("%s: format.head is %s and format.stream %s; the head's GEMMs are in FP8 or in the "
            "stream's format: use e5m2 or %s",
            config_where(r, "format.head"), format_name(c->head), format_name(c->stream),
            format_name(c->stream));
    check_moments(r);
    check_down_scales(r);
}

/* Whether a section of COAT's has keys without effect, because it does not choose the recipe and
 * its method is not `none`. method: QuantizeMethod or NOT_GIVEN. */
static bool block_is_idle(Reader *r, const char *name, int method, bool in_force)
{
    const YamlNode *n = yaml_find(r->root, name);
    return !in_force && method != QUANTIZE_NOTHING && n && n->num_children > 0;
}

static void note_idle(Reader *r, bool model, bool optimizer, bool chosen)
{
    Settings *s = r->s;
    bool idle[2] = { block_is_idle(r, "quantize_model", s->quantize_model.method, model && !chosen),
                     block_is_idle(r, "quantize_optimizer", s->quantize_optimizer.method,
                                   optimizer && !chosen) };
    const char *names = idle[0] && idle[1] ? "quantize_model and quantize_optimizer"
                        : idle[0]          ? "quantize_model"
                                           : "quantize_optimizer";
    if ((idle[0] || idle[1]) && chosen)
        config_note(r, "%s (recipe %s is given)", names, s->recipe);
    else if (idle[0] || idle[1])
        config_note(r, "%s (no %s.use_%s)", names,
                    idle[0] ? "quantize_model" : "quantize_optimizer",
                    idle[0] ? "quantize_model" : "quantize_optimizer");
    if (s->quantize_model.method == QUANTIZE_LINEAR && s->quantize_model.group_size > 0 && !chosen)
        config_note(r, "quantize_model.group_size (fp8linear saves nothing in groups)");
    if (s->precision != NOT_GIVEN && (s->precision == FP32) != (s->c.recipe.stream.dtype == F32))
        config_note(r, "precision (recipe %s)", s->recipe);
}

/* COAT's files without quantization. */
static bool says_nothing(const Settings *s)
{
    return s->quantize_model.method == QUANTIZE_NOTHING ||
           s->quantize_optimizer.method == QUANTIZE_NOTHING;
}

/* The first row that holds decides. */
static void choose_recipe(Reader *r, bool model, bool optimizer)
{
    Settings *s = r->s;
    const bool linear = s->quantize_model.method == QUANTIZE_LINEAR;
    const bool plain = s->precision == AMP_BF16 || says_nothing(s) || config_forward_only(&s->c);
    const struct {
        bool holds;
        const char *key, *recipe;
    } rows[] = {
        { s->recipe != NULL, "recipe", s->recipe },
        { linear && optimizer, "quantize_model", NULL },
        { model && optimizer, "quantize_model", "coat" },
        { linear, "quantize_model", "fp8" },
        { model, "quantize_model", "coat-act" },
        { optimizer, "quantize_optimizer", "coat-opt" },
        { s->precision == FP32, "precision", "f32" },
        { plain, "precision", "bf16" },
        { true, "precision", "coat" },
    };
    int i = 0;
    while (!rows[i].holds)
        i++;
    if (!rows[i].recipe)
        die("%s: fp8linear together with an FP8 optimizer has no recipe; use --recipe=fp8 and set "
            "--format.moment1=e4m3/128 --format.moment2=e4m3/128",
            config_where(r, rows[i].key));
    s->c.recipe = *find_recipe(r, rows[i].recipe, rows[i].key);
    if (i > 0)
        s->recipe = xstrdup(rows[i].recipe);
}

void config_complete_recipe(Reader *r)
{
    Settings *s = r->s;
    const bool linear = s->quantize_model.method == QUANTIZE_LINEAR,
               model = linear || s->quantize_model.method == QUANTIZE_COAT;
    const bool optimizer = s->quantize_optimizer.method == QUANTIZE_COAT,
               chosen = s->recipe != NULL;
    choose_recipe(r, model, optimizer);
    note_idle(r, model, optimizer, chosen);
    if (!chosen)
        apply_blocks(r, model, optimizer);
    if (s->activation_checkpointing == CHECKPOINT_BLOCKS)
        s->c.recipe.keep = KEEP_BLOCK;
    else if (s->activation_checkpointing == CHECKPOINT_FINE_GRAINED)
        s->c.recipe.keep = KEEP_INPUTS;
    else if (s->activation_checkpointing != NOT_GIVEN)
        s->c.recipe.recompute = s->activation_checkpointing;
    static const char *const sections[] = { "format", "activations", "fp8" };
    for (size_t i = 0; i < sizeof sections / sizeof sections[0]; i++) {
        YamlNode *columns = yaml_find(r->root, sections[i]);
        if (columns)
            config_apply(r, columns, sections[i], s);
    }
    if (s->c.recipe.recompute && s->c.recipe.keep == KEEP_BLOCK)
        config_note(r, "%s (activations.keep is block: all blocks recompute)",
                    config_given(r, "activations.recompute") ? "activations.recompute"
                                                             : "activation_checkpointing");
    if (config_forward_only(&s->c) && !config_given(r, "format.frozen"))
        s->c.recipe.frozen = recipe_forward_weights(&s->c.recipe);
    check_columns(r);
}
