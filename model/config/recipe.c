/* The recipe: a row of the table, chosen by name or by COAT's blocks, and what is changed in it. As in check.c, every
 * message names the place of a key that takes part and says which values would do. */
#include "model/config/table.h"

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/error.h"
#include "model/params.h"

static const Recipe *find_recipe(Reader *r, const char *name, const char *key)
{
    const Recipe *found = recipe_find(name);
    if (found)
        return found;
    char known[512] = "";
    for (const Recipe *k = recipes; k->name; k++)
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", k == recipes ? "" : ", ", k->name);
    die("%s: this build has no recipe '%s'; it has %s; --recipe=bf16 runs the rest of this file", config_where(r, key), name,
        known);
}

/* COAT gives three bits per direction; here activations, weights and outputs share one format. */
static int same_bits(Reader *r, const int bit[3], const char *names)
{
    int chosen = -1;
    for (int i = 0; i < 3; i++) {
        if (bit[i] >= 0 && chosen >= 0 && bit[i] != chosen)
            die("%s: %s must be one format; set single tensors by format.operand, format.saved, format.hidden, "
                "format.gradient", config_where(r, "quantize_model"), names);
        if (bit[i] >= 0)
            chosen = bit[i];
    }
    return chosen;
}

static void set_format(Format *f, int bits, int group)
{
    if (!format_is_fp8(*f))
        return;
    if (bits >= 0)
        f->dtype = bits == 0 ? E4M3 : E5M2;
    if (group > 0 && f->group > 0)
        f->group = group;
}

/* NOTE: COAT's published *-COAT-Both files say `expand`, which COAT's optimizer does not know: it turns expansion on
 * for `expansion` and `true` only, so those runs had it off although the file reads as if it were on. */
static void apply_blocks(Reader *r, bool model, bool optimizer)
{
    Settings *s = r->s;
    Recipe *recipe = &s->c.recipe;
    if (model) {
        int forward = same_bits(r, s->quantize_model.forward, "fabit, fwbit and fobit");
        int backward = same_bits(r, s->quantize_model.backward, "babit, bwbit and bobit");
        Format *formats[] = { &recipe->saved, &recipe->qkv, &recipe->att, &recipe->hidden, &recipe->operand };
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
        if (expansion[i] >= 0)
            moment[i]->expand = expansion[i] <= 2;
    if (expansion[0] == 1 || expansion[1] == 1)
        warn("%s: `expand` is read as on; COAT's own program takes only `expansion` and `true` as on, so its run of "
             "this file had no expansion (--format.moment1=e4m3/128 --format.moment2=e4m3/128)",
             config_where(r, "quantize_optimizer.first_order_expansion"));
}

/* The column at `name`, whose groups must divide `size`; 0: it has one scale. `block`: COAT's key for their size. */
static void check_groups(Reader *r, const char *name, const char *block, Format f, int size)
{
    bool moment = strncmp(name, "format.moment", strlen("format.moment")) == 0;
    const bool own = config_given(r, name);
    char recipe[64];
    snprintf(recipe, sizeof recipe, "recipe %s", r->s->recipe);
    const char *place = own ? config_where(r, name) : block && config_given(r, block) ? config_where(r, block) : recipe;
    if (f.expand && !moment)
        die("%s: %s cannot be %s: only moments are expanded, leave out the +", place, name, format_name(f));
    if (f.group && !size)
        die("%s: %s cannot be %s: a GEMM operand has one scale, take e4m3 or e5m2", place, name, format_name(f));
    if (f.group && size % f.group != 0)
        die("%s: %s is %s, but %s of %d cannot be cut into groups of %d; take a divisor of it, or bf16", place, name,
            format_name(f), moment ? "a block" : "a row", size, f.group);
    if (moment && format_is_fp8(f) && !f.group)
        die("%s: %s cannot be %s: FP8 moments have a scale per group, as in %s/128", place, name, format_name(f),
            format_name(f));
    if (f.group && !knows_group(f.group, moment))
        die("%s: %s cannot be %s: the CUDA kernels have groups of %d; other groups train on the CPU (make BACKEND=cpu)", place,
            name, format_name(f), moment ? 128 : 16);
}

/* NOTE: a group's scale without k is BF16, rounded up: a maximum that falls by less than 2^-8 in a step does not fall.
 * With beta2 = 0.99 stationary gradients leave v 1.2 times too large, with 0.999 five times: updates of half the size. */
static void check_moments(Reader *r)
{
    const Config *c = &r->s->c;
    const char *given = config_given(r, "format.moment2") ? "format.moment2" : "format.moment1";
    if (format_is_fp8(c->recipe.moment1) != format_is_fp8(c->recipe.moment2))
        die("%s: format.moment1 is %s and format.moment2 %s; AdamW takes both in FP8 or neither", config_where(r, given),
            format_name(c->recipe.moment1), format_name(c->recipe.moment2));
    if (format_is_fp8(c->recipe.moment2) && !c->recipe.moment2.expand && c->optimizer.beta2 > 0.98)
        warn("%s: FP8 moments without expansion are too coarse for a beta2 of %g: updates are too small. Take 0.95, or "
             "--format.moment2=e4m3/128+", config_where(r, "optimizer.betas"), c->optimizer.beta2);
}

static void check_columns(Reader *r)
{
    const ModelConfig *m = &r->s->c.model;
    const int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    const Recipe *c = &r->s->c.recipe;
    const struct { const char *name; Format format; } wide[] = {
        { "format.stream", c->stream }, { "format.master", c->master }, { "format.grads", c->grads }, { "format.frozen", c->frozen }
    };
    for (int i = 0; i < 4; i++)
        if (format_is_fp8(wide[i].format))
            die("%s: %s cannot be %s; take bf16 or f32", config_where(r, wide[i].name), wide[i].name,
                format_name(wide[i].format));
    const char *model = "quantize_model.group_size", *optimizer = "quantize_optimizer.qgroup_size";
    check_groups(r, "format.saved", model, c->saved, m->d_model);
    check_groups(r, "format.qkv", model, c->qkv, q + 2 * kv);
    check_groups(r, "format.att", model, c->att, q);
    check_groups(r, "format.hidden", model, c->hidden, 2 * m->mlp_width);
    check_groups(r, "format.operand", NULL, c->operand, 0);
    check_groups(r, "format.gradient", NULL, c->gradient, 0);
    const char *given = config_given(r, "format.gradient") ? "format.gradient" : "format.operand";
    if (format_is_fp8(c->operand) != format_is_fp8(c->gradient))
        die("%s: format.operand is %s and format.gradient %s; no GPU multiplies FP8 by anything else: make both FP8 or neither",
            config_where(r, given), format_name(c->operand), format_name(c->gradient));
    check_groups(r, "format.moment1", optimizer, c->moment1, PARAM_ALIGN);
    check_groups(r, "format.moment2", optimizer, c->moment2, PARAM_ALIGN);
    check_moments(r);
}

/* One of COAT's blocks has keys but does not choose the recipe, so they change nothing; a block that says `none` has
 * said so itself. `method` as in Settings. */
static bool block_is_idle(Reader *r, const char *name, int method, bool in_force)
{
    const YamlNode *n = yaml_find(r->root, name);
    return !in_force && method < 2 && n && n->num_children > 0;
}

static void note_idle(Reader *r, bool model, bool optimizer, bool chosen)
{
    Settings *s = r->s;
    bool idle[2] = { block_is_idle(r, "quantize_model", s->quantize_model.method, model && !chosen),
                     block_is_idle(r, "quantize_optimizer", s->quantize_optimizer.method, optimizer && !chosen) };
    const char *names = idle[0] && idle[1] ? "quantize_model and quantize_optimizer"
                      : idle[0] ? "quantize_model" : "quantize_optimizer";
    if ((idle[0] || idle[1]) && chosen)
        config_note(r, "%s (recipe %s is given)", names, s->recipe);
    else if (idle[0] || idle[1])
        config_note(r, "%s (no %s.use_%s)", names, idle[0] ? "quantize_model" : "quantize_optimizer",
                    idle[0] ? "quantize_model" : "quantize_optimizer");
    if (s->quantize_model.method == 1 && s->quantize_model.group_size > 0 && !chosen)
        config_note(r, "quantize_model.group_size (fp8linear saves nothing in groups)");
    if (s->precision >= 0 && (s->precision == 1) != (s->c.recipe.stream.dtype == F32))
        config_note(r, "precision (recipe %s)", s->recipe);
}

void config_check_recipe(Reader *r)
{
    Settings *s = r->s;
    bool model = s->quantize_model.method == 0 || s->quantize_model.method == 1;
    bool optimizer = s->quantize_optimizer.method == 0, chosen = s->recipe != NULL;
    const char *key = "recipe";
    if (!chosen) {
        key = model ? "quantize_model" : optimizer ? "quantize_optimizer" : "precision";
        if (s->quantize_model.method == 1 && optimizer)
            die("%s: fp8linear together with an FP8 optimizer has no recipe; take --recipe=fp8 and set "
                "--format.moment1=e4m3/128 --format.moment2=e4m3/128", config_where(r, key));
        s->recipe = strdup(model && optimizer ? "coat" : s->quantize_model.method == 1 ? "fp8" : model ? "coat-act"
                           : optimizer ? "coat-opt" : s->precision == 1 ? "f32" : "bf16");
    }
    s->c.recipe = *find_recipe(r, s->recipe, key);
    note_idle(r, model, optimizer, chosen);
    if (!chosen)
        apply_blocks(r, model, optimizer);
    if (s->activation_checkpointing >= 0 && s->activation_checkpointing <= 2)
        s->c.recipe.keep = s->activation_checkpointing == 2 ? KEEP_INPUTS : KEEP_BLOCK;
    YamlNode *columns = yaml_find(r->root, "format");
    if (columns)
        config_apply(r, columns, "format", s);
    check_columns(r);
}
