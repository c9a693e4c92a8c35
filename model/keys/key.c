/* Functions on single keys of a configuration. */
#include "model/keys/key.h"

#include <string.h>

#include "model/keys/config_keys.h"

const ConfigKey *key_find(const char *name)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (strcmp(k->name, name) == 0)
            return k;
    return NULL;
}

const char *key_column(const ConfigKey *k)
{
    static const char section[] = "format.";
    const size_t first = offsetof(Config, recipe);
    if (key_element_prefix(k->name) || k->offset < first || k->offset >= first + sizeof(Recipe))
        return NULL;
    return strncmp(k->name, section, strlen(section)) == 0 ? k->name + strlen(section) : k->name;
}

size_t key_element_prefix(const char *name)
{
    const char *brackets = strstr(name, "[].");
    return brackets ? (size_t)(brackets + 3 - name) : 0;
}
