/* The program as a user runs it: mpirun ./train configs/tiny.yaml with overrides, its files and its exit codes. */
#include "tests/launch.h"

#include <sys/file.h>
#include <sys/stat.h>

/* ten steps = five, saved, and five more, bit for bit; on two ranks with bf16 rounding and moments too */
static void check_resume(int ranks, const char *arguments, const char *name)
{
    double whole[MAX_STEPS], parts[MAX_STEPS];
    char run[64];
    snprintf(run, sizeof run, "whole-%s", name);
    expect_status(train(ranks, "%s --max_duration=10 --save_folder=%s/%s", arguments, folder, run), 0);
    losses(whole, run, 10);
    snprintf(run, sizeof run, "parts-%s", name);
    expect_status(train(ranks, "%s --max_duration=10 --stop_at=5 --save_folder=%s/%s", arguments, folder, run), 0);
    losses(parts, run, 5);
    expect_status(train(ranks, "%s --max_duration=10 --try_load_latest_save --save_folder=%s/%s", arguments, folder, run), 0);
    losses(parts, run, 10);
    for (int i = 1; i <= 10; i++)
        if (whole[i] != parts[i])
            fail_msg("%s: step %d: loss %.17g in one run, %.17g after resuming", name, i, whole[i], parts[i]);
}

static void test_resume(void **state)
{
    (void)state;
    check_resume(1, "", "f32");
    check_resume(4, "--recipe=coat-lean", "lean");
    check_resume(2, "--recipe=bf16 --format.master=bf16 --format.moment1=bf16 --format.moment2=bf16", "bf16");
}

/* Same global batch on 1, 2 and 4 ranks. The first losses differ by the order of summation alone: u times the number of
 * tokens' worth of terms, 256, is an upper bound. Later ones also by what that did to the weights: as much again per step. */
static void test_ranks_agree(void **state)
{
    (void)state;
    double one[MAX_STEPS], more[MAX_STEPS];
    expect_status(train(1, "--max_duration=5 --save_folder=%s/w1", folder), 0);
    losses(one, "w1", 5);
    for (int ranks = 2; ranks <= 4 && ranks <= most_ranks(); ranks *= 2) {
        expect_status(train(ranks, "--max_duration=5 --save_folder=%s/w%d", folder, ranks), 0);
        char run[16];
        snprintf(run, sizeof run, "w%d", ranks);
        losses(more, run, 5);
        for (int i = 1; i <= 5; i++)
            if (!(fabs(more[i] - one[i]) <= i * 256 * 0x1p-24 * one[i]))
                fail_msg("%d ranks, step %d: loss %.9g, on one rank %.9g", ranks, i, more[i], one[i]);
    }
}

/* Two steps on 4 ranks, then the state goes through other numbers of ranks and strategies and back: every file of weights and
 * moments keeps its bytes. Training goes on from it on half the ranks with the losses of the first ones, but for the order of
 * summation, which FP8 magnifies to a rounding of E4M3. */
static void test_resharding(void **state)
{
    (void)state;
    static const struct { int ranks; const char *strategy; } way[] = {
        { 4, "FULL_SHARD" }, { 2, "HYBRID_SHARD" }, { 1, "NO_SHARD" }, { 4, "SHARD_GRAD_OP" },
    };
    static const char recipe[] = "--recipe=coat";
    double first[MAX_STEPS], second[MAX_STEPS];
    char from[512] = "";
    for (int i = 0; i < 4; i++) {
        expect_status(train(way[i].ranks, "%s --max_duration=4 --stop_at=2 --fsdp.sharding_strategy=%s "
                            "--save_folder=%s/way%d %s", recipe, way[i].strategy, folder, i, from), 0);
        snprintf(from, sizeof from, "--load_path=%s/way%d/step2", folder, i);
        char command[1024];
        snprintf(command, sizeof command, "for f in %s/way0/step2/*.safetensors; do cmp $f %s/way%d/step2/$(basename $f) || "
                 "exit 1; done", folder, folder, i);
        assert_int_equal(system(command), 0);
    }
    expect_status(train(4, "%s --max_duration=4 --save_folder=%s/on4 %s", recipe, folder, from), 0);
    expect_status(train(2, "%s --max_duration=4 --save_folder=%s/on2 %s", recipe, folder, from), 0);
    losses(first, "on4", 2);
    losses(second, "on2", 2);
    for (int i = 3; i <= 4; i++)
        if (!(fabs(first[i] - second[i]) <= 0x1p-4 * 0x1p-4 * first[i]))
            fail_msg("step %d: loss %.9g on 4 ranks, %.9g on 2", i, first[i], second[i]);
}

static void test_loss_falls(void **state)
{
    (void)state;
    double loss[MAX_STEPS], perplexity[MAX_STEPS];
    expect_status(train(1, "--max_duration=30 --optimizer.learning_rate=1e-2 --eval_interval=1000 --save_folder=%s/falls", folder),
                  0);
    losses(loss, "falls", 30);
    assert_true(fabs(loss[1] - log(50280)) < 1);
    assert_true(loss[30] < loss[1] - 1.5);
    assert_int_equal(metric(perplexity, "falls", "eval/sample/Perplexity"), 1);
    assert_true(perplexity[30] > 1 && perplexity[30] < 50280 / 4.0);
}

/* Weight decay that multiplies the weights by -99: three steps that are not finite in a row end the run, with a checkpoint. */
static void test_not_finite(void **state)
{
    (void)state;
    double skipped[MAX_STEPS];
    int status = train(1, "--max_duration=60 --optimizer.learning_rate=1000 --optimizer.weight_decay=0.1 --save_folder=%s/nan",
                       folder);
    assert_int_not_equal(status, 0);
    expect_output("third step in a row");
    assert_in_range(metric(skipped, "nan", "optim/step_skipped"), 4, 59);
    char path[256];
    struct stat s;
    snprintf(path, sizeof path, "%s/nan/latest/config.json", folder);
    assert_int_equal(stat(path, &s), 0);
}

/* Sends a signal to the ranks whose save_folder is `path`, or to their launcher; returns 0 if there were any.
 * NOTE: the launcher is the ranks' parent; its own name may be mpirun.real, orterun or prterun. */
static int send_signal(const char *name, bool to_launcher, const char *path)
{
    char command[1024];
    snprintf(command, sizeof command,
             "last=; for p in /proc/[0-9]*; do case $(2>/dev/null tr '\\0' ' ' <$p/cmdline) in "
             "%s/train\\ *save_folder=%s\\ *) to=$(sed -n 's/^%s:[^0-9]*//p' $p/status); "
             "test \"$to\" = \"$last\" || kill -%s $to; last=$to ;; esac; done; test -n \"$last\"",
             setting("BUILD", "build/cpu"), path, to_launcher ? "PPid" : "Pid", name);
    return system(command);
}

/* Nobody waits for the 20000 steps unless the signal is lost. */
static void check_signal(const char *name, bool to_launcher)
{
    char path[256], command[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(command, sizeof command, "--max_duration=20000 --console_log_interval=100 --save_folder=%s", path);
    FILE *p = start(2, command);
    snprintf(command, sizeof command, "test $(2>/dev/null wc -l <%s/metrics.jsonl || echo 0) -ge 3", path);
    for (int i = 0; i < 1000 && system(command) != 0; i++)
        usleep(100000);
    int signalled = send_signal(name, to_launcher, path);
    expect_status(finish(p), 0);
    assert_int_equal(signalled, 0);
    expect_output("asked to stop at step");
    snprintf(command, sizeof command, "test -f %s/latest/trainer.json", path);
    assert_int_equal(system(command), 0);
}

/* The ranks get SIGTERM, as from a batch system; mpirun itself would kill them a second after its own. SIGUSR1 it hands on. */
static void test_signals(void **state)
{
    (void)state;
    check_signal("TERM", false);
    check_signal("USR1", true);
}

/* Ctrl-C twice. One step of 5000 sequences takes longer than the test wants to wait. */
static void test_second_signal(void **state)
{
    (void)state;
    char path[256], command[512];
    snprintf(path, sizeof path, "%s/twice", folder);
    snprintf(command, sizeof command, "--max_duration=1 --global_train_batch_size=5000 --save_folder=%s", path);
    FILE *p = start(1, command);
    snprintf(command, sizeof command, "test -f %s/config.yaml", path);
    for (int i = 0; i < 1000 && system(command) != 0; i++)
        usleep(100000);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(send_signal("INT", false, path), 0);
        usleep(300000);
    }
    assert_int_not_equal(finish(p), 0);
}

static bool exists(const char *name)
{
    char path[512];
    struct stat s;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return stat(path, &s) == 0;
}

/* A number of a checkpoint's trainer.json. */
static long trainer(const char *checkpoint, const char *key)
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

static void test_folder_is_not_overwritten(void **state)
{
    (void)state;
    expect_status(train(1, "--max_duration=2 --save_folder=%s/once", folder), 0);
    assert_int_not_equal(train(1, "--max_duration=2 --save_folder=%s/once", folder), 0);
    expect_output("--save_overwrite");
    expect_status(train(1, "--max_duration=3 --save_folder=%s/once --save_overwrite", folder), 0);
    assert_false(exists("once/step2"));         /* or --try_load_latest_save could continue it */
    assert_true(exists("once/step3"));
    /* a folder is not continued because its name begins like another's */
    expect_status(train(1, "--max_duration=2 --save_folder=%s/onc", folder), 0);
    assert_int_not_equal(train(1, "--max_duration=4 --save_folder=%s/onc --load_path=%s/once/step3", folder, folder), 0);
    expect_output("--save_overwrite");
}

/* The test stands for another process that trains there, and for one that left half a checkpoint on a full disk. */
static void test_folder_is_in_use(void **state)
{
    (void)state;
    static const char more[] = "--max_duration=3 --save_num_checkpoints_to_keep=0 --try_load_latest_save";
    char path[256];
    expect_status(train(1, "--max_duration=2 --save_folder=%s/used", folder), 0);
    snprintf(path, sizeof path, "%s/used/step9.tmp", folder);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/used/metrics.jsonl", folder);
    FILE *f = fopen(path, "ae");
    assert_true(f && flock(fileno(f), LOCK_EX) == 0);
    assert_int_not_equal(train(1, "--max_duration=2 --save_overwrite --save_folder=%s/used", folder), 0);
    expect_output("another process trains in save_folder");
    assert_true(exists("used/step2") && exists("used/step9.tmp"));
    fclose(f);
    expect_status(train(1, "%s --save_folder=%s/used", more, folder), 0);
    assert_true(exists("used/step2") && !exists("used/step9.tmp"));
}

/* An update of the moments counts for AdamW's bias correction as long as the moments last. */
static void test_updates(void **state)
{
    (void)state;
    expect_status(train(1, "--max_duration=4 --save_folder=%s/four", folder), 0);
    assert_int_equal(trainer("four/step4", "updates"), 4);
    expect_status(train(1, "--max_duration=6 --load_path=%s/four/step4 --save_folder=%s/six", folder, folder), 0);
    assert_int_equal(trainer("six/step6", "updates"), 6);
    assert_int_not_equal(train(1, "--max_duration=2 --load_path=%s/four/step4 --reset_trainer_state --save_folder=%s/four "
                               "--save_overwrite", folder, folder), 0);
    expect_output("a save_folder of its own");
    expect_status(train(1, "--max_duration=2 --load_path=%s/four/step4 --reset_trainer_state --save_folder=%s/again", folder,
                        folder), 0);
    assert_int_equal(trainer("again/step2", "updates"), 6);
    expect_status(train(1, "--max_duration=6 --load_path=%s/four/step4 --reset_optimizer_state --save_folder=%s/fresh", folder,
                        folder), 0);
    assert_int_equal(trainer("fresh/step6", "updates"), 2);
}

/* The data start over where a run begins and when they change; not when the same command goes on after an interruption. */
static void test_data_start_over(void **state)
{
    (void)state;
    static const char over[] = "--restore_dataloader=false --try_load_latest_save";
    expect_status(train(1, "--max_duration=4 --save_folder=%s/began", folder), 0);
    for (int stop = 5; stop <= 6; stop++)
        expect_status(train(1, "--max_duration=8 --stop_at=%d --load_path=%s/began/step4 %s --save_folder=%s/goes-on", stop,
                            folder, over, folder), 0);
    assert_int_equal(trainer("goes-on/step5", "instance"), 8);
    assert_int_equal(trainer("goes-on/step6", "instance"), 16);
    assert_int_not_equal(train(1, "--max_duration=8 --try_load_latest_save --model.max_sequence_length=16 "
                               "--save_folder=%s/goes-on", folder), 0);
    expect_output("another model.max_sequence_length");
    expect_status(train(1, "--max_duration=7 %s --model.max_sequence_length=16 --save_folder=%s/goes-on", over, folder), 0);
    assert_int_equal(trainer("goes-on/step7", "instance"), 8);
}

/* Back to step 2 only if what came later may go. */
static void test_rewind(void **state)
{
    (void)state;
    double loss[MAX_STEPS];
    expect_status(train(1, "--max_duration=4 --save_interval=2 --save_folder=%s/there", folder), 0);
    assert_int_not_equal(train(1, "--max_duration=4 --load_path=%s/there/step2 --save_folder=%s/there", folder, folder), 0);
    expect_output("--save_overwrite goes back");
    losses(loss, "there", 4);
    expect_status(train(1, "--max_duration=3 --load_path=%s/there/step2 --save_folder=%s/there --save_overwrite", folder, folder),
                  0);
    losses(loss, "there", 3);
    expect_status(train(1, "--max_duration=4 --load_path=%s/there/latest --save_folder=%s/there", folder, folder), 0);
    losses(loss, "there", 4);
    assert_int_not_equal(train(1, "--load_path=%s/there --save_folder=%s/elsewhere", folder, folder), 0);
    expect_output("there/latest");
}

/* A checkpoint of a run that began with a model folder has that folder's tokenizer, and so have those that follow. */
static void test_companions(void **state)
{
    (void)state;
    char command[512];
    expect_status(train(1, "--max_duration=1 --save_folder=%s/model", folder), 0);
    snprintf(command, sizeof command, "cd %s/model/step1 && rm trainer.json optimizer* && printf 'a\\0b' >tokenizer.json && sed -i "
             "'s/\\(bos_token_id\": \\)null/\\13/; s/\\(eos_token_id\": \\)\\([0-9]*\\)/\\1[\\2, 7]/; "
             "s/\\(max_position_embeddings\": \\)[0-9]*/\\1131072/' config.json", folder);
    assert_int_equal(system(command), 0);
    expect_status(train(2, "--max_duration=2 --stop_at=1 --load_path=%s/model/step1 --save_folder=%s/tuned", folder, folder), 0);
    expect_status(train(2, "--max_duration=2 --try_load_latest_save --save_folder=%s/tuned", folder), 0);
    snprintf(command, sizeof command, "cmp %s/model/step1/tokenizer.json %s/tuned/step2/tokenizer.json", folder, folder);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof command, "%s/tuned/step2/config.json", folder);
    json_t *config = json_load_file(command, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(config, "bos_token_id")), 3);
    assert_int_equal(json_array_size(json_object_get(config, "eos_token_id")), 2);
    assert_int_equal(json_integer_value(json_object_get(config, "max_position_embeddings")), 131072);
    json_decref(config);
}

/* As in OLMo: without intervals the end is saved, unless no checkpoint is kept. */
static void test_last_checkpoint(void **state)
{
    (void)state;
    expect_status(train(1, "--max_duration=2 --save_interval=null --save_folder=%s/end", folder), 0);
    assert_true(exists("end/step2"));
    expect_status(train(1, "--max_duration=2 --save_interval=1 --save_num_checkpoints_to_keep=0 --save_folder=%s/none", folder), 0);
    assert_false(exists("none/step1") || exists("none/step2"));
}

/* An id beyond the vocabulary deep in the validation data ends the run at its last evaluation: the checkpoint stays. */
static void test_evaluation_fails(void **state)
{
    (void)state;
    char command[512];
    snprintf(command, sizeof command, "cp data/sample-val.npy %s/val.npy && printf '\377\377\377\377' | "
             "dd of=%s/val.npy conv=notrunc bs=1 seek=30000 2>/dev/null", folder, folder);
    assert_int_equal(system(command), 0);
    assert_int_not_equal(train(2, "--max_duration=2 --eval_interval=2 --save_folder=%s/lost "
                               "--evaluators='[{label: val, data: {paths: [%s/val.npy]}}]'", folder, folder), 0);
    expect_output("val.npy: token 15000");
    assert_true(exists("lost/step2"));
}

static void test_plan_without_data(void **state)
{
    (void)state;
    expect_status(train(4, "--dry_run --data.paths=[] --save_folder=%s/plan", folder), 0);
    expect_output("memory plan of a rank");
    assert_false(exists("plan"));
    assert_int_not_equal(train(1, "--data.paths=[] --save_folder=%s/plan", folder), 0);
    expect_output("no training data");
}

static void test_stop_in_epochs(void **state)
{
    (void)state;
    long tokens = 0, instances = 0;
    expect_status(train(1, "--max_duration=1ep --stop_at=0.002ep --save_folder=%s/epoch", folder), 0);
    const char *data = strstr(output, "data: ");
    assert_int_equal(data ? sscanf(data, "data: %ld tokens in %ld instances", &tokens, &instances) : 0, 2);
    char name[64];
    snprintf(name, sizeof name, "epoch/step%ld", (long)(0.002 * (double)(instances / 8)));
    if (!exists(name))
        fail_msg("no %s", name);
}

/* Validation data that are padding alone have no loss; 0 would be a good one. */
static void test_evaluation_without_labels(void **state)
{
    (void)state;
    double loss[MAX_STEPS];
    char command[512];
    snprintf(command, sizeof command, "yes | tr 'y\\n' '\\1\\0' | head -c 1000 >%s/padding.npy", folder);
    assert_int_equal(system(command), 0);
    expect_status(train(1, "--max_duration=1 --eval_interval=1 --data.generate_attention_mask --save_folder=%s/unlabelled "
                        "--evaluators='[{label: val, data: {paths: [%s/padding.npy]}}]'", folder, folder), 0);
    expect_output("| 0 labels");
    metric(loss, "unlabelled", "eval/val/CrossEntropyLoss");
    assert_true(isnan(loss[1]));
}

/* 8 steps of 8 sequences of 32 tokens, also if the batch changes on the way. */
static void test_token_budget(void **state)
{
    (void)state;
    static const struct { int batch, steps; } rest[] = { { 16, 6 }, { 4, 12 } };
    for (int i = 0; i < 2; i++) {
        expect_status(train(1, "--max_duration=2048T --stop_at=1024T --save_folder=%s/budget%d", folder, i), 0);
        expect_status(train(1, "--max_duration=2048T --try_load_latest_save --global_train_batch_size=%d --save_folder=%s/budget%d",
                            rest[i].batch, folder, i), 0);
        char name[32];
        snprintf(name, sizeof name, "budget%d/latest", i);
        assert_int_equal(trainer(name, "step"), rest[i].steps);
        assert_int_equal(trainer(name, "tokens"), 2048);
    }
}

/* A run may be planned to be longer than any memory. */
static void test_long_run(void **state)
{
    (void)state;
    expect_status(train(1, "--max_duration=1e15 --stop_at=2 --console_log_interval=10 --save_folder=%s/long", folder), 0);
    expect_output("step                2/1000000000000000 ");
    expect_output("eta 0m00s");
}

static void test_bad_arguments(void **state)
{
    (void)state;
    static const struct { const char *arguments, *message; } bad[] = {
        { "--optimizer.learning_rat=1", "learning_rate" },
        { "--global_train_batch_size=7", "7" },
        { "--data.paths=[data/no-such-file.npy]", "data/no-such-file.npy" },
        { "--model.vocab_size=1000 --model.embedding_size=1024 --model.eos_token_id=999", "data/sample-train.npy" },
        { "--load_path=no/such/folder", "no/such/folder" },
        { "--recipe=fp9", "fp9" },
        { "--max_duration=0.00001ep", "max_duration is less than one step" },
        { "--stop_at=0.00001ep", "stop_at is less than one step" },
        { "--recipe=coat --format.gradient=f32", "format.gradient" },
        { "--optimizer.eps=0", "optimizer.eps" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int status = train(2, "--max_duration=2 --save_folder=%s/bad%zu %s", folder, i, bad[i].arguments);
        if (status == 0)
            fail_msg("accepted: %s", bad[i].arguments);
        expect_output(bad[i].message);
        char *first = strstr(output, "\nerror");
        if (first && strstr(first + 1, "\nerror"))
            fail_msg("said twice: %s\n%s", bad[i].arguments, output);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume), cmocka_unit_test(test_resharding), cmocka_unit_test(test_ranks_agree),
        cmocka_unit_test(test_loss_falls), cmocka_unit_test(test_not_finite), cmocka_unit_test(test_signals),
        cmocka_unit_test(test_folder_is_not_overwritten), cmocka_unit_test(test_updates),
        cmocka_unit_test(test_rewind), cmocka_unit_test(test_companions), cmocka_unit_test(test_last_checkpoint),
        cmocka_unit_test(test_stop_in_epochs), cmocka_unit_test(test_plan_without_data),
        cmocka_unit_test(test_evaluation_fails), cmocka_unit_test(test_evaluation_without_labels),
        cmocka_unit_test(test_token_budget), cmocka_unit_test(test_long_run), cmocka_unit_test(test_data_start_over),
        cmocka_unit_test(test_folder_is_in_use), cmocka_unit_test(test_second_signal),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
