/* Quantization statistics of the optimizer's moments: compares metrics.jsonl with the moments,
 * which the test decodes. */
#include "tests/test.h"
#include "tests/measured.h"

#include "model/run/quant_stats.h"

/* Stored moments have the reported error. On the CPU, codes and scales are those of the telemetry,
 * unless the F32 arithmetic of the update falls on the other side of a midpoint. */
TEST(test_moments)
{
    Small s;
    small_open(&s, LLAMA, "coat");
    small_start(&s);
    for (int i = 0; i < 4; i++) {
        small_step(&s, true);
        size_t differ = 0, codes = 0;
        double sum[2] = { 0 }, beta[2] = { (float)0.9, (float)0.95 };
        int matrices = 0;
        Shard *shard = &s.store.shard[1];
        const size_t count = shard->slice[TRAINED].count;
        const size_t group = (size_t)shard->state[0].format.group;
        const double *g = all(shard->grad);
        Elements old[2] = { elements_fetch(shard->state[0], 0, count),
                            elements_fetch(shard->state[1], 0, count) };
        small_update(&s);
        Elements new[2] = { elements_fetch(shard->state[0], 0, count),
                            elements_fetch(shard->state[1], 0, count) };
        for (int p = 0; p < s.store.shape[1].num_params; p++) {
            const Param *param = &s.store.shape[1].param[p];
            size_t at = param->offset, n = (size_t)param->rows * (size_t)param->cols;
            n = n < 8192 ? n : 8192;
            if (param->is_vector)
                continue;
            matrices++;
            for (int j = 0; j < 2; j++) {
                double *x = keep(n * sizeof *x), *q = keep(n * sizeof *q);
                for (size_t e = 0; e < n; e++)
                    x[e] = beta[j] * old[j].x[at + e] +
                           (1 - beta[j]) * (j ? g[at + e] * g[at + e] : g[at + e]);
                Elements r = elements_round(x, n, shard->state[0].format);
                for (size_t e = 0; e < n; e++) {
                    const bool same_k =
                        elements_k(r, e / group) == elements_k(new[j], (at + e) / group);
                    q[e] = same_k ? new[j].x[at + e] : r.x[e];
                }
                sum[j] += pow(relative_error(q, x, n), 2);
                for (size_t e = 0; e < n; e++)
                    differ += ((uint8_t *)r.t.data)[e] != ((uint8_t *)new[j].t.data)[at + e];
                codes += n;
                elements_free(&r);
            }
        }
        /* NOTE: a group has another k in F32 if the exact k is close to a step of 1/16, or if the
         * group's smallest element nearly cancels. Then all codes of the group differ, and the
         * group counts as reported. The test checks below that such groups are few. */
        expect_near("m", metric(&s, "quant/m/0/error"), sqrt(sum[0] / matrices), 1e-3);
        expect_near("v", metric(&s, "quant/v/0/error"), sqrt(sum[1] / matrices), 1e-3);
        if (on_cpu() && differ > codes / 10000 + group)
            fail_msg("step %d: %zu of %zu codes differ", i, differ, codes);
        for (int j = 0; j < 2; j++)
            elements_free(&old[j]), elements_free(&new[j]);
        release();
    }
    small_close(&s);
}

/* F32 moments are rounded once, from double: u = 2^-24. */
TEST(test_f32)
{
    Small s;
    small_open(&s, LLAMA, "f32");
    small_start(&s);
    for (int i = 0; i < 4; i++) {
        small_step(&s, true);
        assert_true(metric(&s, "quant/m/0/error") <= U24 &&
                    metric(&s, "quant/v/head/error") <= U24);
        assert_true(metric(&s, "quant/update/1/error") <= 3 * U24);
        assert_true(metric(&s, "quant/m/1/underflow") == 0);
        small_update(&s);
    }
    small_close(&s);
}

/* Frozen parameters have no moments: a unit without trained parameters has no line. */
TEST(test_frozen)
{
    static const char *const recipes[] = { "f32", "coat" };
    static char *pattern = "model.layers.*.mlp.*";
    for (int i = 0; i < 2; i++) {
        Small s;
        small_open(&s, LLAMA, recipes[i]);
        s.config.trainable = &pattern;
        s.config.num_trainable = 1;
        small_start(&s);
        for (int step = 0; step < 2; step++) {
            small_step(&s, true);
            small_update(&s);
        }
        assert_true(metric(&s, "quant/m/0/dynamic_range") > 1 &&
                    metric(&s, "quant/v/1/dynamic_range") > 1);
        assert_null(json_object_get(s.line, "quant/m/embedding/dynamic_range"));
        assert_null(json_object_get(s.line, "quant/m/head/dynamic_range"));
        small_close(&s);
    }
}

int main(void)
{
    return run_all_tests(measured_start, measured_finish);
}
