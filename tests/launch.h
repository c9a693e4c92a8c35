/* Runs the program as a user does: mpirun ./train configs/tiny.yaml with overrides, its output,
 * exit code and metrics. BUILD names the build folder, LAUNCH the launcher; scripts/run-tests sets
 * both. */
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "kernels/runtime/error.h"
#include "tests/test.h"
#include "tests/sanitized.h"

enum { MAX_STEPS = 128 };

static char folder[] = "/tmp/coat-train-XXXXXX"; /* for all files of a test */
static char output[1 << 16];                     /* stdout and stderr of the last command */

static inline const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static inline bool on_gpu(void)
{
    return strstr(setting("BUILD", "build/cpu"), "cuda");
}

/* Returns how many ranks can run at once: 1, 2 or 4. With CUDA each rank needs a GPU of its own. */
static inline int most_ranks(void)
{
    if (!on_gpu())
        return 4;
    FILE *p = popen("nvidia-smi -L | grep -c GPU", "r");
    int gpus = 1;
    if (!p || fscanf(p, "%d", &gpus) != 1)
        gpus = 1;
    if (p)
        pclose(p);
    return gpus < 2 ? 1 : gpus < 4 ? 2 : 4;
}

/* Returns true if this many ranks can run at once. Otherwise prints that the case `which` is left
 * out; scripts/gpu.sh and run-tests show these lines. */
static inline bool can_run(int ranks, const char *which)
{
    const bool can = ranks <= most_ranks();
    if (!can)
        printf("SKIPPED %s, needs %d GPUs\n", which, ranks);
    return can;
}

#define needs_ranks(ranks) \
    do { \
        if (!can_run(ranks, __func__)) \
            skip(); \
    } while (0)

/* A small, quick variant of tiny.yaml: 2 blocks of width 32, 8 sequences of 32 tokens a step. */
static const char SMALL[] =
    "--model.d_model=32 --model.n_layers=2 --model.n_heads=2 --model.n_kv_heads=1 "
    "--model.mlp_hidden_size=128 --model.max_sequence_length=32 --global_train_batch_size=8 "
    "--device_train_microbatch_size=2 --eval_interval=null --save_interval=1000 --recipe=f32 "
    "--scheduler.t_warmup=2";

/* The text of data/sample-*.npy in token ids below 1000; 999 ends documents. With few ids a step
 * takes a tenth of the time. */
static const char FEW_IDS[] =
    "--model.vocab_size=1000 --model.embedding_size=1024 --model.eos_token_id=999 "
    "--data.paths=[build/few-ids/train.npy] "
    "--evaluators='[{label: sample, data: {paths: [build/few-ids/val.npy]}}]'";
static const char *ids =
    FEW_IDS; /* token ids of the runs that a test starts; "": the sample's ids, for slower steps */

/* Runs a shell command of a test; it must succeed. */
static inline void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *format, ...)
{
    char command[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(command, sizeof command, format, list);
    va_end(list);
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

/* When a rank has failed, OpenMPI's mpirun waits a second for the other ranks. With this setting,
 * for runs of a single rank, it does not wait. */
static const char AT_ONCE[] = "OMPI_MCA_odls_base_sigkill_timeout=0";

/* Starts a shell command, which is killed after 5 minutes, or after 30 minutes in a build with
 * sanitizers. */
static inline FILE *start_command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline FILE *start_command(const char *format, ...)
{
    char command[8192], all[8400];
    va_list list;
    va_start(list, format);
    vsnprintf(command, sizeof command, format, list);
    va_end(list);
    const bool alone = strstr(command, " -n 1 ") && !strstr(command, " : ");
    snprintf(all, sizeof all, "OPENBLAS_NUM_THREADS=1 %s timeout --foreground %d %s 2>&1",
             alone ? AT_ONCE : "", SANITIZED ? 1800 : 300, command);
    FILE *p = popen(all, "r");
    assert_non_null(p);
    return p;
}

/* Makes stdout and stderr of a rank one pipe: from two pipes the launcher may forward the later
 * output first. */
static const char ONE_PIPE[] = "sh -c 'exec \"$0\" \"$@\" 2>&1'";
static const char *by = ""; /* ONE_PIPE, or empty */

/* Starts train on `ranks` ranks, or as many as possible, with SMALL, `ids` and the given
 * arguments. */
static inline FILE *start(int ranks, const char *arguments)
{
    if (ranks > most_ranks())
        ranks = most_ranks();
    return start_command("%s -n %d %s %s/train configs/tiny.yaml %s %s %s",
                         setting("LAUNCH", "mpirun --oversubscribe"), ranks, by,
                         setting("BUILD", "build/cpu"), SMALL, ids, arguments);
}

/* Waits until the command ends, and returns its exit status. The command's output is then in
 * `output`. */
static inline int finish(FILE *p)
{
    size_t n = fread(output, 1, sizeof output - 1, p);
    output[n] = '\0';
    while (fgetc(p) != EOF)
        ;
    int status = pclose(p);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline int train(int ranks, const char *format, ...)
{
    char arguments[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    return finish(start(ranks, arguments));
}

/* NOTE: cmocka cuts messages at 1024 characters, so the output is printed separately. */
static inline void expect_status(int found, int expected)
{
    if (found != expected) {
        fprintf(stderr, "%s\n", output);
        fail_msg("exit status %d, expected %d", found, expected);
    }
}

static inline void expect_output(const char *text)
{
    if (!strstr(output, text)) {
        fprintf(stderr, "%s\n", output);
        fail_msg("no '%s' in the output", text);
    }
}

/* Sets value[step] to a metric of each step, or to NAN if the step has no such metric. Returns the
 * number of lines with the metric. */
static inline int metric(double *value, const char *run, const char *name)
{
    char path[512], line[1 << 15];
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    for (int i = 0; i < MAX_STEPS; i++)
        value[i] = NAN;
    FILE *f = fopen(path, "r");
    if (!f)
        fail_msg("%s is missing", path);
    int found = 0;
    while (fgets(line, sizeof line, f)) {
        json_t *o = json_loads(line, 0, NULL);
        if (!o)
            fail_msg("%s: not JSON: %s", path, line);
        json_t *v = json_object_get(o, name);
        long step = json_integer_value(json_object_get(o, "step"));
        assert_in_range(step, 0, MAX_STEPS - 1);
        if (v) {
            value[step] = json_is_null(v) ? NAN : json_number_value(v);
            found++;
        }
        json_decref(o);
    }
    fclose(f);
    return found;
}

static inline void losses(double *value, const char *run, int expected)
{
    int n = metric(value, run, "train/CrossEntropyLoss");
    if (n != expected)
        fail_msg("%s: %d losses, expected %d; output:\n%s", run, n, expected, output);
}

static inline bool exists(const char *name)
{
    char path[512];
    struct stat s;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &s) == 0;
}

/* Returns a number from a checkpoint's trainer.json. */
static inline long trainer(const char *checkpoint, const char *key)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/trainer.json", folder, checkpoint);
    json_t *o = json_load_file(path, 0, NULL), *value = json_object_get(o, key);
    if (!value)
        value = json_object_get(json_object_get(o, "loader"), key);
    if (!json_is_integer(value))
        fail_msg("no %s in %s", key, path);
    const long n = (long)json_integer_value(value);
    json_decref(o);
    return n;
}

/* Makes a file of FEW_IDS, with two-byte ids as in the sample. Every test rewrites this file, also
 * while runs of other tests read it. */
static inline int make_few_ids(const char *name)
{
    char from[64], to[64], part[128];
    snprintf(from, sizeof from, "data/sample-%s.npy", name);
    snprintf(to, sizeof to, "build/few-ids/%s.npy", name);
    snprintf(part, sizeof part, "%s.%d", to, (int)getpid());
    FILE *in = fopen(from, "rb"), *out = fopen(part, "wb");
    if (!in || !out)
        return -1;
    for (int low, high; (low = getc(in)) != EOF && (high = getc(in)) != EOF;) {
        const int id = low | high << 8, few = id == 50279 ? 999 : id % 999;
        putc(few & 255, out);
        putc(few >> 8, out);
    }
    fclose(in);
    return fclose(out) == 0 && rename(part, to) == 0 ? 0 : -1;
}

static inline int make_folder(void **state)
{
    (void)state;
    mkdir("build", 0777);
    mkdir("build/few-ids", 0777);
    return mkdtemp(folder) && make_few_ids("train") == 0 && make_few_ids("val") == 0 ? 0 : -1;
}

static inline int remove_folder(void **state)
{
    (void)state;
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}
