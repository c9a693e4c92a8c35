/* Gradients that ranks send as codes: their error, compared with the noise of the gradients; bits;
 * and gradients that are not coded. A host is a number of ranks. Runs by hand on up to 64 ranks:
 *
 *     OPENBLAS_NUM_THREADS=1 mpirun --oversubscribe --bind-to none -n 64
 * build/cpu/tests/test_grad_wire_ranks */
#include "tests/test.h"
#include "tests/ranks_state.h"

#include "tests/kit.h"

static const Case wide = { "bf16", LLAMA_GQA, .wide = true };
static const struct {
    const char *name;
    Wire wire;
    /* half the distance of two codes at the largest value of a group, of which E4M3 has a sixteenth
     * at all values, as BF16 has 2^-8; the error of a value is at most this */
    double step;
} wires[] = { { "bf16", WIRE_BF16, 0x1p-8 },
              { "fp8", WIRE_FP8, 0x1p-4 },
              { "int8", WIRE_INT8, 1.0 / 254 },
              { "fp8_lm", WIRE_FP8_LM, 0x1p-4 } };
enum { NUM_WIRES = sizeof wires / sizeof *wires };

static Strategy strategy_of(int shards, int per_host, Wire wire)
{
    return (Strategy){
        .shard_ranks = shards, .grad_sum = SUM_OFTEN, .wire = wire, .ranks_per_host = per_host
    };
}

static void open_run(Run *r, const Case *k, Strategy s)
{
    ModelConfig m = with_sizes(architecture(k->model), 64, 16, 80, 2);
    configure(r, k, m, s);
    place_run(r);
}

/* Runs a step of `share` sequences of each rank. */
static Whole gradients(const Case *k, Strategy s, int share)
{
    Run r;
    open_run(&r, k, s);
    r.config.global_train_batch_size = share * comm_size();
    forward_backward(&r, 0, share);
    fsdp_wait_grads(&r.store);
    take_loss(&r);
    const Whole w = take_whole(&r, GRADIENTS);
    close_run(&r);
    return w;
}

/* |x - y|^2 over the matrices of blocks if `coded`, over all other parameters if not. y NULL:
 * zeros. */
static double distance(const Whole *x, const Whole *y, const Run *r, bool coded)
{
    double sum = 0;
    for (int u = 0; u < x->units; u++)
        for (int i = 0; i < r->store.shape[u].num_params; i++) {
            const Param *p = &r->store.shape[u].param[i];
            for (size_t k = 0; p->is_operand == coded && k < x->numel[u][p->id]; k++)
                sum += pow(x->x[u][p->id][k] - (y ? y->x[u][p->id][k] : 0), 2);
        }
    return sum;
}

/* The gradients of this rank's sequence, without sums over ranks. */
static double square_of_own(void)
{
    static int tokens[MOST_TOKENS], targets[MOST_TOKENS];
    Run r;
    open_run(&r, &wide, ALONE);
    const int T = r.config.model.max_sequence_length;
    fsdp_empty_grads(&r.store);
    model_begin_step(&r.model, comm_size());
    fill_tokens(tokens, targets, (size_t)(comm_rank() * T), T, r.config.model.vocab_size);
    model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 1.0f / (float)(comm_size() * T), 0,
                      PASS_ACCUMULATE);
    const Whole own = take_whole(&r, GRADIENTS);
    double square = distance(&own, NULL, &r, true);
    comm_sum(&square, 1);
    close_run(&r);
    return square;
}

/* The noise of a sum of gradients: the deviation of R times the variance of a rank's gradient. An
 * error is at most `step` of each rank's gradient at each of two levels. Errors are independent, so
 * they grow as noise does. Most values are not at the end of a step; 4 % for FP8 is the aim. */
TEST(test_error)
{
    const int R = comm_size();
    Run r;
    if (R == 1)
        return;
    const double square = square_of_own();
    const Whole exact = gradients(&wide, strategy_of(R, 0, WIRE_NONE), 1);
    open_run(&r, &wide, strategy_of(R, 0, WIRE_NONE));
    const double noise = sqrt(square - distance(&exact, NULL, &r, true) / R);
    for (int w = 0; w < NUM_WIRES; w++)
        for (int per_host = R > 16 ? 8 : R / 2; per_host <= R;
             per_host += R - per_host ? R - per_host : R) {
            const int mark = num_kept;
            const Whole found = gradients(&wide, strategy_of(R, per_host, wires[w].wire), 1);
            const double error = sqrt(distance(&found, &exact, &r, true)) / noise,
                         others = sqrt(distance(&found, &exact, &r, false) /
                                       distance(&exact, NULL, &r, false));
            if (comm_rank() == 0)
                print_message(
                    "%s, %d ranks, %d on a host: error %.2f %% of the noise; others %.1e\n",
                    wires[w].name, R, per_host, 100 * error, others);
            if (!(error > 0 && error <= fmin(0.04, 2 * wires[w].step * sqrt(2))))
                fail_msg("%s: the error is %.3f of the noise", wires[w].name, error);
            assert_true(others <= R * U24);
            release_from(mark);
        }
    close_run(&r);
    release();
}

/* Two runs give the same bits, with queues that overlap or not; all replicas have the same bits; and
 * micro-batches accumulate. */
TEST(test_bits)
{
    static const Case cases[] = { { "bf16", QWEN2 }, { "coat", OLMO }, { "fp8", OLMOE } };
    for (int w = 0; w < NUM_WIRES && comm_size() > 1; w++)
        for (int c = 0; c < 3; c++)
            for (int groups = 1; groups <= 2; groups++) {
                const Case *k = &cases[(c + w) % 3];
                Strategy s = strategy_of(comm_size() / groups, 1, wires[w].wire);
                s.grad_sum = c % 2 ? SUM_ONCE : SUM_OFTEN;
                const Whole first = gradients(k, s, 2);
                device_merge_queues(true);
                const Whole again = gradients(k, s, 2);
                device_merge_queues(false);
                check_whole("the same once more", &again, &first, 0);
                s.wire = WIRE_NONE;
                const Whole plain = gradients(k, s, 2);
                check_whole(wires[w].name, &first, &plain, 0.2);
                for (int u = 0; u < first.units; u++)
                    for (int i = 0; i < NUM_PARAMS; i++) {
                        double sum = 0;
                        for (size_t j = 0; first.x[u][i] && j < first.numel[u][i]; j++)
                            sum += first.x[u][i][j] * (double)(j % 17);
                        double ends[2] = { sum, -sum };
                        comm_max(ends, 2);
                        assert_true(ends[0] == -ends[1]);
                    }
                release();
            }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
