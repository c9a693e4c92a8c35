/* Keys by another name give the same configuration, in files and on the command line, with one
 * warning if the name is from an earlier version. Both names of one key are an error. test_verify.c
 * and test_load_folder.c test saved runs of earlier versions. */
#include "tests/test.h"
#include "tests/try_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* changed: a value that differs from the value in try_complete; value: another such value. with:
 * text that both need. */
static const struct {
    const char *other, *name, *value, *changed, *with;
    int world;
    bool earlier;
} list[] = {
    { "format.keep", "activations.keep", "block", "all", "--recipe=coat", 1, true },
    { "format.recompute", "activations.recompute", "one_in_two", "none", "--recipe=coat", 1, true },
    { "format.forward", "fp8.forward", "saved", "exact", "--recipe=coat", 1, true },
    { "format.fast", "fp8.fast_accumulation", "forward", "none", "--recipe=coat", 1, true },
    { "format.scales", "fp8.scales", "microbatch", "step", "--recipe=coat", 1, true },
    { "format.stream", "format.residual", "f32", "bf16", "--recipe=fp8", 1, true },
    { "format.saved", "format.saved_norm_input", "bf16", "e5m2/16", "--recipe=coat", 1, true },
    { "format.qkv", "format.saved_qkv", "e4m3/16", "bf16", "--recipe=coat", 1, true },
    { "format.att", "format.saved_attention", "e4m3/16", "bf16", "--recipe=coat", 1, true },
    { "format.hidden", "format.saved_mlp", "bf16", "e5m2/16", "--recipe=coat", 1, true },
    { "host.activations", "offload.activations", "all", "never", "--recipe=coat", 1, true },
    { "host.base", "offload.frozen", "all", "never", "--recipe=coat", 1, true },
    { "host.moments", "offload.optimizer", "all", "never", "--recipe=coat", 1, true },
    { "host.master", "offload.master", "all", "never", "--recipe=coat", 1, true },
    { "mlp_tile", "tiled_mlp_tokens", "128", "256", "--activations.keep=block", 1, true },
    { "network", "internode_gb_per_s", "45", "5", "--recipe=coat", 1, true },
    { "optimizer.adjust_lr", "optimizer.adjust_lr_fn", "original", "match_rms_adamw",
      "--optimizer.name=muon", 1, true },
    { "parallelism.data_parallel_replicate_degree", "parallelism.replicate", "2", "1",
      "--recipe=coat", 2, false },
    { "parallelism.data_parallel_shard_degree", "parallelism.shard", "2", "1", "--recipe=coat", 2,
      false },
    { "parallelism.context_parallel_degree", "parallelism.context", "2", "1",
      "--model.weight_tying=false", 2, false },
    { "parallelism.tensor_parallel_degree", "parallelism.tensor", "2", "1", "--recipe=bf16", 2,
      false },
    { "parallelism.pipeline_parallel_degree", "parallelism.pipeline", "2", "1",
      "--model.weight_tying=false", 2, false },
    { "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_schedule", "Sequential",
      "1F1B", "--model.weight_tying=false", 2, false },
    { "lora.r", "lora.rank", "4", "2", "--recipe=bf16", 1, false },
    { "lora.lora_alpha", "lora.alpha", "3", "2", "--lora.rank=4", 1, false },
};
enum { COUNT = sizeof list / sizeof list[0] };

/* Returns the key without its section, and the length of the section's name; 0: the key is in no
 * section. */
static const char *key_in(const char *name, int *section)
{
    const char *dot = strchr(name, '.');
    *section = dot ? (int)(dot - name) : 0;
    return dot ? dot + 1 : name;
}

static char *line_of(const char *name, const char *value)
{
    int n;
    const char *key = key_in(name, &n);
    return n ? xasprintf("%.*s: {%s: %s}", n, name, key, value) : xasprintf("%s: %s", key, value);
}

/* Writes x.yaml with `first` and `second`, which may be NULL; returns the line number of
 * `first`. */
static int write_names(const char *first, const char *second, const char *value)
{
    int n, m = -1;
    const char *key = key_in(first, &n), *other = second ? key_in(second, &m) : NULL;
    char *line, *more = second ? line_of(second, value) : xstrdup("");
    const bool within = strncmp(first, "optimizer.", strlen("optimizer.")) == 0;
    if (within) /* if the section exists already */
        line = xasprintf("learning_rate: 1e-3\n  %s: %s%s%s%s%s", key, value, second ? "\n  " : "",
                         second ? other : "", second ? ": " : "", second ? value : "");
    else if (n > 0 && n == m && strncmp(first, second, (size_t)n) == 0)
        line = xasprintf("%.*s: {%s: %s, %s: %s}", n, first, key, value, other, value);
    else {
        char *own = line_of(first, value);
        line = xasprintf("%s\n%s", own, more);
        free(own);
    }
    const int at = try_write_changed(within ? "learning_rate" : NULL, line);
    free(line);
    free(more);
    return at + within;
}

static char *argument_of(const char *name, const char *value)
{
    return xasprintf("--%s=%s", name, value);
}

#define NOTE "of earlier versions is read as"

static int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)); at++)
        n++;
    return n;
}

/* Loads x.yaml with the argument, and checks that the configuration is `text`. The only warning
 * about names is about list[i], if that is a name of earlier versions. */
static void check_same(int i, const char *argument, const char *text)
{
    char said[8192], names[256];
    Config *c = try_load(list[i].world, list[i].with, argument, NULL, NULL);
    assert_string_equal(c->text, text);
    config_free(c);
    assert_true(try_printed(said, sizeof said, 2, list[i].world, list[i].with, argument));
    assert_int_equal(count(said, NOTE), list[i].earlier);
    if (!list[i].earlier)
        return;
    snprintf(names, sizeof names, "%s %s", list[i].other, list[i].name);
    try_names(said, names);
}

TEST(test_same)
{
    for (int i = 0; i < COUNT; i++) {
        char said[8192];
        char *argument = argument_of(list[i].name, list[i].value);
        char *old = argument_of(list[i].other, list[i].value);
        int n;
        const char *key = key_in(list[i].other, &n);
        char *section = xasprintf("--%.*s={%s: %s}", n, list[i].other, key, list[i].value);
        try_write(try_path, try_complete);
        Config *c = try_load(list[i].world, list[i].with, argument, NULL, NULL);
        Config *without = try_load(list[i].world, list[i].with, NULL, NULL, NULL);
        assert_string_not_equal(c->text, without->text);
        assert_true(try_printed(said, sizeof said, 2, list[i].world, list[i].with, argument));
        assert_int_equal(count(said, NOTE), 0);
        check_same(i, old, c->text);
        if (n)
            check_same(i, section, c->text);
        write_names(list[i].other, NULL, list[i].value);
        check_same(i, NULL, c->text);
        config_free(c);
        config_free(without);
        free(argument);
        free(old);
        free(section);
    }
}

/* The command line overrides the file, whatever name the key has in each. */
TEST(test_override)
{
    for (int i = 0; i < COUNT; i++)
        for (int old = 0; old < 2; old++) {
            const char *const name[2] = { list[i].name, list[i].other };
            char *argument = argument_of(name[!old], list[i].value);
            char *own = argument_of(list[i].name, list[i].value);
            try_write(try_path, try_complete);
            Config *expected = try_load(list[i].world, list[i].with, own, NULL, NULL);
            write_names(name[old], NULL, list[i].changed);
            check_same(i, argument, expected->text);
            config_free(expected);
            free(argument);
            free(own);
        }
}

/* Both names are in the file, or both on the command line. */
TEST(test_both)
{
    for (int i = 0; i < COUNT; i++) {
        char said[8192], names[512];
        char *own = argument_of(list[i].name, list[i].value);
        char *old = argument_of(list[i].other, list[i].value);
        snprintf(names, sizeof names, "%s %s", own, old);
        try_write(try_path, try_complete);
        for (int order = 0; order < 2; order++) {
            assert_false(try_printed(said, sizeof said, 2, list[i].world, order ? own : old,
                                     order ? old : own));
            try_contains(said, "two names of one key");
            try_names(said, names);
        }
        const int line = write_names(list[i].other, list[i].name, list[i].value);
        assert_false(try_printed(said, sizeof said, 2, list[i].world, NULL, NULL));
        snprintf(names, sizeof names, "x.yaml:%d %s %s", line, list[i].other, list[i].name);
        try_names(said, names);
        free(own);
        free(old);
    }
}

/* A section of earlier versions may be empty. A key that the section never had is an error, which
 * names the present section. */
TEST(test_section)
{
    static const char *const empty[] = { "host:", "host: {}", "host: null", "format:" };
    char said[8192];
    try_write(try_path, try_complete);
    Config *without = try_load(1, NULL, NULL, NULL, NULL);
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        try_write_changed(NULL, empty[i]);
        Config *c = try_load(1, NULL, NULL, NULL, NULL);
        assert_string_equal(c->text, without->text);
        config_free(c);
        assert_true(try_printed(said, sizeof said, 2, 1, NULL, NULL));
        assert_int_equal(count(said, NOTE), 0);
    }
    config_free(without);
    static const char *const wrong[] = { "host: {master: all, weights: all}", "host: all",
                                         "host: []" };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        try_write_changed(NULL, wrong[i]);
        try_refused(NULL, NULL, "host offload");
    }
    try_write_changed(NULL, "format: []");
    try_refused(NULL, NULL, "format section list");
    assert_true(try_printed(said, sizeof said, 1, 1, "--help=host", NULL));
    assert_int_equal(count(said, "  offload."), 4);
    assert_true(try_printed(said, sizeof said, 1, 1, "--help=format", NULL));
    assert_int_equal(strncmp(said, "  format.", strlen("  format.")), 0);
}

/* OLMo-core's skip_step is true or false; spikes is a word. */
TEST(test_skip_step)
{
    static const struct {
        const char *text;
        OnSpike spikes;
    } cases[] = { { "true", SPIKES_SKIP }, { "Yes", SPIKES_SKIP }, { "false", SPIKES_WARN } };
    char said[8192];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *argument = argument_of("skip_step", cases[i].text),
             *line = line_of("skip_step", cases[i].text);
        try_write_changed(NULL, "spikes: stop");
        Config *c = try_load(1, argument, NULL, NULL, NULL);
        assert_int_equal(c->spikes, cases[i].spikes);
        config_free(c);
        try_write_changed(NULL, line);
        c = try_load(1, NULL, NULL, NULL, NULL);
        assert_int_equal(c->spikes, cases[i].spikes);
        config_free(c);
        assert_true(try_printed(said, sizeof said, 2, 1, NULL, NULL));
        assert_int_equal(count(said, "skip_step"), 0);
        try_refused(argument, "--spikes=warn", "skip_step spikes");
        free(argument);
        free(line);
    }
    try_write(try_path, try_complete);
    try_refused("--skip_step=stop", NULL, "skip_step stop true false spikes");
}

/* intermediate_size is half of mlp_hidden_size. */
TEST(test_half)
{
    try_write(try_path, try_complete);
    Config *c = try_load(1, "--model.intermediate_size=96", NULL, NULL, NULL),
           *whole = try_load(1, "--model.mlp_hidden_size=192", NULL, NULL, NULL);
    assert_int_equal(c->model.mlp_width, 96);
    assert_string_equal(c->text, whole->text);
    try_accepted("--model.intermediate_size=96", "--recipe=coat", "");
    config_free(c);
    config_free(whole);
    try_refused("--model.intermediate_size=96", "--model.mlp_hidden_size=192",
                "model.intermediate_size 96 model.mlp_hidden_size 192");
    try_refused("--model.intermediate_size=100", NULL, "model.intermediate_size 100 16 96 112");
    try_refused("--model.intermediate_size=1073741824", NULL,
                "model.intermediate_size 1073741823 1073741824");
    try_write_hf("{" TRY_LLAMA "}"); /* half of 96 */
    char *from = xasprintf("--load_path=%s", try_folder);
    c = try_load(1, from, "--model.intermediate_size=112", NULL, NULL);
    assert_int_equal(c->model.mlp_width, 112);
    config_free(c);
    free(from);
}

/* Saved configurations list all formats of a recipe, most as null, which needs no warning. */
TEST(test_null)
{
    char said[8192];
    try_write_changed(NULL, "format: {keep: null, recompute: null, forward: null, fast: null, "
                            "scales: null, stream: null, att: null}");
    assert_true(try_printed(said, sizeof said, 2, 1, "--recipe=coat-lean", NULL));
    assert_int_equal(count(said, NOTE), 0);
    Config *c = try_load(1, "--recipe=coat-lean", "--activations.keep=block", NULL, NULL);
    assert_true(c->recipe.keep == KEEP_BLOCK &&
                c->recipe.scales == recipe_find("coat-lean")->scales);
    config_free(c);
}

/* torchtitan's -1 means all ranks, or the ranks that the replicas leave. */
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

/* The configuration of a run or checkpoint of an earlier version has the names of that version: no
 * warning is printed. */
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

/* PEFT's name of a key that allows only one value. */
TEST(test_dropout)
{
    try_write(try_path, try_complete);
    try_accepted("--lora.lora_dropout=0.0", NULL, "");
    try_refused("--lora.lora_dropout=0.1", NULL, "lora.dropout 0.1");
}

/* --help of the other name explains the key. Every key of the list is in the table. */
TEST(test_help)
{
    char said[8192];
    for (int i = 0; i < COUNT; i++) {
        char *argument = argument_of("help", list[i].other);
        char *expected = xasprintf("%s is read as:\n  %s: ", list[i].other, list[i].name);
        assert_true(try_printed(said, sizeof said, 1, 1, argument, NULL));
        assert_int_equal(strncmp(said, expected, strlen(expected)), 0);
        free(argument);
        free(expected);
    }
}

/* The changelog lists every name of earlier versions. */
TEST(test_changelog)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = fopen(".github/CHANGELOG.md", "r");
    assert_non_null(f);
    assert_true(getdelim(&text, &size, '\0', f) > 0);
    fclose(f);
    for (int i = 0; i < COUNT; i++) {
        char *other = xasprintf("`%s`", list[i].other), *name = xasprintf("`%s`", list[i].name);
        if (list[i].earlier && (!strstr(text, other) || !strstr(text, name)))
            fail_msg(".github/CHANGELOG.md does not say that %s is %s", other, name);
        free(other);
        free(name);
    }
    free(text);
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
