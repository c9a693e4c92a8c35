/* Request files: valid files, refused files with the number of the line; packing of choices; scores
 * of known choices. */
#include "tests/test.h"
#include "tests/kit.h"

#include "model/evaluate/downstream.h"

enum { LENGTH = 6, VOCAB = 100 };

static const TokenLimits limits = { .vocab = VOCAB, .most = LENGTH };

static char path[] = "/tmp/coat-requests-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    const int file = mkstemp(path);
    return file < 0 ? -1 : close(file);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

static Requests read_text(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    return requests_read("x.yaml:3", path, &limits);
}

#define CHOICE(tokens, scored) \
    "{\"tokens\": [" tokens "], \"continuation\": " #scored ", \"characters\": 4, \"bytes\": 5}"
#define HEAD(metric, questions) \
    "{\"task\": \"made\", \"metric\": \"" metric "\", \"questions\": " #questions "}\n"
#define QUESTION(gold, choices) "{\"gold\": " #gold ", \"choices\": [" choices "]}\n"
#define TWO CHOICE("1, 2, 3", 1) ", " CHOICE("1, 2, 4", 2)

/* A context is truncated from the left, so that all tokens except the last fit. A repeated choice
 * is read once. */
TEST(test_reading)
{
    Requests r = read_text(HEAD("len_norm", 2) QUESTION(1, TWO) QUESTION(
        2, CHOICE("10, 11, 12, 13, 14, 15, 16, 17, 18",
                  2) ", " CHOICE("12, 13, 14, 15, 16, 17, 18",
                                 2) ", " CHOICE("12, 13, 14, 15, 16, 17, 18",
                                                3) ", " CHOICE("12, 13, 14, 15, 16, 17, 19", 3)));
    assert_string_equal(r.name, "made");
    assert_int_equal(r.metric, METRIC_LEN_NORM);
    assert_int_equal(r.questions, 2);
    assert_int_equal(r.choices, 6);
    assert_true(r.question[1].first == 2 && r.question[1].count == 4 && r.question[1].gold == 2 &&
                r.question[0].gold == 1);
    const Choice *c = &r.choice[2];
    assert_true(c->length == LENGTH + 1 && c->scored == 2 && c->characters == 4 && c->bytes == 5);
    for (int i = 0; i < c->length; i++)
        assert_int_equal(r.token[c->first + (size_t)i], 12 + i);
    static const int same[] = { 0, 1, 2, 2, 4, 5 };
    for (int i = 0; i < 6; i++)
        assert_int_equal(r.choice[i].same, same[i]);
    requests_free(&r);
}

TEST(test_refused)
{
    unlink(path);
    DIES("x.yaml:3", requests_read("x.yaml:3", path, &limits));
    static const struct {
        const char *text, *said;
    } bad[] = {
        { "", " is empty; expected a request file" },
        { HEAD("acc", 2) QUESTION(0, TWO),
          ":2: the file ends after 1 questions; its first line promises 2" },
        { HEAD("acc", 1) QUESTION(0, TWO) QUESTION(0, TWO), "ends after 2 questions" },
        { HEAD("acc", 1) "{\"gold\": 0, \"choices\": [{\"tok", ":2: no JSON" },
        { HEAD("acc", 1) "[]\n", ":2: expected an object" },
        { HEAD("acc", 0), "\"questions\": expected an integer from 1 on" },
        { HEAD("f1", 1), ":1: \"metric\" f1: expected acc, len_norm or bpb" },
        { "{\"metric\": \"acc\", \"questions\": 1}\n", ":1: expected {\"task\"" },
        { HEAD("acc", 1) QUESTION(2, TWO), ":2: \"gold\" 2: there are 2 choices" },
        { HEAD("acc", 1) QUESTION(0, CHOICE("1, 2", 1)), ":2: 1 choices; expected two or more" },
        { HEAD("bpb", 1) QUESTION(0, TWO), ":2: 2 choices; expected one" },
        { HEAD("bpb", 1) "{\"gold\": 0}\n", ":2: 0 choices" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 100", 1)),
          ":2: token 100 is beyond the vocabulary: model.vocab_size is 100" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, -1", 1)), ":2: token -1" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 2.5", 1)), ":2: \"tokens\": expected integers" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 2", 2)), ":2: a choice has no context" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 2", 0)),
          ":2: \"continuation\": expected an integer from 1 on" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 2", 4294967297)),
          "\"continuation\": expected an integer from 1 on" },
        { HEAD("bpb", 1) QUESTION(0, CHOICE("1, 2, 3, 4, 5, 6, 7, 8", 7)),
          ":2: a continuation of 7 tokens does not fit" },
        { HEAD("bpb", 1)
              QUESTION(0, "{\"tokens\": [1, 2], \"continuation\": 1, \"characters\": 1}"),
          "\"bytes\": expected" },
        { HEAD("bpb", 1) QUESTION(0, "7"), ":2: a choice: expected" },
        { HEAD("bpb", 1) "{\"gold\": 0, \"gold\": 0, \"choices\": []}\n", ":2: no JSON" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        DIES(bad[i].said, read_text(bad[i].text));
}

/* Every choice is in one sequence, in order. No sequence is too long, and no sequence has room for
 * the next choice. */
TEST(test_packing)
{
    enum { CHOICES = 7 };
    /* the program reads one token less */
    static const int length[CHOICES] = { 4, 3, 6, 7, 2, 2, 2 };
    static const int expected[] = { 0, 2, 3, 4, CHOICES };
    Choice choice[CHOICES];
    Question question[2] = { { 0, 4, 0 }, { 4, 3, 0 } };
    for (int i = 0; i < CHOICES; i++)
        choice[i] = (Choice){ .length = length[i], .scored = 1, .same = i };
    const Requests r = {
        .choice = choice, .question = question, .choices = CHOICES, .questions = 2
    };
    int *first;
    assert_int_equal(downstream_pack(&first, &r, 2, LENGTH), 4);
    assert_memory_equal(first, expected, sizeof expected);
    free(first);
    choice[3].same = 2; /* is not read again */
    assert_int_equal(downstream_pack(&first, &r, 1, LENGTH), 2);
    assert_true(first[1] == 2 && first[2] == 4);
    free(first);
}

/* By hand: the first question is right only per character; the second is right except for len_norm,
 * which does not count the blank. Of equal choices the first is taken, so the third question is
 * wrong. */
TEST(test_scores)
{
    const Choice choice[] = { { .characters = 2, .bytes = 2 }, { .characters = 8, .bytes = 9 },
                              { .characters = 1, .bytes = 1 }, { .characters = 3, .bytes = 3 },
                              { .characters = 5, .bytes = 5 }, { .characters = 5, .bytes = 5 } };
    const Question question[] = { { 0, 2, 1 }, { 2, 2, 0 }, { 4, 2, 1 } };
    const double p[] = { -2, -4, -1.5, -3.3, -2.5, -2.5 };
    const Requests r = {
        .choice = (Choice *)choice, .question = (Question *)question, .choices = 6, .questions = 3
    };
    double score[NUM_METRICS];
    downstream_score(score, &r, 3, p);
    assert_true(score[METRIC_ACC] == 1.0 / 3 && score[METRIC_LEN_NORM] == 1.0 / 3 &&
                score[METRIC_LEN_NORM_V2] == 2.0 / 3);
    const double bits = (4.0 / 9 + 1.5 / 1 + 2.5 / 5) / log(2) / 3,
                 with_blank = (4.0 / 10 + 1.5 / 2 + 2.5 / 6) / log(2) / 3;
    assert_true(fabs(score[METRIC_BPB] - bits) < 1e-14 &&
                fabs(score[METRIC_BPB_V2] - with_blank) < 1e-14);
    downstream_score(score, &r, 1, p);
    assert_true(score[METRIC_ACC] == 0 && score[METRIC_LEN_NORM] == 1);
    downstream_score(score, &r, 1, (double[]){ -2, NAN });
    for (int m = 0; m < NUM_METRICS; m++)
        assert_true(isnan(score[m]));
}

int main(void)
{
    return run_all_tests(make_file, remove_file);
}
