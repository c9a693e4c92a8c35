/* FLOPs of a token, counted one by one, and the speed that metrics.jsonl calls that of light, on a device whose rates are known. */
#include <unistd.h>

#include <jansson.h>

#include "tests/kit.h"

#include "model/run/log.h"
#include "model/trainable.h"
#include "tests/models.h"

enum { B = 4 };

static TokenFlops flops_of(const Config *c)
{
    int count;
    HfTensor *tensor = hf_tensors_of(&c->model, &count);
    UnitShape *shape = trainable_shapes(c, tensor, count);
    const TokenFlops f = token_flops(c, shape);
    free(tensor);
    free(shape);
    return f;
}

/* Attention's FLOPs are those of the keys that tokens see, counted one by one: half a key less for each token, as T/2 is than
 * (T+1)/2. */
static void test_flops(void **state)
{
    (void)state;
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Config c;
        const ModelConfig m = architecture(a);
        model_config(&c, &m, "f32", B);
        const int T = m.max_sequence_length;
        double least = 0, most = 0;
        for (int l = 0; l < m.n_layers; l++)
            for (int t = 0; t < T; t++) {
                const int keys = layer_slides(&m, l) && m.sliding_window <= t ? m.sliding_window : t + 1;
                least += (keys - 0.5) / T;
                most += (double)keys / T;
            }
        const double found = flops_of(&c).attention / (12.0 * m.n_heads * m.head_dim);
        assert_true(found >= least && found < most);
        if (m.sliding_window == 0)
            assert_true(found == m.n_layers * T / 2.0);
    }
}

/* Frozen weights have no gradient, and backward ends at the first unit that trains something. */
static void test_flops_of_a_part(void **state)
{
    (void)state;
    static const struct { char *pattern; double block[2], attention[2], head; } cases[] = {     /* passes: forward is 1 */
        { "*", { 3, 3 }, { 3, 3 }, 3 },
        { "lm_head.weight", { 1, 1 }, { 1, 1 }, 2 },
        { "model.layers.1.*", { 1, 3 }, { 1, 3 }, 2 },
    };
    const ModelConfig m = architecture(LLAMA);
    const double HD = m.n_heads * m.head_dim, C = m.d_model, block = 2 * (C * 3 * HD + HD * C + 3 * C * m.mlp_width);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        char *pattern = cases[i].pattern;
        model_config(&c, &m, "f32", B);
        c.trainable = &pattern;
        c.num_trainable = 1;
        const TokenFlops f = flops_of(&c);
        assert_true(f.linear == block * (cases[i].block[0] + cases[i].block[1]));
        assert_true(f.attention == 4 * HD * m.max_sequence_length / 2 * (cases[i].attention[0] + cases[i].attention[1]));
        assert_true(f.head == 2 * C * m.embedding_size * cases[i].head);
        assert_true(f.head_forward == 2 * C * m.embedding_size);
    }
}

/* Of a GPU with rates that nothing real has; the linker puts it in the place of device_peak_flops. */
enum { F32_RATE = 3000000, BF16_RATE = 7000000, FP8_RATE = 11000000 };

double __wrap_device_peak_flops(DType d);
double __wrap_device_peak_flops(DType d)
{
    return d == F32 ? F32_RATE : d == BF16 ? BF16_RATE : FP8_RATE;
}

/* A step's tokens per second over what metrics.jsonl calls their share of the light's. */
static double logged_speed_of_light(Config *c)
{
    static char folder[] = "/tmp/coat-flops-XXXXXX";
    char path[64], line[4096] = "";
    assert_non_null(mkdtemp(strcpy(folder, "/tmp/coat-flops-XXXXXX")));
    c->save_folder = folder;
    Log *log = log_open(c, (RunLength){ .steps = 2 }, 2, 0, false, 1);
    log_step(log, &(StepStats){ .step = 1 });
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    FILE *f = fopen(path, "r");
    assert_true(f && fgets(line, sizeof line, f));
    fclose(f);
    log_close(log);
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
    json_t *o = json_loads(line, 0, NULL);
    const double speed = json_number_value(json_object_get(o, "throughput/device/tokens_per_second"));
    const double share = json_number_value(json_object_get(o, "throughput/device/speed_of_light"));
    json_decref(o);
    assert_true(speed > 0 && share > 0);
    return speed / share;
}

/* Each product at the rate of its operands: those of the blocks in the recipe's format, forward and backward, those of the head in
 * the stream's or, backward, in the head's, attention in the stream's. A matrix of w weights takes 6 w, a third of it forward. */
static void test_speed_of_light(void **state)
{
    (void)state;
    const double bf16 = BF16_RATE, fp8 = FP8_RATE;
    const struct { const char *recipe; double block, attention, head, head_back; } cases[] = {
        { "f32", F32_RATE, F32_RATE, F32_RATE, F32_RATE }, { "bf16", bf16, bf16, bf16, bf16 },
        { "fp8", fp8, bf16, bf16, bf16 }, { "coat", fp8, bf16, bf16, fp8 }, { "coat-lean", fp8, bf16, bf16, fp8 },
    };
    const ModelConfig m = architecture(LLAMA);
    const double HD = m.n_heads * m.head_dim, C = m.d_model;
    const double block = m.n_layers * (C * 3 * HD + HD * C + 3 * C * m.mlp_width), head = C * m.embedding_size;
    const double attention = m.n_layers * 12 * HD * m.max_sequence_length / 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        model_config(&c, &m, cases[i].recipe, B);
        const double expected = 1 / (6 * block / cases[i].block + attention / cases[i].attention + 2 * head / cases[i].head
                                     + 4 * head / cases[i].head_back);
        const double found = logged_speed_of_light(&c);
        if (!(fabs(found / expected - 1) <= 1e-8))      /* two numbers of 9 digits */
            fail_msg("%s: %.9g tokens per second, expected %.9g", cases[i].recipe, found, expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flops), cmocka_unit_test(test_flops_of_a_part), cmocka_unit_test(test_speed_of_light),
    };
    return cmocka_run_group_tests(tests, start_device, NULL);
}
