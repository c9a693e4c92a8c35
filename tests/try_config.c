/* Helpers of the tests of the configuration. */
#include "tests/try_config.h"

#include "model/checkpoint/load.h"
#include "tests/test.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* A complete file. Tests change lines of it. */
const char try_complete[] = "run_name: try\n"
                            "seed: 6198\n"
                            "model:\n"
                            "  d_model: 64\n"
                            "  n_layers: 2\n"
                            "  n_heads: 4\n"
                            "  vocab_size: 100\n"
                            "  eos_token_id: 99\n"
                            "  qkv_bias: false\n"
                            "  layer_norm_type: rms\n"
                            "optimizer:\n"
                            "  learning_rate: 1e-3\n"
                            "  betas: [0.9, 0.95]\n"
                            "scheduler:\n"
                            "  t_warmup: 10\n"
                            "data:\n"
                            "  paths: [a.npy]\n"
                            "max_duration: 100\n"
                            "global_train_batch_size: 8\n"
                            "device_train_microbatch_size: 2\n";

/* The spellings of OLMo's published files, shortened, without the keys that
 * scripts/convert_config.py replaces. */
const char try_published[] =
    "run_name: pub\n"
    "model: {d_model: 64, n_heads: 4, n_layers: 2, mlp_ratio: 8, weight_tying: true, "
    "attention_layer_norm: false,\n"
    "        multi_query_attention: false, layer_norm_type: default, layer_norm_with_affine: "
    "false,\n"
    "        attention_layer_norm_with_affine: false, max_sequence_length: 32, vocab_size: 50280,\n"
    "        embedding_size: 50304, eos_token_id: 50279, pad_token_id: 1, init_fn: mitchell}\n"
    "optimizer:\n  name: adamw\n  learning_rate: 4.0e-4\n  weight_decay: 0.1\n  betas:\n  - 0.9\n  "
    "- 0.95\n"
    "scheduler: {name: linear_with_warmup, t_warmup: 10, alpha_f: 0.1, grad_clip_warmup_steps: "
    "1000,\n"
    "            grad_clip_warmup_factor: 10.0}\n"
    "save_interval: 1000\n"
    "save_interval_unsharded: 10000\n"
    "max_duration: 739_328  # steps\n"
    "global_train_batch_size: 2048\n"
    "device_train_microbatch_size: 8\n"
    "fsdp: {precision: mixed, sharding_strategy: FULL_SHARD}\n"
    "max_grad_norm: 1.0\n"
    "evaluators:\n"
    "  - label: small\n    data:\n      datasets:\n"
    "        c4-validation:\n          - eval/c4.npy\n        pile-validation: [eval/p0.npy, "
    "eval/p1.npy]\n"
    "        far-validation: [s3://far/x.npy]\n"
    "  - {label: own, data: {paths: eval/own.npy, memmap_dtype: uint32}}\n"
    "  - label: piqa\n    type: downstream\n"
    "data: {paths: [d.npy]}\n";

char try_folder[64], try_path[128];

int try_make_folder(void **state)
{
    (void)state;
    strcpy(try_folder, "/tmp/test_config_XXXXXX");
    if (!mkdtemp(try_folder))
        return -1;
    snprintf(try_path, sizeof try_path, "%s/x.yaml", try_folder);
    return 0;
}

int try_remove_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", try_folder);
    return system(command);
}

void try_write(const char *name, const char *text)
{
    FILE *f = fopen(name, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

int try_write_changed(const char *line, const char *with)
{
    char text[4096] = "";
    int number = 0, found = 0;
    for (const char *c = try_complete; *c; number++) {
        size_t length = strcspn(c, "\n") + 1, indent = strspn(c, " ");
        if (line && strncmp(c + indent, line, strlen(line)) == 0) {
            snprintf(text + strlen(text), sizeof text - strlen(text), "%.*s%s\n", (int)indent, c,
                     with);
            found = number + 1;
        } else {
            strncat(text, c, length);
        }
        c += length;
    }
    if (!line) {
        strcat(text, with);
        strcat(text, "\n");
        found = number + 1;
    }
    try_write(try_path, text);
    assert_true(found);
    return found;
}

Config *try_load(int world, const char *a, const char *b, const char *c, const char *d)
{
    const char *arguments[] = { "train", try_path, a, b, c, d };
    char *argv[7] = { NULL };
    int argc = 0;
    while (argc < 6 && arguments[argc]) {
        argv[argc] = strdup(arguments[argc]);
        argc++;
    }
    Config *config = config_load(argc, argv, world, checkpoint_latest);
    for (int i = 0; i < argc; i++)
        free(argv[i]);
    return config;
}

bool try_printed(char *out, size_t size, int stream, int world, const char *a, const char *b)
{
    int ends[2], status;
    size_t n = 0;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], stream);
        close(ends[0]);
        close(ends[1]);
        config_free(try_load(world, a, b, NULL, NULL));
        fflush(NULL);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; n + 1 < size && (got = read(ends[0], out + n, size - 1 - n)) > 0;)
        n += (size_t)got;
    out[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void try_contains(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("expected '%s' in: %s", part, text);
}

/* Whether a name begins or ends between these two characters. */
static bool is_border(char inside, char outside)
{
    const bool word = isalnum((unsigned char)outside) || outside == '_';
    return !word || !(isalnum((unsigned char)inside) || inside == '_');
}

static bool has_name(const char *text, const char *name, size_t length)
{
    for (const char *at = text; (at = strstr(at, name)); at++)
        if ((at == text || is_border(*name, at[-1])) && is_border(name[length - 1], at[length]))
            return true;
    return false;
}

void try_names(const char *text, const char *names)
{
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", names);
    for (char *name = strtok(copy, " "); name; name = strtok(NULL, " "))
        if (!has_name(text, name, strlen(name)))
            fail_msg("expected %s in: %s", name, text);
}

static void check_printed(bool expected, const char *a, const char *b, const char *names)
{
    char message[8192];
    if (try_printed(message, sizeof message, 2, 1, a, b) != expected)
        fail_msg("%s %s was %s: %s", a ? a : "the file", b ? b : "",
                 expected ? "refused" : "accepted", message);
    if (*names)
        try_names(message, names);
    else
        assert_string_equal(message, "");
}

void try_accepted(const char *a, const char *b, const char *names)
{
    check_printed(true, a, b, names);
}

void try_refused(const char *a, const char *b, const char *names)
{
    check_printed(false, a, b, names);
}

void try_write_hf(const char *json)
{
    char name[128];
    snprintf(name, sizeof name, "%s/config.json", try_folder);
    try_write(name, json);
    try_write(try_path, "data: {paths: a.npy}\n"
                        "global_train_batch_size: 8\n"
                        "device_train_microbatch_size: 2\n");
}
