/* Texts of a configuration: of its values, and which may be in it. */
#include "model/config/table.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/error.h"

char *value_text(const void *base, const ConfigKey *k)
{
    char *printed;
    FILE *f = xtext(&printed);
    value_print(f, base, k, 0);
    fclose(f);
    printed[strcspn(printed, "\n")] = '\0';
    char *text = xasprintf("%s", printed + 1);
    free(printed);
    return text;
}

json_t *config_columns(const Config *c)
{
    json_t *columns = json_object();
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const char *column = config_column(k);
        if (!column)
            continue;
        char *text = value_text(c, k);
        json_object_set_new(columns, column, json_string(text));
        free(text);
    }
    return columns;
}

static void check_text(const YamlNode *n, const char *name, const char *text)
{
    json_t *json = json_string(text);
    if (!json)
        die("%s: %s: its text is not UTF-8, so neither YAML nor JSON can hold it; take another name", yaml_place(n), name);
    json_decref(json);
    if (strstr(text, "${") || strncmp(text, "~/", 2) == 0)
        die("%s: %s: '%s' would be evaluated again where the run's config.yaml is read; take a name without ${ and ~/",
            yaml_place(n), name, text);
}

void config_check_texts(const YamlNode *n, const char *name)
{
    if (n->text)
        check_text(n, name, n->text);
    for (int i = 0; i < n->num_children; i++) {
        if (n->child[i]->key)
            check_text(n->child[i], name, n->child[i]->key);
        config_check_texts(n->child[i], name);
    }
}
