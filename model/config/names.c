/* Other names of keys: those that earlier versions had, and torchtitan's. Files, arguments and
 * saved configurations may have them. After config_rename a tree has the names of table.c only. */
#include "model/config/table.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* as_null: the value of `other` that `name` has as null. */
static const struct {
    const char *other, *name, *as_null;
} names[] = {
    /* the ranks that are left */
    { "format.keep", "activations.keep" },
    { "format.recompute", "activations.recompute" },
    { "format.forward", "fp8.forward" },
    { "format.fast", "fp8.fast_accumulation" },
    { "format.scales", "fp8.scales" },
    { "parallelism.data_parallel_replicate_degree", "parallelism.replicate" },
    { "parallelism.data_parallel_shard_degree", "parallelism.shard", "-1" },
    { "parallelism.context_parallel_degree", "parallelism.context" },
    { "parallelism.tensor_parallel_degree", "parallelism.tensor" },
    { "parallelism.pipeline_parallel_degree", "parallelism.pipeline" },
    { "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_schedule" },
};
enum { NUM_NAMES = sizeof names / sizeof names[0] };

const char *config_name(const char *name)
{
    for (int i = 0; i < NUM_NAMES; i++)
        if (strcmp(names[i].other, name) == 0)
            return names[i].name;
    return name;
}

const char *config_other_name(const char *name)
{
    for (int i = 0; i < NUM_NAMES; i++)
        if (strcmp(names[i].name, name) == 0)
            return names[i].other;
    return NULL;
}

static bool is_null(const YamlNode *n, const char *as_null)
{
    return as_null && n->kind == YAML_SCALAR && n->text && strcmp(n->text, as_null) == 0;
}

void config_check_names(const YamlNode *root)
{
    for (int i = 0; i < NUM_NAMES; i++) {
        const YamlNode *other = yaml_find(root, names[i].other),
                       *own = yaml_find(root, names[i].name);
        if (other && own)
            die("%s: '%s' and '%s' (%s) are two names of one key; give only '%s'",
                yaml_where(other), names[i].other, names[i].name, yaml_where(own), names[i].name);
        const bool null = other && is_null(other, names[i].as_null);
        if (other && (other->kind != YAML_SCALAR || other->text))
            warn("%s: key '%s%s%s' is accepted and read as '%s%s'; use that name",
                 yaml_where(other), names[i].other, null ? ": " : "", null ? names[i].as_null : "",
                 names[i].name, null ? ": null" : "");
    }
}

void config_rename(YamlNode *root)
{
    for (int i = 0; i < NUM_NAMES; i++) {
        YamlNode *n = yaml_take(root, names[i].other);
        if (n && is_null(n, names[i].as_null)) {
            free(n->text);
            n->text = NULL;
        }
        if (n)
            yaml_put(root, names[i].name, n);
    }
}
