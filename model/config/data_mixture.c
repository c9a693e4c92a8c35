/* data.mix: a list of sources of training data. */
#include "model/config/data_mixture.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/check_local.h"
#include "model/keys/config_keys.h"
#include "model/keys/value_print.h"

static void check_alone(const Reader *r)
{
    const Config *c = &r->s->c;
    const char *const where = reader_where(r, "data.mix");
    if (c->data.files.num_paths > 0 || r->s->num_datasets > 0)
        die("%s: give data.paths, data.datasets or data.mix, only one of them (--data.paths=null "
            "drops data.paths, --data.mix=null drops data.mix)",
            where);
    if (c->data.files.num_label_mask_paths > 0)
        die("%s: data.label_mask_paths belong to data.paths; with data.mix each source has its "
            "own: [{name: chat, paths: [a.npy], "
            "label_mask_paths: [a.mask], ratio: 1}]",
            where);
}

/* where: file and line of the source. */
static void check_source(Reader *r, const char *where, const DataSource *s)
{
    const Config *c = &r->s->c;
    if (!s->name || !*s->name)
        die("%s: a source of data.mix has no name; give one, as in {name: web, paths: [web/*.npy], "
            "ratio: 0.7}",
            where);
    if (strlen(s->name) >= SOURCE_NAME)
        die("%s: data.mix: the name '%s' has %zu bytes, more than the maximum %d; use a shorter "
            "one",
            where, s->name, strlen(s->name), SOURCE_NAME - 1);
    for (const DataSource *other = c->data.mix; other < s; other++)
        if (strcmp(other->name, s->name) == 0)
            die("%s: data.mix: two sources are named '%s', so their metrics and positions in "
                "checkpoints would have the same name; rename one, or make one source with the "
                "paths of both",
                where, s->name);
    if (s->files.num_paths == 0)
        die("%s: data.mix: source '%s' has no paths; give its token shards, as in paths: "
            "[%s/*.npy]",
            where, s->name, s->name);
    if (s->ratio == 0)
        die("%s: data.mix: source '%s' has no ratio; give its share of the tokens, above 0 (the "
            "sum of all ratios is the whole), "
            "or leave the source out",
            where, s->name);
    check_local(r, "data.mix", s->files.paths, s->files.num_paths);
    check_local(r, "data.mix", s->files.label_mask_paths, s->files.num_label_mask_paths);
}

void data_mixture_read(Reader *r)
{
    Config *c = &r->s->c;
    YamlNode *list = reader_is_unread(c, "data.mix") ? NULL : yaml_find(r->root, "data.mix");
    if (!list || (list->kind == YAML_SCALAR && !list->text) ||
        (list->kind == YAML_LIST && list->num_children == 0))
        return;
    if (list->kind != YAML_LIST)
        die("%s: data.mix is a list of sources: `- name: web`, then indented `paths:` and `ratio:`",
            yaml_where(list));
    if (list->num_children > MOST_SOURCES)
        die("%s: data.mix has %d sources, more than the maximum %d; make one source with the paths "
            "of several",
            yaml_where(list), list->num_children, MOST_SOURCES);
    check_alone(r);
    c->data.mix = xcalloc((size_t)list->num_children, sizeof *c->data.mix);
    for (int i = 0; i < list->num_children; i++) {
        YamlNode *n = list->child[i];
        if (n->kind != YAML_MAP)
            die("%s: data.mix: a source is a section with name, paths and ratio", yaml_where(n));
        DataSource *s = &c->data.mix[c->data.num_mix++];
        reader_apply_element(r, n, SOURCE_PREFIX, s);
        check_source(r, yaml_where(n), s);
    }
}

void data_mixture_free(Config *c)
{
    for (int i = 0; i < c->data.num_mix; i++)
        reader_free_element(&c->data.mix[i], SOURCE_PREFIX);
    free(c->data.mix);
}

void data_mixture_print(FILE *f, const Config *c)
{
    fputs(c->data.num_mix ? "\n" : " []\n", f);
    for (int i = 0; i < c->data.num_mix; i++) {
        const char *mark = "-";
        for (const ConfigKey *k = config_keys; k->name; k++) {
            if (strncmp(k->name, SOURCE_PREFIX, strlen(SOURCE_PREFIX)) != 0)
                continue;
            fprintf(f, "  %s %s:", mark, k->name + strlen(SOURCE_PREFIX));
            value_print(f, &c->data.mix[i], k, 4);
            mark = " ";
        }
    }
}
