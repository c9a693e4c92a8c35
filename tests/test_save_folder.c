/* The files that a run leaves in its save_folder, for each kind of end, and how the next run
 * resumes. */
#include "tests/test.h"
#include "tests/launch.h"

#include <sys/file.h>

/* A process ended between two evaluators. The next process makes the missing evaluation, once. */
TEST(test_cut_between_evaluators)
{
    char command[1024], run[512];
    snprintf(run, sizeof run,
             "--max_duration=4 --stop_at=2 --eval_interval=2 --eval_subset_num_batches=1 "
             "--save_folder=%s/cut "
             "--evaluators='[{label: a, data: {paths: build/few-ids/val.npy}}, {label: b, data: "
             "{paths: build/few-ids/val.npy}}]'",
             folder);
    expect_status(train(2, "%s", run), 0);
    snprintf(command, sizeof command,
             "cd %s/cut && sed -i '/eval.b/d' metrics.jsonl && grep -q 'eval/a/' metrics.jsonl",
             folder);
    assert_int_equal(system(command), 0);
    for (int i = 0; i < 2; i++) {
        expect_status(train(2, "%s --try_load_latest_save", run), 0);
        assert_null(strstr(output, "eval at step 2 | a "));
        assert_int_equal(strstr(output, "eval at step 2 | b ") != NULL, i == 0);
    }
}

/* The end is computed from the configuration and the progress of a checkpoint. */
TEST(test_too_long)
{
    static const char *const durations[] = { "--max_duration=1e17", "--max_duration=1e300ep",
                                             "--max_duration=9 --stop_at=9e18" };
    for (int i = 0; i < 3; i++) {
        assert_int_not_equal(train(1, "--save_folder=%s/long %s", folder, durations[i]), 0);
        expect_output(i < 2 ? "error: max_duration: the run would end after"
                            : "error: stop_at: the run would end after");
        expect_output("more than the maximum 9e+18");
    }
}

/* The number of steps of an epoch depends on the data. */
TEST(test_schedule_of_epochs)
{
    assert_int_not_equal(train(1,
                               "--save_folder=%s/epochs --max_duration=1ep --scheduler.name=wsd "
                               "--scheduler.t_decay=100000",
                               folder),
                         0);
    expect_output("and t_decay 100000 do not fit max_duration, which is ");
    expect_status(
        train(1,
              "--save_folder=%s/epochs --max_duration=1ep --stop_at=1 --scheduler.t_warmup=100000",
              folder),
        0);
    expect_output("still warming up when the run ends: scheduler.t_warmup 100000, max_duration ");
}

TEST(test_folder_is_not_overwritten)
{
    expect_status(train(1, "--max_duration=2 --save_folder=%s/once", folder), 0);
    assert_int_not_equal(train(1, "--max_duration=2 --save_folder=%s/once", folder), 0);
    expect_output("--save_overwrite");
    expect_status(train(1, "--max_duration=3 --save_folder=%s/once --save_overwrite", folder), 0);
    assert_false(exists("once/step2")); /* otherwise --try_load_latest_save could continue it */
    assert_true(exists("once/step3"));
    /* a folder does not count as this run's folder because its name begins like another's */
    expect_status(train(1, "--max_duration=2 --save_folder=%s/onc", folder), 0);
    assert_int_not_equal(
        train(1, "--max_duration=4 --save_folder=%s/onc --load_path=%s/once/step3", folder, folder),
        0);
    expect_output("--save_overwrite");
    assert_int_not_equal(train(1, "--max_duration=2 --save_folder=%s/once/config.yaml", folder), 0);
    expect_output("once/config.yaml is not a folder; give another --save_folder");
}

/* Lines of a replaced run are deleted. A resumed run keeps every line except those that it writes
 * again. */
TEST(test_lines_that_stay)
{
    static const char evaluates[] =
        "--evaluators='[{label: val, data: {paths: build/few-ids/val.npy}}]' "
        "--eval_subset_num_batches=1 --eval_on_load";
    for (int i = 0; i < 2; i++)
        expect_status(train(1, "--max_duration=2 --save_folder=%s/lines %s --save_overwrite",
                            folder, evaluates),
                      0);
    shell("test $(grep -c '\"step\": 0' %s/lines/metrics.jsonl) = 1", folder);
    shell("test $(grep -c '\"step\": 1' %s/lines/metrics.jsonl) = 1", folder);
    shell("sed -i '2s/.*/damaged/' %s/lines/metrics.jsonl", folder);
    expect_status(
        train(1, "--max_duration=3 --save_folder=%s/lines --try_load_latest_save", folder), 0);
    shell("test $(grep -c damaged %s/lines/metrics.jsonl) = 1", folder);
    shell("test $(grep -c '\"step\": 2' %s/lines/metrics.jsonl) = 1", folder);
    shell("test $(grep -c '\"step\": 3' %s/lines/metrics.jsonl) = 1", folder);
}

/* If the link is dangling, the run still finds its newest checkpoint. It warns once, although it
 * follows the link twice. */
TEST(test_latest_gone)
{
    shell("ln -sfn step9 %s/lines/latest", folder);
    expect_status(
        train(2, "--max_duration=4 --save_folder=%s/lines --try_load_latest_save", folder), 0);
    expect_output("lines/step3, at step 3 of 4");
    const char *told = strstr(output, "/latest points to step9");
    assert_non_null(told);
    assert_null(strstr(told + 1, "/latest points to"));
    assert_int_equal(trainer("lines/latest", "step"), 4);
}

/* The state that a failed run set aside is not a checkpoint until it is saved as one. */
TEST(test_set_aside)
{
    expect_status(train(1, "--max_duration=2 --save_folder=%s/aside", folder), 0);
    shell("cd %s/aside && rm latest && mv step2 step2-aborted", folder);
    expect_status(
        train(1, "--max_duration=2 --load_path=%s/aside/step2-aborted --save_folder=%s/aside",
              folder, folder),
        0);
    assert_true(exists("aside/step2/trainer.json"));
    assert_int_equal(trainer("aside/latest", "step"), 2);
}

/* A copy that followed links has a folder in place of the link. Nothing is deleted, and the message
 * says what to do. */
TEST(test_copied_with_links)
{
    expect_status(train(1, "--max_duration=2 --save_folder=%s/linked", folder), 0);
    shell("cp -rL %s/linked %s/copied", folder, folder);
    for (int i = 0; i < 2; i++) {
        expect_status(train(1, "--max_duration=4 --save_folder=%s/copied %s", folder,
                            i ? "--save_overwrite" : "--try_load_latest_save"),
                      STATUS_INPUT);
        expect_output(
            "copied/latest is not a link to a checkpoint (a copy that followed links?); delete it");
        assert_true(exists("copied/step2/trainer.json") && !exists("copied/.latest.tmp"));
    }
}

/* Checkpoints without their tokenizer files, as after copying or exporting, also belong to the run.
 * Other entries are never replaced or deleted. */
TEST(test_copied_alone)
{
    expect_status(train(1, "--max_duration=4 --save_interval=2 --save_folder=%s/all", folder), 0);
    shell("cd %s && mkdir alone && cp -r all/step2 all/step4 alone && cd alone && find . -type f | "
          "sort | xargs cksum >../sums",
          folder);
    expect_status(train(1, "--max_duration=4 --save_folder=%s/alone", folder), STATUS_INPUT);
    expect_output("alone has a run already");
    expect_status(train(1, "--max_duration=4 --load_path=%s/alone/step2 --save_folder=%s/alone",
                        folder, folder),
                  STATUS_INPUT);
    expect_output("--save_overwrite goes back");
    shell("mkdir %s/alone/step3 && echo mine >%s/alone/step3/text", folder, folder);
    for (int i = 0; i < 2; i++) {
        expect_status(train(1, "--max_duration=6 --save_folder=%s/alone %s", folder,
                            i ? "--save_overwrite" : "--try_load_latest_save"),
                      STATUS_INPUT);
        expect_output(
            "alone: step3 is not a checkpoint, and the run might replace or delete it: move it");
    }
    shell("cd %s/alone && rm -r step3 && find . -type f | sort | xargs cksum | cmp - ../sums",
          folder);
    expect_status(
        train(1, "--max_duration=5 --save_folder=%s/alone --try_load_latest_save", folder), 0);
    expect_output("alone/step4, at step 4 of 5");
}

/* Simulates another process that trains in this folder, and a process that left half a checkpoint
 * on a full disk. */
TEST(test_folder_is_in_use)
{
    static const char more[] =
        "--max_duration=3 --save_num_checkpoints_to_keep=0 --try_load_latest_save";
    char path[256];
    expect_status(train(1, "--max_duration=2 --save_folder=%s/used", folder), 0);
    snprintf(path, sizeof path, "%s/used/step9.tmp", folder);
    assert_int_equal(mkdir(path, 0777), 0);
    snprintf(path, sizeof path, "%s/used/metrics.jsonl", folder);
    FILE *f = fopen(path, "ae");
    assert_true(f && flock(fileno(f), LOCK_EX) == 0);
    assert_int_not_equal(
        train(1, "--max_duration=2 --save_overwrite --save_folder=%s/used", folder), 0);
    expect_output("another process trains in save_folder");
    assert_true(exists("used/step2") && exists("used/step9.tmp"));
    fclose(f);
    expect_status(train(1, "%s --save_folder=%s/used", more, folder), 0);
    assert_true(exists("used/step2") && !exists("used/step9.tmp"));
}

/* AdamW's bias correction counts updates of the current moments. */
TEST(test_updates)
{
    expect_status(train(1, "--max_duration=4 --save_folder=%s/four", folder), 0);
    assert_int_equal(trainer("four/step4", "updates"), 4);
    expect_status(
        train(1, "--max_duration=6 --load_path=%s/four/step4 --save_folder=%s/six", folder, folder),
        0);
    assert_int_equal(trainer("six/step6", "updates"), 6);
    assert_int_not_equal(train(1,
                               "--max_duration=2 --load_path=%s/four/step4 --reset_trainer_state "
                               "--save_folder=%s/four "
                               "--save_overwrite",
                               folder, folder),
                         0);
    expect_output("a save_folder of its own");
    expect_status(train(1,
                        "--max_duration=2 --load_path=%s/four/step4 --reset_trainer_state "
                        "--save_folder=%s/again",
                        folder, folder),
                  0);
    assert_int_equal(trainer("again/step2", "updates"), 6);
    expect_status(train(1,
                        "--max_duration=6 --load_path=%s/four/step4 --reset_optimizer_state "
                        "--save_folder=%s/fresh",
                        folder, folder),
                  0);
    assert_int_equal(trainer("fresh/step6", "updates"), 2);
}

/* The data start over when a run begins and when the data change, but not when the same command
 * resumes after an interruption. */
TEST(test_data_start_over)
{
    static const char over[] = "--restore_dataloader=false --try_load_latest_save";
    expect_status(train(1, "--max_duration=4 --save_folder=%s/began", folder), 0);
    for (int stop = 5; stop <= 6; stop++)
        expect_status(train(1,
                            "--max_duration=8 --stop_at=%d --load_path=%s/began/step4 %s "
                            "--save_folder=%s/goes-on",
                            stop, folder, over, folder),
                      0);
    assert_int_equal(trainer("goes-on/step5", "instance"), 8);
    assert_int_equal(trainer("goes-on/step6", "instance"), 16);
    assert_int_not_equal(
        train(1,
              "--max_duration=8 --try_load_latest_save --model.max_sequence_length=16 "
              "--save_folder=%s/goes-on",
              folder),
        0);
    expect_output("another value of model.max_sequence_length");
    expect_status(
        train(1, "--max_duration=7 %s --model.max_sequence_length=16 --save_folder=%s/goes-on",
              over, folder),
        0);
    assert_int_equal(trainer("goes-on/step7", "instance"), 8);
}

/* A run goes back to step 2 only if it may delete later checkpoints. */
TEST(test_rewind)
{
    double loss[MAX_STEPS];
    expect_status(train(1, "--max_duration=4 --save_interval=2 --save_folder=%s/there", folder), 0);
    assert_int_not_equal(train(1,
                               "--max_duration=4 --load_path=%s/there/step2 --save_folder=%s/there",
                               folder, folder),
                         0);
    expect_output("--save_overwrite goes back");
    losses(loss, "there", 4);
    expect_status(
        train(1,
              "--max_duration=3 --load_path=%s/there/step2 --save_folder=%s/there --save_overwrite",
              folder, folder),
        0);
    losses(loss, "there", 3);
    assert_false(exists("there/step4")); /* otherwise a damaged step3 would lead to it */
    /* after an interruption before the next save, the run resumes from this step, not from later
     * checkpoints */
    expect_status(train(1,
                        "--max_duration=4 --stop_at=2 --load_path=%s/there/step2 "
                        "--save_folder=%s/there --save_overwrite",
                        folder, folder),
                  0);
    assert_int_equal(trainer("there/latest", "step"), 2);
    expect_status(
        train(1, "--max_duration=3 --try_load_latest_save --save_folder=%s/there", folder), 0);
    losses(loss, "there", 3);
    expect_status(train(1, "--max_duration=4 --load_path=%s/there/latest --save_folder=%s/there",
                        folder, folder),
                  0);
    losses(loss, "there", 4);
    assert_int_not_equal(
        train(1, "--load_path=%s/there --save_folder=%s/elsewhere", folder, folder), 0);
    expect_output("there/latest");
}

/* Checkpoints of a run that began with a model folder have that folder's tokenizer, also after a
 * resume. */
TEST(test_tokenizer_files)
{
    char command[512];
    expect_status(train(1, "--max_duration=1 --save_folder=%s/model", folder), 0);
    snprintf(
        command, sizeof command,
        "cd %s/model/step1 && rm trainer.json optimizer* && printf 'a\\0b' >tokenizer.json && sed "
        "-i "
        "'s/\\(bos_token_id\": \\)null/\\13/; s/\\(eos_token_id\": \\)\\([0-9]*\\)/\\1[\\2, 7]/; "
        "s/\\(max_position_embeddings\": \\)[0-9]*/\\1131072/' config.json",
        folder);
    assert_int_equal(system(command), 0);
    expect_status(
        train(2, "--max_duration=2 --stop_at=1 --load_path=%s/model/step1 --save_folder=%s/tuned",
              folder, folder),
        0);
    expect_status(
        train(2, "--max_duration=2 --try_load_latest_save --save_folder=%s/tuned", folder), 0);
    snprintf(command, sizeof command,
             "cmp %s/model/step1/tokenizer.json %s/tuned/step2/tokenizer.json", folder, folder);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof command, "%s/tuned/step2/config.json", folder);
    json_t *config = json_load_file(command, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(config, "bos_token_id")), 3);
    assert_int_equal(json_array_size(json_object_get(config, "eos_token_id")), 2);
    assert_int_equal(json_integer_value(json_object_get(config, "max_position_embeddings")),
                     131072);
    json_decref(config);
}

/* ./train --export on one process without mpirun. */
static int export(const char *checkpoint, const char *target, const char *dtype)
{
    return finish(start_command("%s/train --export=%s/%s %s/%s --dtype=%s",
                                setting("BUILD", "build/cpu"), folder, checkpoint, folder, target,
                                dtype));
}

/* A run from random weights has the configuration's tokenizer, also after a resume; other runs do
 * not. */
TEST(test_tokenizer)
{
    shell("mkdir %s/tok && cd %s/tok && echo '{\"model\": {\"vocab\": {\"a\": 0, \"b\": 600}}, "
          "\"added_tokens\": "
          "[{\"id\": 999}]}' >tokenizer.json && echo x >tokenizer_config.json && echo y "
          ">generation_config.json",
          folder, folder);
    expect_status(
        train(1, "--max_duration=1 --tokenizer=%s/tok --save_folder=%s/named", folder, folder), 0);
    shell("cd %s && cmp tok/tokenizer.json named/step1/tokenizer.json && cmp "
          "tok/tokenizer_config.json "
          "named/step1/tokenizer_config.json && test ! -e named/step1/generation_config.json",
          folder);
    /* a file, which takes precedence over the tokenizer of the loaded model */
    shell("cd %s && sed 's/600/599/' tok/tokenizer.json >other.json && echo z "
          ">named/step1/generation_config.json && "
          "mv tok gone",
          folder);
    expect_status(train(2,
                        "--max_duration=2 --load_path=%s/named/step1 --tokenizer=%s/other.json "
                        "--save_folder=%s/renamed",
                        folder, folder, folder),
                  0);
    shell("cd %s/renamed/step2 && cmp ../../other.json tokenizer.json && test ! -e "
          "tokenizer_config.json && "
          "cmp ../../named/step1/generation_config.json generation_config.json",
          folder);
}

/* One rank and two ranks save the same weights; one process exports both to the same bytes. */
TEST(test_export)
{
    static const char still[] =
        "--max_duration=2 --optimizer.learning_rate=0 --optimizer.weight_decay=0 "
        "--scheduler.warmup_min_lr=0";
    expect_status(train(1, "--max_duration=1 --save_folder=%s/exported", folder), 0);
    for (int ranks = 1; ranks <= 2; ranks++) {
        expect_status(train(ranks, "%s --load_path=%s/exported/step1 --save_folder=%s/on%d", still,
                            folder, folder, ranks),
                      0);
        char run[16], target[16];
        snprintf(run, sizeof run, "on%d", ranks);
        snprintf(target, sizeof target, "out%d", ranks);
        expect_status(export(run, target, "bf16"), 0);
        expect_output("in 1 file, BF16");
    }
    shell("cd %s && diff -r out1 out2 && test \"$(ls out1 | tr '\\n' ' ')\" = 'config.json "
          "model.safetensors '",
          folder);
    expect_status(export("on2/step2", "whole", "f32"), 0);
    shell("cd %s && cmp whole/model.safetensors exported/step1/model.safetensors", folder);
    assert_int_equal(export("on1", "out1", "bf16"), STATUS_INPUT);
    expect_output("out1 exists already");
    if (most_ranks() > 1) {
        expect_status(finish(start_command("%s -n 2 %s/train --export=x y",
                                           setting("LAUNCH", "mpirun --oversubscribe"),
                                           setting("BUILD", "build/cpu"))),
                      STATUS_INPUT);
        expect_output("start it without mpirun");
    }
}

/* As in OLMo: without intervals the end is saved, unless no checkpoint is kept. */
TEST(test_last_checkpoint)
{
    expect_status(train(1, "--max_duration=2 --save_interval=null --save_folder=%s/end", folder),
                  0);
    assert_true(exists("end/step2"));
    expect_status(train(1,
                        "--max_duration=2 --save_interval=1 --save_num_checkpoints_to_keep=0 "
                        "--save_folder=%s/none",
                        folder),
                  0);
    assert_false(exists("none/step1") || exists("none/step2"));
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
