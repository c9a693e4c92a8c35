/* Counts the FLOPs of a token one by one. Also checks throughput/device/speed_of_light in
 * metrics.jsonl, on a device with known rates, and the remaining time on the terminal. */
#include <unistd.h>

#include <jansson.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "model/predict/flops.h"
#include "model/run/log.h"
#include "model/shape/trainable.h"
#include "tests/models.h"

enum { B = 4 };

static UnitLayout *shapes_of(const Config *c)
{
    int count;
    HfTensor *tensor = hf_tensors_of(&c->model, &count);
    UnitLayout *shape = trainable_shapes(c, tensor, count);
    free(tensor);
    return shape;
}

static TokenFlops flops_of(const Config *c)
{
    UnitLayout *shape = shapes_of(c);
    const TokenFlops f = token_flops(c, shape);
    units_free(shape, unit_count(&c->model));
    return f;
}

/* The FLOPs of attention are those of the keys that tokens attend to, counted one by one, minus
 * half a key per token: T/2 instead of (T+1)/2. */
TEST(test_flops)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Config c;
        const ModelConfig m = architecture(a);
        model_config(&c, &m, "f32", B);
        const int T = m.max_sequence_length;
        double least = 0, most = 0;
        for (int l = 0; l < m.n_layers; l++)
            for (int t = 0; t < T; t++) {
                const int keys =
                    layer_slides(&m, l) && m.sliding_window <= t ? m.sliding_window : t + 1;
                least += (keys - 0.5) / T;
                most += (double)keys / T;
            }
        const double found = flops_of(&c).attention / (12.0 * m.n_heads * m.head_dim);
        assert_true(found >= least && found < most);
        if (m.sliding_window == 0)
            assert_true(found == m.n_layers * T / 2.0);
    }
}

/* Frozen weights have no gradient, and backward ends at the first unit with trained weights. */
TEST(test_flops_of_a_part)
{
    /* passes: the forward pass counts as 1 */
    static const struct {
        char *pattern;
        double block[2], attention[2], head;
    } cases[] = {
        { "*", { 3, 3 }, { 3, 3 }, 3 },
        { "lm_head.weight", { 1, 1 }, { 1, 1 }, 2 },
        { "model.layers.1.*", { 1, 3 }, { 1, 3 }, 2 },
    };
    const ModelConfig m = architecture(LLAMA);
    const double HD = m.n_heads * m.head_dim, C = m.d_model,
                 block = 2 * (C * 3 * HD + HD * C + 3 * C * m.mlp_width);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        char *pattern = cases[i].pattern;
        model_config(&c, &m, "f32", B);
        c.trainable = &pattern;
        c.num_trainable = 1;
        const TokenFlops f = flops_of(&c);
        assert_true(f.linear == block * (cases[i].block[0] + cases[i].block[1]));
        assert_true(f.attention == 4 * HD * m.max_sequence_length / 2 *
                                       (cases[i].attention[0] + cases[i].attention[1]));
        assert_true(f.head == 2 * C * m.embedding_size * cases[i].head);
        assert_true(f.head_forward == 2 * C * m.embedding_size);
    }
}

/* A GPU with invented rates. The linker uses this function in place of device_peak_flops. */
enum { F32_RATE = 3000000, BF16_RATE = 7000000, FP8_RATE = 11000000 };

double __wrap_device_peak_flops(int bits);
double __wrap_device_peak_flops(int bits)
{
    return bits == 32 ? F32_RATE : bits == 16 ? BF16_RATE : FP8_RATE;
}

static char folder[32], logged[4096]; /* logged: the last line of metrics.jsonl in `folder` */

static double metric(const char *name)
{
    json_t *o = json_loads(logged, 0, NULL);
    const double x = json_number_value(json_object_get(o, name));
    json_decref(o);
    return x;
}

/* Logs a step of a run with `ranks` ranks and `steps` steps, `milliseconds` after its start. */
static void log_one_step(Config *c, int ranks, long steps, int milliseconds)
{
    char path[64];
    assert_non_null(mkdtemp(strcpy(folder, "/tmp/coat-flops-XXXXXX")));
    c->save_folder = folder;
    UnitLayout *shape = shapes_of(c);
    Log *log = log_open(c, shape, (RunLength){ .steps = steps }, steps, 0, false, ranks);
    usleep((useconds_t)milliseconds * 1000);
    log_step(log, &(StepStats){ .step = 1 });
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    FILE *f = fopen(path, "r");
    assert_true(f && fgets(logged, sizeof logged, f));
    fclose(f);
    log_close(log);
    units_free(shape, unit_count(&c->model));
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
}

/* Returns a step's tokens per second, divided by speed_of_light in metrics.jsonl. */
static double logged_speed_of_light(Config *c)
{
    log_one_step(c, 1, 2, 0);
    const double speed = metric("throughput/device/tokens_per_second"),
                 share = metric("throughput/device/speed_of_light");
    assert_true(speed > 0 && share > 0);
    return speed / share;
}

/* Each product counts at the rate of its operands. Blocks have the recipe's format, forward and
 * backward. The head has the stream's format forward, and the format of the head backward.
 * Attention has the stream's format. A matrix of w weights takes 6 w FLOPs, a third of them
 * forward. */
TEST(test_speed_of_light)
{
    const double bf16 = BF16_RATE, fp8 = FP8_RATE;
    const struct {
        const char *recipe;
        double block, attention, head, head_back;
    } cases[] = {
        { "f32", F32_RATE, F32_RATE, F32_RATE, F32_RATE },
        { "bf16", bf16, bf16, bf16, bf16 },
        { "fp8", fp8, bf16, bf16, bf16 },
        { "coat", fp8, bf16, bf16, fp8 },
        { "coat-lean", fp8, bf16, bf16, fp8 },
    };
    const ModelConfig m = architecture(LLAMA);
    const double HD = m.n_heads * m.head_dim, C = m.d_model;
    const double block = m.n_layers * (C * 3 * HD + HD * C + 3 * C * m.mlp_width),
                 head = C * m.embedding_size;
    const double attention = m.n_layers * 12 * HD * m.max_sequence_length / 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        model_config(&c, &m, cases[i].recipe, B);
        const double expected = 1 / (6 * block / cases[i].block + attention / cases[i].attention +
                                     2 * head / cases[i].head + 4 * head / cases[i].head_back);
        const double found = logged_speed_of_light(&c);
        if (!(fabs(found / expected - 1) <= 1e-8)) /* two numbers of 9 digits */
            fail_msg("%s: %.9g tokens per second, expected %.9g", cases[i].recipe, found, expected);
    }
}

/* The remaining time is the time that all ranks together need for the remaining tokens. */
TEST(test_time_left)
{
    enum { STEPS = 10000 };
    const ModelConfig m = architecture(LLAMA);
    for (int ranks = 1; ranks <= 4; ranks *= 4) {
        Config c;
        char line[256] = "", *eta = NULL;
        long minutes = 0, seconds = 0;
        model_config(&c, &m, "f32", B);
        FILE *out = tmpfile();
        assert_non_null(out);
        fflush(stdout);
        const int before = dup(STDOUT_FILENO);
        dup2(fileno(out), STDOUT_FILENO);
        log_one_step(&c, ranks, STEPS, 20);
        fflush(stdout);
        dup2(before, STDOUT_FILENO);
        close(before);
        rewind(out);
        while (!eta && fgets(line, sizeof line, out))
            eta = strstr(line, "eta ");
        fclose(out);
        assert_true(eta && sscanf(eta, "eta %ldm%lds", &minutes, &seconds) == 2);
        const double left = (STEPS - 1.0) * B * m.max_sequence_length;
        const double expected = left / (ranks * metric("throughput/device/tokens_per_second"));
        assert_true(expected > 10 && fabs((double)(60 * minutes + seconds) - expected) <= 1);
    }
}

/* The layers of a token cost the same FLOPs on any number of ranks. */
TEST(test_flops_of_cut_layers)
{
    const ModelConfig m = architecture(LLAMA);
    Config c;
    model_config(&c, &m, "f32", B);
    UnitLayout *shape = shapes_of(&c);
    const TokenFlops whole = token_flops(&c, shape);
    for (int u = 0; u < unit_count(&m); u++)
        if (shape[u].kind->is_layer)
            unit_cut(&shape[u], 2, 1, 1);
    const TokenFlops cut = token_flops(&c, shape);
    assert_true(cut.linear == whole.linear && cut.attention == whole.attention &&
                cut.head == whole.head);
    units_free(shape, unit_count(&m));
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
