/* Runs with sequence_length_warmup: short sequences equal documents that end where the sequences
 * end. After the warmup, and in evaluation, sequences are whole. */
#include "tests/test.h"
#include "tests/launch.h"

/* Sequences of 32 tokens. Their 8th, 16th, ... token ends a document. */
static char data[256];

static int run(int ranks, const char *name, const char *more)
{
    return train(ranks,
                 "%s --max_duration=6 --save_interval=2 --save_num_checkpoints_to_keep=-1 "
                 "--save_folder=%s/%s %s",
                 data, folder, name, more);
}

static int make_data(void **state)
{
    enum { TOKENS = 64 * 32 + 1 };
    uint16_t id[TOKENS];
    char path[128];
    if (make_folder(state) != 0)
        return -1;
    FILE *in = fopen("build/few-ids/train.npy", "rb");
    snprintf(path, sizeof path, "%s/eights.npy", folder);
    snprintf(data, sizeof data, "--data.paths=[%s]", path);
    FILE *out = fopen(path, "wb");
    if (!in || !out || fread(id, sizeof *id, TOKENS, in) != TOKENS)
        return -1;
    for (int i = 0; i < TOKENS; i++)
        id[i] = i % 8 == 7 ? 999 : id[i] == 999 ? 0 : id[i];
    fclose(in);
    return fwrite(id, sizeof *id, TOKENS, out) == TOKENS && fclose(out) == 0 ? 0 : -1;
}

static void check_same(const char *a, const char *b, int first, int last, double tolerance)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    metric(x, a, "train/CrossEntropyLoss");
    metric(y, b, "train/CrossEntropyLoss");
    for (int i = first; i <= last; i++)
        if (!(fabs(x[i] - y[i]) <= tolerance * x[i]))
            fail_msg("step %d: loss %.9g in %s, %.9g in %s", i, x[i], a, y[i], b);
}

/* In all six steps, sequences have 8 tokens, so documents of 8 tokens change nothing. The same on
 * two context ranks. */
TEST(test_pieces)
{
    static const char warmup[] =
        "--sequence_length_warmup.min_sequence_length=8 --sequence_length_warmup.warmup_steps=100";
    char more[256];
    expect_status(run(1, "documents", "--data.generate_doc_lengths"), 0);
    expect_status(run(1, "pieces", warmup), 0);
    check_same("documents", "pieces", 1, 6, 0);
    if (can_run(2, "ranks that share sequences")) {
        snprintf(more, sizeof more, "%s --parallelism.context=2 --model.n_kv_heads=2", warmup);
        expect_status(run(2, "context", more), 0);
        expect_status(
            run(1, "context-documents", "--data.generate_doc_lengths --model.n_kv_heads=2"), 0);
        check_same("context-documents", "context", 1, 6, 1e-5);
    }
    /* sequences of 16 tokens cut no further document */
    expect_status(run(1, "both",
                      "--data.generate_doc_lengths --sequence_length_warmup.min_sequence_length=16 "
                      "--sequence_length_warmup.warmup_steps=100"),
                  0);
    check_same("documents", "both", 1, 6, 0);
}

/* The length is 8 + 24 (step - 1) / 4 tokens, in multiples of 8. No token and no label is missing,
 * and evaluation has whole sequences. */
TEST(test_lengths)
{
    static const char warmup[] =
        "--sequence_length_warmup.min_sequence_length=8 --sequence_length_warmup.warmup_steps=4 "
        "--eval_interval=2";
    static const int expected[] = { 0, 8, 8, 16, 24, 32, 32 };
    double length[MAX_STEPS], labels[MAX_STEPS], tokens[MAX_STEPS], eval[MAX_STEPS],
        later[MAX_STEPS];
    expect_status(run(1, "grows", warmup), 0);
    metric(length, "grows", "train/sequence_length");
    metric(labels, "grows", "train/labels");
    metric(tokens, "grows", "throughput/total_tokens");
    for (int i = 1; i <= 6; i++)
        assert_true(length[i] == expected[i] && labels[i] == 8 * 31 && tokens[i] == 8 * 32 * i);
    metric(eval, "grows", "eval/sample/CrossEntropyLoss");
    /* from step 4 on without the warmup: the same evaluation and the same steps, because attention
     * has whole sequences */
    expect_status(train(1,
                        "%s --max_duration=6 --eval_interval=2 --eval_on_load "
                        "--load_path=%s/grows/step4 --save_folder=%s/whole",
                        data, folder, folder),
                  0);
    metric(later, "whole", "eval/sample/CrossEntropyLoss");
    assert_true(fabs(later[4] - eval[4]) <= 1e-6 * eval[4] &&
                fabs(later[6] - eval[6]) <= 1e-6 * eval[6]);
    check_same("grows", "whole", 5, 6, 1e-6);
    expect_status(run(2, "resumed",
                      "--sequence_length_warmup.min_sequence_length=8 "
                      "--sequence_length_warmup.warmup_steps=4 "
                      "--stop_at=2"),
                  0);
    expect_status(run(1, "resumed",
                      "--sequence_length_warmup.min_sequence_length=8 "
                      "--sequence_length_warmup.warmup_steps=4 "
                      "--try_load_latest_save"),
                  0);
    check_same("grows", "resumed", 1, 6, 1e-6);
}

TEST(test_errors)
{
    expect_status(run(1, "wrong", "--sequence_length_warmup.min_sequence_length=8"), STATUS_INPUT);
    expect_output("warmup_steps is missing");
    expect_status(run(1, "wrong",
                      "--sequence_length_warmup.min_sequence_length=33 "
                      "--sequence_length_warmup.warmup_steps=2"),
                  STATUS_INPUT);
    expect_output("min_sequence_length 33 is more than model.max_sequence_length 32");
    assert_false(exists("wrong"));
}

int main(void)
{
    return run_all_tests(make_data, remove_folder);
}
