/* Saving during training: the saved state is that of checkpoint_begin, whatever happens afterwards;
 * nothing waits for the disk unnecessarily; and a writer that fails or is killed leaves the
 * previous checkpoint.
 *
 * The pwrite below replaces libc's: it delays or refuses writes of threads other than the
 * test's. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "kernels/runtime/comm.h"
#include "model/shape/architecture.h"
#include "tests/test.h"
#include "tests/pattern.h"
#include "tests/saved.h"

static pthread_t test_thread;
static atomic_bool held;       /* the writer waits, with a limit: a test must not hang */
static atomic_int writes_left; /* number of writes that succeed */

ssize_t pwrite(int fd, const void *src, size_t bytes, off_t at)
{
    if (!pthread_equal(pthread_self(), test_thread)) {
        for (int i = 0; i < 100000 && atomic_load(&held); i++)
            usleep(100);
        if (atomic_fetch_sub(&writes_left, 1) <= 0) {
            errno = ENOSPC;
            return -1;
        }
    }
    return syscall(SYS_pwrite64, fd, src, bytes, at);
}

/* Sets weights and moments of a run to the pattern of `seed`. */
static void set_state(Run *r, uint64_t seed)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Tensor t[] = { r->store.shard[u].slice[TRAINED].stored, r->store.shard[u].state[0],
                             r->store.shard[u].state[1] };
        for (uint64_t i = 0; i < 3; i++)
            pattern_put(t[i].data, seed + i, 0, tensor_bytes(t[i]));
    }
}

/* A checkpoint holds the pattern of `seed` in every tensor; these runs are all F32. */
static void expect_state(Run *r, const char *checkpoint, uint64_t seed)
{
    set_state(r, 99);
    load(r, checkpoint);
    for (int u = 0; u < r->store.num_units; u++) {
        const Tensor t[] = { r->store.shard[u].slice[TRAINED].stored, r->store.shard[u].state[0],
                             r->store.shard[u].state[1] };
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        for (int k = 0; k < count * 3; k++) {
            size_t first = hf_first(&r->store.shape[u], &tensor[k / 3]) * 4,
                   bytes = tensor[k / 3].rows * tensor[k / 3].cols * 4;
            const char *data = t[k % 3].data;
            if (pattern_check(data + first, seed + (uint64_t)(k % 3), first, bytes) < bytes)
                fail_msg("%s: %s is not what was saved", checkpoint, tensor[k / 3].name);
        }
        free(tensor);
    }
}

static void expect_latest(const Run *r, long step)
{
    char *found = checkpoint_latest(r->config.save_folder);
    assert_non_null(found);
    assert_string_equal(found, step_folder(r, step));
    free(found);
}

/* waits up to ten seconds; normally milliseconds are enough */
static void poll_until_saved(void)
{
    for (int i = 0; i < 100000; i++) {
        if (checkpoint_poll())
            return;
        usleep(100);
    }
    fail_msg("no end of a save in ten seconds");
}

/* ---- what is saved --------------------------------------------------------------------------- */

TEST(test_training_goes_on)
{
    Run r;
    open_small(&r);
    assert_false(checkpoint_poll());
    set_state(&r, 10);
    save(&r, 10);
    set_state(&r, 20);
    atomic_store(&held, true);
    TrainState s = state_of(20), found, expected = s;
    checkpoint_begin(&r.config, &r.store, &s, CHECKPOINT_FILE_BYTES);
    s = state_of(21);
    set_state(&r, 30);
    for (int i = 0; i < 100; i++)
        assert_false(checkpoint_poll());
    expect_latest(&r, 10);
    assert_false(exists(text("%s.tmp/trainer.json", step_folder(&r, 20))));
    atomic_store(&held, false);
    poll_until_saved();
    assert_false(checkpoint_poll());
    expect_latest(&r, 20);
    assert_true(checkpoint_load(step_folder(&r, 20), &r.config, &r.store, &found, true));
    assert_memory_equal(&found, &expected, sizeof found);
    expect_state(&r, step_folder(&r, 20), 20);
    expect_state(&r, step_folder(&r, 10), 10);
    close_run(&r);
    release();
}

/* A save waits for the previous one. Of two saves of the same step, the second stays. A larger
 * model also fits. */
TEST(test_one_after_the_other)
{
    Run r, large;
    ModelConfig m = architecture(LLAMA);
    m.n_layers = 4;
    open_small(&r);
    open_run(&large, &m, (Format){ F32, 0 }, (Format){ F32, 0 }, (Format){ F32, 0 });
    const long step[] = { 10, 20, 20 };
    for (int i = 0; i < 3; i++) {
        set_state(&r, (uint64_t)i * 10);
        begin(&r, step[i]);
        assert_true(i == 0 || exists(step_folder(&r, step[i - 1])));
    }
    set_state(&r, 50);
    set_state(&large, 40);
    begin(&large, 40);
    set_state(&large, 60);
    expect_latest(&r, 20);
    checkpoint_finish();
    checkpoint_finish();
    expect_state(&r, step_folder(&r, 10), 0);
    expect_state(&r, step_folder(&r, 20), 20);
    expect_state(&large, step_folder(&large, 40), 40);
    close_run(&r);
    close_run(&large);
    release();
}

TEST(test_prunes)
{
    Run r;
    open_small(&r);
    r.config.save_num_checkpoints_to_keep = 2;
    r.config.save_interval = 10;
    for (long step = 10; step <= 40; step += 10) {
        begin(&r, step);
        poll_until_saved();
    }
    for (long step = 10; step <= 40; step += 10)
        assert_true(exists(step_folder(&r, step)) == (step > 20));
    close_run(&r);
    release();
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static void save_with_writes(Run *r, int writes, bool polls)
{
    atomic_store(&writes_left, writes);
    begin(r, 20);
    while (polls && !checkpoint_poll())
        usleep(100);
    checkpoint_finish();
}

/* The disk becomes full after 0, 1, ... writes of the thread, until a save succeeds. */
TEST(test_disk_full)
{
    needs_fork();
    Run r;
    open_small(&r);
    set_state(&r, 10);
    save(&r, 10);
    /* embedding, norm and head; nine tensors of two blocks */
    int pieces = 3 * (2 + 9 * 2 + 1);
    for (int writes = 0; writes < pieces; writes++) {
        DIES("step 20", save_with_writes(&r, writes, writes % 2));
        expect_latest(&r, 10);
    }
    DIES("model.safetensors: cannot write", save_with_writes(&r, 0, false));
    DIES("optimizer-00001.states: cannot write", save_with_writes(&r, pieces - 1, true));
    DIES("No space left on device", save_with_writes(&r, 1, true));
    expect_state(&r, step_folder(&r, 10), 10);
    set_state(&r, 20);
    save_with_writes(&r, pieces, false);
    expect_latest(&r, 20);
    expect_state(&r, step_folder(&r, 20), 20);
    atomic_store(&writes_left, INT32_MAX);
    close_run(&r);
    release();
}

/* The writer is killed when half of the files are written. */
TEST(test_killed_while_writing)
{
    needs_fork();
    Run r;
    open_small(&r);
    set_state(&r, 10);
    save(&r, 10);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&held, true);
        begin(&r, 20);
        _exit(write(ends[1], "x", 1) == 1 && pause());
    }
    char byte;
    assert_int_equal(read(ends[0], &byte, 1), 1);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(ends[0]), close(ends[1]);
    assert_true(exists(text("%s.tmp/model.safetensors", step_folder(&r, 20))));
    expect_latest(&r, 10);
    expect_state(&r, step_folder(&r, 10), 10);
    save(&r, 30);
    assert_false(exists(text("%s.tmp", step_folder(&r, 20))));
    close_run(&r);
    release();
}

/* ---- several ranks --------------------------------------------------------------------------- */

/* This program is one of several ranks. It saves step 10, and then step 20, while the disk of the
 * last rank is full. Every rank has whole units, and each writes a part of them. */
static int save_on_ranks(int argc, char **argv)
{
    Run r;
    comm_start(&argc, &argv);
    device_init(comm_local_rank());
    open_small(&r);
    r.config.save_folder = argv[1];
    save(&r, 10);
    if (comm_rank() == comm_size() - 1) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 4096, 4096 });
    }
    begin(&r, 20);
    while (!checkpoint_poll())
        usleep(100);
    comm_finish();
    return 0;
}

/* Rank 0 has created the files in their full size, so only the writer of the last rank reaches the
 * limit. */
TEST(test_one_rank_fails)
{
    needs_fork();
    const char *launch = getenv("LAUNCH");
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        Run r;
        char said[8192];
        open_small(&r);
        FILE *p = popen(text("%s -n %d %s %s 2>&1", launch ? launch : "mpirun --oversubscribe",
                             ranks, program_invocation_name, r.config.save_folder),
                        "r");
        size_t n = fread(said, 1, sizeof said - 1, p);
        said[n] = '\0';
        int status = pclose(p);
        const char *error =
            strstr(said, text("error (rank %d): %s.tmp/", ranks - 1, step_folder(&r, 20)));
        if (!WIFEXITED(status) || WEXITSTATUS(status) == 0 || !error ||
            !strstr(error, "File too large"))
            fail_msg("%d ranks: expected an error about step20.tmp; status %x, output: %s", ranks,
                     status, said);
        assert_null(strstr(error + 1, "error (rank"));
        expect_latest(&r, 10);
        load(&r, step_folder(&r, 10));
        close_run(&r);
        release();
    }
}

int main(int argc, char **argv)
{
    test_thread = pthread_self();
    atomic_store(&writes_left, INT32_MAX);
    if (argc > 1)
        return save_on_ranks(argc, argv);
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
