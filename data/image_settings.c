#include "data/image_settings.h"

#include "kernels/runtime/error.h"

#include <stdbool.h>
#include <stdlib.h>

/* Reads the JSON object in a file of the folder. Returns NULL if there is no such file. */
static json_t *read_file(const char *model, const char *name)
{
    char *path = xasprintf("%s/%s", model, name);
    json_t *o = json_load_file(path, 0, NULL);
    free(path);
    return o;
}

static json_t *read_processor(const char *model)
{
    json_t *o = read_file(model, "processor_config.json");
    json_t *processor = json_incref(json_object_get(o, "image_processor"));
    json_decref(o);
    if (json_is_object(processor))
        return processor;
    json_decref(processor);
    return read_file(model, "preprocessor_config.json");
}

/* Whether two settings are equal. 1 equals 1.0. A number equals an object whose values are all this
 * number: 336 equals {"shortest_edge": 336}. */
static bool same(const json_t *given, const json_t *used)
{
    const char *key;
    json_t *one;
    size_t i;
    if (json_is_number(given) && json_is_number(used))
        return json_number_value(given) == json_number_value(used);
    if (json_is_number(given) && json_is_object(used)) {
        json_object_foreach((json_t *)used, key, one) if (!same(given, one)) return false;
        return true;
    }
    if (json_is_array(given) && json_is_array(used) &&
        json_array_size(given) == json_array_size(used)) {
        json_array_foreach(used, i, one) if (!same(json_array_get(given, i), one)) return false;
        return true;
    }
    return json_equal(given, used);
}

static char *shown(const json_t *value)
{
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    return text ? text : xstrdup("not given");
}

/* Compares the settings of one JSON object (config, vision_config or image_processor) with the
 * values `found` in the folder's file `name`. */
static char *differing(const json_t *settings, const json_t *found, const char *name)
{
    const char *key;
    json_t *pair;
    json_object_foreach((json_t *)settings, key, pair)
    {
        const json_t *used = json_array_get(pair, 0), *given = json_object_get(found, key);
        const json_t *value = given && !json_is_null(given) ? given : json_array_get(pair, 1);
        if (same(value, used) || (given && json_equal(given, used)))
            continue;
        char *now = shown(given), *then = shown(used);
        char *text = xasprintf("%s (%s) is %.200s, but the features were made with %.200s", key,
                               name, now, then);
        free(now);
        free(then);
        return text;
    }
    return NULL;
}

char *image_settings_differing(const json_t *settings, const char *model)
{
    json_t *config = read_file(model, "config.json"), *processor = read_processor(model);
    const json_t *tower = json_object_get(config, "vision_config");
    char *text = NULL;
    if (json_is_object(tower)) {
        text = differing(json_object_get(settings, "config"), config, "config.json");
        if (!text)
            text = differing(json_object_get(settings, "vision_config"), tower,
                             "vision_config of config.json");
        if (!text && processor)
            text = differing(json_object_get(settings, "image_processor"), processor,
                             "preprocessor_config.json");
    }
    json_decref(config);
    json_decref(processor);
    return text;
}
