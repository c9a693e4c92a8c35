/* Folders of checkpoints: which one is the latest, which ones are deleted, and the effects of a
 * crash, a full disk or a damaged file. */
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <sys/resource.h>

#include "model/formats/file.h"
#include "model/shape/architecture.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/saved_as.h"
#include "tests/test.h"
#include "tests/sanitized.h"
#include "tests/saved.h"

/* checkpoint_latest returns save_folder/<expected>, or nothing. */
static void expect_latest(const Run *r, const char *expected)
{
    char *found = checkpoint_latest(r->config.save_folder);
    if (!found || !expected)
        assert_true(!found && !expected);
    else
        assert_string_equal(found, text("%s/%s", r->config.save_folder, expected));
    free(found);
}

/* Returns the sorted entries of the save folder, separated by blanks. */
static void expect_entries(const Run *r, const char *expected)
{
    char found[1024] = "";
    FILE *p = popen(text("ls %s", r->config.save_folder), "r");
    size_t n = fread(found, 1, sizeof found - 1, p);
    pclose(p);
    for (size_t i = 0; i < n; i++)
        found[i] = found[i] == '\n' ? i + 1 < n ? ' ' : '\0' : found[i];
    assert_string_equal(found, expected);
}

static void in_folder(const Run *r, const char *command)
{
    shell(text("cd %s && %s", r->config.save_folder, command));
}

/* ---- the latest ------------------------------------------------------------------------------ */

TEST(test_latest)
{
    Run r;
    open_small(&r);
    expect_latest(&r, NULL);
    save(&r, 10);
    expect_latest(&r, "step10");
    save(&r, 20);
    save(&r, 9); /* resumed from an earlier checkpoint */
    expect_latest(&r, "step9");
    expect_entries(&r, "latest step10 step20 step9");
    char *link = folder_latest(r.config.save_folder);
    assert_string_equal(link, "step9"); /* the link is relative, so the folder can be moved */
    free(link);
    in_folder(&r, "test \"$(ls step9)\" = "
                  "'config.json\nconfig.yaml\nmodel.safetensors\noptimizer-00001.states\n"
                  "trainer.json' && test \"$(cat step9/config.yaml)\" = 'run_name: test'");
    assert_string_equal(r.config.text, "run_name: test\n");
    close_run(&r);
    release();
}

/* A crash at any of the steps of folder_publish. */
TEST(test_crashes)
{
    const struct {
        const char *what, *latest;
    } crash[] = {
        /* crash before the rename */
        { "cp -r step10 step30.tmp && touch step30.tmp/.unfinished", "step20" },
        { "mkdir step30.tmp", "step20" },
        /* crash before `latest` moved */
        { "cp -r step10 step30", "step20" },
        { "ln -s step30 .latest.tmp", "step20" },
        { "rm latest", "step20" },
        { "ln -sfn step30.tmp latest && mkdir step30.tmp", "step20" },
        { "ln -sfn step99 latest", "step20" },
        { "rm -r step20", "step10" },
        { "rm step20/trainer.json", "step10" },
        { "echo '{' >step20/trainer.json", "step10" },
        { "truncate -s -1 step20/model.safetensors", "step10" },
        { "truncate -s +1 step20/model.safetensors", "step10" },
        { "rm step20/optimizer-00001.states", "step10" },
        { "rm -r step10 && mv step20 step20.old && mkdir step20.tmp && touch "
          "step20.old/.unfinished",
          "step20.old" },
        { "rm -r step10 step20", NULL },
    };
    for (size_t i = 0; i < sizeof crash / sizeof crash[0]; i++) {
        Run r;
        open_small(&r);
        save(&r, 10);
        save(&r, 20);
        in_folder(&r, crash[i].what);
        expect_latest(&r, crash[i].latest);
        save(&r, 30); /* the next save succeeds and cleans up */
        expect_latest(&r, "step30");
        assert_false(exists(text("%s/step30.tmp", r.config.save_folder)));
        assert_false(exists(text("%s/step20.tmp", r.config.save_folder)));
        assert_false(exists(text("%s/.latest.tmp", r.config.save_folder)));
        load(&r, step_folder(&r, 30));
        close_run(&r);
        release();
    }
}

/* If the only checkpoint cannot be read, a run does not start from scratch. */
TEST(test_none_complete)
{
    needs_fork();
    Run r;
    open_small(&r);
    save(&r, 10);
    in_folder(&r, "truncate -s -4 step10/optimizer-00001.states");
    DIES("no complete checkpoint (", checkpoint_latest(r.config.save_folder));
    save(&r, 10);
    in_folder(&r, "rm step10/config.json");
    DIES("step10 has neither config.json nor adapter_config.json",
         checkpoint_latest(r.config.save_folder));
    in_folder(&r, "rm -r latest step10/trainer.json");
    DIES("trainer.json", checkpoint_latest(r.config.save_folder));
    close_run(&r);
    release();
}

/* A new checkpoint of the same step replaces the old one completely. */
TEST(test_replace)
{
    Run r;
    open_small(&r);
    save(&r, 10);
    in_folder(&r, "cp -r step10 step10.old && touch step10.old/.unfinished step10/left-over");
    store_init(&r.store, &r.config.model, 4);
    float before = 0, after = 0;
    device_get(&before, r.store.shard[0].slice[TRAINED].stored.data, sizeof before);
    save(&r, 10);
    expect_entries(&r, "latest step10");
    assert_false(exists(text("%s/left-over", step_folder(&r, 10))));
    store_init(&r.store, &r.config.model, 3);
    load(&r, step_folder(&r, 10));
    device_get(&after, r.store.shard[0].slice[TRAINED].stored.data, sizeof after);
    assert_true(before == after);
    close_run(&r);
    release();
}

/* ---- other programs -------------------------------------------------------------------------- */

/* The number of tensors in *.safetensors. Engines load these files, and leave out at most those
 * that an index does not name [vLLM and SGLang: filter_duplicate_safetensors_files]. Fails if a
 * file has a tensor that the model lacks. */
static int tensors_of_engine(const Run *r, const char *path)
{
    glob_t g;
    int count = 0;
    assert_int_equal(glob(text("%s/*.safetensors", path), 0, NULL, &g), 0);
    for (size_t i = 0; i < g.gl_pathc; i++) {
        SafeFile *f = safetensors_open(g.gl_pathv[i]);
        for (int k = 0, t; k < f->count; k++, count++) {
            for (t = 0; t < r->store.num_tensors &&
                        strcmp(r->store.tensor[t].name, f->tensor[k].name) != 0;
                 t++)
                ;
            if (t == r->store.num_tensors)
                fail_msg("%s: %s is not a tensor of the model", f->path, f->tensor[k].name);
        }
        safetensors_close(f);
    }
    globfree(&g);
    return count;
}

/* A checkpoint can be served: engines find the whole model and nothing else, whether it is one file
 * or several. */
TEST(test_engines)
{
    static const size_t limits[] = { CHECKPOINT_FILE_BYTES, 4000 };
    for (int i = 0; i < 2; i++) {
        Run r;
        open_small(&r);
        r.file_limit = limits[i];
        save(&r, 10);
        assert_int_equal(tensors_of_engine(&r, step_folder(&r, 10)), r.store.num_tensors);
        close_run(&r);
    }
    release();
}

/* Checkpoints of earlier commits have their states in optimizer-*.safetensors. */
TEST(test_old_names)
{
    needs_fork();
    Run r;
    open_small(&r);
    store_init(&r.store, &r.config.model, 3);
    save(&r, 10);
    in_folder(&r, "sed -i 's/\\(optimizer-.*\\)\\.states/\\1.safetensors/' step10/trainer.json && "
                  "mv step10/optimizer-00001.states step10/optimizer-00001.safetensors && cp -r "
                  "step10 step11");
    expect_latest(&r, "step10");
    load(&r, step_folder(&r, 10));
    save(&r, 20);
    in_folder(&r,
              "cmp step10/optimizer-00001.safetensors step20/optimizer-00001.states && "
              "cmp step10/model.safetensors step20/model.safetensors && rm step11/trainer.json");
    assert_true(saved_as_ours(step_folder(&r, 11)));
    DIES("step11: the checkpoint is incomplete: trainer.json, which is written last",
         load(&r, step_folder(&r, 11)));
    close_run(&r);
    release();
}

/* ---- damage ---------------------------------------------------------------------------------- */

TEST(test_damaged_checkpoints)
{
    needs_fork();
    const struct {
        const char *damage, *message;
    } table[] = {
        { "rm trainer.json", "trainer.json" },
        { "echo '{' >trainer.json", "trainer.json:" },
        { "truncate -s -1 model.safetensors", "model.safetensors: " },
        { "truncate -s +1 optimizer-00001.states", "optimizer-00001.states: " },
        { "rm optimizer-00001.states", "optimizer-00001.states: No such file" },
        { "sed -i 's/\"step\"/\"stop\"/' trainer.json", "trainer.json" },
        { "sed -i 's/version\": 1/version\": 2/' trainer.json", "format_version is 2" },
        { "rm *", "no model.safetensors" },
        { "printf '\\377' | dd of=model.safetensors conv=notrunc bs=1 seek=7 status=none",
          "model.safetensors" },
        { "printf 'x' | dd of=optimizer-00001.states conv=notrunc bs=1 seek=20 status=none",
          "optimizer-00001" },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        Run r;
        open_small(&r);
        save(&r, 10);
        in_folder(&r, text("cd step10 && %s", table[i].damage));
        DIES(table[i].message, load(&r, step_folder(&r, 10)));
        close_run(&r);
        release();
    }
    Run r;
    open_small(&r);
    DIES("there is no such folder", load(&r, "/nowhere/at/all"));
    close_run(&r);
    release();
}

static void flip_bit(const char *path, size_t at)
{
    unsigned char byte;
    const int file = open(path, O_RDWR);
    assert_int_equal(pread(file, &byte, 1, (off_t)at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(file, &byte, 1, (off_t)at), 1);
    close(file);
}

/* Flips one bit of every `step`-th tensor: at its start, at its end, or inside. */
static void check_flipped(Run *r, const char *name, int step)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", step_folder(r, 10), name);
    SafeFile *file = safetensors_open(path);
    assert_true(file->count > 0);
    for (int i = 0; i < file->count; i += step) {
        const SafeTensor *t = &file->tensor[i];
        const size_t bytes = t->end - t->begin, places[] = { 0, bytes - 1, bytes / 2 },
                     at = file->data + t->begin + places[i % 3];
        flip_bit(path, at);
        DIES(text("%s: tensor %s has the checksum ", path, t->name), load(r, step_folder(r, 10)));
        flip_bit(path, at);
    }
    safetensors_close(file);
}

TEST(test_flipped_bits)
{
    needs_fork();
    Run r;
    ModelConfig m = architecture(LLAMA_GQA);
    open_run(&r, &m, (Format){ BF16, 0 }, (Format){ E4M3, 128, true }, (Format){ E4M3, 128, true });
    store_init(&r.store, &r.config.model, 3);
    save(&r, 10);
    check_flipped(&r, "model.safetensors", 1);
    check_flipped(&r, "optimizer-00001.states", 5);
    load(&r, step_folder(&r, 10));
    in_folder(&r, "sed -i 's/\"[0-9a-f]\\{8\\}\"/\"none\"/' step10/trainer.json");
    DIES("trainer.json: crc32c of model.", load(&r, step_folder(&r, 10)));
    close_run(&r);
    release();
}

/* Invalid manifests: the message names the file, the key, what was found and what was expected. */
TEST(test_damaged_manifests)
{
    needs_fork();
    const struct {
        const char *damage, *message;
    } table[] = {
        { "s/\"step\": 10/\"step\": -6/",
          "step10/trainer.json: step: expected an integer >= 0, found -6" },
        { "s/\"updates\": 98/\"updates\": -1/",
          "trainer.json: updates: expected an integer >= 0, found -1" },
        { "s/\"epoch\": 7/\"epoch\": 7.5/",
          "trainer.json: loader.epoch: expected an integer >= 0, found 7.5" },
        { "s/\"instance\"/\"at\"/",
          "trainer.json: loader.instance: expected an integer >= 0, found nothing" },
        { "s/ba9876543210/ba987654321g/",
          "trainer.json: data_fingerprint: expected 16 hexadecimal digits, found \"fed" },
        { "s/.*/{}/;q", "files: expected the checkpoint's files and their bytes, found none" },
        { "s/.*/[]/;q", "trainer.json: files: expected" },
        { "s/\"optimizer-/\"..\\/step10\\/optimizer-/",
          "expected names of files in the folder and their bytes, found '../" },
    };
    Run r;
    open_small(&r);
    save(&r, 10);
    in_folder(&r, "mv step10/trainer.json .");
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        in_folder(&r, text("sed '%s' trainer.json >step10/trainer.json", table[i].damage));
        DIES(table[i].message, load(&r, step_folder(&r, 10)));
    }
    DIES("has no complete checkpoint", (in_folder(&r, "echo '{}' >step10/trainer.json"),
                                        checkpoint_latest(r.config.save_folder)));
    close_run(&r);
    release();
}

/* The disk accepts only `bytes` bytes of a file. */
static void save_on_full_disk(Run *r, rlim_t bytes)
{
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){ bytes, bytes });
    save(r, 20);
}

TEST(test_disk_full)
{
    needs_fork();
    Run r;
    open_small(&r);
    save(&r, 10);
    for (rlim_t bytes = 0; bytes <= 65536; bytes += 16384) {
        DIES("step20.tmp/", save_on_full_disk(&r, bytes));
        expect_latest(&r, "step10");
        load(&r, step_folder(&r, 10));
    }
    /* the name is taken */
    in_folder(&r, "chmod 600 step10 && rm -r step20.tmp && touch step20.tmp");
    save(&r, 20);
    expect_latest(&r, "step20");
    char *good = r.config.save_folder;
    r.config.save_folder = "/dev/null";
    DIES("/dev/null/step20.tmp: cannot create: Not a directory", save(&r, 20));
    r.config.save_folder = good;
    close_run(&r);
    release();
}

/* SIGKILL at any moment of a save: a complete checkpoint exists at all times, and it loads. If
 * there is only one step, the save replaces the only checkpoint. */
static void check_killed(long last_step)
{
    /* microseconds, long enough for a few saves */
    enum { KILLS = SANITIZED ? 20 : 100, SPREAD = SANITIZED ? 200000 : 100000 };
    Run r;
    open_small(&r);
    save(&r, 10);
    for (int i = 0; i < KILLS; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
            for (;;)
                for (long step = 10; step <= last_step; step++)
                    begin(&r, step); /* this also finishes the previous save */
        }
        usleep((useconds_t)(500 + i * SPREAD / KILLS));
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
        char *latest = checkpoint_latest(r.config.save_folder);
        assert_non_null(latest);
        load(&r, latest);
        free(latest);
    }
    save(&r, 11);
    expect_latest(&r, "step11");
    close_run(&r);
    release();
}

TEST(test_killed)
{
    needs_fork();
    check_killed(10);
    check_killed(12);
}

/* ---- pruning --------------------------------------------------------------------------------- */

/* The folders `steps`, and those that remain. A folder contains only the file that says how it was
 * saved, by these settings. */
static void check_prune(long keep_last, long interval, long permanent, long ephemeral,
                        const char *steps, const char *latest, const char *left)
{
    Run r;
    open_small(&r);
    r.config.save_num_checkpoints_to_keep = keep_last;
    r.config.save_interval = interval;
    r.config.save_interval_unsharded = permanent;
    r.config.save_interval_ephemeral = ephemeral;
    in_folder(&r, text("mkdir %s && ln -s %s latest", steps, latest));
    long *step;
    for (int i = file_steps(&step, r.config.save_folder, "") - 1; i >= 0; i--)
        in_folder(&r,
                  text("echo '{\"format_version\": 1, \"saved_as\": \"%s\"}' >step%ld/trainer.json",
                       saved_as_name(saved_as_of(&r.config, step[i])), step[i]));
    free(step);
    checkpoint_prune(&r.config);
    expect_entries(&r, left);
    close_run(&r);
    release();
}

TEST(test_prune)
{
    const char *four = "step100 step200 step300 step400";
    check_prune(-1, 100, 0, 0, four, "step400", "latest step100 step200 step300 step400");
    check_prune(2, 100, 0, 0, four, "step400", "latest step300 step400");
    check_prune(1, 100, 0, 0, four, "step400", "latest step400");
    check_prune(0, 100, 0, 0, four, "step400", "latest step400");
    check_prune(9, 100, 0, 0, four, "step400", "latest step100 step200 step300 step400");
    /* permanent checkpoints stay and do not count */
    check_prune(1, 100, 200, 0, four, "step400", "latest step200 step300 step400");
    /* only the last ephemeral checkpoint stays, whatever the other settings are */
    check_prune(-1, 100, 0, 20, "step100 step120 step140 step200 step220 step240", "step240",
                "latest step100 step200 step240");
    check_prune(1, 100, 0, 20, "step100 step120 step200", "step200", "latest step120 step200");
    /* the run resumed from 200: the old 300 and 400 belong to another run until this run reaches
     * these steps */
    check_prune(1, 100, 0, 0, four, "step200", "latest step200 step300 step400");
    /* other entries are ignored */
    check_prune(1, 100, 0, 0, "step100 step200 steps step100x", "step200",
                "latest step100x step200 steps");
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
