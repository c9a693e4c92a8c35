/* The mean loss of a validation set, weighted by labels, counts every sequence once, with any
 * ranks, batches and micro-batches. It is compared with the same sequences, run one by one on a
 * single rank. On 1, 2 and 4 ranks. */
#include "kernels/runtime/error.h"
#include "model/evaluate/evaluate.h"
#include "tests/test.h"
#include "tests/ranks_case.h"

/* The batch of a rank is not a multiple of its micro-batch. On 4 ranks a batch has 12 sequences.
 * The last batch of `odd` has one sequence, so three ranks have none. The last batch of `two files`
 * has 5, so the ranks have different numbers. */
enum { T = 16, MICRO = 2, EVAL_BATCH = 3, PAD = 1, MOST = 17, NUM_SETS = 4 };
static const struct {
    const char *name;
    int sequences[2];
    bool padding;
} sets[NUM_SETS] = {
    { "two files", { 10, 7 }, false },
    { "odd", { 13, 0 }, false },
    { "one", { 1, 0 }, false },
    { "padding", { 2, 0 }, true },
};

static char paths[NUM_SETS][2][64], masks[NUM_SETS][2][72];
static Config config;

/* ---- validation sets ------------------------------------------------------------------------- */

/* Sequences have padding after 16, 11, 6, 1, 12 ... tokens, so that they differ in labels. */
static int token(int set, int sequence, int t)
{
    const bool padded = sets[set].padding || t >= 16 - sequence * 5 % 16;
    return padded ? PAD
                  : 2 + test_token(40 + (uint64_t)set, (uint64_t)(sequence * T + t),
                                   config.model.vocab_size - 2);
}

/* Some tokens of the first set are not targets. */
static bool is_masked(int set, int sequence, int t)
{
    return set == 0 && (sequence * T + t) % 5 == 3;
}

/* After the last sequence of a file begins another one, which is not part of the set. */
static void write_files(const char *path, const char *mask_path, int set, int first, int count)
{
    uint16_t ids[(MOST + 1) * T];
    uint8_t mask[(MOST + 1) * T];
    for (int i = 0; i < (count + 1) * T; i++) {
        ids[i] = (uint16_t)token(set, first + i / T, i % T);
        mask[i] = !is_masked(set, first + i / T, i % T);
    }
    FILE *f = fopen(path, "wb"), *m = fopen(mask_path, "wb");
    assert_true(f && m);
    const size_t n = (size_t)(count * T + T / 2);
    assert_int_equal(fwrite(ids, sizeof *ids, n, f), n);
    assert_int_equal(fwrite(mask, sizeof *mask, n, m), n);
    assert_int_equal(fclose(f) + fclose(m), 0);
}

static int make_sets(void **state)
{
    ModelConfig m = architecture(LLAMA_GQA);
    m.weight_tying = false;
    /* more than a rank gathers at a time: the ranks must agree on the number of passes */
    m.n_layers = 3;
    m.eos_token_id = -1;
    m.pad_token_id = PAD;
    model_config(&config, &m, "f32", MICRO);
    config.device_eval_batch_size = EVAL_BATCH;
    config.data.mask_padding = true;
    if (make_shared(state) != 0)
        return -1;
    config.eval = xcalloc(NUM_SETS, sizeof *config.eval);
    config.num_eval = NUM_SETS;
    for (int s = 0; s < NUM_SETS; s++) {
        EvalSet *set = &config.eval[s];
        *set = (EvalSet){ .label = (char *)sets[s].name,
                          .where = (char *)sets[s].name,
                          .files.itemsize = 2 };
        set->files.paths = xcalloc(2, sizeof *set->files.paths);
        set->files.label_mask_paths = xcalloc(2, sizeof *set->files.label_mask_paths);
        for (int f = 0; f < 2 && sets[s].sequences[f]; f++) {
            snprintf(paths[s][f], sizeof paths[s][f], "%s/%d-%d.npy", shared, s, f);
            snprintf(masks[s][f], sizeof masks[s][f], "%s.mask", paths[s][f]);
            if (comm_rank() == 0)
                write_files(paths[s][f], masks[s][f], s, f ? sets[s].sequences[0] : 0,
                            sets[s].sequences[f]);
            set->files.paths[set->files.num_paths++] = paths[s][f];
            set->files.label_mask_paths[f] = masks[s][f];
        }
        set->files.num_label_mask_paths = s == 0 ? set->files.num_paths : 0;
    }
    comm_barrier();
    return 0;
}

static int remove_sets(void **state)
{
    (void)state;
    comm_barrier();
    for (int s = 0; s < NUM_SETS; s++) {
        for (int f = 0; f < config.eval[s].files.num_paths && comm_rank() == 0; f++)
            unlink(paths[s][f]), unlink(masks[s][f]);
        free(config.eval[s].files.paths);
        free(config.eval[s].files.label_mask_paths);
    }
    free(config.eval);
    return remove_shared(state);
}

/* ---- the reference --------------------------------------------------------------------------- */

/* Returns the mean over the labels of the first `count` sequences, each as a separate micro-batch
 * on an unsharded model. */
static EvalResult one_by_one(int set, int count)
{
    double loss = 0;
    long labels = 0;
    Run r;
    open_as(&r, &config, ALONE, 1);
    for (int i = 0; i < count; i++) {
        int tokens[T], targets[T];
        for (int t = 0; t < T; t++) {
            tokens[t] = token(set, i, t);
            targets[t] = t + 1 < T && token(set, i, t + 1) != PAD && !is_masked(set, i, t + 1)
                             ? token(set, i, t + 1)
                             : -1;
            labels += targets[t] >= 0;
        }
        model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 0, 0, PASS_FORWARD);
        loss += take_loss(&r);
    }
    close_run(&r);
    return (EvalResult){ sets[set].name, labels ? loss / (double)labels : NAN, labels };
}

/* Losses are positive, so sums of up to MOST T losses in any order have an error of MOST T
 * roundoffs. A loss depends on logits. BLAS may order the at most 96 products of a logit's sum by
 * the number of rows, and the effect through the blocks is allowed as much again. */
static void check_result(const EvalResult *found, const EvalResult *expected, const char *what)
{
    assert_string_equal(found->label, expected->label);
    if (found->labels != expected->labels)
        fail_msg("%s, %s: %ld labels, expected %ld", found->label, what, found->labels,
                 expected->labels);
    if (expected->labels
            ? !(fabs(found->loss - expected->loss) <= 2 * MOST * T * U24 * expected->loss)
            : !isnan(found->loss))
        fail_msg("%s, %s: loss %.9g, expected %.9g", found->label, what, found->loss,
                 expected->loss);
    EvalResult first = *found;
    comm_broadcast(&first.loss, sizeof first.loss, 0);
    check_same_bytes("on rank 0", &found->loss, &first.loss, sizeof first.loss);
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* expected for all batches; expected for the first batch, also if two ranks share sequences */
static EvalResult whole[NUM_SETS], part[NUM_SETS], shared_part[NUM_SETS];

static int set_size(int set)
{
    return sets[set].sequences[0] + sets[set].sequences[1];
}

/* The sets have different means, and the means over labels, sequences and positions differ;
 * otherwise the other tests would be weak. */
TEST(test_reference)
{
    const int batch = EVAL_BATCH * comm_size();
    for (int s = 0; s < NUM_SETS; s++) {
        whole[s] = one_by_one(s, set_size(s));
        part[s] = one_by_one(s, set_size(s) < batch ? set_size(s) : batch);
        shared_part[s] = one_by_one(s, set_size(s) < batch / 2 ? set_size(s) : batch / 2);
    }
    assert_true(fabs(whole[0].loss - whole[1].loss) > 1e-3 &&
                fabs(whole[0].loss - part[0].loss) > 1e-3);
    assert_int_equal(whole[2].labels, T - 1);
    assert_int_equal(whole[3].labels, 0);
}

/* Evaluates twice on one model: neither an evaluation nor a training step before it affects the
 * next evaluation. */
static void check_mesh(Strategy s, const char *name)
{
    static int tokens[MICRO * T], targets[MICRO * T];
    const EvalResult *first = data_ranks(&s, comm_size()) < comm_size() ? shared_part : part;
    Run r;
    open_as(&r, &config, s, MICRO);
    model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 0, 0, PASS_FORWARD);
    for (int i = 0; i < 2 * NUM_SETS; i++) {
        const int set = i % NUM_SETS;
        r.config.eval_subset_num_batches = -1;
        EvalResult e = evaluate(&r.config, set, &r.model, &r.store, NULL);
        check_result(&e, &whole[set], name);
        r.config.eval_subset_num_batches = 1;
        e = evaluate(&r.config, set, &r.model, &r.store, NULL);
        check_result(&e, &first[set], name);
        assert_false(e.cut);
    }
    /* one rank is told to stop; all ranks report it */
    const atomic_int stop = comm_rank() == comm_size() - 1;
    assert_true(evaluate(&r.config, 0, &r.model, &r.store, &stop).cut);
    close_run(&r);
}

TEST(test_meshes)
{
    on_meshes(check_mesh);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(make_sets, remove_sets));
}
