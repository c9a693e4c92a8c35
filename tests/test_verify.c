/* Checks before a resume: the bytes of the checkpoint, and whether the data are those that the run
 * trained on. */
#include "data/loader.h"
#include "tests/test.h"
#include "tests/launch.h"

/* ---- samples of files ------------------------------------------------------------------------ */

static void in_folder(const char *command)
{
    char text[1024];
    snprintf(text, sizeof text, "cd %s && { %s; }", folder, command);
    if (system(text) != 0)
        fail_msg("%s failed", text);
}

/* Flips a bit of byte `at` of a file; counted from the end if negative. */
static void flip(const char *name, long at)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, at < 0 ? SEEK_END : SEEK_SET), 0);
    const int byte = fgetc(file);
    assert_int_equal(fseek(file, -1, SEEK_CUR), 0);
    assert_int_equal(fputc(byte ^ 1, file), byte ^ 1);
    assert_int_equal(fclose(file), 0);
}

static DataHashes content(void)
{
    char path[4][64], *shards[] = { path[0], path[1] }, *masks[] = { path[2], path[3] };
    static const char *const names[] = { "short.npy", "long.npy", "short.mask", "long.mask" };
    for (int i = 0; i < 4; i++)
        snprintf(path[i], sizeof path[i], "%s/%s", folder, names[i]);
    const DataSpec spec = { .paths = shards,
                            .num_paths = 2,
                            .label_mask_paths = masks,
                            .num_label_mask_paths = 2,
                            .itemsize = 2,
                            .sequence_length = 8,
                            .vocab_size = 65536,
                            .eos_token_id = -1,
                            .pad_token_id = -1 };
    Loader *l = loader_open(&spec, 4, 0, 1);
    const DataHashes s = loader_content(l);
    loader_close(l);
    return s;
}

/* A flipped bit at the start, in the middle or at the end of any file is detected, with its set. */
TEST(test_sample)
{
    static const long seen[] = { 0, 4095, 49152, 53247, 98304, 99999 },
                      unseen[] = { 4096, 49151, 53248, 98303 };
    in_folder("seq 100000 | head -c 100000 >long.npy; head -c 100 long.npy >short.npy; "
              "tr '0-4\\n5-9' '[\\0*6][\\1*5]' <long.npy | head -c 50000 >long.mask; head -c 50 "
              "long.mask >short.mask");
    const DataHashes whole = content(), again = content();
    assert_true(whole.tokens && whole.masks && again.tokens == whole.tokens &&
                again.masks == whole.masks);
    for (size_t i = 0; i < sizeof seen / sizeof seen[0]; i++) {
        flip("long.npy", seen[i]);
        assert_true(content().tokens != whole.tokens && content().masks == whole.masks);
        flip("long.npy", seen[i]);
    }
    /* the sample does not contain this byte */
    for (size_t i = 0; i < sizeof unseen / sizeof unseen[0]; i++)
        flip("long.npy", unseen[i]);
    assert_true(content().tokens == whole.tokens);
    flip("short.npy", -1);
    assert_true(content().tokens != whole.tokens);
    flip("short.npy", -1);
    flip("long.mask", -1);
    assert_true(content().tokens == whole.tokens && content().masks != whole.masks);
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Resumes a copy of the run `first` with its data, which may have changed. */
static int go_on(int ranks, const char *run, const char *more)
{
    return train(ranks,
                 "--recipe=coat --max_duration=4 --data.paths='[%s/train.npy]' "
                 "--data.label_mask_paths='[%s/train.mask]' "
                 "--try_load_latest_save --save_folder=%s/%s %s",
                 folder, folder, folder, run, more);
}

/* Two of four steps. */
static void make_first(void)
{
    char command[512];
    if (exists("first"))
        return;
    snprintf(command, sizeof command, "cp build/few-ids/train.npy %s/train.npy", folder);
    assert_int_equal(system(command), 0);
    in_folder("head -c $(($(stat -c %s train.npy) / 2)) /dev/zero | tr '\\0' '\\1' >train.mask");
    expect_status(go_on(2, "first", "--stop_at=2"), 0);
}

static void refuse(int ranks, const char *more, const char *message)
{
    in_folder("rm -rf copy; cp -r first copy");
    assert_int_not_equal(go_on(ranks, "copy", more), 0);
    expect_output(message);
    assert_false(exists("copy/step4"));
}

/* The same on any number of ranks, in one group or in two. */
TEST(test_flipped_bits)
{
    make_first();
    flip("first/step2/optimizer-00001.states", -1000);
    refuse(
        4,
        most_ranks() < 4
            ? ""
            : "--fsdp.sharding_strategy=HYBRID_SHARD --fsdp.hybrid_sharding_num_model_replicas=2",
        "copy/step2/optimizer-00001.states: tensor model.");
    refuse(2, "--recipe=bf16", " from trainer.json"); /* moments are converted */
    flip("first/step2/optimizer-00001.states", -1000);
    flip("first/step2/model.safetensors", -100000);
    refuse(2, "", "copy/step2/model.safetensors: tensor model.");
    expect_output(" from trainer.json");
    flip("first/step2/model.safetensors", -100000);
}

TEST(test_other_content)
{
    make_first();
    flip("train.npy", -1);
    refuse(1, "", "was trained on files of data.paths that had other content than now");
    expect_status(go_on(1, "copy", "--restore_dataloader=false"), 0);
    flip("train.npy", -1);
    refuse(1, "--data.packing=best_fit",
           "or with another value of model.max_sequence_length, data.packing, ");
    expect_output("resume: data.packing best_fit, was concat\n");
    flip("train.mask", 1);
    refuse(1, "", "was trained on files of data.label_mask_paths that had other content than now");
    flip("train.mask", 1);
}

/* Reports all changed settings and no others. The moments are converted to the new recipe's
 * formats. */
TEST(test_other_settings)
{
    make_first();
    in_folder("rm -rf copy; cp -r first copy");
    expect_status(
        go_on(
            2, "copy",
            "--recipe=bf16 --optimizer.betas=[0.9,0.99] --max_duration=3 --console_log_interval=2"),
        0);
    expect_output("loading: exp_avg is converted from e4m3/128+ to f32\n");
    expect_output("loading: exp_avg_sq is converted from e4m3/128+ to f32\n");
    const char *said = strstr(output, "resume: ");
    static const char lines[] = "resume: recipe bf16, was coat\nresume: max_duration 3, was 4\n"
                                "resume: optimizer.betas[1] 0.99, was 0.95\n";
    if (!said || strncmp(said, lines, strlen(lines)) != 0 ||
        strstr(said + strlen(lines), "resume: "))
        fail_msg("expected '%s' in: %s", lines, output);
    in_folder(
        "rm -rf copy; cp -r first copy; "
        "sed -i '/warmup_fraction/d; /label_mask_paths/,+1d; /trainable/d' copy/step2/config.yaml");
    expect_status(go_on(1, "copy", "--restore_dataloader=false"), 0); /* from an older program */
    if (strstr(strstr(output, "resume: ") + 1, "resume: "))
        fail_msg("%s", output);
    expect_output("resume: data.label_mask_paths[0] ");
    expect_output("; 1 in all, were 0\n");
    in_folder("rm -rf copy; cp -r first copy");
    expect_status(go_on(1, "copy", ""), 0);
    assert_null(strstr(output, "resume: "));
}

/* Several changed settings of training that do not affect shapes. */
TEST(test_other_training)
{
    static const char *const keys[] = { "max_grad_norm",
                                        "spikes",
                                        "softmax_auxiliary_loss",
                                        "auxiliary_loss_multiplier",
                                        "scheduler.t_warmup",
                                        "optimizer.weight_decay",
                                        "device_train_microbatch_size",
                                        "seed" };
    make_first();
    in_folder("rm -rf copy; cp -r first copy");
    expect_status(go_on(1, "copy",
                        "--max_grad_norm=0.25 --spikes=skip --softmax_auxiliary_loss "
                        "--auxiliary_loss_multiplier=0.125 "
                        "--scheduler.t_warmup=3 --optimizer.weight_decay=0.375 "
                        "--device_train_microbatch_size=1 --seed=77 "
                        "--data.seed=6198 --restore_dataloader=false"),
                  0);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char line[128];
        snprintf(line, sizeof line, "resume: %s ", keys[i]);
        expect_output(line);
    }
}

/* If a program with another row for the recipe wrote the run, trainer.json has that row. The run
 * can resume with the new or the old row. */
TEST(test_other_columns)
{
    make_first();
    in_folder("rm -rf copy; cp -r first copy; "
              "sed -i 's/\"fp8.scales\": \"step\"/\"fp8.scales\": \"microbatch\"/; "
              "s/\"fp8.fast_accumulation\": \"all\"/\"fp8.fast_accumulation\": \"none\"/' "
              "copy/step2/trainer.json");
    expect_status(go_on(1, "copy", "--fp8.fast_accumulation=forward"), 0);
    expect_output(
        "resume: fp8.fast_accumulation forward, was none\n"
        "resume: fp8.scales step, was microbatch: --fp8.scales=microbatch continues as before\n");
    assert_null(strstr(strstr(strstr(output, "resume: ") + 1, "resume: ") + 1, "resume: "));
}

/* Makes `copy` of `first` with the names of earlier versions: keys in config.yaml, and formats in
 * trainer.json. */
static void copy_as_earlier(void)
{
    in_folder("rm -rf copy; cp -r first copy; for f in copy/config.yaml copy/step2/config.yaml; do "
              "sed -i '/^activations:/,/^  recompute:/d; /^fp8:/,/^  down_scales:/d; "
              "s/^format:/format:\\n  keep: null    # inputs\\n  recompute: null    # none\\n"
              "  forward: null    # exact\\n  fast: null    # all\\n  scales: null    # step/' $f; "
              "grep -q '^  fast: null' $f || exit 1; grep -q '^fp8:' $f && exit 1; done; "
              "sed -zi 's/,[^,]*\"fp8.down_scales\": \"tensor\"//; "
              "s/\"activations\\.\\([a-z]*\\)\"/\"\\1\"/g; "
              "s/\"fp8.fast_accumulation\"/\"fast\"/; s/\"fp8.\\([a-z]*\\)\"/\"\\1\"/g' "
              "copy/step2/trainer.json; grep -q '\"scales\": \"step\"' copy/step2/trainer.json && "
              "grep -q '\"keep\": \"inputs\"' copy/step2/trainer.json");
    in_folder(
        "sed -i 's/^  residual:/  stream:/; s/^  saved_norm_input:/  saved:/; "
        "s/^  saved_qkv:/  qkv:/; s/^  saved_attention:/  att:/; s/^  saved_mlp:/  hidden:/; "
        "s/^  adjust_lr_fn:/  adjust_lr:/; s/^offload:/host:/; s/^  frozen: auto/  base: auto/; "
        "s/^  optimizer: auto/  moments: auto/; s/^tiled_mlp_tokens:/mlp_tile:/; "
        "s/^internode_gb_per_s:/network:/' copy/config.yaml copy/step2/config.yaml; "
        "grep -q '^  base: auto' copy/config.yaml");
    in_folder("sed -i 's/\"residual\"/\"stream\"/; s/\"saved_norm_input\"/\"saved\"/; "
              "s/\"saved_qkv\"/\"qkv\"/; s/\"saved_attention\"/\"att\"/; "
              "s/\"saved_mlp\"/\"hidden\"/' copy/step2/trainer.json; "
              "grep -q '\"att\": \"bf16\"' copy/step2/trainer.json");
}

/* Such copies resume as before, and a changed format is found. */
TEST(test_other_names)
{
    static const char silent[] =
        "sed -i 's/^  keep: null .*/  keep: inputs/' copy/config.yaml copy/step2/config.yaml; "
        "grep -q '^  keep: inputs' copy/config.yaml";
    make_first();
    copy_as_earlier();
    expect_status(go_on(1, "copy", ""), 0);
    assert_null(strstr(output, "resume: "));
    copy_as_earlier();
    in_folder(silent);
    expect_status(go_on(1, "copy", ""), 0);
    if (strstr(output, "resume: ") || strstr(output, "earlier versions"))
        fail_msg("%s", output);
    copy_as_earlier();
    expect_status(go_on(1, "copy", "--fp8.fast_accumulation=forward --activations.keep=block"), 0);
    expect_output("resume: activations.keep block, was inputs\nresume: fp8.fast_accumulation "
                  "forward, was all\n");
    copy_as_earlier();
    in_folder(
        "sed -i 's/\"scales\": \"step\"/\"scales\": \"microbatch\"/' copy/step2/trainer.json");
    expect_status(go_on(1, "copy", "--format.keep=inputs"), 0);
    expect_output(
        "resume: fp8.scales step, was microbatch: --fp8.scales=microbatch continues as before\n");
    expect_output("--format.keep=inputs: key 'format.keep' of earlier versions is read as "
                  "'activations.keep'");
    if (strstr(strstr(output, "resume: ") + 1, "resume: "))
        fail_msg("%s", output);
    copy_as_earlier();
    in_folder("sed -i 's/\"att\": \"bf16\"/\"att\": \"e4m3\\/16\"/' copy/step2/trainer.json");
    expect_status(go_on(1, "copy", ""), 0);
    expect_output("resume: format.saved_attention bf16, was e4m3/16: "
                  "--format.saved_attention=e4m3/16 continues as before\n");
}

/* The manifest has neither checksums nor samples: nothing is verified, and the rest of the run is
 * the same bit for bit. */
TEST(test_old_checkpoint)
{
    char path[512];
    make_first();
    in_folder("cp -r first new; cp -r first old");
    snprintf(path, sizeof path, "%s/old/step2/trainer.json", folder);
    json_t *manifest = json_load_file(path, 0, NULL);
    assert_int_equal(json_object_del(manifest, "crc32c"), 0);
    assert_int_equal(json_object_del(manifest, "data_sample"), 0);
    assert_int_equal(json_dump_file(manifest, path, 0), 0);
    json_decref(manifest);
    expect_status(go_on(2, "new", ""), 0);
    expect_status(go_on(2, "old", ""), 0);
    in_folder("for f in new/step4/*.s* new/step4/trainer.json; do cmp $f old/step4/${f##*/} || "
              "exit 1; done");
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
