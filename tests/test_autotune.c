/* Stored GEMM choices: added values are found, also with concurrent writers, and a damaged file
 * gives no wrong value. */
#include "tests/test.h"
#include "tests/kit.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/runtime/autotune.h"

static char folder[] = "/tmp/coat-autotune-XXXXXX";
static const char *const file = "test.txt", *const key = "NVIDIA H200, m 4096 n 16384";

static char *path(void)
{
    char *p = keep(64);
    snprintf(p, 64, "%s/coat/%s", folder, file);
    return p;
}

static bool find(const char *wanted, uint64_t *value)
{
    char *text = autotune_read(file);
    const bool found = autotune_find(text, wanted, value, sizeof *value);
    free(text);
    return found;
}

static void write_file(const char *text, size_t n)
{
    FILE *f = fopen(path(), "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
}

TEST(test_found)
{
    uint64_t x = 0;
    const uint64_t a = 0x0123456789abcdef, b = 77;
    assert_false(find(key, &x));
    autotune_add(file, key, &a, sizeof a);
    autotune_add(file, key, &b, sizeof b);
    autotune_add(file, "another", &b, sizeof b);
    assert_true(find(key, &x) && x == a); /* the first value wins */
    assert_true(find("another", &x) && x == b);
    assert_false(find("NVIDIA H200", &x));
    assert_false(find("NVIDIA H200, m 4096 n 1638", &x));
    char *text = autotune_read(file);
    assert_false(autotune_find(text, key, &(uint32_t){ 0 }, sizeof(uint32_t)));
    free(text);
    unlink(path());
    release();
}

/* If a byte is changed, or the file is cut before it, the stored value or nothing is found. */
TEST(test_damaged)
{
    const uint64_t value = 0x0123456789abcdef;
    autotune_add(file, key, &value, sizeof value);
    char *text = autotune_read(file);
    const size_t n = strlen(text);
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            uint64_t x = value;
            text[i] ^= (char)(1 << bit);
            write_file(text, n);
            text[i] ^= (char)(1 << bit);
            find(key, &x);
            assert_true(x == value);
        }
    for (size_t i = 0; i < n; i++) {
        uint64_t x = value;
        write_file(text, i);
        assert_true(!find(key, &x) || x == value);
        /* a truncated line does not affect the next */
        autotune_add(file, "behind", &value, sizeof value);
        x = 0;
        assert_true(find("behind", &x) && x == value);
    }
    free(text);
    unlink(path());
    release();
}

TEST(test_writers)
{
    enum { WRITERS = 4, LINES = 100 };
    pid_t child[WRITERS];
    char name[32];
    for (int w = 0; w < WRITERS; w++) {
        child[w] = fork();
        assert_true(child[w] >= 0);
        for (uint64_t i = 0; child[w] == 0 && i < LINES; i++) {
            snprintf(name, sizeof name, "writer %d line %d", w, (int)i);
            autotune_add(file, name, &i, sizeof i);
        }
        if (child[w] == 0)
            _exit(0);
    }
    for (int w = 0; w < WRITERS; w++)
        assert_int_equal(waitpid(child[w], NULL, 0), child[w]);
    for (int w = 0; w < WRITERS; w++)
        for (uint64_t i = 0; i < LINES; i += 33) {
            uint64_t x = LINES;
            snprintf(name, sizeof name, "writer %d line %d", w, (int)i);
            assert_true(find(name, &x) && x == i);
        }
    unlink(path());
    release();
}

/* The folder is missing, a file is in its place, or the file is endless: nothing is found, and the
 * program does not end. A full file is not changed. */
TEST(test_no_place)
{
    uint64_t x = 1;
    char *blocked = keep(64), *full = keep(1 << 20);
    struct stat s;
    snprintf(blocked, 64, "%s/file", folder);
    fclose(fopen(blocked, "w"));
    const char *const places[] = { blocked, "/no/such/folder", "relative" };
    unsetenv("HOME");
    for (int i = 0; i < 3; i++) {
        setenv("XDG_CACHE_HOME", places[i], 1);
        autotune_add(file, key, &x, sizeof x);
        assert_false(find(key, &x));
    }
    setenv("XDG_CACHE_HOME", folder, 1);
    memset(full, 'x', 1 << 20);
    write_file(full, 1 << 20);
    autotune_add(file, key, &x, sizeof x);
    assert_false(find(key, &x));
    assert_int_equal(stat(path(), &s), 0);
    assert_int_equal(s.st_size, 1 << 20);
    unlink(path());
    unlink(blocked);
    release();
}

int main(void)
{
    assert_non_null(mkdtemp(folder));
    setenv("XDG_CACHE_HOME", folder, 1);
    const int failed = run_all_tests(NULL, NULL);
    char made[64];
    snprintf(made, sizeof made, "%s/coat", folder);
    rmdir(made);
    rmdir(folder);
    return failed;
}
