/* Tries every key that transformers declares or reads for the classes of architecture.c, as
 * recorded in tests/golden/config_keys.json. A key that changes the model in transformers must
 * change the model here, or be refused by name. A key that changes nothing there must change
 * nothing here. Declared keys must be known. Missing keys must get the defaults of transformers. */
#include "model/formats/hf.h"
#include "model/formats/hf_keys.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef enum { SAME, OTHER, DIED } Outcome;

static json_t *golden;
static const char *where; /* version, class and key, for messages */

static void write_config(json_t *config)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", try_folder);
    assert_int_equal(json_dump_file(config, path, 0), 0);
}

static ModelConfig *read_config(json_t *config)
{
    ModelConfig *m = calloc(1, sizeof *m);
    write_config(config);
    hf_read(m, try_folder);
    m->architecture = NULL;
    return m;
}

/* Reads the config in another process. Returns the process's messages, and whether the result is
 * the model `base`. */
static Outcome try_reading(const ModelConfig *base, json_t *config, char *said, size_t size)
{
    int tube[2], status;
    size_t n = 0;
    assert_int_equal(pipe(tube), 0);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        dup2(tube[1], 2);
        const ModelConfig *m = read_config(config);
        _exit(memcmp(m, base, sizeof *m) == 0 ? 10 + SAME : 10 + OTHER);
    }
    close(tube[1]);
    for (ssize_t got; n < size - 1 && (got = read(tube[0], said + n, size - 1 - n)) > 0;)
        n += (size_t)got;
    said[n] = 0;
    close(tube[0]);
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) >= 10)
        return (Outcome)(WEXITSTATUS(status) - 10);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 || !strstr(said, "error: "))
        fail_msg("%s: crashed: %s", where, said);
    return DIED;
}

/* k: the row of the key; NULL: there is none. says: the value is neither null nor false, so the
 * feature is present. */
static void check_key(const HfKey *k, const char *key, bool declared, bool says, const char *effect,
                      Outcome outcome, const char *said)
{
    const int kind = k ? k->kind & HF_KIND_MASK : -1;
    const bool refused = kind == HF_ONLY || kind == HF_REFUSED, without = kind >= HF_WRITTEN;
    const bool changes = strcmp(effect, "nothing") != 0,
               warned = strstr(said, " does not read ") != NULL;
    if (declared && !k)
        fail_msg("%s: the class declares it, and there is no row", where);
    if (outcome == DIED ? !strstr(said, key) && !strstr(said, "quantized")
                        : warned != (!k && *key != '_' && says))
        fail_msg("%s: it is not named: %s", where, said);
    if (changes && outcome == SAME)
        fail_msg("%s: it changes transformers' %s and nothing here: %s", where, effect, said);
    if (refused && outcome != DIED)
        fail_msg("%s: it is not refused: %s", where, said);
    if ((!k || without) && (outcome == OTHER || (outcome == DIED && !strstr(said, "quantized"))))
        fail_msg("%s: it is to be ignored: %s", where, said);
    if (!changes && outcome == OTHER && kind != HF_VALUE && kind != HF_TOKEN &&
        kind != HF_ROTATION && kind != HF_BLOCKS)
        fail_msg("%s: it changes nothing in transformers", where);
}

/* Whether an earlier version has the same record for this key. */
static bool is_known(const Architecture *a, const char *part, const char *key, const json_t *row,
                     const json_t *of_class)
{
    const char *version;
    json_t *classes;
    json_object_foreach(golden, version, classes)
    {
        const json_t *earlier = json_object_get(classes, a->class);
        if (earlier == of_class)
            return false;
        if (json_equal(json_object_get(json_object_get(earlier, part), key), row))
            return true;
    }
    return false;
}

/* Tries each key of `part` in `base`. at: the object of `base` that has the keys; NULL: `base`
 * itself. */
static int try_keys(const Architecture *a, json_t *of_class, const char *part, json_t *base,
                    const char *at)
{
    json_t *defaults = json_object_get(of_class, "defaults"),
           *tried = json_object_get(of_class, part), *row;
    const char *key;
    char said[4096], name[256];
    ModelConfig *m = read_config(base);
    const char *outer = where;
    json_object_foreach(tried, key, row)
    {
        if (is_known(a, part, key, row, of_class))
            continue;
        json_t *config = json_deep_copy(base);
        json_object_set(at ? json_object_get(config, at) : config, key, json_array_get(row, 0));
        snprintf(name, sizeof name, "%s, %s%s%s", outer, at ? at : "", at ? "." : "", key);
        where = name;
        const json_t *type = json_object_get(json_object_get(config, "rope_scaling"), "rope_type");
        const RopeType rope =
            type && strcmp(json_string_value(type), "llama3") == 0 ? ROPE_LLAMA3 : ROPE_YARN;
        const bool becomes = a->with_layer_types && strcmp(key, "layer_types") == 0;
        const HfKey *k = at ? hf_rope_key(key, rope)
                            : hf_key(becomes ? architecture_find(a->with_layer_types) : a, key);
        const Outcome outcome = try_reading(m, config, said, sizeof said);
        const json_t *value = json_array_get(row, 0);
        check_key(k, key, !at && json_object_get(defaults, key),
                  !json_is_false(value) && !json_is_null(value),
                  json_string_value(json_array_get(row, 1)), outcome, said);
        json_decref(config);
        where = outer;
    }
    free(m);
    return (int)json_object_size(tried);
}

/* Calls `check` for each version and class. */
static int for_each(int (*check)(const Architecture *a, json_t *of_class))
{
    const char *version, *class;
    json_t *classes, *of_class;
    char name[256];
    int count = 0;
    json_object_foreach(golden, version, classes) json_object_foreach(classes, class, of_class)
    {
        snprintf(name, sizeof name, "transformers %s, %s", version, class);
        where = name;
        assert_non_null(architecture_find(class));
        count += check(architecture_find(class), of_class);
    }
    return count;
}

static int check_class(const Architecture *a, json_t *c)
{
    json_t *scaled = json_object_get(c, "scaled");
    int count = try_keys(a, c, "keys", json_object_get(c, "base"), NULL);
    assert_true(count > 80);
    if (scaled)
        count += try_keys(a, c, "rope_keys", scaled, "rope_scaling");
    return count;
}

TEST(test_every_key)
{
    assert_true(for_each(check_class) > 1200);
}

/* Without the key, the model equals the model with the key's default: null, or a number of
 * transformers. If versions differ, as for rope_theta of OLMo-3, the latest version counts. */
static int check_defaults(const Architecture *a, json_t *c)
{
    static const char sizes[] =
        "{\"hidden_size\": 64, \"intermediate_size\": 96, \"num_hidden_layers\": 30, "
        "\"num_attention_heads\": 32, \"vocab_size\": 60000}";
    json_t *base = json_loads(sizes, 0, NULL), *value;
    const char *key;
    int count = 0;
    json_object_set_new(base, "architectures", json_pack("[s]", a->class));
    if (strncmp(where, "transformers 4.", strlen("transformers 4.")) == 0)
        json_object_del(json_object_get(c, "defaults"), "rope_theta");
    ModelConfig *m = read_config(base);
    json_object_foreach(json_object_get(c, "defaults"), key, value)
    {
        const HfKey *k = hf_key(a, key);
        if (!k || (k->kind & HF_KIND_MASK) > HF_REFUSED || json_object_get(base, key))
            continue;
        json_t *config = json_copy(base);
        json_object_set(config, key, value);
        ModelConfig *given = read_config(config);
        if (memcmp(m, given, sizeof *m) != 0)
            fail_msg("%s: without %s it is another model than with its default", where, key);
        json_decref(config);
        free(given);
        count++;
    }
    json_decref(base);
    free(m);
    assert_true(count >= 7);
    return count;
}

TEST(test_defaults)
{
    for_each(check_defaults);
}

/* Every class that the program reads is in the file, and every key has one row per class. */
TEST(test_complete)
{
    const char *version;
    json_t *classes;
    json_object_foreach(golden, version, classes)
    {
        char *names = architecture_names();
        for (char *rest = names, *name; (name = strsep(&rest, ", "));)
            if (*name && !json_object_get(classes, name))
                fail_msg(
                    "transformers %s: there is no %s; scripts/golden_config_keys.py makes the file",
                    version, name);
        free(names);
    }
    assert_int_equal(json_object_size(golden), 2);
    for (const HfKey *k = hf_keys; k->key; k++)
        for (const HfKey *other = k + 1; other->key; other++)
            if (strcmp(k->key, other->key) == 0 && (k->kind ^ other->kind) / HF_LISTED != 3)
                fail_msg("%s has two rows", k->key);
}

static int open_golden(void **state)
{
    golden = json_load_file("tests/golden/config_keys.json", 0, NULL);
    return golden ? try_make_folder(state) : -1;
}

int main(void)
{
    return run_all_tests(open_golden, try_remove_folder);
}
