/* ./train --generate as a user runs it: continuations on stdout, where they end, their settings,
 * and errors. */
#include "tests/test.h"
#include "tests/launch.h"

enum { MOST = 128 };

/* One continuation as printed. */
typedef struct {
    int prompt, count, token[MOST];
    char finish[16];
} Continuation;

static char prompts[256];

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

/* Runs the program without a configuration file. */
static int generate(int ranks, const char *text, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int generate(int ranks, const char *text, const char *format, ...)
{
    char arguments[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    snprintf(prompts, sizeof prompts, "%s/prompts.jsonl", folder);
    write_file(prompts, text);
    return finish(start_command("%s -n %d %s/train --generate=%s %s",
                                setting("LAUNCH", "mpirun --oversubscribe"),
                                ranks > most_ranks() ? most_ranks() : ranks,
                                setting("BUILD", "build/cpu"), prompts, arguments));
}

/* Finds the lines of `output` that are JSON; returns their number. */
static int continuations(Continuation *c, int most)
{
    int count = 0;
    for (const char *line = output; line;
         line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (*line != '{')
            continue;
        json_t *o = json_loads(line, JSON_DISABLE_EOF_CHECK, NULL),
               *tokens = json_object_get(o, "tokens");
        assert_true(count < most && json_array_size(tokens) <= MOST);
        c[count] = (Continuation){ .prompt = (int)json_integer_value(json_object_get(o, "prompt")),
                                   .count = (int)json_array_size(tokens) };
        snprintf(c[count].finish, sizeof c[count].finish, "%s",
                 json_string_value(json_object_get(o, "finish")));
        for (int i = 0; i < c[count].count; i++)
            c[count].token[i] = (int)json_integer_value(json_array_get(tokens, (size_t)i));
        count++;
        json_decref(o);
    }
    return count;
}

static void expect_same(const Continuation *a, const Continuation *b)
{
    assert_int_equal(a->count, b->count);
    assert_memory_equal(a->token, b->token, sizeof a->token[0] * (size_t)a->count);
}

/* Compares with transformers' continuation of the second of two prompts, after a blank line. The
 * first prompt is a plain list. */
TEST(test_greedy)
{
    json_t *o = json_load_file("tests/golden/mistral/continuation.json", 0, NULL);
    json_t *expected = json_object_get(o, "tokens");
    char *prompt = json_dumps(json_object_get(o, "prompt"), 0), text[1024];
    Continuation c[3];
    snprintf(text, sizeof text, "[1, 2]\n\n{\"id\": 7, \"tokens\": %s}", prompt);
    expect_status(generate(1, text,
                           "--load_path=tests/golden/mistral --recipe=f32 --max_new_tokens=64 "
                           "--model.max_sequence_length=128"),
                  0);
    assert_int_equal(continuations(c, 3), 2);
    assert_int_equal(c[0].prompt, 0);
    assert_int_equal(c[1].prompt, 1);
    assert_int_equal(c[1].count, 64);
    assert_string_equal(c[1].finish, "length");
    for (int i = 0; i < 64; i++)
        assert_int_equal(c[1].token[i], json_integer_value(json_array_get(expected, (size_t)i)));
    expect_output("ms each");
    free(prompt);
    json_decref(o);
}

/* Samples depend on the seed, not on the ranks. Ranks gather whole weights, and each stage has the
 * weights of its blocks, so all compute the same bits. The logits of tensor ranks differ by
 * roundings of F32, which are too small to change a token here. */
TEST(test_draws)
{
    static const char text[] = "[5, 6, 7]\n[8]\n[5, 6, 7]\n";
    static const char arguments[] = "--load_path=tests/golden/llama-gqa-tied --recipe=f32 "
                                    "--max_new_tokens=30 --temperature=1.5";
    Continuation one[3], two[3], stages[3], cut[3], other[3];
    expect_status(generate(1, text, "%s", arguments), 0);
    assert_int_equal(continuations(one, 3), 3);
    expect_status(generate(2, text, "%s", arguments), 0);
    assert_int_equal(continuations(two, 3), 3);
    expect_status(generate(4, text, "%s%s", arguments,
                           most_ranks() < 4 ? "" : " '--parallelism={context: 2, pipeline: 2}'"),
                  0);
    assert_int_equal(continuations(stages, 3), 3);
    expect_status(
        generate(2, text, "%s --parallelism.tensor=%d", arguments, most_ranks() < 2 ? 1 : 2), 0);
    assert_int_equal(continuations(cut, 3), 3);
    expect_status(generate(1, text, "%s --seed=2", arguments), 0);
    assert_int_equal(continuations(other, 3), 3);
    for (int i = 0; i < 3; i++) {
        expect_same(&one[i], &two[i]);
        expect_same(&one[i], &stages[i]);
        expect_same(&one[i], &cut[i]);
    }
    /* each prompt has its own random numbers */
    assert_memory_not_equal(one[0].token, one[2].token, sizeof(int) * 8);
    assert_memory_not_equal(one[0].token, other[0].token, sizeof(int) * 8);
}

/* A text ends after any eos token of generation_config.json, or after the given eos token, or at
 * the end of the sequence. */
TEST(test_ends)
{
    Continuation cut;
    char command[256], path[256], text[128];
    json_t *o = json_load_file("tests/golden/olmo3/continuation.json", 0, NULL),
           *all = json_object_get(o, "tokens");
    char *prompt = json_dumps(json_object_get(o, "prompt"), 0);
    const json_int_t end = json_integer_value(json_array_get(all, 5));
    int first = 0;
    while (json_integer_value(json_array_get(all, (size_t)first)) != end)
        first++;
    snprintf(command, sizeof command, "mkdir %s/eos && cp tests/golden/olmo3/*.* %s/eos", folder,
             folder);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, "%s/eos/generation_config.json", folder);
    snprintf(text, sizeof text, "{\"eos_token_id\": [1000, %d]}", (int)end);
    write_file(path, text);
    expect_status(
        generate(1, prompt, "--load_path=%s/eos --recipe=f32 --max_new_tokens=20", folder), 0);
    assert_int_equal(continuations(&cut, 1), 1);
    assert_string_equal(cut.finish, "eos");
    assert_int_equal(cut.count, first + 1);
    for (int i = 0; i <= first; i++)
        assert_int_equal(cut.token[i], json_integer_value(json_array_get(all, (size_t)i)));
    expect_status(generate(1, prompt,
                           "--load_path=tests/golden/olmo3 --recipe=f32 --max_new_tokens=20 "
                           "--model.eos_token_id=%d "
                           "--top_p=0.5 --lora.rank=2",
                           (int)end),
                  0);
    assert_int_equal(continuations(&cut, 1), 1);
    assert_string_equal(cut.finish, "eos");
    assert_int_equal(cut.count, first + 1);
    expect_output("lora.rank (tests/golden/olmo3 has no adapters, and new adapters do "
                  "not change the output), top_p "
                  "(without a temperature");
    expect_status(generate(1, prompt,
                           "--load_path=tests/golden/olmo3 --recipe=f32 --max_new_tokens=20 "
                           "--model.max_sequence_length=%d",
                           (int)json_array_size(json_object_get(o, "prompt")) + 8),
                  0);
    assert_int_equal(continuations(&cut, 1), 1);
    assert_int_equal(cut.count, 8);
    assert_string_equal(cut.finish, "length");
    expect_output("max_new_tokens 20 is longer than model.max_sequence_length 20");
    free(prompt);
    json_decref(o);
}

/* Reads the samples of a step from metrics.jsonl; returns their number. */
static int read_samples(Continuation *c, int most, const char *run, long step)
{
    char path[512], line[8192];
    int count = 0;
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        json_t *o = json_loads(line, 0, NULL), *samples = json_object_get(o, "samples");
        for (size_t i = 0;
             i < json_array_size(samples) && json_integer_value(json_object_get(o, "step")) == step;
             i++) {
            json_t *tokens = json_object_get(json_array_get(samples, i), "tokens");
            assert_true(count < most && json_array_size(tokens) <= MOST);
            c[count] = (Continuation){ .prompt = (int)i, .count = (int)json_array_size(tokens) };
            for (int t = 0; t < c[count].count; t++)
                c[count].token[t] = (int)json_integer_value(json_array_get(tokens, (size_t)t));
            count++;
        }
        json_decref(o);
    }
    fclose(f);
    return count;
}

/* Samples equal those that the saved model generates, on any number of ranks, also of context
 * ranks, tensor ranks and stages, and with more prompts than a micro-batch has sequences. Training
 * is bit-identical with and without samples. Texts end in the second half of a sequence. */
TEST(test_samples)
{
    static const char text[] = "[3, 4]\n[200]\n[9, 8, 7, 6, 5]\n";
    static const char common[] = "--max_duration=4 --save_interval=2 --model.n_kv_heads=2";
    static const struct {
        int ranks;
        const char *mesh;
    } runs[] = {
        { 1, "--seed=6198" },
        { 2, "--seed=6198" },
        { 2, "--parallelism.context=2" },
        { 4, "--parallelism={context: 2, pipeline: 2}" },
        { 2, "--parallelism.tensor=2" },
    };
    Continuation found[3], later[3], expected[3];
    double plain[MAX_STEPS], sampled[MAX_STEPS];
    snprintf(prompts, sizeof prompts, "%s/prompts.jsonl", folder);
    write_file(prompts, text);
    expect_status(train(1, "--save_folder=%s/plain %s", folder, common), 0);
    losses(plain, "plain", 4);
    expect_status(
        generate(1, text, "--load_path=%s/plain/step2 --recipe=f32 --max_new_tokens=16", folder),
        0);
    assert_int_equal(continuations(expected, 3), 3);
    for (int i = 0; i < 5; i++) {
        char run[16];
        snprintf(run, sizeof run, "sampled%d", i);
        expect_status(train(runs[i].ranks,
                            "--save_folder=%s/%s %s --samples.prompts=%s --samples.interval=2 "
                            "--samples.max_new_tokens=16 '%s'",
                            folder, run, common, prompts,
                            runs[i].ranks <= most_ranks() ? runs[i].mesh : "--seed=6198"),
                      0);
        expect_output("sample 2: ");
        assert_int_equal(read_samples(found, 3, run, 2), 3);
        for (int k = 0; k < 3; k++)
            expect_same(&found[k], &expected[k]);
    }
    losses(sampled, "sampled0", 4);
    assert_memory_equal(sampled, plain, sizeof plain);
    assert_int_equal(read_samples(later, 3, "sampled0", 4), 3);
}

/* The sequence length limits a text, whatever max_new_tokens is: the prompt has 30 of the 32
 * tokens. */
TEST(test_full_sample)
{
    char text[256] = "[";
    Continuation c[1];
    for (int i = 0; i < 30; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d", i ? ", " : "", 7 * i + 1);
    strcat(text, "]\n");
    snprintf(prompts, sizeof prompts, "%s/prompts.jsonl", folder);
    write_file(prompts, text);
    expect_status(
        train(1,
              "--save_folder=%s/full --max_duration=1 --samples.prompts=%s --samples.interval=1 "
              "--samples.max_new_tokens=12",
              folder, prompts),
        0);
    assert_int_equal(read_samples(c, 1, "full", 1), 1);
    assert_int_equal(c[0].count, 2);
}

/* Uses the checkpoint of test_samples, with its own configuration file, which names the recipe.
 * Without this file the recipe is bf16. */
TEST(test_own_checkpoint)
{
    Continuation c;
    expect_status(generate(1, "[3, 4]", "--load_path=%s/plain/latest --max_new_tokens=5", folder),
                  0);
    assert_int_equal(continuations(&c, 1), 1);
    assert_int_equal(c.count, 5);
    expect_status(
        finish(start_command(
            "%s -n 1 %s/train %s/plain/config.yaml --generate=%s --load_path=%s/plain/step2 "
            "--max_new_tokens=3",
            setting("LAUNCH", "mpirun --oversubscribe"), setting("BUILD", "build/cpu"), folder,
            prompts, folder)),
        0);
    assert_int_equal(continuations(&c, 1), 1);
    assert_int_equal(c.count, 3);
    expect_status(generate(1, "[3]", "--load_path=%s/plain/latest --dry_run", folder), 0);
    expect_output("keys and values of 32 tokens");
    expect_output("recipe bf16: ");
    expect_output("frozen weights bf16");
    expect_status(generate(1, "[3]", "--load_path=%s/plain/latest --dry_run --recipe=fp8", folder),
                  0);
    expect_output("frozen weights f32"); /* as in training, which encodes FP8 from these weights */
}

static void expect_error(const char *text, const char *arguments, const char *message)
{
    if (generate(1, text, "%s", arguments) == 0)
        fail_msg("no error, expected '%s'", message);
    expect_output(message);
}

TEST(test_errors)
{
    expect_error("[1, 2, 3, 4]\n", "--load_path=tests/golden/llama --model.max_sequence_length=4",
                 "prompts.jsonl:1: a prompt of 4 tokens; expected at most 3");
    expect_error("[1]\n", "--load_path=tests/golden/llama --eval_only",
                 "generate and eval_only are both given");
    expect_error("[1]\n", "--recipe=f32", "there is no model; --load_path=FOLDER names");
    assert_int_not_equal(
        finish(start_command("%s -n 1 %s/train configs/tiny.yaml --generate=%s --load_path=%s",
                             setting("LAUNCH", "mpirun --oversubscribe"),
                             setting("BUILD", "build/cpu"), prompts, prompts)),
        0);
    expect_output("this is a file");
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
