/* Keys by another name: the same configuration, in files and on the command line, with one warning
 * if the name is of an earlier version; two names of a key are an error. Saved runs of earlier
 * versions: test_verify.c and test_load_folder.c. */
#include "tests/test.h"
#include "tests/try_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* other: a value other than that of try_complete. with: needed for that value. */
static const struct {
    const char *old_section, *old_key, *section, *key, *value, *other, *with;
    int world;
} list[] = {
    { "format", "keep", "activations", "keep", "block", "all", "--recipe=coat", 1 },
    { "format", "recompute", "activations", "recompute", "one_in_two", "none", "--recipe=coat", 1 },
    { "format", "forward", "fp8", "forward", "saved", "exact", "--recipe=coat", 1 },
    { "format", "fast", "fp8", "fast_accumulation", "forward", "none", "--recipe=coat", 1 },
    { "format", "scales", "fp8", "scales", "microbatch", "step", "--recipe=coat", 1 },
    { "parallelism", "data_parallel_replicate_degree", "parallelism", "replicate", "2", "1",
      "--recipe=coat", 2 },
    { "parallelism", "data_parallel_shard_degree", "parallelism", "shard", "2", "1",
      "--recipe=coat", 2 },
    { "parallelism", "context_parallel_degree", "parallelism", "context", "2", "1",
      "--model.weight_tying=false", 2 },
    { "parallelism", "tensor_parallel_degree", "parallelism", "tensor", "2", "1", "--recipe=bf16",
      2 },
    { "parallelism", "pipeline_parallel_degree", "parallelism", "pipeline", "2", "1",
      "--model.weight_tying=false", 2 },
    { "parallelism", "pipeline_parallel_schedule", "parallelism", "pipeline_schedule", "Sequential",
      "1F1B", "--model.weight_tying=false", 2 },
    { "lora", "r", "lora", "rank", "4", "2", "--recipe=bf16", 1 },
    { "lora", "lora_alpha", "lora", "alpha", "3", "2", "--lora.rank=4", 1 },
};
enum { COUNT = sizeof list / sizeof list[0] };

static char *line_of(const char *section, const char *key, const char *value)
{
    return xasprintf("%s: {%s: %s}", section, key, value);
}

static char *argument_of(const char *section, const char *key, const char *value)
{
    return xasprintf("--%s.%s=%s", section, key, value);
}

#define NOTE "of earlier versions is read as"

static int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at++)
        n++;
    return n;
}

/* Loads x.yaml with the argument, and checks that the configuration is `text`. Its only warning
 * about names is about list[i], if that is a name of earlier versions. */
static void check_same(int i, const char *argument, const char *text)
{
    char said[8192], names[256];
    Config *c = try_load(list[i].world, list[i].with, argument, NULL, NULL);
    assert_string_equal(c->text, text);
    config_free(c);
    assert_true(try_printed(said, sizeof said, 2, list[i].world, list[i].with, argument));
    const bool earlier = strcmp(list[i].old_section, "format") == 0;
    assert_int_equal(count(said, NOTE), earlier);
    if (!earlier)
        return;
    snprintf(names, sizeof names, "%s.%s %s.%s", list[i].old_section, list[i].old_key,
             list[i].section, list[i].key);
    try_names(said, names);
}

TEST(test_same)
{
    for (int i = 0; i < COUNT; i++) {
        char said[8192];
        char *argument = argument_of(list[i].section, list[i].key, list[i].value);
        char *old = argument_of(list[i].old_section, list[i].old_key, list[i].value);
        char *old_line = line_of(list[i].old_section, list[i].old_key, list[i].value);
        char *section =
            xasprintf("--%s={%s: %s}", list[i].old_section, list[i].old_key, list[i].value);
        try_write(try_path, try_complete);
        Config *c = try_load(list[i].world, list[i].with, argument, NULL, NULL);
        Config *without = try_load(list[i].world, list[i].with, NULL, NULL, NULL);
        assert_string_not_equal(c->text, without->text);
        assert_true(try_printed(said, sizeof said, 2, list[i].world, list[i].with, argument));
        assert_int_equal(count(said, NOTE), 0);
        check_same(i, old, c->text);
        check_same(i, section, c->text);
        try_write_changed(NULL, old_line);
        check_same(i, NULL, c->text);
        config_free(c);
        config_free(without);
        free(argument);
        free(old);
        free(old_line);
        free(section);
    }
}

/* The command line replaces the file's value, whatever each of both calls the key. */
TEST(test_override)
{
    for (int i = 0; i < COUNT; i++)
        for (int old = 0; old < 2; old++) {
            const char *const section[2] = { list[i].section, list[i].old_section };
            const char *const key[2] = { list[i].key, list[i].old_key };
            char *line = line_of(section[old], key[old], list[i].other);
            char *argument = argument_of(section[!old], key[!old], list[i].value);
            char *own = argument_of(list[i].section, list[i].key, list[i].value);
            try_write(try_path, try_complete);
            Config *expected = try_load(list[i].world, list[i].with, own, NULL, NULL);
            try_write_changed(NULL, line);
            check_same(i, argument, expected->text);
            config_free(expected);
            free(line);
            free(argument);
            free(own);
        }
}

/* Both names in the file, or both on the command line. */
TEST(test_both)
{
    for (int i = 0; i < COUNT; i++) {
        char said[8192], names[512];
        char *own = argument_of(list[i].section, list[i].key, list[i].value);
        char *old = argument_of(list[i].old_section, list[i].old_key, list[i].value);
        snprintf(names, sizeof names, "%s %s", own, old);
        try_write(try_path, try_complete);
        for (int order = 0; order < 2; order++) {
            assert_false(try_printed(said, sizeof said, 2, list[i].world, order ? own : old,
                                     order ? old : own));
            try_contains(said, "two names of one key");
            try_names(said, names);
        }
        const bool apart = strcmp(list[i].section, list[i].old_section) != 0;
        char *lines =
            apart ? xasprintf("%s: {%s: %s}\n%s: {%s: %s}", list[i].section, list[i].key,
                              list[i].value, list[i].old_section, list[i].old_key, list[i].value)
                  : xasprintf("%s: {%s: %s, %s: %s}", list[i].section, list[i].key, list[i].value,
                              list[i].old_key, list[i].value);
        const int line = try_write_changed(NULL, lines);
        assert_false(try_printed(said, sizeof said, 2, list[i].world, NULL, NULL));
        snprintf(names, sizeof names, "x.yaml:%d %s.%s %s.%s", line + apart, list[i].old_section,
                 list[i].old_key, list[i].section, list[i].key);
        try_names(said, names);
        free(own);
        free(old);
        free(lines);
    }
}

/* Saved configurations list all columns of a recipe, most as null, which needs no warning. */
TEST(test_null)
{
    char said[8192];
    try_write_changed(
        NULL, "format: {keep: null, recompute: null, forward: null, fast: null, scales: null}");
    assert_true(try_printed(said, sizeof said, 2, 1, "--recipe=coat-lean", NULL));
    assert_int_equal(count(said, NOTE), 0);
    Config *c = try_load(1, "--recipe=coat-lean", "--activations.keep=block", NULL, NULL);
    assert_true(c->recipe.keep == KEEP_BLOCK &&
                c->recipe.scales == recipe_find("coat-lean")->scales);
    config_free(c);
}

/* torchtitan's -1: all ranks, or those that the replicas leave. */
TEST(test_left)
{
    static const struct {
        const char *replicate;
        int shards;
    } cases[] = {
        { NULL, 4 },
        { "--parallelism.data_parallel_replicate_degree=2", 2 },
        { "--parallelism.replicate=4", 1 },
    };
    char said[8192];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        try_write_changed(NULL, "parallelism: {data_parallel_shard_degree: -1}");
        Config *c = try_load(4, cases[i].replicate, NULL, NULL, NULL);
        assert_int_equal(c->strategy.shard_ranks, cases[i].shards);
        config_free(c);
    }
    try_write(try_path, try_complete);
    assert_false(
        try_printed(said, sizeof said, 2, 4, "--parallelism.data_parallel_shard_degree=-2", NULL));
    assert_false(
        try_printed(said, sizeof said, 2, 4, "--parallelism.context_parallel_degree=-1", NULL));
}

/* The file of a run of an earlier version, or of a checkpoint, has its names: nothing is
 * printed. */
TEST(test_own_file)
{
    static const char *const signs[] = { "trainer.json", "metrics.jsonl" };
    char said[8192], saved[sizeof try_path], sign[sizeof try_path];
    strcpy(saved, try_path);
    for (int i = 0; i < 3; i++) {
        snprintf(try_path, sizeof try_path, "%s/config.yaml", try_folder);
        snprintf(sign, sizeof sign, "%s/%s", try_folder, signs[i % 2]);
        try_write_changed(NULL, "format: {keep: block, fast: none}");
        if (i < 2)
            try_write(sign, "");
        assert_true(try_printed(said, sizeof said, 2, 1, "--recipe=coat", NULL));
        assert_int_equal(count(said, NOTE), i < 2 ? 0 : 2);
        Config *c = try_load(1, "--recipe=coat", NULL, NULL, NULL);
        assert_true(c->recipe.keep == KEEP_BLOCK && c->recipe.fast == FAST_NONE);
        config_free(c);
        assert_int_equal(remove(try_path), 0);
        remove(sign);
    }
    strcpy(try_path, saved);
}

/* PEFT's name of a key that has one value. */
TEST(test_dropout)
{
    char said[8192];
    try_write(try_path, try_complete);
    assert_true(try_printed(said, sizeof said, 2, 1, "--lora.lora_dropout=0.0", NULL));
    assert_string_equal(said, "");
    assert_false(try_printed(said, sizeof said, 2, 1, "--lora.lora_dropout=0.1", NULL));
    try_names(said, "lora.dropout 0.1");
}

/* --help of the other name explains the key, and every key of the list is in the table. */
TEST(test_help)
{
    char said[8192];
    for (int i = 0; i < COUNT; i++) {
        char *argument = xasprintf("--help=%s.%s", list[i].old_section, list[i].old_key);
        char *expected = xasprintf("  %s.%s: ", list[i].section, list[i].key);
        assert_true(try_printed(said, sizeof said, 1, 1, argument, NULL));
        assert_int_equal(strncmp(said, expected, strlen(expected)), 0);
        free(argument);
        free(expected);
    }
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
