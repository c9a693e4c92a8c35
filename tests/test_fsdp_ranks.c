/* Sharding on any number of ranks: what is gathered is what was scattered, bit for bit; sums over ranks are sums; every strategy
 * trains alike; two runs, and queues that overlap or not, give the same bits. Run with 1, 2 and 4 ranks. */
#include <math.h>

#include "tests/kit.h"

#include "kernels/comm.h"
#include "model/optimizer.h"
#include "model/trace.h"
#include "tests/models.h"

enum { BATCH = 8, MICRO = 1, STEPS = 3, MAX_TOKENS = 4096 };

static const struct { const char *name; int groups; bool keep_weights; GradSum sum; } strategies[] = {
    { "no_shard", 0, false, SUM_OFTEN },                { "full_shard", 1, false, SUM_OFTEN },
    { "full_shard, one sum", 1, false, SUM_ONCE },      { "shard_grad_op", 1, true, SUM_OFTEN },
    { "hybrid_shard", 2, false, SUM_OFTEN },            { "hybrid_shard_zero2", 2, true, SUM_ONCE_IF_FITS },
};
enum { NUM_STRATEGIES = sizeof strategies / sizeof strategies[0] };

static const char *const recipe_names[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };

typedef struct { Config config; Model model; Fsdp fsdp; Optimizer optimizer; } Run;

/* Ranks of a shard group; 0: the strategy needs more ranks. */
static int shard_ranks(int strategy)
{
    const int groups = strategies[strategy].groups ? strategies[strategy].groups : comm_size();
    return comm_size() % groups == 0 ? comm_size() / groups : 0;
}

static ModelConfig small(Architecture a)
{
    ModelConfig m = architecture(a);
    m.d_model = 128;
    m.head_dim = 32;
    m.mlp_width = 160;
    m.n_layers = 3;             /* both slots are used twice */
    return m;
}

static void open_run(Run *r, const ModelConfig *m, const char *recipe, int strategy)
{
    *r = (Run){ 0 };
    model_config(&r->config, m, recipe, MICRO);
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ shard_ranks(strategy), strategies[strategy].keep_weights, strategies[strategy].sum };
    comm_device_finish();
    comm_divide(r->config.strategy.shard_ranks);
    comm_init();
    model_plan(&r->model, &r->fsdp, &r->config, comm_group_size(RANKS_SHARD), comm_group_rank(RANKS_SHARD));
    model_place(&r->model, &r->fsdp, &r->config, comm_group_size(RANKS_SHARD), comm_group_rank(RANKS_SHARD));
    optimizer_create(&r->optimizer);
    fsdp_init(&r->fsdp, &r->config.model, 5);
}

static void close_run(Run *r)
{
    optimizer_free(&r->optimizer);
    model_free(&r->model, &r->fsdp);
}

/* ---- gathering -------------------------------------------------------------------------------------------- */

static void check_tensor_bytes(const char *what, int u, const char *name, Tensor t, Tensor ref)
{
    char text[96];
    snprintf(text, sizeof text, "%s: %s of unit %d", what, name, u);
    assert_true(format_equal(t.format, ref.format) && t.rows == ref.rows && t.cols == ref.cols);
    const size_t n = tensor_bytes(t);
    void *a = keep(n), *b = keep(n);
    memcpy(a, tensor_snapshot(t), n);
    memcpy(b, tensor_snapshot(ref), n);
    check_same_bytes(text, a, b, n);
}

/* Every unit as gathered from shards against the same weights unsharded, twice around, as forward and backward go. */
static void gather_case(Architecture arch, const char *recipe, int strategy)
{
    if (!shard_ranks(strategy))
        return;
    ModelConfig m = small(arch);
    Run alone, sharded;
    open_run(&alone, &m, recipe, 0);
    open_run(&sharded, &m, recipe, strategy);
    Fsdp *f = &sharded.fsdp, *g = &alone.fsdp;
    for (int i = 0; i < 2 * f->num_units; i++) {
        const int u = i < f->num_units ? i : 2 * f->num_units - 1 - i;
        fsdp_gather(f, u, i < f->num_units ? FOR_FORWARD : FOR_BACKWARD);
        fsdp_gather(g, u, FOR_FORWARD | FOR_BACKWARD);
        const Unit *a = fsdp_acquire(f, u), *b = fsdp_acquire(g, u);
        for (int k = 0; k < f->shape[u].num_params; k++) {
            const Param *p = &f->shape[u].param[k];
            Tensor x = a->tensor[p->slot], y = b->tensor[p->slot];
            if (format_is_fp8(x.format) && i < f->num_units)
                x.data_t = y.data_t = NULL;     /* what forward does not read */
            else if (format_is_fp8(x.format))
                x.data = x.data_t, y.data = y.data_t, x.data_t = y.data_t = NULL;
            check_tensor_bytes(strategies[strategy].name, u, p->name, x, y);
        }
        fsdp_release(f, u);
        fsdp_release(g, u);
        release();
    }
    close_run(&alone);
    close_run(&sharded);
}

static void test_gather(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof recipe_names / sizeof recipe_names[0]; i++)
        for (int s = 0; s < NUM_STRATEGIES; s++)
            gather_case(i % 2 ? OLMO2 : LLAMA_GQA, recipe_names[i], s);
}

/* ---- training --------------------------------------------------------------------------------------------- */

/* This rank's part of step `step`; the batch is the same for any number of ranks. Returns the loss of the batch per token. */
static double forward_backward(Run *r, int step)
{
    static int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    const int T = r->config.model.max_sequence_length, share = BATCH / comm_size(), vocab = r->config.model.vocab_size;
    assert_true(MICRO * T <= MAX_TOKENS);
    fsdp_zero_grads(&r->fsdp);
    for (int i = 0; i < share; i++) {
        const int sequence = (step * BATCH + comm_rank() * share + i) * T;
        for (int t = 0; t < T; t++) {
            tokens[t] = test_token(11, (uint64_t)(sequence + t), vocab);
            targets[t] = test_token(11, (uint64_t)(sequence + t + 1), vocab);
        }
        r->fsdp.last_micro_batch = i == share - 1;
        model_step(&r->model, &r->fsdp, tokens, targets, 1.0f / (float)(BATCH * T), 0, true);
    }
    double loss = model_losses(&r->model).loss / (BATCH * T);
    comm_sum(&loss, 1);
    return loss;
}

typedef struct { double loss[STEPS], norm[STEPS]; } Curve;

static Curve train(Run *r)
{
    Curve c;
    for (int s = 0; s < STEPS; s++) {
        c.loss[s] = forward_backward(r, s);
        c.norm[s] = optimizer_grad_norm(&r->optimizer, &r->fsdp);
        optimizer_step(&r->fsdp, &r->config, s + 1, s + 1, 1e-2, fmin(1, 1 / c.norm[s]));
    }
    return c;
}

/* The shard of the sum over all ranks and micro-batches: adding BATCH numbers and W - 1 times between ranks errs by as many
 * roundings of the sum of their sizes, which is at most BATCH times the largest sum of one rank: here, of sizes themselves. */
static void check_sums(Run *sharded, Run *alone, const char *what)
{
    const Fsdp *f = &sharded->fsdp, *g = &alone->fsdp;
    const double u = unit_roundoff(f->recipe.grads);
    for (int unit = 0; unit < f->num_units; unit++) {
        const Shard *s = &f->shard[unit], *whole = &g->shard[unit];
        if (s->count == 0)
            continue;
        const double *a = values(s->grad), *b = values(whole->grad);
        double size = 0;
        for (size_t i = 0; i < whole->count; i++)
            size = fmax(size, fabs(b[i]));
        for (size_t i = 0; i < s->count; i++) {
            const double expected = s->first + i < whole->count ? b[s->first + i] : 0;
            if (fabs(a[i] - expected) > 4 * BATCH * u * size)
                fail_msg("%s: unit %d, element %zu: %g, expected %g (largest %g)", what, unit, s->first + i, a[i], expected, size);
        }
        release();
    }
}

/* The first step's gradients agree within rounding; losses of later steps may drift apart by what rounding weights and operands
 * does, u per step and layer of values of the size of the loss. */
static void train_case(Architecture arch, const char *recipe, int strategy)
{
    if (!shard_ranks(strategy))
        return;
    ModelConfig m = small(arch);
    Run alone, sharded;
    open_run(&alone, &m, recipe, 0);
    forward_backward(&alone, 0);
    open_run(&sharded, &m, recipe, strategy);
    forward_backward(&sharded, 0);
    check_sums(&sharded, &alone, strategies[strategy].name);
    close_run(&sharded);

    open_run(&sharded, &m, recipe, strategy);
    Curve c = train(&sharded), again;
    close_run(&sharded);
    open_run(&sharded, &m, recipe, strategy);
    device_merge_queues(true);
    again = train(&sharded);
    device_merge_queues(false);
    close_run(&sharded);
    check_same_bytes("the same once more, with one queue", &c, &again, sizeof c);
    comm_broadcast(&again, sizeof again, 0);
    check_same_bytes("on rank 0", &c, &again, sizeof c);

    comm_device_finish();
    comm_divide(1);
    comm_init();
    Curve ref = train(&alone);
    const double u = strcmp(recipe, "f32") == 0 ? U24 * 64 : strcmp(recipe, "bf16") == 0 ? 0x1p-9 : 0x1p-6;
    for (int s = 0; s < STEPS; s++)
        if (!(fabs(c.loss[s] - ref.loss[s]) <= u * ref.loss[s]))
            fail_msg("%s, %s: loss %.9g in step %d, %.9g unsharded", recipe, strategies[strategy].name, c.loss[s], s, ref.loss[s]);
    close_run(&alone);
}

static void test_training(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof recipe_names / sizeof recipe_names[0]; i++)
        for (int s = 0; s < NUM_STRATEGIES; s++)
            train_case(i % 3 == 0 ? LLAMA : i % 3 == 1 ? OLMO2 : LLAMA_GQA, recipe_names[i], s);
}

/* A traced step: spans of all kinds in a file that is JSON, and waits that are not negative. */
static void test_trace(void **state)
{
    (void)state;
    char folder[] = "/tmp/coat-trace-XXXXXX", path[64], text[1 << 16];
    ModelConfig m = small(LLAMA);
    Run r;
    open_run(&r, &m, "coat", 1);
    assert_non_null(mkdtemp(folder));
    trace_open(folder, comm_rank());
    for (int s = 0; s < 2; s++) {
        trace_step(s, s == 1);
        forward_backward(&r, s);
        assert_true(trace_step_end() >= 0);
    }
    trace_close();
    close_run(&r);
    snprintf(path, sizeof path, "%s/trace-rank%d.json", folder, comm_rank());
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    assert_non_null(strstr(text, "\"forward 1\""));
    assert_non_null(strstr(text, "\"backward 3\""));
    assert_non_null(strstr(text, "\"gather 3\""));
    if (comm_size() > 1)
        assert_non_null(strstr(text, "\"reduce 0\""));
    assert_string_equal(text + strlen(text) - 2, "]\n");
    unlink(path);
    rmdir(folder);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_gather), cmocka_unit_test(test_training),
                                        cmocka_unit_test(test_trace) };
    alarm(600);     /* a rank that fails leaves the others in a collective */
    comm_start(&argc, &argv);
    device_init(comm_local_rank());
    comm_init();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    double any = failed;
    comm_max(&any, 1);
    comm_finish();
    return any > 0;
}
