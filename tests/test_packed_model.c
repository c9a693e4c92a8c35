/* The model with packed documents: the loss and the gradients equal those of separate documents,
 * and documents do not influence each other. */
#include "tests/test.h"
#include "tests/kit.h"

#include <math.h>
#include <unistd.h>

#include "data/loader.h"
#include "kernels/runtime/error.h"
#include "tests/models.h"

/* Files of documents with these lengths, each with an eos at its end, packed into two sequences.
 * One of the sequences has padding. */
enum { T = 16, B = 2, DOCUMENTS = 7, EOS = 0 };
static const int length[DOCUMENTS] = { 5, 9, 1, 4, 2, 3, 5 };

static char path[] = "/tmp/test_packed_model_XXXXXX";

static int make_file(void **state)
{
    (void)state;
    uint16_t ids[B * T];
    int n = 0;
    for (int d = 0; d < DOCUMENTS; d++)
        for (int t = 0; t < length[d]; t++, n++)
            ids[n] = t == length[d] - 1 ? EOS : (uint16_t)(1 + test_token(3, (uint64_t)n, 89));
    const int file = mkstemp(path);
    const size_t bytes = (size_t)n * sizeof *ids;
    device_init(0);
    return file < 0 || write(file, ids, bytes) != (ssize_t)bytes || close(file);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

static Loader *open_packed(Batch *b)
{
    char *paths[] = { path };
    const DataSpec spec = { .paths = paths,
                            .num_paths = 1,
                            .itemsize = 2,
                            .sequence_length = T,
                            .vocab_size = 90,
                            .eos_token_id = EOS,
                            .pad_token_id = -1,
                            .best_fit = true,
                            .reopened = true };
    Loader *l = loader_open(&spec, B, 0, 1);
    assert_int_equal(loader_instances(l), B);
    assert_true(loader_next(l, b));
    return l;
}

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Setup;

static void open_model(Setup *s, SmallModel a, int sequences, bool documents)
{
    const ModelConfig m = architecture(a);
    model_config(&s->config, &m, "f32", sequences);
    s->config.data.generate_doc_lengths = documents;
    model_create(&s->model, &s->store, &s->config);
    store_init(&s->store, &s->config.model, 7);
    fsdp_empty_grads(&s->store);
}

typedef struct {
    double loss;
    float *gradient;
    size_t n;
} Result;

static Result result_of(Setup *s)
{
    Result r = { .loss = take_losses(&s->model).loss };
    for (int u = 0; u < s->store.num_units; u++) {
        const size_t count = s->store.shard[u].slice[TRAINED].count;
        if (count == 0)
            continue;
        r.gradient = xrealloc(r.gradient, (r.n + count) * sizeof *r.gradient);
        device_get(r.gradient + r.n, s->store.shard[u].grad.data, count * sizeof *r.gradient);
        r.n += count;
    }
    model_free(&s->model, &s->store);
    return r;
}

static Result packed(SmallModel a, const Batch *b, bool documents)
{
    Setup s;
    open_model(&s, a, B, documents);
    model_micro_batch(&s.model, &s.store, b->tokens, b->targets, b->begins, 1.0f / (float)b->labels,
                      0, PASS_COMPLETE);
    return result_of(&s);
}

/* Each document of the batch at the start of a separate sequence, followed by padding. */
static Result padded(SmallModel a, const Batch *b)
{
    Setup s;
    open_model(&s, a, 1, false);
    for (int n = 0; n < B * T;) {
        int tokens[T] = { 0 }, targets[T], t = 0;
        memset(targets, 0xff, sizeof targets);
        do {
            tokens[t] = b->tokens[n];
            targets[t++] = b->targets[n++];
        } while (n < B * T && !b->begins[n]);
        model_micro_batch(&s.model, &s.store, tokens, targets, NULL, 1.0f / (float)b->labels, 0,
                          n < B * T ? PASS_ACCUMULATE : PASS_COMPLETE);
    }
    return result_of(&s);
}

/* relative to the largest element of the gradient */
static double distance(const Result *a, const Result *b)
{
    double worst = 0, largest = 0;
    for (size_t i = 0; i < a->n; i++) {
        worst = fmax(worst, fabs((double)a->gradient[i] - b->gradient[i]));
        largest = fmax(largest, fabs((double)b->gradient[i]));
    }
    return worst / largest;
}

/* Positions differ, and so do the rounded rotations and the order of sums. An operation adds at
 * most a roundoff for each of up to 128 terms of a sum. A weight's gradient depends on some 20
 * operations with sums: forward and backward of each block, and the head. With attention across
 * documents, the test would fail by a factor of 100. */
static const double bound = 20 * 128 * U24;

TEST(test_as_padded)
{
    Batch b;
    Loader *l = open_packed(&b);
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Result p = packed(a, &b, true), each = padded(a, &b), across = packed(a, &b, false);
        if (!(fabs(p.loss - each.loss) <= bound * each.loss) || !(distance(&p, &each) <= bound))
            fail_msg("%s: loss %.9g, padded %.9g; gradients differ by %.3g, bound %.3g",
                     architecture_name(a), p.loss, each.loss, distance(&p, &each), bound);
        assert_true(distance(&across, &each) > 100 * bound);
        free(p.gradient), free(each.gradient), free(across.gradient);
    }
    loader_close(l);
}

/* Computes the losses of all tokens, and the gradients if only one document has targets. */
static void step_of_one(float *losses, Result *r, SmallModel a, const Batch *b, const int *tokens,
                        int first, int end)
{
    Setup s;
    int targets[B * T];
    for (int n = 0; n < B * T; n++)
        targets[n] = n >= first && n < end ? b->targets[n] : -1;
    open_model(&s, a, B, true);
    model_micro_batch(&s.model, &s.store, tokens, b->targets, b->begins, 1, 0, PASS_FORWARD);
    device_get(losses, s.model.losses, sizeof(float) * B * T);
    take_losses(&s.model);
    model_micro_batch(&s.model, &s.store, tokens, targets, b->begins, 1, 0, PASS_COMPLETE);
    *r = result_of(&s);
}

/* Changes one token of a document. All bits stay the same in the losses of the other documents, and
 * in the gradients of another document. */
static void check_apart(SmallModel a, const Batch *b, int changed)
{
    int first = changed, end = changed + 1, other = changed < T ? T : 0, other_end = other + 1,
        tokens[B * T];
    while (!b->begins[first])
        first--;
    while (end < B * T && !b->begins[end])
        end++;
    while (!b->begins[other_end])
        other_end++;
    memcpy(tokens, b->tokens, sizeof tokens);
    tokens[changed] = tokens[changed] == 1 ? 2 : 1;
    float before[B * T], after[B * T];
    Result r, same;
    step_of_one(before, &same, a, b, b->tokens, other, other_end);
    step_of_one(after, &r, a, b, tokens, other, other_end);
    check_same_bytes("losses before it", after, before, (size_t)first * sizeof *after);
    check_same_bytes("losses after it", after + end, before + end,
                     (size_t)(B * T - end) * sizeof *after);
    if (b->targets[changed] >= 0)
        assert_true(after[changed] != before[changed]);
    assert_true(r.loss == same.loss);
    for (size_t i = 0; i < r.n; i++)
        assert_true(r.gradient[i] == same.gradient[i]);
    free(r.gradient), free(same.gradient);
}

/* Not with experts: the number of rows in an expert's GEMM depends on other documents, and the bits
 * depend on the number of rows. */
TEST(test_apart)
{
    Batch b;
    Loader *l = open_packed(&b);
    for (SmallModel a = 0; a < OLMOE; a++)
        for (int n = (int)a % 3; n < B * T; n += 3)
            check_apart(a, &b, n);
    loader_close(l);
}

int main(void)
{
    return run_all_tests(make_file, remove_file);
}
