/* Tests for cmocka that register themselves: TEST(test_sum) { assert_int_equal(1 + 1, 2); }
 * run_all_tests runs the tests of the file, in the order of the file. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static struct CMUnitTest all_tests[80];
static size_t num_tests;

static inline void add_test(const char *name, CMUnitTestFunction function, void *state)
{
    if (num_tests < sizeof all_tests / sizeof *all_tests) /* run_all_tests reports too many tests */
        all_tests[num_tests] =
            (struct CMUnitTest){ .name = name, .test_func = function, .initial_state = state };
    num_tests++;
}

#define TEST(name) \
    static void name(void **); \
    __attribute__((constructor)) static void add_##name(void) \
    { \
        add_test(#name, name, NULL); \
    } \
    static void name(__attribute__((unused)) void **state)

/* setup and teardown run once, before and after all tests; NULL: nothing runs. Returns the number
 * of failed tests. */
static inline int run_all_tests(CMFixtureFunction setup, CMFixtureFunction teardown)
{
    if (num_tests > sizeof all_tests / sizeof *all_tests)
        return (int)num_tests;
    return _cmocka_run_group_tests("tests", all_tests, num_tests, setup, teardown);
}
