/* Reads the manifest and checks all of its values: the disk may have failed, or a user may have
 * edited the file. */
#include "model/checkpoint/manifest.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/folder.h"
#include "model/keys/value_json.h"

bool manifest_is_complete(const char *folder, const json_t *manifest, char *problem, size_t size)
{
    const json_t *files = json_object_get(manifest, "files");
    const char *name;
    json_t *bytes;
    if (json_object_size(files) == 0)
        snprintf(
            problem, size,
            "%s/trainer.json: files: expected the checkpoint's files and their bytes, found none",
            folder);
    json_object_foreach((json_t *)files, name, bytes)
    {
        char *path = xasprintf("%s/%s", folder, name);
        struct stat status;
        bool found = false;
        if (!folder_holds(name) || !json_is_integer(bytes))
            snprintf(problem, size,
                     "%s/trainer.json: files: expected names of files in the folder and their "
                     "bytes, found '%s'",
                     folder, name);
        else if (stat(path, &status) != 0)
            snprintf(problem, size, "%s: %s", path, strerror(errno));
        else if (status.st_size != json_integer_value(bytes))
            snprintf(problem, size, "%s: %lld bytes, expected %lld", path,
                     (long long)status.st_size, (long long)json_integer_value(bytes));
        else
            found = true;
        free(path);
        if (!found)
            return false;
    }
    return json_object_size(files) > 0;
}

#define NUMBER(key, type, offset) { key, type, NULL, NAN, 0, LONGS, NULL, offset, NULL, NULL }
#define COUNT(key, type, field) NUMBER(key, type, offsetof(TrainState, field))
static const ConfigKey counts[] = {
    COUNT("step", LONG, step),
    COUNT("tokens", LONG, tokens),
    COUNT("loader.epoch", U64, loader.epoch),
    COUNT("loader.instance", U64, loader.instance),
};

/* Reads `key` of `object`; errors call it `name`. */
static uint64_t hexadecimal(const json_t *object, const char *key, const char *name,
                            const char *path)
{
    const json_t *value = json_object_get(object, key);
    const char *digits = json_string_value(value);
    char *last = NULL;
    const uint64_t x = digits ? strtoull(digits, &last, 16) : 0;
    if (!digits || strlen(digits) != 16 || *last)
        value_json_wrong(path, name, "16 hexadecimal digits", value);
    return x;
}

static void read_spikes(SpikeWindow *w, const json_t *spikes, const char *path)
{
    const char *loss = json_string_value(json_object_get(spikes, "loss"));
    const char *grad_norm = json_string_value(json_object_get(spikes, "grad_norm"));
    w->count = loss ? spikes_parse(w->loss, loss) : -1;
    if (w->count < 0 || !grad_norm || spikes_parse(w->grad_norm, grad_norm) != w->count)
        die("%s: spikes: expected up to %d numbers in loss and as many in grad_norm", path,
            (int)SPIKES_WINDOW);
}

/* Reads a list of numbers. */
static void read_router_bias(TrainState *s, const json_t *bias, const char *path)
{
    s->router_biases = (int)json_array_size(bias);
    s->router_bias = xcalloc((size_t)s->router_biases, sizeof *s->router_bias);
    for (int i = 0; i < s->router_biases; i++) {
        const json_t *x = json_array_get(bias, (size_t)i);
        if (!(json_is_number(x) && fabs(json_number_value(x)) <= 1e6))
            value_json_wrong(path, "router_bias", "a list of numbers from -1e6 to 1e6", x);
        s->router_bias[i] = (float)json_number_value(x);
    }
}

#define POSITION(field) offsetof(SourcePosition, field)

/* Reads sources in the order of the file; first come the sources of the checkpoint's present
 * mixture. */
static void read_mix(TrainState *s, const json_t *mix, const char *path)
{
    static const ConfigKey position_keys[] = { NUMBER("epoch", U64, POSITION(epoch)),
                                               NUMBER("instance", U64, POSITION(instance)),
                                               NUMBER("mixed", U64, POSITION(mixed)) };
    static const ConfigKey weight_key = NUMBER("weight", U64, offsetof(MixtureSourceState, weight));
    const char *name;
    json_t *source;
    if (mix && (!json_is_object(mix) || json_object_size(mix) > MIXTURE_MOST))
        die("%s: mix: expected up to %d sources", path, (int)MIXTURE_MOST);
    json_object_foreach((json_t *)mix, name, source)
    {
        MixtureSourceState *m = &s->mix[s->num_mix];
        if (strlen(name) >= MIXTURE_NAME)
            die("%s: mix: expected names of up to %d bytes, found '%s'", path,
                (int)MIXTURE_NAME - 1, name);
        strcpy(m->name, name);
        char *key = xasprintf("mix.%s", name);
        value_json_parse(m, &weight_key, json_object_get(source, "weight"), path, key);
        for (size_t i = 0; i < sizeof position_keys / sizeof position_keys[0]; i++)
            value_json_parse(&s->loader.source[s->num_mix], &position_keys[i],
                             json_object_get(source, position_keys[i].name), path, key);
        m->fingerprint = hexadecimal(source, "fingerprint", key, path);
        m->content = (DataHashes){ hexadecimal(source, "paths", key, path),
                                   hexadecimal(source, "label_mask_paths", key, path) };
        s->num_mix++;
        free(key);
    }
}

uint64_t manifest_base(const json_t *manifest, const char *folder)
{
    char *path = xasprintf("%s/trainer.json", folder);
    const uint64_t base = json_object_get(manifest, "base_sample")
                              ? hexadecimal(manifest, "base_sample", "base_sample", path)
                              : 0;
    free(path);
    return base;
}

#define STATES(key, field) NUMBER(key, LONG, offsetof(StateCounts, field))

StateCounts manifest_counts(const json_t *manifest, const char *folder)
{
    static const ConfigKey updates = STATES("updates", updates);
    static const ConfigKey raised = STATES("grad_wire_raised", raised);
    static const ConfigKey keys[] = { STATES("last", average.last), STATES("every", average.every),
                                      STATES("count", average.count) };
    const json_t *average = json_object_get(manifest, "average");
    char *path = xasprintf("%s/trainer.json", folder);
    StateCounts c = { 0 };
    value_json_parse(&c, &updates, json_object_get(manifest, updates.name), path, updates.name);
    if (json_object_get(manifest, raised.name))
        value_json_parse(&c, &raised, json_object_get(manifest, raised.name), path, raised.name);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0] && average; i++)
        value_json_parse(&c, &keys[i], json_object_get(average, keys[i].name), path, "average");
    free(path);
    return c;
}

/* Old checkpoints lack data_sample and spikes. */
void manifest_state(TrainState *s, const json_t *manifest, const char *folder)
{
    char *path = xasprintf("%s/trainer.json", folder);
    const json_t *loader = json_object_get(manifest, "loader"),
                 *sample = json_object_get(manifest, "data_sample");
    const json_t *spikes = json_object_get(manifest, "spikes");
    *s = (TrainState){ 0 };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const char *name = counts[i].name, *dot = strchr(name, '.');
        value_json_parse(s, &counts[i],
                         json_object_get(dot ? loader : manifest, dot ? dot + 1 : name), path,
                         name);
    }
    s->fingerprint = hexadecimal(manifest, "data_fingerprint", "data_fingerprint", path);
    if (sample)
        s->content = (DataHashes){ hexadecimal(sample, "paths", "data_sample.paths", path),
                                   hexadecimal(sample, "label_mask_paths",
                                               "data_sample.label_mask_paths", path) };
    read_mix(s, json_object_get(manifest, "mix"), path);
    if (spikes)
        read_spikes(&s->spikes, spikes, path);
    if (json_object_get(manifest, "router_bias"))
        read_router_bias(s, json_object_get(manifest, "router_bias"), path);
    free(path);
}
