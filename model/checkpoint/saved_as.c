#include "model/checkpoint/saved_as.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "model/formats/file.h"
#include "model/keys/yaml.h"

static const char *const names[NUM_SAVED_AS] = { NULL, "permanent", "interval", "ephemeral",
                                                 "aborted" };

const char *saved_as_name(SavedAs s)
{
    return names[s];
}

SavedAs saved_as_of(const Config *c, long step)
{
    if (is_due(step, c->save_interval_unsharded))
        return SAVED_PERMANENT;
    if (is_due(step, c->save_interval_ephemeral) && !is_due(step, c->save_interval))
        return SAVED_EPHEMERAL;
    return c->save_num_checkpoints_to_keep < 0 ? SAVED_PERMANENT : SAVED_INTERVAL;
}

static bool is_file(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode);
}

/* Reads trainer.json, owned by the caller; NULL: there is none, or it cannot be read. */
static json_t *manifest_of(const char *folder)
{
    char *path = xasprintf("%s/trainer.json", folder);
    json_t *manifest = is_file(path) ? json_load_file(path, 0, NULL) : NULL;
    free(path);
    return manifest;
}

SavedAs saved_as_read(const char *folder)
{
    json_t *manifest = manifest_of(folder);
    const char *name = json_string_value(json_object_get(manifest, "saved_as"));
    SavedAs found = SAVED_UNKNOWN;
    for (int i = 1; name && i < NUM_SAVED_AS; i++)
        if (strcmp(name, names[i]) == 0)
            found = (SavedAs)i;
    json_decref(manifest);
    return found;
}

bool saved_as_with_states(const char *folder)
{
    static const char *const ends[] = { "states", "safetensors" };
    bool found = false;
    for (int i = 0; i < 2; i++) {
        char *path = xasprintf("%s/optimizer-00001.%s", folder, ends[i]);
        found |= is_file(path);
        free(path);
    }
    return found;
}

bool saved_as_ours(const char *folder)
{
    json_t *manifest = manifest_of(folder);
    const bool ours = json_object_get(manifest, "format_version") || saved_as_with_states(folder);
    json_decref(manifest);
    return ours;
}

/* The argument of read_yaml when error_catch calls it: the file may be invalid. */
typedef struct {
    const char *path;
    YamlNode *root;
} Reading;

static void read_yaml(void *what)
{
    Reading *r = what;
    r->root = yaml_load(r->path);
}

int saved_as_in(const char *folder, const char *save_folder)
{
    char *path = xasprintf("%s/config.yaml", folder);
    Reading r = { path, NULL };
    if (is_file(path))
        free(error_catch(read_yaml, &r));
    const YamlNode *n = r.root ? yaml_find(r.root, "save_folder") : NULL;
    int in =
        n && n->text ? strcmp(n->text, save_folder) == 0 || file_is_same(n->text, save_folder) : -1;
    if (in == 1 && n->text[0] != '/') /* a relative path may belong to another project */
        in = -1;
    yaml_free(r.root);
    free(path);
    return in;
}
