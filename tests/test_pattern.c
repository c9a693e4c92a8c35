/* data/pattern: compares the matches of patterns with Python's sorted(glob.glob(pattern,
 * recursive=True)) in the same folder; with **, only files match. */
#include "data/pattern.h"
#include "tests/test.h"

#include <stddef.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/test_pattern_XXXXXX";

static const char tree[] = "mkdir -p 'a/b/c' 'a/[x]/d' 'a/.h/i' z && touch top.npy z/7.npy a/1.npy "
                           "a/b/2.npy a/b/c/3.npy a/.6.npy "
                           "'a/[x]/d/4.npy' a/.h/i/5.npy 'a/b/q*.npy' && ln -s ../z a/zz";

static int enter_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) && chdir(folder) == 0 && system(tree) == 0 ? 0 : -1;
}

static int leave_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return chdir("/") == 0 && system(command) == 0 ? 0 : -1;
}

/* Returns the names of the files, each followed by a blank. */
static const char *matched(const char *pattern, int expected_error)
{
    static char text[4096];
    int error;
    Matches m = pattern_match(pattern, &error);
    assert_int_equal(error, expected_error);
    *text = '\0';
    for (int i = 0; i < m.count; i++)
        strcat(strcat(text, m.path[i]), " ");
    pattern_free(&m);
    return text;
}

TEST(test_as_python)
{
    static const struct {
        const char *pattern, *paths;
    } cases[] = {
        { "**/*.npy",
          "a/1.npy a/[x]/d/4.npy a/b/2.npy a/b/c/3.npy a/b/q*.npy a/zz/7.npy top.npy z/7.npy " },
        { "a/**/*.npy", "a/1.npy a/[x]/d/4.npy a/b/2.npy a/b/c/3.npy a/b/q*.npy a/zz/7.npy " },
        { "a/**/c/*.npy", "a/b/c/3.npy " },
        { "a/**", "a/1.npy a/[x]/d/4.npy a/b/2.npy a/b/c/3.npy a/b/q*.npy a/zz/7.npy " },
        { "**",
          "a/1.npy a/[x]/d/4.npy a/b/2.npy a/b/c/3.npy a/b/q*.npy a/zz/7.npy top.npy z/7.npy " },
        { "*/**/*.npy",
          "a/1.npy a/[x]/d/4.npy a/b/2.npy a/b/c/3.npy a/b/q*.npy a/zz/7.npy z/7.npy " },
        { "a/**/b/**/*.npy", "a/b/2.npy a/b/c/3.npy a/b/q*.npy " },
        { "a/.h/**/*.npy", "a/.h/i/5.npy " },
        { "a/**/.6.npy", "a/.6.npy " },
        { "a/b**/*.npy", "a/b/2.npy a/b/q*.npy " },
        { "a/*", "a/1.npy a/[x] a/b a/zz " },
        { "nothing/**/*.npy", "" },
        { "a/**/[[]x]/**/*.npy", "a/[x]/d/4.npy " },
        { "./**/7.npy", "./a/zz/7.npy ./z/7.npy " },
        { "a/**/3.npy", "a/b/c/3.npy " },
        { "a/?/*.npy", "a/b/2.npy a/b/q*.npy " },
        { "a/[ab]/**/[23].npy", "a/b/2.npy a/b/c/3.npy " },
        { "a/**/**/3.npy", "a/b/c/3.npy " },
        { "***/*.npy", "a/1.npy z/7.npy " },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_string_equal(matched(cases[i].pattern, 0), cases[i].paths);
    char whole[256], first[256];
    snprintf(whole, sizeof whole, "%s/a/**/c/*.npy", folder);
    snprintf(first, sizeof first, "%s/a/b/c/3.npy ", folder);
    assert_string_equal(matched(whole, 0), first);
}

/* A link to a parent folder: the files behind it are found once. */
TEST(test_circle)
{
    char before[4096];
    strcpy(before, matched("**/*.npy", 0));
    assert_int_equal(symlink("../..", "a/b/up"), 0);
    assert_string_equal(matched("**/*.npy", 0), before);
    assert_int_equal(unlink("a/b/up"), 0);
}

/* Unreadable folders are an error, not skipped. */
TEST(test_forbidden)
{
    if (geteuid() == 0)
        skip();
    assert_int_equal(chmod("a/b/c", 0), 0);
    matched("a/**/*.npy", EACCES);
    assert_int_equal(chmod("a/b/c", 0777), 0);
}

int main(void)
{
    return run_all_tests(enter_folder, leave_folder);
}
