/* Initial values of each init_fn for each kind of parameter in each block, against OLMo's formulas
 * (olmo/model.py 0.6.0, reset_parameters of OLMo and of its blocks) and, for adapters, PEFT's.
 *
 * Bounds. The mean square of n normal numbers has a standard error of sqrt(2 / n) of the variance,
 * less if they are truncated; 5 of these are allowed, and 5 of the mean's. Tensors have 1024
 * elements or more: 22 % of the variance, or 11 % of the standard deviation. The formulas differ by
 * 22 % at least: from the second block to the third. */
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"

#include "tests/models.h"

enum { BLOCKS = 3, D = 80, HEADS = 64, MLP = 160, RANK = 16 };
static const double STD = 0.05;

/* Standard deviations of these parameters in each block, or of a parameter outside of the
 * blocks. */
typedef struct {
    const char *params;
    double std[BLOCKS];
} Row;
#define ALL(x) { x, x, x }

static void fill_rows(Row rows[4], InitFn fn)
{
    const Row normal[4] = { { "embed qkv out gate_up down head", ALL(STD) } };
    const Row mitchell[4] = {
        { "embed qkv gate_up head", ALL(1 / sqrt(D)) },
        { "out", { 1 / sqrt(2 * D * 1), 1 / sqrt(2 * D * 2), 1 / sqrt(2 * D * 3) } },
        { "down", { 1 / sqrt(2 * MLP * 1), 1 / sqrt(2 * MLP * 2), 1 / sqrt(2 * MLP * 3) } },
    };
    const Row megatron[4] = {
        { "embed qkv gate_up", ALL(STD) },
        { "out down", ALL(STD / sqrt(2 * BLOCKS)) },
        { "head", ALL(1 / sqrt(D)) },
    };
    memcpy(rows,
           fn == INIT_NORMAL     ? normal
           : fn == INIT_MITCHELL ? mitchell
                                 : megatron,
           4 * sizeof *rows);
}

/* kaiming_uniform_ with a = sqrt(5) is a uniform distribution between +-1/sqrt(fan in). Its
 * variance is a third of 1/fan in. */
static const Row adapters[4] = { { "qkv_a gate_up_a", ALL(0.0645497) },
                                 { "out_a", ALL(0.0721688) },
                                 { "down_a", ALL(0.0456435) } };

static bool names(const char *list, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0'))
            return true;
    return false;
}

static double find_std(const Row rows[4], const char *name, int block)
{
    for (int i = 0; i < 4 && rows[i].params; i++)
        if (names(rows[i].params, name))
            return rows[i].std[block];
    return 0;
}

/* Returns the variance of a standard normal number that is drawn again until it is at most
 * `cutoff`; 0: no cutoff. */
static double variance(double cutoff)
{
    return cutoff == 0 ? 1
                       : 1 - 2 * cutoff * exp(-cutoff * cutoff / 2) / sqrt(2 * M_PI) /
                                 erf(cutoff / sqrt(2));
}

/* Checks n elements. If std is 0, all must be `constant`. */
static void check_values(const char *name, int unit, const double *x, size_t n, double std,
                         double cutoff, double constant)
{
    double sum = 0, squares = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i], squares += x[i] * x[i];
        largest = fmax(largest, fabs(x[i]));
        if (std == 0 && x[i] != constant)
            fail_msg("%s of unit %d: element %zu is %g, expected %g", name, unit, i, x[i],
                     constant);
    }
    const double expected = std * std * variance(cutoff);
    if (std > 0 && !(fabs(squares / (double)n / expected - 1) <= 5 * sqrt(2.0 / (double)n)))
        fail_msg("%s of unit %d: standard deviation %g, expected %g", name, unit,
                 sqrt(squares / (double)n), sqrt(expected));
    if (std > 0 && !(fabs(sum / (double)n) <= 5 * sqrt(expected / (double)n)))
        fail_msg("%s of unit %d: mean %g, expected 0", name, unit, sum / (double)n);
    if (std > 0 && cutoff > 0 && !(largest <= cutoff * std * (1 + 1e-6)))
        fail_msg("%s of unit %d: %g is beyond %g standard deviations of %g", name, unit, largest,
                 cutoff, std);
    /* 13 of 5000 on average */
    if (std > 0 && cutoff == 0 && n > 5000 && !(largest > 3 * std))
        fail_msg("%s of unit %d: none of %zu is beyond 3 standard deviations of %g", name, unit, n,
                 std);
}

static ModelConfig model_of(InitFn fn, double cutoff)
{
    ModelConfig m = architecture(LLAMA);
    m.d_model = D, m.n_layers = BLOCKS, m.head_dim = HEADS / m.n_heads, m.mlp_width = MLP;
    m.init_fn = fn, m.init_std = STD, m.init_cutoff_factor = cutoff;
    return m;
}

/* Checks every parameter. Embedding and head have rows for the vocabulary, then zeros. */
static void check_model(const ModelConfig *m, double cutoff)
{
    Config c;
    Model model;
    ParamStore store;
    Row rows[4];
    fill_rows(rows, m->init_fn);
    model_config(&c, m, "f32", 1);
    model_create(&model, &store, &c);
    store_init(&store, m, 7);
    for (int u = 0; u < store.num_units; u++)
        for (int i = 0; i < store.shape[u].num_params; i++) {
            const Param *p = &store.shape[u].param[i];
            const int block = u > 0 && u <= BLOCKS ? u - 1 : 0;
            const size_t padded = param_numel(p),
                         n = p->has_padding ? (size_t)m->vocab_size * (size_t)p->cols : padded;
            const double *x = values(shard_weights(&store.shard[u], p, 0, padded));
            const double std = find_std(p->is_adapter ? adapters : rows, p->name, block);
            assert_true(std > 0 || p->is_vector || p->is_b);
            check_values(p->name, u, x, n, std, p->is_adapter ? 0 : cutoff, p->is_norm);
            check_values(p->name, u, x + n, padded - n, 0, 0, 0);
        }
    model_free(&model, &store);
    release();
}

TEST(test_deviations)
{
    for (InitFn fn = INIT_MITCHELL; fn <= INIT_FULL_MEGATRON; fn++) {
        const ModelConfig as_usual = model_of(fn, 0), cut = model_of(fn, 1.5);
        check_model(&as_usual, fn == INIT_NORMAL ? 0 : 3);
        check_model(&cut, 1.5);
    }
}

TEST(test_adapters)
{
    const ModelConfig m =
        with_adapters(model_of(INIT_MITCHELL, 0), RANK, ALL_MODULES, BASE_AS_FROZEN);
    check_model(&m, 3);
}

/* Random numbers have the index of their element, so no two elements share a number. Adapters have
 * a separate seed. */
TEST(test_numbers)
{
    enum { MOST = 64 };
    struct {
        size_t first, end;
        bool adapter;
    } drawn[MOST];
    const ModelConfig m =
        with_adapters(model_of(INIT_NORMAL, 0), RANK, ALL_MODULES, BASE_AS_FROZEN);
    int count = 0;
    Config c;
    Model model;
    ParamStore store;
    model_config(&c, &m, "f32", 1);
    model_create(&model, &store, &c);
    for (int u = 0; u < store.num_units; u++)
        for (int i = 0; i < store.shape[u].num_params; i++) {
            const Param *p = &store.shape[u].param[i];
            const size_t first = store.shape[u].first + p->number;
            assert_true(count < MOST);
            for (int k = 0; k < count; k++)
                if (drawn[k].adapter == p->is_adapter && first < drawn[k].end &&
                    drawn[k].first < first + param_numel(p))
                    fail_msg("%s of unit %d draws numbers that another parameter draws", p->name,
                             u);
            drawn[count].first = first;
            drawn[count].end = first + param_numel(p);
            drawn[count++].adapter = p->is_adapter;
        }
    model_free(&model, &store);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
