/* Helpers of the tests of the configuration. */
#include "tests/try_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* A complete file. Tests change lines of it. */
const char try_base[] =
    "run_name: try\n"
    "seed: 6198\n"
    "model:\n"
    "  d_model: 64\n"
    "  n_layers: 2\n"
    "  n_heads: 4\n"
    "  vocab_size: 100\n"
    "  eos_token_id: 99\n"
    "  include_bias: false\n"
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
    for (const char *c = try_base; *c; number++) {
        size_t length = strcspn(c, "\n") + 1, indent = strspn(c, " ");
        if (line && strncmp(c + indent, line, strlen(line)) == 0) {
            snprintf(text + strlen(text), sizeof text - strlen(text), "%.*s%s\n", (int)indent, c, with);
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
    Config *config = config_load(argc, argv, world);
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

void try_write_hf(const char *json)
{
    char name[128];
    snprintf(name, sizeof name, "%s/config.json", try_folder);
    try_write(name, json);
    try_write(try_path, "data: {paths: a.npy}\n"
                        "global_train_batch_size: 8\n"
                        "device_train_microbatch_size: 2\n");
}
