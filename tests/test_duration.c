/* The length of a run: max_duration in steps, tokens and epochs, also if the batch changes, and
 * what is saved at the end. */
#include "tests/test.h"
#include "tests/launch.h"

TEST(test_stop_in_epochs)
{
    long tokens = 0, instances = 0;
    expect_status(train(1, "--max_duration=1ep --stop_at=0.002ep --save_folder=%s/epoch", folder),
                  0);
    const char *data = strstr(output, "data: ");
    assert_int_equal(
        data ? sscanf(data, "data: %ld tokens in %ld instances", &tokens, &instances) : 0, 2);
    char name[64];
    snprintf(name, sizeof name, "epoch/step%ld", (long)(0.002 * (double)(instances / 8)));
    if (!exists(name))
        fail_msg("no %s", name);
}

/* Two tokens, with steps of 256 tokens. */
TEST(test_less_than_a_step)
{
    expect_status(train(1, "--max_duration=2T --save_folder=%s/less", folder), 0);
    expect_output("warning: max_duration: 2 tokens are less than one step, which has 256");
    expect_status(train(1, "--max_duration=256T --save_folder=%s/step", folder), 0);
    assert_null(strstr(output, "less than one step"));
}

/* The last step of a decay to 0 is the only step. */
TEST(test_only_step)
{
    expect_status(
        train(1,
              "--max_duration=1 --scheduler.alpha_f=0 --scheduler.t_warmup=0 --save_folder=%s/only",
              folder),
        0);
    expect_output(
        "warning: the run has one step, its last, whose learning rate is 0: nothing is learned");
}

/* 8 steps of 8 sequences of 32 tokens, also if the batch changes during the run. */
TEST(test_token_budget)
{
    static const struct {
        int batch, steps;
    } rest[] = { { 16, 6 }, { 4, 12 } };
    for (int i = 0; i < 2; i++) {
        expect_status(
            train(1, "--max_duration=2048T --stop_at=1024T --save_folder=%s/budget%d", folder, i),
            0);
        expect_status(train(1,
                            "--max_duration=2048T --try_load_latest_save "
                            "--global_train_batch_size=%d --save_folder=%s/budget%d",
                            rest[i].batch, folder, i),
                      0);
        char name[32];
        snprintf(name, sizeof name, "budget%d/latest", i);
        assert_int_equal(trainer(name, "step"), rest[i].steps);
        assert_int_equal(trainer(name, "tokens"), 2048);
    }
}

/* If no checkpoints are rotated, the end is saved if there are permanent checkpoints. */
TEST(test_saved_at_the_end)
{
    static const char *const arguments[] = { "", "--save_interval_unsharded=100",
                                             "--save_interval_ephemeral=100" };
    for (int i = 0; i < 3; i++) {
        char name[32];
        expect_status(
            train(1, "--max_duration=2 --save_num_checkpoints_to_keep=0 --save_folder=%s/end%d %s",
                  folder, i, arguments[i]),
            0);
        snprintf(name, sizeof name, "end%d/step2", i);
        assert_int_equal(exists(name), i == 1);
    }
}

/* A number of tokens that ends within a step includes this step. */
TEST(test_token_budget_in_a_step)
{
    expect_status(train(1, "--max_duration=513T --save_folder=%s/three", folder), 0);
    assert_int_equal(trainer("three/latest", "step"), 3);
    assert_int_equal(trainer("three/latest", "tokens"), 3 * 256);
}

/* The same for epochs: 0.04 epochs of 5195 sequences are 207.8 sequences, of which 104 are done. */
TEST(test_epoch_budget)
{
    static const struct {
        int batch, steps;
    } rest[] = { { 8, 25 }, { 16, 19 }, { 4, 38 } };
    for (int i = 0; i < 3; i++) {
        expect_status(
            train(1, "--max_duration=0.04ep --stop_at=13 --save_folder=%s/epochs%d", folder, i), 0);
        expect_status(
            train(1,
                  "--max_duration=0.04ep --try_load_latest_save --global_train_batch_size=%d "
                  "--save_folder=%s/epochs%d",
                  rest[i].batch, folder, i),
            0);
        char name[32];
        snprintf(name, sizeof name, "epochs%d/latest", i);
        assert_int_equal(trainer(name, "step"), rest[i].steps);
    }
}

/* An epoch of packed documents has every label once, also if a run resumes within the epoch. After
 * the first document of the sample follow 1200 tokens of three documents: 39 or 40 sequences of 32
 * tokens, because long documents overlap by one token. */
TEST(test_packed_epoch)
{
    char command[256];
    double labels[MAX_STEPS], sum = 0;
    snprintf(command, sizeof command,
             "tail -c +6691 build/few-ids/train.npy | head -c 2400 >%s/short.npy", folder);
    assert_int_equal(system(command), 0);
    for (int stop = 0; stop < 2; stop++)
        expect_status(
            train(
                1 + stop,
                "--data.paths='[%s/short.npy]' --data.packing=best_fit --data.long_documents=split "
                "--max_duration=1ep --try_load_latest_save --save_folder=%s/packed %s",
                folder, folder, stop ? "" : "--stop_at=3"),
            0);
    expect_output("packing: 3 documents, ");
    const int steps = metric(labels, "packed", "train/labels");
    assert_int_equal(steps, 5);
    for (int i = 1; i <= steps; i++)
        sum += labels[i];
    assert_true(sum == 1200 - 3);
}

/* A run may be planned that is longer than its per-step data could be in memory. */
TEST(test_long_run)
{
    expect_status(
        train(1, "--max_duration=1e15 --stop_at=2 --console_log_interval=10 --save_folder=%s/long",
              folder),
        0);
    expect_output("step                2/1000000000000000 ");
    expect_output("eta 0m00s");
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
