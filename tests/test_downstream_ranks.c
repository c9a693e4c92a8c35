/* Scores of downstream tasks with a model: choices are packed into sequences, which are distributed
 * over ranks. Each score is compared with the losses of each choice in a separate sequence on an
 * unsharded model. On 1, 2 and 4 ranks. */
#include "kernels/runtime/error.h"
#include "model/evaluate/downstream.h"
#include "tests/test.h"
#include "tests/ranks_case.h"

/* Choices have 3 to 20 tokens, cut to T + 1 = 17: about 15 sequences. So on 4 ranks the last pass
 * has masked sequences. One task has three choices per question. In the other task, each choice is
 * a question, and all count. */
enum { T = 16, MICRO = 2, ALL = 21, CHOICES = 3, NUM_TASKS = 2 };
static const struct {
    const char *label, *metric;
    int choices;
} tasks[NUM_TASKS] = { { "three", "acc", 3 }, { "one", "bpb", 1 } };

static Config config;
static EvalSet sets[NUM_TASKS];
static double alone[ALL]; /* log-probability of each choice */

static int tokens_of(int i)
{
    return 3 + i * 5 % 18;
}

static int scored_of(int i)
{
    return 1 + i % (tokens_of(i) - 1 < 4 ? tokens_of(i) - 1 : 4);
}

static int token(int i, int t)
{
    return test_token(60 + (uint64_t)i, (uint64_t)t, config.model.vocab_size);
}

/* All kinds of token ids, also eos, which does not end documents here. */
static void write_choice(FILE *f, int i)
{
    fprintf(f, "{\"tokens\": [");
    for (int t = 0; t < tokens_of(i); t++)
        fprintf(f, t ? ", %d" : "%d", t == 1 ? config.model.eos_token_id : token(i, t));
    fprintf(f, "], \"continuation\": %d, \"characters\": %d, \"bytes\": %d}", scored_of(i),
            1 + i % 5, 2 + i % 5);
}

/* The last choice of the three repeats the first. */
static int first_of_kind(int i)
{
    return i == ALL - 1 ? i - CHOICES + 1 : i;
}

static void write_task(const char *path, const char *metric, int choices)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"task\": \"made\", \"metric\": \"%s\", \"questions\": %d}\n", metric,
            ALL / choices);
    for (int i = 0; i < ALL; i++) {
        if (i % choices == 0)
            fprintf(f, "{\"gold\": %d, \"choices\": [", i / choices % choices);
        write_choice(f, first_of_kind(i));
        fputs(i % choices == choices - 1 ? "]}\n" : ", ", f);
    }
    assert_int_equal(fclose(f), 0);
}

static int make_tasks(void **state)
{
    ModelConfig m = architecture(LLAMA_GQA);
    m.weight_tying = false;
    /* more than a rank gathers at a time: the ranks must agree on the number of passes */
    m.n_layers = 3;
    m.max_sequence_length = T;
    m.eos_token_id = 3;
    model_config(&config, &m, "f32", MICRO);
    if (make_shared(state) != 0)
        return -1;
    config.eval = sets;
    config.num_eval = NUM_TASKS;
    for (int i = 0; i < NUM_TASKS; i++) {
        sets[i] = (EvalSet){ .label = (char *)tasks[i].label,
                             .where = (char *)tasks[i].label,
                             .downstream = true };
        sets[i].files.paths = xcalloc(1, sizeof *sets[i].files.paths);
        sets[i].files.num_paths = 1;
        sets[i].files.paths[0] = xasprintf("%s/%d.jsonl", shared, i);
        if (comm_rank() == 0)
            write_task(sets[i].files.paths[0], tasks[i].metric, tasks[i].choices);
    }
    comm_barrier();
    return 0;
}

static int remove_tasks(void **state)
{
    (void)state;
    comm_barrier();
    for (int i = 0; i < NUM_TASKS; i++) {
        if (comm_rank() == 0)
            unlink(sets[i].files.paths[0]);
        free(sets[i].files.paths[0]);
        free(sets[i].files.paths);
    }
    return remove_shared(state);
}

/* The last tokens of a choice that fit are at the start of the sequence. Only the continuation has
 * labels. */
TEST(test_alone)
{
    Run r;
    open_as(&r, &config, ALONE, 1);
    take_loss(&r);
    for (int i = 0; i < ALL; i++) {
        const int k = first_of_kind(i), all = tokens_of(k), skipped = all > T + 1 ? all - T - 1 : 0,
                  n = all - skipped;
        int id[T + 1], tokens[T] = { 0 }, targets[T];
        for (int t = 0; t < n; t++)
            id[t] = t + skipped == 1 ? config.model.eos_token_id : token(k, t + skipped);
        for (int t = 0; t < T; t++) {
            tokens[t] = t < n - 1 ? id[t] : 0;
            targets[t] = t < n - 1 && t >= n - 1 - scored_of(k) ? id[t + 1] : -1;
        }
        model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 0, 0, PASS_FORWARD);
        alone[i] = -take_loss(&r);
    }
    close_run(&r);
}

/* Computes the scores of the first `questions` questions from `alone`; each question has `choices`
 * choices. */
static void expected_scores(double score[NUM_METRICS], int choices, int questions)
{
    Choice choice[ALL];
    Question question[ALL];
    for (int i = 0; i < ALL; i++) {
        const int k = first_of_kind(i);
        choice[i] = (Choice){ .characters = 1 + k % 5, .bytes = 2 + k % 5 };
        question[i] = (Question){ i * choices, choices, i % choices };
    }
    const Requests r = {
        .choice = choice, .question = question, .choices = ALL, .questions = ALL / choices
    };
    downstream_score(score, &r, questions, alone);
}

/* The bits per byte are means of losses that were computed at other positions of other batches. As
 * in test_evaluate_ranks, BLAS may order the up to 96 products of a logit's sum by the number of
 * rows, and the effect through the blocks is allowed as much again. So is the effect of the rotary
 * embedding at other positions, whose angles of up to T are rounded: T roundoffs. */
static void check_scores(const DownstreamResult *d, int task, int most, const char *what)
{
    const int choices = tasks[task].choices, questions = (most < ALL ? most : ALL) / choices;
    double expected[NUM_METRICS];
    expected_scores(expected, choices, questions);
    assert_string_equal(d->label, tasks[task].label);
    assert_string_equal(metric_name(d->metric), tasks[task].metric);
    assert_int_equal(d->questions, questions);
    assert_false(d->cut);
    for (int m = 0; m < NUM_METRICS; m++) {
        const bool bits = m == METRIC_BPB || m == METRIC_BPB_V2;
        const double allowed = bits ? (2 * 96 + T) * U24 * expected[m] : 0;
        if (!(fabs(d->score[m] - expected[m]) <= allowed))
            fail_msg("%s, %s: %.9g, expected %.9g", metric_name((Metric)m), what, d->score[m],
                     expected[m]);
    }
}

/* Evaluates twice on one model, after a training step's forward pass: an evaluation affects neither
 * the next one nor the sums. */
static void check_mesh(Strategy s, const char *name)
{
    static int tokens[MICRO * T], targets[MICRO * T];
    Run r;
    open_as(&r, &config, s, MICRO);
    model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 0, 0, PASS_FORWARD);
    for (int i = 0; i < 2 * NUM_TASKS; i++) {
        const int task = i % NUM_TASKS;
        r.config.eval_subset_num_batches = -1;
        DownstreamResult d = downstream_evaluate(&r.config, task, &r.model, &r.store, NULL);
        check_scores(&d, task, ALL, name);
        assert_false(r.model.text.documents);
        /* MICRO choices per rank: the questions that are complete in these batches */
        r.config.eval_subset_num_batches = 2;
        d = downstream_evaluate(&r.config, task, &r.model, &r.store, NULL);
        check_scores(&d, task, 2 * MICRO * data_ranks(&s, comm_size()), name);
    }
    /* one rank is told to stop; all ranks report it */
    const atomic_int stop = comm_rank() == comm_size() - 1;
    assert_true(downstream_evaluate(&r.config, 0, &r.model, &r.store, &stop).cut);
    close_run(&r);
}

TEST(test_meshes)
{
    on_meshes(check_mesh);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(make_tasks, remove_tasks));
}
