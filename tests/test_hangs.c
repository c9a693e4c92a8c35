/* Slow runs are not ended, hung ones are reported, and a signal ends a run that is not training
 * yet.
 *
 * This program is also ./train: with arguments it is a rank in which one function is slow, hangs,
 * dies or waits for ever when SIGTERM comes. FAULT sets this: "pwrite slow 0 1" is slow from the
 * first call on in rank 1, "shard_read hang 40 -1" hangs at the 41st call in every rank. */
#include "data/shuffle.h"
#include "kernels/kernels.h"
#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/weight_files.h"
#include "model/keys/yaml.h"
#include "model/run/log.h"
#include "tests/test.h"
#include "tests/launch.h"
#include "tests/sanitized.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

/* seconds from a fault to the end of all ranks, on a busy machine */
enum { MOST = SANITIZED ? 300 : 60 };

/* ---- a rank ---------------------------------------------------------------------------------- */

static pthread_t main_thread;

/* Called before function `name`. milliseconds: of a slow call. */
static void meet_fault(const char *name, int milliseconds)
{
    static atomic_int calls;
    char function[32], how[8];
    int after, rank;
    if (!getenv("FAULT") ||
        sscanf(getenv("FAULT"), "%31s %7s %d %d", function, how, &after, &rank) != 4)
        return;
    if (strcmp(function, name) != 0 || (rank >= 0 && rank != comm_rank()) || calls++ < after)
        return;
    if (strcmp(how, "die") == 0)
        die("%s cannot continue", name);
    if (strcmp(how, "term") == 0)
        kill(getpid(), SIGTERM);
    do
        usleep((useconds_t)milliseconds * 1000);
    while (strcmp(how, "slow") != 0);
}

int __real_main(int argc, char **argv);
void __real_backend_attention_forward(Tensor y, float *lse, Tensor qkv, Attention a,
                                      Documents docs);
void __wrap_backend_attention_forward(Tensor y, float *lse, Tensor qkv, Attention a,
                                      Documents docs);
ssize_t __real_pwrite(int fd, const void *src, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void *src, size_t bytes, off_t at);
const void *__real_map_file(size_t *bytes, const char *key, const char *path);
const void *__wrap_map_file(size_t *bytes, const char *key, const char *path);
int __real_shard_read(int *ids, const void *s, uint64_t first, int count, int vocab_size);
int __wrap_shard_read(int *ids, const void *s, uint64_t first, int count, int vocab_size);
bool __real_numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *arg),
                          void *arg);
bool __wrap_numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *arg),
                          void *arg);
char *__real_checkpoint_latest(const char *save_folder);
char *__wrap_checkpoint_latest(const char *save_folder);
YamlNode *__real_yaml_load(const char *path);
YamlNode *__wrap_yaml_load(const char *path);
void __real_folder_clean(const char *save_folder);
void __wrap_folder_clean(const char *save_folder);
void __real_folder_publish(const char *save_folder, long step);
void __wrap_folder_publish(const char *save_folder, long step);
void __real_folder_remove_step(const char *save_folder, long step);
void __wrap_folder_remove_step(const char *save_folder, long step);
Log *__real_log_open(const Config *c, const UnitLayout *shape, RunLength length, long last_step,
                     long first_step, bool resumes, int world);
Log *__wrap_log_open(const Config *c, const UnitLayout *shape, RunLength length, long last_step,
                     long first_step, bool resumes, int world);
WeightFiles __real_weight_files_open(const char *folder);
WeightFiles __wrap_weight_files_open(const char *folder);

void __wrap_backend_attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    meet_fault("backend_attention_forward", 100);
    __real_backend_attention_forward(y, lse, qkv, a, docs);
}

ssize_t __wrap_pwrite(int fd, const void *src, size_t bytes, off_t at)
{
    if (!pthread_equal(pthread_self(), main_thread))
        meet_fault("pwrite", 400);
    return __real_pwrite(fd, src, bytes, at);
}

const void *__wrap_map_file(size_t *bytes, const char *key, const char *path)
{
    meet_fault("map_file", 100);
    return __real_map_file(bytes, key, path);
}

int __wrap_shard_read(int *ids, const void *s, uint64_t first, int count, int vocab_size)
{
    if (!pthread_equal(pthread_self(), main_thread))
        meet_fault("shard_read", 100);
    return __real_shard_read(ids, s, first, count, vocab_size);
}

char *__wrap_checkpoint_latest(const char *save_folder)
{
    meet_fault("checkpoint_latest", 100);
    return __real_checkpoint_latest(save_folder);
}

YamlNode *__wrap_yaml_load(const char *path)
{
    meet_fault("yaml_load", 100);
    return __real_yaml_load(path);
}

void __wrap_folder_clean(const char *save_folder)
{
    meet_fault("folder_clean", 100);
    __real_folder_clean(save_folder);
}

void __wrap_folder_publish(const char *save_folder, long step)
{
    meet_fault("folder_publish", 100);
    __real_folder_publish(save_folder, step);
}

void __wrap_folder_remove_step(const char *save_folder, long step)
{
    meet_fault("folder_remove_step", 100);
    __real_folder_remove_step(save_folder, step);
}

Log *__wrap_log_open(const Config *c, const UnitLayout *shape, RunLength length, long last_step,
                     long first_step, bool resumes, int world)
{
    meet_fault("log_open", 100);
    return __real_log_open(c, shape, length, last_step, first_step, resumes, world);
}

WeightFiles __wrap_weight_files_open(const char *folder)
{
    meet_fault("weight_files_open", 100);
    return __real_weight_files_open(folder);
}

static bool (*real_go_on)(void *arg);

static bool slow_go_on(void *arg)
{
    const bool goes_on = real_go_on(arg);
    meet_fault("numpy_shuffle", 400);
    return goes_on;
}

bool __wrap_numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *arg),
                          void *arg)
{
    real_go_on = go_on;
    return __real_numpy_shuffle(index, n, seed, slow_go_on, arg);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static FILE *start_faulty(int ranks, const char *fault, const char *run, const char *arguments)
{
    char here[512];
    const ssize_t n = readlink("/proc/self/exe", here, sizeof here - 1);
    assert_true(n > 0);
    here[n] = '\0';
    return start_command(
        "env FAULT='%s' %s %s -n %d %s configs/tiny.yaml %s --save_folder=%s/%s %s", fault,
        setting("LAUNCH", "mpirun --oversubscribe"),
        strstr(fault, " die ") ? "--enable-recovery" : "",
        ranks < most_ranks() ? ranks : most_ranks(), here, SMALL, folder, run, arguments);
}

/* All ranks end by themselves and print each of these texts once. content: the launcher lets the
 * other ranks continue, so it may return 0. */
static void expect_fault(FILE *p, bool content, const char *const said[3])
{
    const double since = clock_seconds();
    const int status = finish(p);
    const double took = clock_seconds() - since;
    if ((status == 0 && !content) || took > MOST) {
        fprintf(stderr, "%s\n", output);
        fail_msg("status %d after %.1f s, expected another than 0 within %d s", status, took, MOST);
    }
    printf("ended with status %d after %.1f s\n", status, took);
    for (int i = 0; i < 3 && said[i]; i++) {
        expect_output(said[i]);
        if (strstr(strstr(output, said[i]) + 1, said[i])) {
            fprintf(stderr, "%s\n", output);
            fail_msg("said twice: '%s'", said[i]);
        }
    }
}

/* ---- what is slow ---------------------------------------------------------------------------- */

static double seconds_after(const char *text)
{
    expect_output(text);
    return strtod(strstr(output, text) + strlen(text), NULL);
}

/* A save of rank 1 takes more than ten timeouts, and so does its shuffle of an epoch of 7 million
 * sequences. Rank 0 finishes its work at once and waits. */
TEST(test_slow)
{
    char arguments[512], command[256];
    double loss[MAX_STEPS];
    if (on_gpu() || SANITIZED) /* starts slowly: ten timeouts would take minutes */
        skip();
    snprintf(command, sizeof command, "truncate -s 112M %s/sparse.npy", folder);
    assert_int_equal(system(command), 0);
    snprintf(arguments, sizeof arguments,
             "--timeout_seconds=1 --max_duration=1 --save_interval=null "
             "--save_num_checkpoints_to_keep=0 --model.max_sequence_length=8 "
             "--data.paths=[%s/sparse.npy]",
             folder);
    FILE *save = start_faulty(2, "pwrite slow 0 1", "slow-save",
                              "--timeout_seconds=1 --model.n_layers=3 --max_duration=1");
    FILE *shuffle = start_faulty(2, "numpy_shuffle slow 0 1", "slow-shuffle", arguments);
    expect_status(finish(save), 0);
    assert_true(exists("slow-save/step1/trainer.json"));
    const double written = seconds_after("written in ");
    expect_status(finish(shuffle), 0);
    losses(loss, "slow-shuffle", 1);
    printf("written in %.1f s\n", written);
    assert_true(written > 10);
}

/* ---- what hangs ------------------------------------------------------------------------------ */

/* Arguments may contain %s, the test's folder. The cases do not run at the same time, because a
 * slow run would look like a hung run. */
TEST(test_hung)
{
    static const struct {
        const char *fault, *arguments, *since;
    } cases[] = {
        { "pwrite hang 5 1", "--save_interval=2", "since writing step2.tmp/" },
        { "numpy_shuffle hang 0 1", "", "since shuffling epoch 1 in step 1." },
        { "backend_attention_forward hang 1 1", "--max_duration=1",
          "since computation of block 1 in step 1" },
        { "backend_attention_forward hang 2 1",
          "--max_duration=1 --parallelism.pipeline=2 --model.weight_tying=false",
          "since computation of block 1 in step 1" },
        { "shard_read hang 12 1", "", "since reading data/sample-train.npy in step " },
        { "map_file hang 2 1", "--eval_interval=1", "since opening data/sample-val.npy in step 1" },
        { "map_file hang 0 1", "", "since opening data/sample-train.npy" },
        { "yaml_load hang 0 1", "", "since reading the configuration" },
        { "checkpoint_latest hang 0 1", "--try_load_latest_save",
          "since looking for the latest checkpoint" },
        { "weight_files_open hang 0 1", "--load_path=%s/before/step1",
          "since opening the files to load" },
        { "log_open hang 0 0", "", "since opening metrics.jsonl" },
        { "folder_clean hang 0 0", "", "since tidying save_folder and writing config.yaml" },
        { "folder_publish hang 0 0", "--save_interval=2",
          "since publishing the checkpoint in step " },
        { "folder_remove_step hang 0 0", "--save_interval=2 --save_num_checkpoints_to_keep=1",
          "since deleting old checkpoints in step " },
    };
    enum { CASES = sizeof cases / sizeof cases[0], AT_ONCE = 5 };
    FILE *p[CASES];
    needs_ranks(2);
    expect_status(train(1, "--max_duration=1 --save_folder=%s/before", folder), 0);
    for (int i = 0; i < CASES + AT_ONCE; i++) {
        char text[256];
        if (i >= AT_ONCE) {
            const char *fault = cases[i - AT_ONCE].fault;
            snprintf(text, sizeof text, "rank %s (process", fault + strlen(fault) - 1);
            expect_fault(
                p[i - AT_ONCE], false,
                (const char *[3]){ cases[i - AT_ONCE].since, text, "has made no progress for" });
        }
        if (i < CASES) {
            char run[32], arguments[512];
            snprintf(run, sizeof run, "hung%d", i);
            snprintf(text, sizeof text, cases[i].arguments, folder);
            snprintf(arguments, sizeof arguments, "--timeout_seconds=%d --max_duration=20 %s",
                     on_gpu() || SANITIZED ? 20 : 3, text);
            p[i] = start_faulty(2, cases[i].fault, run, arguments);
        }
    }
}

/* ---- single ranks ---------------------------------------------------------------------------- */

/* A rank dies in a thread that is not the main thread. It cannot end the other ranks, and neither
 * does this launcher. */
TEST(test_died_in_a_thread)
{
    needs_ranks(2);
    expect_fault(
        start_faulty(2, "shard_read die 12 1", "died", "--timeout_seconds=100 --max_duration=20"),
        true,
        (const char *[3]){ "error (rank 1): shard_read cannot continue", "rank 1 (process",
                           "ended with an error of its own" });
}

/* The watchdog also watches a run of one rank. */
TEST(test_alone)
{
    const char *arguments = on_gpu() || SANITIZED ? "--timeout_seconds=20 --max_duration=20"
                                                  : "--timeout_seconds=2 --max_duration=20";
    expect_fault(start_faulty(1, "shard_read hang 12 0", "alone", arguments), false,
                 (const char *[3]){ "since reading data/sample-train.npy in step ",
                                    "has made no progress for" });
}

/* ---- before training ------------------------------------------------------------------------- */

/* Hangs while files are opened, or in a thread while the main thread waits for the first step; also
 * in one of several ranks. */
TEST(test_signal_before_training)
{
    static const struct {
        int ranks;
        const char *fault, *said;
    } cases[] = {
        { 1, "map_file term 0 -1",
          "error: SIGTERM while opening data/sample-train.npy, before the first step" },
        { 2, "map_file term 0 -1",
          "error: SIGTERM while opening data/sample-train.npy, before the first step" },
        { 2, "map_file term 0 1",
          "error: SIGTERM while opening data/sample-train.npy, before the first step" },
        { 1, "numpy_shuffle term 0 -1",
          "error: SIGTERM while shuffling epoch 1, before the first step" },
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    FILE *p[CASES];
    for (int i = 0; i < CASES; i++) {
        char run[32];
        snprintf(run, sizeof run, "loads%d", i);
        p[i] = start_faulty(cases[i].ranks, cases[i].fault, run, "--max_duration=20");
    }
    for (int i = 0; i < CASES; i++)
        if (i != 2 || most_ranks() > 1)
            expect_fault(p[i], false, (const char *[3]){ cases[i].said });
        else
            finish(p[i]);
}

int main(int argc, char **argv);
int __wrap_main(int argc, char **argv);

int __wrap_main(int argc, char **argv)
{
    main_thread = pthread_self();
    if (argc > 1)
        return __real_main(argc, argv);
    ids = "";
    return run_all_tests(make_folder, remove_folder);
}
