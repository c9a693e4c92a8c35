/* Values of JSON files, described by rows of ConfigKey: types, ranges and messages are the same as
 * for keys of the configuration. */
#include "model/keys/value_json.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "model/keys/value.h"

_Noreturn void value_json_wrong(const char *path, const char *key, const char *expected,
                                const json_t *found)
{
    char *text = found && !json_is_null(found)
                     ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15))
                     : NULL;
    die("%s: %s: expected %s, found %.64s", path, key, expected, text ? text : "nothing");
}

bool value_json_is_nothing(const json_t *value)
{
    return !value || json_is_null(value) || json_is_false(value) ||
           (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

void value_json_set(void *holder, const ConfigKey *k, double x)
{
    void *field = (char *)holder + k->offset;
    switch (k->type & TYPE_MASK) {
    case INT: *(int *)field = (int)x; break;
    case LONG: *(long *)field = (long)x; break;
    case U64: *(uint64_t *)field = (uint64_t)x; break;
    case FLOAT: *(float *)field = (float)x; break;
    case DOUBLE: *(double *)field = x; break;
    case BOOL: *(bool *)field = x != 0; break;
    default: die("model/keys/value_json.c: %s has a type that is not read from JSON", k->name);
    }
}

void value_json_parse(void *holder, const ConfigKey *k, const json_t *value, const char *path,
                      const char *key)
{
    const int type = k->type & TYPE_MASK;
    const double x = json_is_boolean(value) ? json_is_true(value) : json_number_value(value);
    char expected[256];
    value_expected(expected, sizeof expected, k);
    if (type == BOOL ? !json_is_boolean(value) : !json_is_number(value) || x < k->min || x > k->max)
        value_json_wrong(path, key, expected, value);
    if (type != BOOL && type != FLOAT && type != DOUBLE && x != floor(x))
        value_json_wrong(path, key, expected, value);
    value_json_set(holder, k, x);
    char *field = (char *)holder + k->offset;
    if (json_is_integer(value) && type == LONG) /* a double would lose digits beyond 2^53 */
        *(long *)field = (long)json_integer_value(value);
    else if (json_is_integer(value) && type == U64)
        *(uint64_t *)field = (uint64_t)json_integer_value(value);
}
