/* Runs with batch_size_warmup have the losses of three runs with constant batches that continue
 * each other. Also tokens, mixtures, epochs, resumes, and other numbers of ranks. */
#include "tests/test.h"
#include "tests/launch.h"

/* 4 steps of 2 sequences, 4 steps of 4, then steps of 8: 56 sequences of 32 tokens in 12 steps. */
#define WARMUP "--batch_size_warmup=[4,8] "
#define USUAL \
    "--device_train_microbatch_size=1 --save_interval=3 --save_num_checkpoints_to_keep=-1 "
#define MIX \
    "--data.paths=null --data.mix=\"[{name: books, paths: [build/few-ids/train.npy], ratio: " \
    "0.7}, " \
    "{name: code, paths: [build/few-ids/val.npy], ratio: 0.3}]\" "

static int run(int ranks, const char *name, const char *more)
{
    return train(ranks, USUAL "--save_folder=%s/%s %s", folder, name, more);
}

static int batch_of(int step)
{
    return step <= 4 ? 2 : step <= 8 ? 4 : 8;
}

static void check_same(const char *a, const char *b, double tolerance)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    losses(x, a, 12);
    losses(y, b, 12);
    for (int i = 1; i <= 12; i++)
        if (!(fabs(x[i] - y[i]) <= tolerance * x[i]))
            fail_msg("step %d: loss %.9g in %s, %.9g in %s", i, x[i], a, y[i], b);
}

/* Each run continues the previous one with twice its batch. */
static void run_parts(const char *name, const char *data)
{
    static const char *const part[] = { "--global_train_batch_size=2 --stop_at=4",
                                        "--global_train_batch_size=4 --stop_at=8",
                                        "--global_train_batch_size=8" };
    for (int i = 0; i < 3; i++) {
        char more[1024];
        snprintf(more, sizeof more, "%s --max_duration=12 %s --try_load_latest_save", data,
                 part[i]);
        expect_status(run(1, name, more), 0);
    }
}

static void run_whole(int ranks, const char *name, const char *data, const char *more)
{
    char all[1024];
    snprintf(all, sizeof all, WARMUP "%s --max_duration=12 %s", data, more);
    expect_status(run(ranks, name, all), 0);
}

/* 45 sequences: after step 10 five are left, fewer than the batch of step 11. So step 11 begins the
 * second epoch. */
TEST(test_epochs)
{
    char data[256];
    double tokens[MAX_STEPS], batch[MAX_STEPS];
    shell("head -c %d build/few-ids/train.npy >%s/few.npy", 2 * (45 * 32 + 1), folder);
    snprintf(data, sizeof data, "--data.paths=[%s/few.npy]", folder);
    run_whole(1, "whole", data, "");
    expect_output("  2 sequences up to step 4\n  4 sequences up to step 8\n");
    run_parts("parts", data);
    check_same("whole", "parts", 0);
    assert_int_equal(trainer("whole/step12", "epoch"), 1);
    assert_int_equal(trainer("whole/step12", "instance"), trainer("parts/step12", "instance"));
    metric(tokens, "whole", "throughput/total_tokens");
    metric(batch, "whole", "train/batch_size");
    for (int i = 1, sum = 0; i <= 12; i++) {
        sum += 32 * batch_of(i);
        assert_true(tokens[i] == sum && batch[i] == batch_of(i));
    }
    run_whole(1, "resumed", data, "--stop_at=7");
    run_whole(1, "resumed", data, "--try_load_latest_save");
    check_same("whole", "resumed", 0);
    run_whole(2, "ranks", data, "--stop_at=3");
    run_whole(1, "ranks", data,
              "--try_load_latest_save --stop_at=6 --device_train_microbatch_size=2");
    run_whole(2, "ranks", data, "--try_load_latest_save");
    check_same("whole", "ranks", 1e-6);
}

/* At any step, the share of each source is exact, rounded up or down to whole sequences. */
TEST(test_mixture)
{
    double books[MAX_STEPS], given = 0, all = 0;
    run_whole(1, "mixed", MIX, "");
    expect_output("mix: books: 70 % of the tokens; epochs 0 to 0.007546 of its 5195 sequences");
    run_parts("mixed-parts", MIX);
    check_same("mixed", "mixed-parts", 0);
    metric(books, "mixed", "data/mix/books");
    for (int i = 1; i <= 12; i++) {
        given += books[i] * batch_of(i);
        all += batch_of(i);
        assert_true(fabs(given - 0.7 * all) < 1);
    }
}

/* max_duration and the schedule are in tokens: 24 + 5 x 8 = 64 sequences are 13 steps, and the rate
 * is linear in tokens, from 0. */
TEST(test_tokens)
{
    double rate[MAX_STEPS];
    expect_status(run(1, "tokens",
                      WARMUP
                      "--max_duration=2048T --stop_at=1536T --scheduler.name=linear_with_warmup "
                      "--scheduler.units=tokens --scheduler.t_warmup=0 --scheduler.alpha_f=0 "
                      "--optimizer.learning_rate=1e-3"),
                  0);
    assert_int_equal(metric(rate, "tokens", "optim/learning_rate_group0"), 11);
    for (int i = 1, sum = 0; i <= 11; i++) {
        sum += 32 * batch_of(i);
        assert_true(fabs(rate[i] - 1e-3 * (1 - sum / 2048.0)) <= 1e-12);
    }
    expect_output("11/13");
}

TEST(test_errors)
{
    static const struct {
        const char *more, *error;
    } cases[] = {
        { "--batch_size_warmup=[4,3]",
          "batch_size_warmup: expected ascending numbers of steps, as in [1000, 3000], found '3'" },
        { "--batch_size_warmup=[4T]", "found '4T'" },
        { "--batch_size_warmup=[0]", "found '0'" },
        { "--batch_size_warmup=[1,2,3,4]",
          "global_train_batch_size 8 halved 4 times is not a multiple of 1 ranks x "
          "device_train_microbatch_size 1; use a multiple of 16" },
        { "--batch_size_warmup=[1] --max_duration=1ep", "length in epochs is not supported" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_status(run(1, "wrong", cases[i].more), STATUS_INPUT);
        expect_output(cases[i].error);
    }
    assert_false(exists("wrong"));
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
