/* The thread of data/loader: what it shuffles, that it reports progress, and that other work can be
 * done while the main thread waits. test_loader.c tests what the thread reads. */
#include "data/loader.h"
#include "kernels/runtime/clock.h"
#include "kernels/runtime/error.h"
#include "tests/test.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[] = "/tmp/test_loader_thread_XXXXXX";

/* A sparse file of zeros. */
static DataSpec zeros(long instances, void (*beat)(const char *doing))
{
    static char *paths[] = { path };
    assert_int_equal(truncate(path, instances * 2 * 2), 0);
    return (DataSpec){ .paths = paths,
                       .num_paths = 1,
                       .itemsize = 2,
                       .sequence_length = 2,
                       .vocab_size = 8,
                       .eos_token_id = -1,
                       .pad_token_id = -1,
                       .shuffle = true,
                       .seed = 6198,
                       .drop_last = true,
                       .beat = beat };
}

static int make_file(void **state)
{
    (void)state;
    const int file = mkstemp(path);
    return file < 0 || close(file);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

/* reports of the last loader, only about shuffles; ".": the thread is idle */
static char told[4096];

static void tell(const char *doing)
{
    if (!doing || strncmp(doing, "shuffling", 9) == 0)
        strncat(told, doing ? doing : ".", sizeof told - strlen(told) - 1);
}

/* Two steps of eight are an epoch of twenty instances. Epochs without a step are not shuffled:
 * neither an epoch that a resumed run has finished, nor an epoch after the last step. */
TEST(test_no_idle_shuffle)
{
    static const struct {
        LoaderState from;
        int steps;
        const char *shuffles[3];
    } cases[] = {
        { { 0, 0 }, 2, { "shuffling epoch 1" } },
        { { 0, 0 }, 3, { "shuffling epoch 1", "shuffling epoch 2" } },
        { { 6, 8 }, 1, { "shuffling epoch 7" } },
        { { 6, 16 }, 1, { "shuffling epoch 8" } },
        { { 0, 0 }, 0, { NULL } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        DataSpec spec = zeros(20, tell);
        told[0] = '\0';
        Loader *l = loader_open(&spec, 8, 0, 1);
        Batch b;
        usleep(20000); /* time in which the thread could do unwanted work */
        loader_seek(l, cases[i].from);
        loader_limit(l, (uint64_t)cases[i].steps);
        for (int k = 0; k < cases[i].steps; k++)
            assert_true(loader_next(l, &b));
        assert_false(loader_next(l, &b));
        loader_close(l);
        const char *at = told;
        for (int k = 0; k < 3 && cases[i].shuffles[k]; k++) {
            at += strspn(at, ".");
            if (strncmp(at, cases[i].shuffles[k], strlen(cases[i].shuffles[k])) != 0)
                fail_msg("case %zu: told '%s', expected %s", i, told, cases[i].shuffles[k]);
            at += strlen(cases[i].shuffles[k]);
        }
        assert_true(*at == '.' && at[strspn(at, ".")] == '\0'); /* idle at the end */
    }
}

static int sampled;

static void count_samples(const char *doing)
{
    sampled += doing && strncmp(doing, "sampling", 8) == 0;
}

/* Thousands of files on a slow server take minutes to sample. */
TEST(test_sample_beats)
{
    DataSpec spec = zeros(20, count_samples);
    Loader *l = loader_open(&spec, 8, 0, 1);
    loader_content(l);
    assert_int_equal(sampled, 1);
    loader_close(l);
}

static atomic_bool entered;

static void take_long(const char *doing)
{
    if (doing && strncmp(doing, "shuffling", 9) == 0) {
        atomic_store(&entered, true);
        usleep(50000);
    }
}

/* A shuffle takes 3 seconds. Other work can be done during the wait, and closing the loader ends
 * the shuffle. */
TEST(test_wait)
{
    enum { ENTRIES = 30 << 18 }; /* it reports progress 60 times */
    DataSpec spec = zeros(ENTRIES, take_long);
    const double start = clock_seconds();
    Loader *l = loader_open(&spec, 8, 0, 1);
    assert_false(loader_wait(l, 0.1));
    assert_true(clock_seconds() - start < 1.5);
    while (!atomic_load(&entered))
        usleep(1000);
    loader_close(l);
    assert_true(clock_seconds() - start < 1.5);

    spec = zeros(20, NULL);
    l = loader_open(&spec, 8, 0, 1);
    Batch b;
    assert_true(loader_wait(l, 60));
    assert_true(loader_wait(l, 0));
    assert_true(loader_next(l, &b));
    assert_int_equal(b.sequences, 8);

    /* waiting for a step does not release the previous one; otherwise the thread would overwrite
     * it */
    uint32_t held[8];
    memcpy(held, b.index, sizeof held);
    assert_true(loader_wait(l, 60));
    usleep(50000);
    assert_memory_equal(b.index, held, sizeof held);
    assert_true(loader_next(l, &b));
    assert_memory_not_equal(b.index, held, sizeof held);
    loader_close(l);
}

int main(void)
{
    return run_all_tests(make_file, remove_file);
}
