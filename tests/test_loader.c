/* data/loader: the order of training, the steps of every rank, resume, labels and documents.
 * test_shard.c tests files, formats and error messages, test_shuffle.c the shuffle. */
#include "data/loader.h"
#include "data/sequence.h"
#include "data/shuffle.h"
#include "kernels/kernels.h"
#include "kernels/runtime/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"
#include "tests/shards.h"

enum { T = 6, INSTANCES = 20, VOCAB = 50304 };

static char folder[64];
static char *paths[3], *masks[3];

/* Three shards with 7, 8 and 5 instances; remaining tokens form no instance. Token t of instance i
 * is 100 i + t. */
static const int shard_tokens[3] = { 7 * T + 3, 8 * T, 5 * T + T - 1 };

/* The mask selects every token whose id is not a multiple of 3. */
static int make_files(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/test_loader_XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    for (int f = 0, instance = 0; f < 3; f++) {
        uint16_t ids[64];
        uint8_t mask[64];
        for (int i = 0; i < shard_tokens[f]; i++) {
            ids[i] = 100 * (instance + i / T) + i % T;
            mask[i] = ids[i] % 3 != 0;
        }
        instance += shard_tokens[f] / T;
        paths[f] = xasprintf("%s/%d.npy", folder, f);
        masks[f] = xasprintf("%s/%d.mask", folder, f);
        write_file(paths[f], ids, shard_tokens[f] * sizeof *ids);
        write_file(masks[f], mask, shard_tokens[f]);
    }
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    for (int f = 0; f < 3; f++) {
        unlink(paths[f]);
        unlink(masks[f]);
        free(paths[f]);
        free(masks[f]);
    }
    return rmdir(folder);
}

static DataSpec small_spec(bool shuffle)
{
    return (DataSpec){
        .paths = paths,
        .num_paths = 3,
        .itemsize = 2,
        .sequence_length = T,
        .vocab_size = VOCAB,
        .eos_token_id = -1,
        .pad_token_id = -1,
        .shuffle = shuffle,
        .seed = 6198,
        .drop_last = shuffle,
    };
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* numpy's order; test_shuffle.c has the commands. */
static const uint32_t order_6198[INSTANCES] = { 17, 4,  14, 3,  5, 12, 6, 15, 18, 13,
                                                10, 11, 2,  19, 0, 16, 7, 9,  8,  1 };

/* Collects the indices of `steps` steps of G instances in order, from all W ranks. */
static void collect(uint32_t *index, int steps, int G, int W, LoaderState from)
{
    DataSpec spec = small_spec(true);
    for (int rank = 0; rank < W; rank++) {
        Loader *l = loader_open(&spec, G, rank, W);
        Batch b;
        loader_seek(l, from);
        for (int k = 0; k < steps; k++) {
            assert_true(loader_next(l, &b));
            assert_int_equal(b.sequences, G / W);
            for (int i = 0; i < b.sequences; i++)
                index[k * G + i * W + rank] = b.index[i];
        }
        loader_close(l);
    }
}

TEST(test_order_is_the_same_for_any_number_of_ranks)
{
    enum { G = 8, STEPS = 6 }; /* 2 steps per epoch: 4 of 20 instances are dropped */
    LoaderState start = { 0, 0 };
    uint32_t expected[STEPS * G], index[STEPS * G], epoch[INSTANCES];
    for (int e = 0; e < 3; e++) {
        numpy_shuffle(epoch, INSTANCES, 6198 + e, NULL, NULL);
        memcpy(expected + e * 2 * G, epoch, 2 * G * sizeof *epoch);
    }
    assert_memory_equal(expected, order_6198, 2 * G * sizeof *expected);
    for (int W = 1; W <= 4; W *= 2) {
        memset(index, 255, sizeof index);
        collect(index, STEPS, G, W, start);
        assert_memory_equal(index, expected, sizeof index);
    }
}

TEST(test_every_instance_once_per_epoch)
{
    enum { G = 4, STEPS = INSTANCES / G };
    uint32_t index[2 * INSTANCES];
    for (int W = 1; W <= 4; W *= 2) {
        LoaderState start = { 0, 0 };
        collect(index, 2 * STEPS, G, W, start);
        for (int e = 0; e < 2; e++) {
            int seen[INSTANCES] = { 0 };
            for (int i = 0; i < INSTANCES; i++)
                seen[index[e * INSTANCES + i]]++;
            for (int i = 0; i < INSTANCES; i++)
                assert_int_equal(seen[i], 1);
        }
        assert_memory_not_equal(index, index + INSTANCES, INSTANCES * sizeof *index);
    }
}

static void assert_tokens(const Batch *b)
{
    long labels = 0;
    for (int i = 0; i < b->sequences; i++)
        for (int t = 0; t < T; t++) {
            int id = 100 * (int)b->index[i] + t;
            assert_int_equal(b->tokens[i * T + t], id);
            assert_int_equal(b->targets[i * T + t], t < T - 1 ? id + 1 : -1);
            assert_int_equal(b->begins[i * T + t], t == 0);
            labels += t < T - 1;
        }
    assert_int_equal(b->labels, labels);
}

TEST(test_tokens_and_targets)
{
    DataSpec spec = small_spec(true);
    Loader *l = loader_open(&spec, 5, 0, 1);
    Batch b;
    assert_int_equal(loader_instances(l), INSTANCES);
    assert_int_equal(loader_tokens(l), shard_tokens[0] + shard_tokens[1] + shard_tokens[2]);
    for (int k = 0; k < 9; k++) {
        assert_true(loader_next(l, &b));
        assert_tokens(&b);
    }
    loader_close(l);
}

/* ---- resume ---------------------------------------------------------------------------------- */

/* At every instance of two epochs, even if the instance is not a multiple of the batch (the batch
 * may have changed). */
TEST(test_resume_at_every_instance)
{
    DataSpec spec = small_spec(true);
    Loader *l = loader_open(&spec, 4, 1, 2);
    uint32_t order[2][INSTANCES];
    numpy_shuffle(order[0], INSTANCES, 6198, NULL, NULL);
    numpy_shuffle(order[1], INSTANCES, 6199, NULL, NULL);
    for (uint64_t position = 0; position <= INSTANCES; position++) {
        LoaderState s = { 0, position };
        Batch b;
        loader_seek(l, s);
        for (int k = 0; k < 4; k++) {
            LoaderState now = loader_state(l);
            assert_int_equal(now.epoch, s.epoch);
            assert_int_equal(now.instance, s.instance);
            if (s.instance + 4 > INSTANCES)
                s = (LoaderState){ s.epoch + 1, 0 };
            assert_true(loader_next(l, &b));
            assert_int_equal(b.sequences, 2);
            assert_int_equal(b.index[0], order[s.epoch][s.instance + 1]);
            assert_int_equal(b.index[1], order[s.epoch][s.instance + 3]);
            assert_tokens(&b);
            s.instance += 4;
        }
    }
    loader_close(l);
}

/* Instances that are too few for a step of the saved run suffice for a step of fewer sequences. */
TEST(test_resume_with_fewer)
{
    enum { G = INSTANCES * 2 / 3 };
    DataSpec spec = small_spec(true);
    uint32_t order[INSTANCES];
    numpy_shuffle(order, INSTANCES, 6198, NULL, NULL);
    Loader *l = loader_open(&spec, G, 0, 1), *fewer = loader_open(&spec, 1, 0, 1);
    Batch b;
    assert_true(loader_next(l, &b));
    loader_seek(fewer, loader_state(l));
    for (int i = G; i < INSTANCES; i++) {
        assert_true(loader_next(fewer, &b));
        assert_int_equal(b.index[0], order[i]);
    }
    loader_close(l);
    loader_close(fewer);
}

TEST(test_resume_in_a_new_loader)
{
    enum { G = 4, STEPS = 12 };
    LoaderState start = { 0, 0 };
    uint32_t whole[STEPS * G], part[STEPS * G];
    collect(whole, STEPS, G, 1, start);
    DataSpec spec = small_spec(true);
    for (int stop = 0; stop < STEPS; stop++) {
        Loader *l = loader_open(&spec, G, 0, 1);
        Batch b;
        for (int k = 0; k < stop; k++)
            assert_true(loader_next(l, &b));
        LoaderState saved = loader_state(l);
        loader_close(l);
        collect(part, STEPS - stop, G, 4, saved);
        assert_memory_equal(part, whole + stop * G, (STEPS - stop) * G * sizeof *part);
    }
}

TEST(test_fingerprint)
{
    DataSpec spec = small_spec(true);
    Loader *a = loader_open(&spec, 4, 0, 1);
    Loader *b = loader_open(&spec, 8, 1, 2);
    assert_int_equal(loader_fingerprint(a), loader_fingerprint(b));
    loader_close(b);
    spec.num_paths = 2;
    b = loader_open(&spec, 4, 0, 1);
    assert_int_not_equal(loader_fingerprint(a), loader_fingerprint(b));
    loader_close(b);
    spec.num_paths = 3;
    spec.sequence_length = T - 1;
    b = loader_open(&spec, 4, 0, 1);
    assert_int_not_equal(loader_fingerprint(a), loader_fingerprint(b));
    loader_close(b);
    loader_close(a);
}

/* ---- evaluation: file order, short last step ------------------------------------------------- */

TEST(test_unshuffled_pass)
{
    /* 8 + 8 + 4 instances; then 3 instances of a last step of 8 for 4 ranks */
    enum { G = 8, W = 4 };
    for (int rank = 0; rank < W; rank++) {
        DataSpec spec = small_spec(false);
        Loader *l = loader_open(&spec, G, rank, W);
        Batch b;
        for (int pass = 0; pass < 2; pass++) {
            for (int k = 0; k < 3; k++) {
                assert_true(loader_next(l, &b));
                assert_int_equal(b.sequences, k < 2 ? 2 : 1);
                for (int i = 0; i < b.sequences; i++)
                    assert_int_equal(b.index[i], k * G + i * W + rank);
                assert_tokens(&b);
            }
            assert_false(loader_next(l, &b));
            assert_false(loader_next(l, &b));
            assert_int_equal(loader_state(l).instance, INSTANCES);
            loader_seek(l, (LoaderState){ 0, 0 });
        }
        loader_seek(l, (LoaderState){ 0, 17 }); /* 3 instances are left for 4 ranks */
        assert_true(loader_next(l, &b));
        assert_int_equal(b.sequences, rank < 3);
        assert_int_equal(b.labels, rank < 3 ? T - 1 : 0);
        if (rank < 3)
            assert_int_equal(b.index[0], 17 + rank);
        assert_false(loader_next(l, &b));
        loader_close(l);
    }
}

TEST(test_unshuffled_pass_without_the_rest)
{
    DataSpec spec = small_spec(false);
    spec.drop_last = true;
    Loader *l = loader_open(&spec, 8, 0, 1);
    Batch b;
    assert_true(loader_next(l, &b));
    assert_true(loader_next(l, &b));
    assert_int_equal(b.index[7], 15);
    assert_false(loader_next(l, &b));
    loader_close(l);
}

/* Batches of 2, 2, 4 and 8, with an interruption of the thread in between, have the same instances,
 * on two ranks. */
TEST(test_doubling)
{
    static const uint64_t until[] = { 2, 3 };
    static const int expected[] = { 2, 2, 4, 8 };
    DataSpec spec = small_spec(false);
    for (int rank = 0; rank < 2; rank++) {
        Loader *l = loader_open(&spec, 8, rank, 2);
        Batch b;
        loader_double(l, until, 2);
        for (int step = 0, first = 0; step < 4; first += expected[step++]) {
            if (step == 1)
                loader_limit(l, 3);
            assert_true(loader_next(l, &b));
            assert_int_equal(b.sequences, expected[step] / 2);
            for (int i = 0; i < b.sequences; i++)
                assert_int_equal(b.index[i], first + 2 * i + rank);
        }
        loader_close(l);
    }
}

/* ---- labels ---------------------------------------------------------------------------------- */

TEST(test_label_mask)
{
    DataSpec spec = small_spec(true);
    spec.label_mask_paths = masks;
    spec.num_label_mask_paths = 3;
    Loader *l = loader_open(&spec, INSTANCES, 0, 1);
    Batch b;
    long labels = 0;
    assert_true(loader_next(l, &b));
    for (int i = 0; i < INSTANCES; i++)
        for (int t = 0; t < T; t++) {
            int next = b.tokens[i * T + t] + 1;
            bool target = t < T - 1 && next % 3 != 0;
            assert_int_equal(b.targets[i * T + t], target ? next : -1);
            labels += target;
        }
    assert_int_equal(b.labels, labels);
    loader_close(l);
}

TEST(test_padding)
{
    DataSpec spec = small_spec(false);
    Batch b;
    spec.pad_token_id = 304;
    for (int mask = 0; mask < 2; mask++) {
        spec.mask_padding = mask;
        spec.eos_token_id = mask ? 304 : -1;
        Loader *l = loader_open(&spec, INSTANCES, 0, 1);
        assert_true(loader_next(l, &b));
        assert_int_equal(b.tokens[3 * T + 4], 304);
        assert_int_equal(b.targets[3 * T + 2], 303);
        assert_int_equal(b.targets[3 * T + 3], mask ? -1 : 304);
        assert_int_equal(b.targets[3 * T + 4], 305);
        assert_int_equal(b.labels, INSTANCES * (T - 1) - mask);
        assert_int_equal(b.begins[3 * T + 5], mask);
        loader_close(l);
    }
}

/* By the definition: some n-gram occurs `count` times in a row. */
static bool repeats_by_definition(const int *x, int n, int min_period, int max_period, int count)
{
    for (int p = min_period; p <= max_period; p++)
        for (int start = 0; start + p * count <= n; start++) {
            int i = 0;
            while (i < p * count && x[start + i] == x[start + i % p])
                i++;
            if (i == p * count)
                return true;
        }
    return false;
}

TEST(test_repetition)
{
    int found = 0, x[24];
    uint32_t random = 1;
    for (int trial = 0; trial < 20000; trial++) {
        int n = 1 + trial % 24, alphabet = 2 + trial / 24 % 2, count = 3 + trial / 48 % 3;
        int low = 1 + trial / 144 % 3, high = low + trial / 432 % 3;
        for (int i = 0; i < n; i++) {
            random = random * 1664525u + 1013904223u;
            x[i] = (int)(random >> 16) % alphabet;
        }
        bool expected = repeats_by_definition(x, n, low, high, count);
        assert_int_equal(sequence_repeats(x, n, low, high, count), expected);
        found += expected;
    }
    assert_in_range(found, 1000, 19000); /* both results occurred */
}

/* OLMo's filter with its usual numbers 13, 1, 32. 31 repetitions pass; 32 repetitions mask every
 * label. */
TEST(test_instance_filter)
{
    enum { LENGTH = 128 };
    char path[128];
    uint16_t ids[2 * LENGTH];
    for (int i = 0; i < 2 * LENGTH; i++)
        ids[i] = i;
    for (int i = 0; i < 31 * 3; i++)
        ids[20 + i] = 7 + i % 3;
    for (int i = 0; i < 32 * 3; i++)
        ids[LENGTH + 20 + i] = 7 + i % 3;
    snprintf(path, sizeof path, "%s/repeated.npy", folder);
    write_file(path, ids, sizeof ids);

    DataSpec spec = small_spec(false);
    spec.paths = (char *[]){ path };
    spec.num_paths = 1;
    spec.sequence_length = LENGTH;
    spec.max_period = 13;
    spec.min_period = 1;
    spec.max_count = 32;
    Loader *l = loader_open(&spec, 2, 0, 1);
    Batch b;
    assert_true(loader_next(l, &b));
    assert_int_equal(b.labels, LENGTH - 1);
    for (int t = 0; t < LENGTH; t++) {
        assert_int_equal(b.targets[t], t < LENGTH - 1 ? ids[t + 1] : -1);
        assert_int_equal(b.targets[LENGTH + t], -1);
    }
    loader_close(l);
    unlink(path);
}

TEST(test_document_starts)
{
    enum { EOS = 9 };
    const int tokens[] = { 1, EOS, 2, 3, EOS, EOS, 4, EOS, 5, 6, 7, 8 };
    const int expected[] = { 0, 2, 4, 5, 6, 8, 12 };
    int start[13], longest = -1;
    uint8_t begins[12];
    for (int row = 0; row < 3; row++)
        sequence_begins(begins + 4 * row, tokens + 4 * row, 4, EOS);
    assert_int_equal(document_starts(start, &longest, begins, 3, 4), 6);
    assert_memory_equal(start, expected, sizeof expected);
    assert_int_equal(longest, 4);

    const int whole[] = { 0, 4, 8, 12 };
    for (int row = 0; row < 3; row++)
        sequence_begins(begins + 4 * row, tokens + 4 * row, 4, -1);
    for (int given = 0; given < 2; given++) {
        assert_int_equal(document_starts(start, &longest, given ? begins : NULL, 3, 4), 3);
        assert_memory_equal(start, whole, sizeof whole);
        assert_int_equal(longest, 4);
    }

    const uint8_t all[] = { 1, 1, 1, 1 };
    assert_int_equal(document_starts(start, &longest, all, 2, 2), 4);
    assert_int_equal(start[4], 4);
    assert_int_equal(longest, 1);
}

int main(void)
{
    return run_all_tests(make_files, remove_files);
}
