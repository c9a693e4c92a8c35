/* Which texts may be in a configuration. */
#include "model/config/table.h"

#include <jansson.h>
#include <string.h>

#include "kernels/error.h"

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
