/* Ownership in a save_folder: names that only resemble those of checkpoints, links, checkpoints
 * that must stay or cannot be deleted, and file systems that lack features.
 *
 * The functions below replace libc's, and fail as on such file systems. */
#include <fcntl.h>
#include <errno.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "model/checkpoint/folder.h"
#include "model/checkpoint/saved_as.h"
#include "tests/test.h"
#include "tests/saved.h"

static bool no_links, no_rename;
static int no_sync; /* errno of fsync of a folder; 0: it works */
/* suffix of a path that cannot be deleted; NULL: every path can be deleted */
static const char *busy;

int symlink(const char *target, const char *path)
{
    if (!no_links)
        return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
    errno = EPERM;
    return -1;
}

int fsync(int fd)
{
    struct stat status;
    if (no_sync == 0 || fstat(fd, &status) != 0 || !S_ISDIR(status.st_mode))
        return (int)syscall(SYS_fsync, fd);
    errno = no_sync;
    return -1;
}

int rename(const char *from, const char *to)
{
    if (!no_rename)
        return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    errno = ENOTSUP;
    return -1;
}

int remove(const char *path)
{
    const size_t n = strlen(path), m = busy ? strlen(busy) : 0;
    if (!busy || n < m || strcmp(path + n - m, busy) != 0)
        return unlink(path) == 0 ? 0 : rmdir(path);
    errno = EBUSY;
    return -1;
}

static void in_folder(const Run *r, const char *command)
{
    shell(text("cd %s && { %s; }", r->config.save_folder, command));
}

static bool has(const Run *r, const char *name)
{
    return exists(text("%s/%s", r->config.save_folder, name));
}

static void expect_latest(const Run *r, const char *expected)
{
    char *found = checkpoint_latest(r->config.save_folder);
    assert_non_null(found);
    assert_string_equal(found, text("%s/%s", r->config.save_folder, expected));
    free(found);
}

/* ---- saved to stay --------------------------------------------------------------------------- */

/* keep, interval, permanent, ephemeral. Checkpoints up to step 12 are saved with the first
 * settings, later ones with the second. */
typedef struct {
    long keep, interval, permanent, ephemeral;
} Settings4;

static void set(Run *r, Settings4 s)
{
    r->config.save_num_checkpoints_to_keep = s.keep;
    r->config.save_interval = s.interval;
    r->config.save_interval_unsharded = s.permanent;
    r->config.save_interval_ephemeral = s.ephemeral;
}

static void save_steps(Run *r, Settings4 s, long first, long last)
{
    set(r, s);
    for (long step = first; step <= last; step++)
        if (is_due(step, s.interval) || is_due(step, s.permanent) || is_due(step, s.ephemeral))
            save(r, step);
}

TEST(test_saved_to_stay)
{
    const struct {
        Settings4 then, now;
        const char *left;
    } table[] = {
        { { 1, 1, 6, 0 }, { 1, 1, 7, 0 }, "step14 step16 step6 step12" }, /* "never deleted" */
        { { -1, 4, 0, 0 }, { 1, 1, 0, 0 }, "step16 step4 step8 step12" }, /* "all" */
        { { -1, 4, 0, 0 }, { -1, 10, 0, 2 }, "step16 step4 step8 step12" },
        /* saved for rotation, then the settings keep all */
        { { 2, 4, 0, 0 }, { -1, 16, 0, 2 }, "step14 step16 step8 step12" },
        { { 2, 4, 0, 0 }, { 2, 2, 0, 0 }, "step14 step16" }, /* both settings rotate */
        /* the newest ephemeral checkpoint stays */
        { { 1, 100, 0, 4 }, { 1, 1, 0, 0 }, "step16 step12" },
        { { 1, 100, 0, 4 }, { 1, 100, 0, 2 }, "step16" },
        /* permanent by the second settings */
        { { 1, 4, 0, 0 }, { 1, 1, 12, 0 }, "step16 step12" },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        Run r;
        open_small(&r);
        save_steps(&r, table[i].then, 1, 12);
        save_steps(&r, table[i].now, 13, 16);
        in_folder(&r, text("for s in %s; do test -d $s || exit 1; done; test $(ls -d step* | wc "
                           "-l) = $(echo %s | wc -w)",
                           table[i].left, table[i].left));
        close_run(&r);
        release();
    }
}

/* These are not rotated: checkpoints of earlier versions, which do not say how they were saved,
 * copies from another run, and links. */
TEST(test_not_for_rotation)
{
    static const char *const what[] = {
        "sed -i 's/\"saved_as\"/\"unknown\"/' step1/trainer.json",
        "echo 'save_folder: /elsewhere' >step1/config.yaml",
        "mv step1 ../moved && ln -s ../moved step1",
        "rm step1/trainer.json",
        "echo '[' >step1/trainer.json",
        "sed -i 's/\"interval\"/\"aborted\"/' step1/trainer.json",
    };
    for (size_t i = 0; i < sizeof what / sizeof what[0]; i++) {
        Run r;
        open_small(&r);
        set(&r, (Settings4){ 1, 1, 0, 0 });
        save(&r, 1);
        in_folder(&r, what[i]);
        in_folder(&r, "find -L step1 -type f | sort | xargs cksum >sums");
        save(&r, 2);
        save(&r, 3);
        in_folder(&r, "find -L step1 -type f | sort | xargs cksum | cmp - sums && test ! -e step2 "
                      "-a -e step3");
        close_run(&r);
        release();
    }
    Run r;
    open_small(&r);
    set(&r, (Settings4){ 1, 1, 0, 0 });
    save(&r, 1);
    /* the same folder under another name */
    in_folder(&r, "printf 'save_folder: %s\\n' \"$PWD/.\" >step1/config.yaml");
    save(&r, 2);
    assert_false(has(&r, "step1"));
    close_run(&r);
    release();
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Other files next to the checkpoints do not change, even if their names begin like those of
 * checkpoints. */
static const char foreign[] = "cp -r step1 step2.tmp; cp -r step1 step2.old; cp -r step1 "
                              "step1.old; cp -r step1 step2-aborted; mkdir step02; "
                              "echo mine >step02/text; echo mine >step3.tmp; ln -s step1 "
                              "step4.tmp; mkdir step1x; echo mine >step1x/text; "
                              "echo mine >latest.tmp; echo mine >config.yaml.tmp; mkdir step; ln "
                              "-s nothing step5.old; echo mine >step6.tmp2; "
                              "mkdir -p step7.tmp/.unfinishe; echo mine >step99999999999999999999";
static const char list[] =
    "find step2.tmp step2.old step1.old step2-aborted step02 step3.tmp step4.tmp step1x latest.tmp "
    "config.yaml.tmp step step5.old step6.tmp2 step7.tmp step99999999999999999999 | sort | tee "
    "names | "
    "xargs -I{} sh -c 'test -f {} && cksum {} || true'";

TEST(test_foreign_names)
{
    Run r;
    open_small(&r);
    set(&r, (Settings4){ 1, 1, 0, 0 });
    save(&r, 1);
    in_folder(&r, foreign);
    in_folder(&r, text("%s >sums; mv names before", list));
    for (long step = 1; step <= 7; step++)
        save(&r, step);
    TrainState s = state_of(2);
    char *aside = checkpoint_set_aside(&r.config, &r.store, &s, r.file_limit);
    assert_string_equal(aside, text("%s/step2-aborted2", r.config.save_folder));
    free(aside);
    expect_latest(&r, "step7");
    in_folder(&r,
              text("test \"$(echo step?)\" = step7 && %s | cmp - sums && cmp names before", list));
    folder_clear(r.config.save_folder);
    in_folder(&r, "test ! -e step7 -a ! -e latest");
    in_folder(&r, "test -f step3.tmp -a -f step2.tmp/trainer.json -a -f step2.old/trainer.json -a "
                  "-f step02/text -a -L step4.tmp");
    close_run(&r);
    release();
}

/* A save that replaced step 1 was interrupted while its usual temporary name was taken by another
 * file. */
TEST(test_replaced)
{
    Run r;
    open_small(&r);
    save(&r, 1);
    in_folder(&r, "rm latest; touch step1/.unfinished; mv step1 step1.old2; echo mine >step1.old; "
                  "mkdir step8.old; "
                  "echo mine >step8.old/trainer.json");
    expect_latest(&r, "step1.old2");
    save(&r, 1);
    in_folder(&r, "test ! -e step1.old2 && grep -q mine step1.old step8.old/trainer.json");
    close_run(&r);
    release();
}

/* A foreign stepN that appears during the run is renamed for the checkpoint, with its contents
 * unchanged. */
TEST(test_foreign_step)
{
    Run r;
    open_small(&r);
    save(&r, 1);
    in_folder(&r, "mkdir step2; echo mine >step2/text");
    assert_int_equal(folder_foreign_step(r.config.save_folder), 2);
    save(&r, 2);
    save(&r, 3);
    expect_latest(&r, "step3");
    in_folder(&r, "grep -q mine step2.old/text && test -f step2/trainer.json");
    /* a folder with only a model is not a checkpoint */
    in_folder(&r, "mkdir step4; cp step3/config.json step3/model.safetensors step4");
    assert_int_equal(folder_foreign_step(r.config.save_folder), 4);
    close_run(&r);
    release();
}

/* A checkpoint on another disk, with a link in its place: its files stay if it is replaced,
 * cleared, or newer than the resumed step. */
TEST(test_links)
{
    Run r;
    open_small(&r);
    for (long step = 1; step <= 3; step++)
        save(&r, step);
    in_folder(
        &r,
        "mkdir ../disk; for i in 1 2 3; do mv step$i ../disk; ln -s ../disk/step$i step$i; done");
    in_folder(&r, "find ../disk -type f | sort | xargs cksum >sums");
    save(&r, 2);
    assert_true(has(&r, "step2/trainer.json") && has(&r, "step1/trainer.json"));
    in_folder(&r, "test ! -L step2 -a -L step1 -a ! -e step2.old");
    folder_remove_later(r.config.save_folder, 2);
    in_folder(&r, "test ! -L step3");
    folder_clear(r.config.save_folder);
    in_folder(&r, "test ! -L step1 && find ../disk -type f | sort | xargs cksum | cmp - sums && rm "
                  "-r ../disk");
    close_run(&r);
    release();
}

/* ---- what cannot be done --------------------------------------------------------------------- */

/* Runs as a user who may not delete files in step1: root switches to nobody. */
static void save_beside_protected(Run *r)
{
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0)
        _exit(2);
    save(r, 2);
    save(r, 3);
    save(r, 4);
    folder_clean(r->config.save_folder);
    fputs("ALL IS WELL\n", stderr);
    _exit(1);
}

TEST(test_protected)
{
    needs_fork();
    Run r;
    open_small(&r);
    set(&r, (Settings4){ 1, 1, 0, 0 });
    shell(text("chmod 755 %s", root));
    save(&r, 1);
    in_folder(&r, "chmod -R a+rwX . && chmod -R a-w step1");
    DIES("step1: cannot delete: Permission denied; it stays there", save_beside_protected(&r));
    DIES("ALL IS WELL", save_beside_protected(&r));
    expect_latest(&r, "step4");
    in_folder(&r, "test -f step1/trainer.json -a -f step1/model.safetensors -a ! -e step1.tmp -a ! "
                  "-e step2 -a ! -e step3");
    load(&r, step_folder(&r, 1));
    in_folder(&r, "chmod -R a+rwX .");
    save(&r, 5);
    assert_false(has(&r, "step1") || has(&r, "step4"));
    close_run(&r);
    release();
}

/* A file of the checkpoint is open over NFS: the rest is deleted later, and the name does not block
 * a save. */
TEST(test_busy)
{
    Run r;
    open_small(&r);
    set(&r, (Settings4){ 1, 1, 0, 0 });
    save(&r, 1);
    busy = "step1.tmp/model.safetensors";
    for (long step = 2; step <= 3; step++)
        save(&r, step);
    expect_latest(&r, "step3");
    assert_true(has(&r, "step1.tmp/model.safetensors") && !has(&r, "step1") && !has(&r, "step2"));
    save(&r, 1); /* the usual name is taken */
    expect_latest(&r, "step1");
    load(&r, step_folder(&r, 1));
    busy = NULL;
    save(&r, 4);
    assert_false(has(&r, "step1.tmp") || has(&r, "step1.tmp2") || has(&r, "step1"));
    close_run(&r);
    release();
}

TEST(test_no_links)
{
    Run r;
    open_small(&r);
    save(&r, 1);
    no_links = true;
    folder_try(r.config.save_folder);
    for (long step = 2; step <= 3; step++) {
        save(&r, step);
        expect_latest(&r, step == 2 ? "step2" : "step3");
        in_folder(&r, text("test ! -L latest && test \"$(cat latest)\" = step%ld", step));
    }
    char *newest = folder_newest(r.config.save_folder), *same = realpath(step_folder(&r, 3), NULL);
    assert_string_equal(newest, same);
    free(newest);
    free(same);
    in_folder(&r, "test \"$(ls -A | tr '\\n' ' ')\" = 'latest step1 step2 step3 '");
    in_folder(&r, "rm -r step3; echo step9 >latest");
    expect_latest(&r, "step2");
    folder_clear(r.config.save_folder);
    in_folder(&r, "test -z \"$(ls -A)\"");
    no_links = false;
    folder_try(r.config.save_folder);
    save(&r, 5);
    in_folder(&r, "test -L latest && test \"$(ls -A | tr '\\n' ' ')\" = 'latest step5 '");
    close_run(&r);
    release();
}

/* A `latest` that is neither a link nor a file with the name of a checkpoint belongs to somebody
 * else. */
TEST(test_latest_is_none)
{
    needs_fork();
    static const char *const what[] = { "mkdir latest", "printf 'a\nb\n' >latest",
                                        "printf step1 >latest", ": >latest", "mkfifo latest" };
    for (size_t i = 0; i < sizeof what / sizeof what[0]; i++) {
        Run r;
        open_small(&r);
        save(&r, 1);
        in_folder(&r, text("rm latest; %s", what[i]));
        DIES("latest is not a link to a checkpoint", checkpoint_latest(r.config.save_folder));
        close_run(&r);
        release();
    }
}

/* If a file system does not support an operation, the error is ignored. Other errors are reported
 * before the first step. */
TEST(test_no_sync)
{
    needs_fork();
    const int without[] = { EINVAL, ENOTSUP, ENOSYS };
    Run r;
    open_small(&r);
    for (int i = 0; i < 3; i++) {
        no_sync = without[i];
        folder_try(r.config.save_folder);
        save(&r, 1 + i);
    }
    expect_latest(&r, "step3");
    no_sync = EIO;
    DIES("cannot write: Input/output error", folder_try(r.config.save_folder));
    no_sync = 0;
    no_rename = true;
    DIES("cannot rename a folder in it: Operation not supported", folder_try(r.config.save_folder));
    no_rename = false;
    save(&r, 4);
    close_run(&r);
    release();
}

/* The same relative path runs/a in two projects names two different folders. */
TEST(test_relative)
{
    static const char relative[] = "save_folder: runs/a\n";
    char folder[300], config[320], absolute[320];
    snprintf(folder, sizeof folder, "%s/named", root);
    snprintf(config, sizeof config, "%s/config.yaml", folder);
    snprintf(absolute, sizeof absolute, "save_folder: %s\n", root);
    mkdir(folder, 0777);
    folder_write(config, relative, strlen(relative));
    assert_int_equal(saved_as_in(folder, "runs/a"), -1);
    assert_int_equal(saved_as_in(folder, "runs/b"), 0);
    folder_write(config, absolute, strlen(absolute));
    assert_int_equal(saved_as_in(folder, root), 1);
    assert_int_equal(saved_as_in(folder, "runs/a"), 0);
}

/* A checkpoint of another run was copied to the name of the next checkpoint. It stays, under
 * another name. */
TEST(test_copied)
{
    Run r;
    open_small(&r);
    save(&r, 2);
    in_folder(&r, "cp -r step2 step3 && echo 'save_folder: /elsewhere' > step3/config.yaml");
    save(&r, 3);
    in_folder(&r,
              "grep -q elsewhere step3.old/config.yaml && ! grep -q elsewhere step3/config.yaml");
    expect_latest(&r, "step3");
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
