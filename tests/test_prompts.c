/* Files of prompts: valid ones, and the message for each mistake. */
#include "tests/test.h"
#include "tests/kit.h"

#include "data/prompts.h"

static char path[] = "/tmp/coat-prompts-XXXXXX";

static const char *file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    return path;
}

static const TokenLimits limits = { .vocab = 99, .most = 3 };

TEST(test_read)
{
    Prompts p;
    prompts_read(
        &p, file("{\"text\": \"x\", \"tokens\": [3, 0, 98]}\n\n \t\r\n[7]\n{\"tokens\": [1, 2]}"),
        &limits);
    assert_int_equal(p.count, 3);
    assert_int_equal(prompts_length(&p, 0), 3);
    assert_int_equal(prompts_length(&p, 1), 1);
    assert_int_equal(prompts_length(&p, 2), 2);
    assert_int_equal(prompts_longest(&p), 3);
    assert_memory_equal(p.token, ((const int[]){ 3, 0, 98, 7, 1, 2 }), 6 * sizeof(int));
    prompts_free(&p);
}

TEST(test_errors)
{
    const struct {
        const char *text, *message;
    } rows[] = {
        { "[1]\n[2, x]\n", ":2: not JSON" },
        { "[1] [2]\n", ":1: not JSON" },
        { "[1]\n\n{\"text\": \"a\"}\n",
          ":3: no list of tokens; expected {\"tokens\": [1, 2, ...]}" },
        { "{\"tokens\": 5}\n", ":1: no list of tokens" },
        { "{\"tokens\": [1], \"tokens\": [2]}\n", ":1: not JSON: duplicate object key" },
        { "[1, 99]\n", ":1: token 99 is not in the vocabulary, which has ids from 0 to 98" },
        { "[-1]\n", ":1: token -1 is not in the vocabulary" },
        { "[1, 2.5]\n", ":1: element 1 of the tokens is not an integer" },
        { "[1, \"2\"]\n", ":1: element 1 of the tokens is not an integer" },
        { "{\"tokens\": []}\n", ":1: a prompt without tokens" },
        { "[1, 2, 3, 4]\n", ":1: a prompt of 4 tokens; expected at most 3" },
        { " \n", ": there are no prompts" },
        { "", ": there are no prompts" },
    };
    Prompts p;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        file(rows[i].text);
        DIES(rows[i].message, prompts_read(&p, path, &limits));
    }
    DIES("/tmp/no/such: cannot read the prompts", prompts_read(&p, "/tmp/no/such", &limits));
}

static int make_file(void **state)
{
    (void)state;
    const int f = mkstemp(path);
    return f >= 0 ? close(f) : -1;
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

int main(void)
{
    return run_all_tests(make_file, remove_file);
}
