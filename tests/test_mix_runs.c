/* Runs with data.mix: metrics, resumes on other numbers of ranks and with another micro-batch,
 * changed mixtures, errors. */
#include "tests/test.h"
#include "tests/launch.h"

#define TRAIN "{name: books, paths: [build/few-ids/train.npy], ratio: 0.7}"
#define VAL "{name: code, paths: [build/few-ids/val.npy], ratio: 0.3, max_repetition: 2}"

static int train_mix(int ranks, const char *mix, const char *run, const char *more)
{
    return train(ranks, "--data.paths=null --save_folder=%s/%s --data.mix=\"[%s]\" %s", folder, run,
                 mix, more);
}

/* Returns the source's number in trainer.json; -1: there is no such source. */
static long place(const char *checkpoint, const char *source, const char *key)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/trainer.json", folder, checkpoint);
    json_t *o = json_load_file(path, 0, NULL),
           *value = json_object_get(json_object_get(json_object_get(o, "mix"), source), key);
    const long n = json_is_integer(value) ? (long)json_integer_value(value) : -1;
    json_decref(o);
    return n;
}

/* After each step, the shares of all steps so far are exact, rounded up or down. The shares of a
 * single step are within one sequence. */
static void check_shares(const char *run, int first, int last, double ratio, const char *name)
{
    double share[MAX_STEPS], sum = 0;
    metric(share, run, name);
    for (int i = first; i <= last; i++) {
        sum += share[i] * 8;
        assert_true(fabs(sum - ratio * 8 * (i - first + 1)) < 1);
    }
}

static void check_same(const char *a, const char *b, int steps, double tolerance)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    losses(x, a, steps);
    losses(y, b, steps);
    for (int i = 1; i <= steps; i++)
        assert_true(fabs(x[i] - y[i]) <= tolerance * x[i]);
}

TEST(test_shares_and_resume)
{
    expect_status(train_mix(1, TRAIN ", " VAL, "whole", "--max_duration=12"), 0);
    expect_output("mix: books: 70 % of the tokens; epochs 0 to 0.01294 of its 5195 sequences");
    check_shares("whole", 1, 12, 0.7, "data/mix/books");
    check_shares("whole", 1, 12, 0.3, "data/mix/code");
    expect_status(train_mix(1, TRAIN ", " VAL, "part", "--max_duration=12 --stop_at=5"), 0);
    assert_int_equal(place("part/latest", "books", "instance"), 28);
    assert_int_equal(place("part/latest", "code", "instance"), 12);
    /* listed in another order */
    expect_status(train_mix(1, VAL ", " TRAIN, "part", "--max_duration=12 --try_load_latest_save"),
                  0);
    check_same("whole", "part", 12, 0);
    expect_status(train_mix(2, TRAIN ", " VAL, "ranks", "--max_duration=12 --stop_at=5"), 0);
    expect_status(train_mix(1, TRAIN ", " VAL, "ranks",
                            "--max_duration=12 --stop_at=9 --try_load_latest_save "
                            "--device_train_microbatch_size=1"),
                  0);
    expect_status(train_mix(4, TRAIN ", " VAL, "ranks", "--max_duration=12 --try_load_latest_save"),
                  0);
    check_same("whole", "ranks", 12, 1e-6);
    const char *const keys[] = { "weight", "epoch", "instance", "mixed" };
    for (int i = 0; i < 4; i++) {
        assert_int_equal(place("ranks/latest", "books", keys[i]),
                         place("whole/latest", "books", keys[i]));
        assert_int_equal(place("ranks/latest", "code", keys[i]),
                         place("whole/latest", "code", keys[i]));
    }
}

/* A resume without changes, from the written configuration, ends in the same state. */
TEST(test_written_configuration)
{
    FILE *p = start_command("%s -n 1 %s/train %s/whole/latest/config.yaml --save_folder=%s/again",
                            setting("LAUNCH", "mpirun --oversubscribe"),
                            setting("BUILD", "build/cpu"), folder, folder);
    expect_status(finish(p), 0);
    check_same("whole", "again", 12, 0);
}

/* Other ratios, a removed source and a new one: each source continues where it was, also a source
 * that comes back. */
TEST(test_changed_mixture)
{
    shell("cp build/few-ids/val.npy %s/new.npy", folder);
    char mix[512];
    snprintf(mix, sizeof mix,
             "{name: new, paths: [%s/new.npy], ratio: 1}, {name: code, paths: "
             "[build/few-ids/val.npy], ratio: 3}",
             folder);
    expect_status(train_mix(1, mix, "part", "--max_duration=16 --try_load_latest_save"), 0);
    expect_output("mix: changed at step 12: the new ratios count from here on");
    expect_output(
        "mix: books: no longer in the mixture; its position, sequence 67 of epoch 0, is kept");
    check_shares("part", 13, 16, 0.75, "data/mix/code");
    assert_int_equal(place("part/latest", "new", "instance"), 8);
    assert_int_equal(place("part/latest", "code", "instance"), 29 + 24);
    assert_int_equal(place("part/latest", "code", "mixed"), 24);
    assert_int_equal(place("part/latest", "books", "instance"), 67);
    expect_status(train_mix(2, TRAIN, "part", "--max_duration=17 --try_load_latest_save"), 0);
    assert_int_equal(place("part/latest", "books", "instance"), 67 + 8);
    assert_int_equal(place("part/latest", "code", "instance"), 29 + 24);
}

/* First data.paths, then a mixture in which a source has the same files: this source continues at
 * its position. */
TEST(test_from_paths)
{
    expect_status(train(1, "--save_folder=%s/paths --max_duration=3", folder), 0);
    assert_int_equal(place("paths/latest", "books", "instance"), -1);
    expect_status(train_mix(1, TRAIN ", " VAL, "paths", "--max_duration=4 --try_load_latest_save"),
                  0);
    expect_output("mix: code: 30 % of the tokens; epochs 0 to");
    assert_in_range(place("paths/latest", "books", "instance"), 24 + 5, 24 + 6);
}

TEST(test_lengths)
{
    /* 544 sequences of 1813 in all */
    const char *once = TRAIN ", {name: code, paths: [build/few-ids/val.npy], ratio: 0.3}";
    expect_status(train_mix(1, once, "length", "--max_duration=1ep --stop_at=1"), 0);
    expect_output("run: 226 steps of 8 x ");
    expect_status(train_mix(1, once, "length", "--max_duration=0.5ep --stop_at=1 --save_overwrite"),
                  0);
    expect_output("run: 113 steps of 8 x ");
    expect_status(
        train_mix(1, once, "length", "--max_duration=1ep --stop_at=3 --try_load_latest_save"), 0);
    expect_output("run: 226 steps of 8 x ");
    expect_status(
        train_mix(1, once, "length", "--max_duration=25600T --stop_at=1 --save_overwrite"), 0);
    expect_output("run: 100 steps of 8 x ");
    expect_status(train_mix(1, once, "length", "--max_duration=3ep --save_overwrite"),
                  STATUS_INPUT);
    expect_output("max_duration: 3ep: data.mix has only one epoch: it ends when the first source "
                  "reaches its max_repetition");
    expect_status(train_mix(1, once, "long", "--max_duration=227"), STATUS_INPUT);
    expect_output("data.mix: source 'code': 32 tokens are missing: the run takes 17440 tokens of "
                  "this source (30 % "
                  "of 58112), and the source has 17408 "
                  "left (544 sequences of 32 tokens, max_repetition 1). Raise its max_repetition "
                  "to 1.01, add paths, lower its "
                  "ratio, or end the run 58016 tokens from here (max_duration)");
    assert_false(exists("long"));
}

/* Packed conversations with label masks next to text without. */
TEST(test_packed)
{
    shell("head -c 20000 build/few-ids/val.npy >%s/chat.npy && head -c 10000 /dev/zero | tr '\\0' "
          "'\\1' >%s/chat.mask",
          folder, folder);
    char mix[512];
    snprintf(mix, sizeof mix,
             "{name: chat, paths: [%s/chat.npy], label_mask_paths: [%s/chat.mask], ratio: 1, "
             "tokens: 3200}, "
             "{name: code, paths: [build/few-ids/val.npy], ratio: 1}",
             folder, folder);
    const char *packs =
        "--data.packing=best_fit --data.long_documents=split --data.generate_doc_lengths "
        "--data.instance_filter.repetition_max_count=32";
    char more[256];
    snprintf(more, sizeof more, "%s --max_duration=4", packs);
    expect_status(train_mix(2, mix, "packed", more), 0);
    expect_output("mix: chat: 50 % of the tokens; epochs 0 to 0.16 of its 100 sequences");
    check_shares("packed", 1, 4, 0.5, "data/mix/chat");
}

TEST(test_errors)
{
    static const struct {
        const char *mix, *more, *error;
    } cases[] = {
        { TRAIN, "--data.paths=[build/few-ids/train.npy]",
          "give data.paths, data.datasets or data.mix, only one of them" },
        { TRAIN, "--data.label_mask_paths=[a.mask]",
          "data.label_mask_paths belong to data.paths; with data.mix each source has" },
        { TRAIN ", " TRAIN, "", "two sources are named 'books'" },
        { "{name: a, paths: [a.npy]}", "",
          "source 'a' has no ratio; give its share of the tokens" },
        { "{name: a, ratio: 1}", "", "source 'a' has no paths; give its token shards" },
        { "{paths: [a.npy], ratio: 1}", "", "a source of data.mix has no name" },
        { "{name: a, paths: [a.npy], ratio: -1}", "",
          "data.mix[].ratio: expected a number from 1e-06 to 1000000, found '-1'" },
        { "{name: a, paths: [a.npy], ratio: 1, max_repetition: 0.5}", "",
          "data.mix[].max_repetition: expected a number from 1" },
        { "{name: a, path: [a.npy], ratio: 1}", "",
          "unknown key 'data.mix[].path'; did you mean 'data.mix[].paths'?" },
        { "{name: a, paths: ['s3://x/a.npy'], ratio: 1}", "", "only local files are read" },
        { "{name: a, paths: [none.npy], ratio: 1}", "", "data.mix: source 'a'" },
        { "a.npy", "", "a source is a section with name, paths and ratio" },
        { "{name: a, paths: [build/few-ids/val.npy], ratio: 1, tokens: 31}", "",
          "tokens 31 are less than one sequence of 32" },
        { "{name: a, paths: [build/few-ids/val.npy], label_mask_paths: [x.mask], ratio: 1}", "",
          "data.mix: source 'a'" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_status(train_mix(1, cases[i].mix, "errors", cases[i].more), STATUS_INPUT);
        expect_output(cases[i].error);
    }
}

/* If a source has other files, the run ends with an error. With restore_dataloader=false, these
 * files start at their beginning, and the other sources continue. */
TEST(test_other_files)
{
    char mix[512];
    shell("mkdir %s/a %s/b && cp build/few-ids/val.npy %s/a/x.npy && head -c 20000 "
          "build/few-ids/train.npy >%s/b/x.npy",
          folder, folder, folder, folder);
    snprintf(mix, sizeof mix, TRAIN ", {name: code, paths: [%s/a/x.npy], ratio: 0.3}", folder);
    expect_status(train_mix(1, mix, "files", "--max_duration=5"), 0);
    snprintf(mix, sizeof mix, TRAIN ", {name: code, paths: [%s/b/x.npy], ratio: 0.3}", folder);
    expect_status(train_mix(1, mix, "files", "--max_duration=10 --try_load_latest_save"),
                  STATUS_INPUT);
    expect_output(
        "was trained on other files of source 'code' of data.mix than the configured ones");
    expect_status(train_mix(1, mix, "files",
                            "--max_duration=10 --try_load_latest_save --restore_dataloader=false"),
                  0);
    assert_int_equal(place("files/latest", "books", "instance"), 56);
    assert_int_equal(place("files/latest", "code", "instance"), 12);
}

/* An edited trainer.json is refused by name. */
TEST(test_damaged_state)
{
    static const struct {
        const char *change, *error;
    } cases[] = {
        { "s/\"weight\": 700000000/\"weight\": -1/", "trainer.json: mix.books" },
        { "s/\"mixed\": [0-9]*/\"mixed\": null/", "trainer.json: mix.books" },
        { "s/\"books\": {/\"books\": [], \"other\": {/", "trainer.json: mix.books" },
        { "s/\"mix\": {/\"mix\": 3, \"other\": {/",
          "trainer.json: mix: expected up to 64 sources" },
    };
    expect_status(train_mix(1, TRAIN ", " VAL, "damaged", "--max_duration=2"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        shell(
            "cp %s/damaged/step2/trainer.json %s/kept && sed -i '%s' %s/damaged/step2/trainer.json",
            folder, folder, cases[i].change, folder);
        expect_status(
            train_mix(1, TRAIN ", " VAL, "damaged", "--max_duration=3 --try_load_latest_save"),
            STATUS_INPUT);
        expect_output(cases[i].error);
        shell("cp %s/kept %s/damaged/step2/trainer.json", folder, folder);
    }
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
