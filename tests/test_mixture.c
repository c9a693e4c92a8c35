/* data/loader with a mixture: steps of every rank, epochs of each source, resume, a changed
 * mixture, and missing data. test_mix.c tests the shares of every prefix, test_mix_runs.c runs with
 * data.mix. */
#include "data/loader.h"
#include "data/shuffle.h"
#include "model/run/mixture_state.h"
#include "kernels/runtime/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"
#include "tests/shards.h"

/* Source s has LENGTH[s] instances of T tokens; token t of its instance i is 1000 s + 10 i + t. */
enum { T = 6, SOURCES = 3, SEED = 6198, G = 8 };
static const int LENGTH[SOURCES] = { 40, 17, 5 };

static char folder[64];
static char *paths[SOURCES], *masks[SOURCES];

static int make_files(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/test_mixture_XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    for (int s = 0; s < SOURCES; s++) {
        uint16_t ids[256];
        uint8_t mask[256];
        for (int i = 0; i < LENGTH[s] * T; i++) {
            ids[i] = (uint16_t)(1000 * s + 10 * (i / T) + i % T);
            mask[i] = i % T < 3;
        }
        paths[s] = xasprintf("%s/%d.npy", folder, s);
        masks[s] = xasprintf("%s/%d.mask", folder, s);
        write_file(paths[s], ids, (size_t)(LENGTH[s] * T) * sizeof *ids);
        write_file(masks[s], mask, (size_t)(LENGTH[s] * T));
    }
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    for (int s = 0; s < SOURCES; s++) {
        unlink(paths[s]);
        unlink(masks[s]);
        free(paths[s]);
        free(masks[s]);
    }
    return rmdir(folder);
}

static MixtureSource source_of(int s, double ratio, double max_repetition)
{
    static char *const names[SOURCES] = { "web", "code", "math" };
    return (MixtureSource){ .name = names[s],
                            .paths = &paths[s],
                            .num_paths = 1,
                            .ratio = ratio,
                            .max_repetition = max_repetition };
}

static DataSpec spec_of(const MixtureSource *mix, int count)
{
    return (DataSpec){ .mix = mix,
                       .num_mix = count,
                       .itemsize = 2,
                       .sequence_length = T,
                       .vocab_size = 5000,
                       .eos_token_id = -1,
                       .pad_token_id = -1,
                       .shuffle = true,
                       .seed = SEED,
                       .drop_last = true };
}

/* What a run has read: source and instance at each position. */
typedef struct {
    int source, index;
} Read;
enum { MOST = 64 * G };

/* Reads `steps` steps from a position on, as W ranks; returns the position after them. */
static LoaderState collect(Read *read, const DataSpec *spec, int steps, int W, LoaderState from)
{
    LoaderState after = from;
    for (int rank = 0; rank < W; rank++) {
        Loader *l = loader_open(spec, G, rank, W);
        Batch b;
        loader_seek(l, from);
        loader_limit(l, (uint64_t)steps);
        for (int k = 0; k < steps; k++) {
            assert_true(loader_next(l, &b));
            assert_int_equal(b.sequences, G / W);
            for (int i = 0; i < b.sequences; i++) {
                read[k * G + i * W + rank] = (Read){ b.source[i], (int)b.index[i] };
                assert_int_equal(b.tokens[i * T + 1],
                                 1000 * (spec->mix[b.source[i]].name[0] == 'w'   ? 0
                                         : spec->mix[b.source[i]].name[0] == 'c' ? 1
                                                                                 : 2) +
                                     10 * (int)b.index[i] + 1);
            }
            uint32_t all = 0;
            for (int s = 0; s < spec->num_mix; s++)
                all += b.share[s];
            assert_int_equal(all, G);
        }
        assert_false(loader_next(l, &b));
        after = loader_state(l);
        loader_close(l);
    }
    return after;
}

TEST(test_same_for_any_number_of_ranks)
{
    const MixtureSource mix[] = { source_of(0, 0.6, 10), source_of(1, 0.3, 10),
                                  source_of(2, 0.1, 10) };
    const DataSpec spec = spec_of(mix, 3);
    static Read one[MOST], more[MOST];
    const LoaderState end = collect(one, &spec, 20, 1, (LoaderState){ 0 });
    for (int W = 2; W <= 4; W *= 2) {
        const LoaderState other = collect(more, &spec, 20, W, (LoaderState){ 0 });
        assert_memory_equal(more, one, 20 * G * sizeof *one);
        assert_memory_equal(&other, &end, sizeof end);
    }
}

/* Each source has all its instances once, then once more, in numpy's order of its epochs. */
TEST(test_each_source_has_its_epochs)
{
    const MixtureSource mix[] = { source_of(0, 0.6, 10), source_of(1, 0.3, 10),
                                  source_of(2, 0.1, 10) };
    const DataSpec spec = spec_of(mix, 3);
    static Read read[MOST];
    collect(read, &spec, 40, 1, (LoaderState){ 0 });
    for (int s = 0; s < SOURCES; s++) {
        uint32_t order[64];
        int n = 0;
        for (int i = 0; i < 40 * G; i++)
            if (read[i].source == s) {
                const int epoch = n / LENGTH[s], place = n++ % LENGTH[s];
                numpy_shuffle(order, (uint64_t)LENGTH[s], (uint64_t)(SEED + epoch), NULL, NULL);
                assert_int_equal(read[i].index, order[place]);
            }
        assert_true(n > LENGTH[s]);
    }
}

/* A single source has the instances of data.paths, as long as its epoch lasts. */
TEST(test_one_source_is_data_paths)
{
    const MixtureSource mix[] = { source_of(0, 1, 1) };
    DataSpec spec = spec_of(mix, 1);
    static Read read[MOST];
    collect(read, &spec, LENGTH[0] / G, 2, (LoaderState){ 0 });
    spec.mix = NULL;
    spec.paths = paths;
    spec.num_paths = 1;
    Loader *l = loader_open(&spec, G, 0, 1);
    Batch b;
    for (int k = 0; k < LENGTH[0] / G; k++) {
        assert_true(loader_next(l, &b));
        for (int i = 0; i < G; i++)
            assert_int_equal(read[k * G + i].index, b.index[i]);
    }
    loader_close(l);
}

/* Resumes from the state after each step, on other numbers of ranks. */
TEST(test_resume)
{
    enum { STEPS = 14 };
    const MixtureSource mix[] = { source_of(0, 0.5, 10), source_of(1, 0.35, 10),
                                  source_of(2, 0.15, 10) };
    const DataSpec spec = spec_of(mix, 3);
    static Read whole[MOST], part[MOST];
    collect(whole, &spec, STEPS, 1, (LoaderState){ 0 });
    for (int stop = 1; stop < STEPS; stop++) {
        const LoaderState saved = collect(part, &spec, stop, 2, (LoaderState){ 0 });
        collect(part, &spec, STEPS - stop, stop % 2 ? 4 : 1, saved);
        assert_memory_equal(part, whole + stop * G, (size_t)((STEPS - stop) * G) * sizeof *part);
    }
}

/* Returns the state of a run with this mixture that continues from the position of another run. */
static TrainState state_of(const MixtureSource *mix, int count, const TrainState *then)
{
    TrainState s = { .num_mix = count };
    for (int i = 0; i < count; i++) {
        s.mix[i].weight = mixture_weight(mix[i].ratio);
        strcpy(s.mix[i].name, mix[i].name);
    }
    if (then)
        mixture_continue(&s, then);
    return s;
}

/* Positions follow the names of sources. `mixed` begins again, and continues in a run that resumes
 * with the same mixture. */
TEST(test_changed_mixture)
{
    const MixtureSource before[] = { source_of(0, 0.7, 10), source_of(1, 0.3, 10) };
    /* code is removed, math is added */
    const MixtureSource after[] = { source_of(2, 0.25, 10), source_of(0, 0.75, 10) };
    const DataSpec first = spec_of(before, 2), second = spec_of(after, 2);
    static Read read[MOST];
    TrainState was = state_of(before, 2, NULL);
    const LoaderState s = was.loader = collect(read, &first, 5, 1, (LoaderState){ 0 });
    /* 40 instances at 0.7 and 0.3 */
    assert_true(s.source[0].instance == 28 && s.source[1].instance == 12);
    TrainState is = state_of(after, 2, &was);
    assert_true(is.num_mix == 3 && strcmp(is.mix[2].name, "code") == 0 && is.mix[2].weight == 0);
    const LoaderState t = is.loader = collect(read, &second, 2, 2, is.loader);
    uint32_t web[64], math[64];
    numpy_shuffle(web, 40, SEED, NULL, NULL);
    numpy_shuffle(math, 5, SEED, NULL, NULL);
    int next_web = 28, next_math = 0;
    for (int i = 0; i < 2 * G; i++)
        assert_int_equal(read[i].index, read[i].source == 1 ? web[next_web++] : math[next_math++]);
    assert_true(next_web == 28 + 12 && next_math == 4);
    assert_int_equal(t.source[1].mixed, 12);
    /* a source that this mixture lacks: unchanged */
    assert_int_equal(t.source[2].instance, 12);
    const TrainState again = state_of(after, 2, &is);
    assert_memory_equal(&again.loader, &t, sizeof t);
}

/* With `tokens`, each epoch has the same instances. A larger value later continues the first
 * epoch. */
TEST(test_a_part_of_a_source)
{
    MixtureSource mix[] = { source_of(0, 1, 4) };
    mix[0].tokens = 10 * T + 3;
    const DataSpec spec = spec_of(mix, 1);
    static Read read[MOST];
    collect(read, &spec, 5, 1, (LoaderState){ 0 });
    uint32_t order[64];
    int seen[40] = { 0 };
    numpy_shuffle(order, 40, SEED, NULL, NULL);
    for (int i = 0; i < 5 * G; i++) {
        seen[read[i].index]++;
        if (i < 10)
            assert_int_equal(read[i].index, order[i]);
    }
    for (int i = 0; i < 10; i++)
        assert_int_equal(seen[order[i]], 4);
    mix[0].tokens = 30 * T;
    const LoaderState s = collect(read, &spec, 1, 1, (LoaderState){ 0 });
    collect(read, &spec, 2, 1, s);
    for (int i = 0; i < 2 * G; i++)
        assert_int_equal(read[i].index, order[G + i]);
}

/* Each source has its own label masks, or none. */
TEST(test_label_masks)
{
    MixtureSource mix[] = { source_of(0, 1, 1), source_of(1, 1, 1) };
    mix[1].label_mask_paths = &masks[1];
    mix[1].num_label_mask_paths = 1;
    const DataSpec spec = spec_of(mix, 2);
    Loader *l = loader_open(&spec, G, 0, 1);
    Batch b;
    assert_true(loader_next(l, &b));
    assert_true(b.share[0] == G / 2 && b.share[1] == G / 2);
    for (int i = 0; i < G; i++)
        for (int t = 0; t < T; t++)
            assert_int_equal(b.targets[i * T + t] >= 0, t < (b.source[i] == 1 ? 2 : T - 1));
    assert_int_equal(b.labels, G / 2 * (T - 1) + G / 2 * 2);
    loader_close(l);
}

TEST(test_what_is_missing)
{
    /* 40 once, or 5 twice: 50 of either */
    const MixtureSource mix[] = { source_of(0, 0.8, 1), source_of(2, 0.2, 2) };
    const DataSpec spec = spec_of(mix, 2);
    static Read read[MOST];
    Loader *l = loader_open(&spec, G, 0, 1);
    assert_int_equal(loader_left(l), 50);
    assert_null(loader_lack(l, 6));
    char *lack = loader_lack(l, 7); /* 56 instances, of which 45 are from web */
    assert_non_null(strstr(lack, "data.mix: source 'web': 30 tokens are missing"));
    assert_non_null(strstr(lack, "max_repetition to 1.13,"));
    assert_non_null(strstr(lack, "300 tokens from here"));
    free(lack);
    loader_close(l);
    const LoaderState s = collect(read, &spec, 6, 2, (LoaderState){ 0 });
    l = loader_open(&spec, G, 0, 1);
    loader_seek(l, s);
    assert_int_equal(loader_given(l), 48);
    assert_int_equal(loader_left(l), 2);
    /* the seventh step */
    assert_non_null(strstr(loader_problem(l), "data.mix: source '"));
    assert_non_null(strstr(loader_problem(l), "max_repetition"));
    loader_close(l);
    const MixtureSource longer[] = { source_of(0, 0.8, 9), mix[1] };
    const DataSpec other = spec_of(longer, 2);
    l = loader_open(&other, G, 0, 1);
    loader_seek(l, s);
    /* 88 instances, of which 18 are from math, which is in its second epoch */
    lack = loader_lack(l, 5);
    assert_non_null(strstr(lack, "data.mix: source 'math'"));
    assert_non_null(strstr(lack, "max_repetition to 3.6,"));
    free(lack);
    loader_close(l);
}

static uint64_t fingerprint_of(const MixtureSource *mix, int count, bool metadata)
{
    DataSpec spec = spec_of(mix, count);
    spec.metadata = metadata;
    spec.reopened = true;
    Loader *l = loader_open(&spec, G, 0, 1);
    const uint64_t x = loader_fingerprint(l);
    loader_close(l);
    return x;
}

/* Returns all that a source knows about the instances of a run. */
TEST(test_fingerprint)
{
    const MixtureSource same[] = { source_of(0, 0.8, 2), source_of(1, 0.2, 2) };
    const uint64_t expected = fingerprint_of(same, 2, false);
    for (int i = 0; i < 4; i++) {
        MixtureSource mix[] = { same[0], same[1] };
        mix[1].ratio = i == 0 ? 0.3 : 0.2;
        mix[1].max_repetition = i == 1 ? 3 : 2;
        mix[1].tokens = i == 2 ? 10 * T : 0;
        mix[1].name = i == 3 ? "other" : same[1].name;
        assert_true(fingerprint_of(mix, 2, false) != expected);
    }
    assert_true(fingerprint_of(same, 2, false) == expected);
}

/* Documents of the second file of a source. The metadata need not be compressed. */
TEST(test_fingerprint_of_documents)
{
    static const char *const rows[] = { "0,60\n", "0,50\n50,60\n" };
    MixtureSource mix[] = { source_of(0, 1, 1) };
    char *metadata[] = { xasprintf("%s/0.csv.gz", folder), xasprintf("%s/1.csv.gz", folder) };
    uint64_t fingerprint[2];
    mix[0].num_paths = 2;
    write_file(metadata[0], rows[0], strlen(rows[0]));
    for (int i = 0; i < 2; i++) {
        write_file(metadata[1], rows[i], strlen(rows[i]));
        fingerprint[i] = fingerprint_of(mix, 1, true);
    }
    assert_true(fingerprint[0] != fingerprint[1]);
    for (int f = 0; f < 2; f++) {
        unlink(metadata[f]);
        free(metadata[f]);
    }
}

int main(void)
{
    return run_all_tests(make_files, remove_files);
}
