/* How large an update of AdamW becomes where rows have rare gradients, for each format of m and v.
 *
 * With exact m and v, |m| <= B sqrt(v) by Cauchy and Schwarz: m and v are sums of g beta1^i (1 -
 * beta1) and g^2 beta2^i (1 - beta2), so B^2 = (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)).
 *
 * This fails if v is rounded to 0 and m is not: then an update without a gradient is m / eps. Let r
 * be the largest v, relative to the largest of its group, that is stored as 0, and G the largest
 * gradient of the group, so v <= G^2. A v is stored as 0 in each step only if (1 - beta2) g^2 <= r
 * G^2. So m, a mean of such g, is at most G sqrt(r / (1 - beta2)), and
 *
 *     |update| <= B + G / eps sqrt(r / (1 - beta2))
 *
 * The formats have these r:
 *
 *     dynamic    half the map's smallest value, 1e-6 (0.1 + 0.55) / 2
 *     FP8        half the smallest code over the largest one: 2^-10 / 448, 2^-17 / 57344
 *     expanded   zeros count as 1e-20 when k is chosen (kernels/fp8.c), so a v above 1e-20 is not stored as 0
 *     BF16, F32  half the smallest subnormal number, 2^-134 and 2^-150, whatever the group
 *
 * An m of E4M3 without expansion has the opposite fault next to a v of a finer format: it stays at
 * up to four times the smallest code (0.9 * 4 rounds to 4), 4 * 2^-9 / 448 of the group's largest
 * m, while v decays. Then |update| <= B + G / eps * 2^-7 / 448. */
#include <math.h>

#include "kernels/values.h"
#include "model/plan_model.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/models.h"

#define PLAIN(d) { d, 128, .bf16_scale = true }
static const Format F = { F32, 0 };
static const double BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8;
enum { GROUP = 256 }; /* the longest group */

/* r, and the smallest m that does not decay */
typedef struct {
    Format m, v;
    double zero, stays;
} Way;

static const Way ways[] = {
    { { F32, 0 }, { F32, 0 }, 0, 0 },
    { { BF16, 0 }, { BF16, 0 }, 0, 0 },
    { PLAIN(E4M3), { BF16, 0 }, 0, 0x1p-7 / 448 },
    { PLAIN(E4M3), PLAIN(E4M3), 0x1p-10 / 448, 0 },
    { PLAIN(E4M3), PLAIN(E5M2), 0x1p-17 / 57344, 0x1p-7 / 448 },
    { { E4M3, 128, true }, { E4M3, 128, true }, 0, 0 },
    { { E4M3, 128, true }, { E5M2, 128, true }, 0, 0 },
    { { DYNAMIC8, 256 }, { UDYNAMIC8, 256 }, 1e-6 * 0.325 / 2, 0 },
};
enum { WAYS = sizeof ways / sizeof *ways };

/* ---- what is stored as 0 --------------------------------------------------------------------- */

/* Returns a v of x as it is read back, next to a v of `most` and zeros. */
static float read_back(Format f, float x, float most)
{
    float in[GROUP] = { most, x }, out[GROUP];
    Tensor t = { .format = f,
                 .rows = 1,
                 .cols = GROUP,
                 .data = keep(GROUP * sizeof(float)),
                 .scale = keep(GROUP * sizeof(float)) };
    tensor_store(t, 0, in, GROUP);
    tensor_load(out, t, 0, GROUP);
    release();
    return out[1];
}

/* Returns the largest such x, by bisection over the bits of floats. */
static double largest_zero(Format f, float most)
{
    uint32_t below = 0, above;
    memcpy(&above, &most, sizeof above);
    while (above - below > 1) {
        const uint32_t middle = below + (above - below) / 2;
        if (read_back(f, float_from_bits(middle), most) == 0)
            below = middle;
        else
            above = middle;
    }
    return (double)float_from_bits(below);
}

/* A BF16 scale is rounded up, by at most 2^-7. The remaining error is rounding of F32. */
TEST(test_zeros)
{
    for (int i = 0; i < WAYS; i++)
        for (float most = 1e-12f; most <= 1e6f; most *= 100) {
            const double zero = largest_zero(ways[i].v, most), r = ways[i].zero * (double)most;
            if (ways[i].zero > 0 ? zero < r * (1 - 1e-6) || zero > r * (1 + 0x1p-7 + 1e-6)
                                 : zero > 1e-20)
                fail_msg("%s: %g next to %g is stored as 0; expected up to %g",
                         format_name(ways[i].v), zero, (double)most, r);
        }
}

/* ---- the worst gradients --------------------------------------------------------------------- */

/* One rounding of m and v makes |m| / sqrt(v) at most (1 + e)^(1/k) (1 - e)^(-1/2k) times as large,
 * e being half a unit of the code: 1.45 for E4M3 (2^-4) and 1.53 for E5M2 (2^-3) with the smallest
 * k of these groups, 4/16 and 7/16. */
static const double ROUNDING = 1.6;

/* Returns the largest update of the second element of a group whose first element has gradients G.
 * The second element has no gradient for `late` steps, `small` gradients for 60 steps, and then
 * none again. */
static double worst_update(const Way *k, double G, double small, int late, int without)
{
    const int n = format_is_dynamic8(k->m) ? GROUP : 128;
    Tensor w = make(F, 1, n), g = make(F, 1, n), m = make(k->m, 1, n), v = make(k->v, 1, n);
    const float zeros[GROUP] = { 0 };
    float in[GROUP] = { (float)G }, out[GROUP];
    double worst = 0;
    tensor_restore(m, keep(tensor_bytes(m)));
    tensor_restore(v, keep(tensor_bytes(v)));
    for (int t = 1; t <= late + 60 + without; t++) {
        const AdamW a = { .lr = 1,
                          .beta1 = (float)BETA1,
                          .beta2 = (float)BETA2,
                          .eps = (float)EPS,
                          .grad_scale = 1,
                          .correction1 = (float)(1 - pow(BETA1, t)),
                          .correction2 = (float)(1 - pow(BETA2, t)) };
        in[1] = t > late && t <= late + 60 ? (float)small : 0;
        put(w, zeros);
        put(g, in);
        (format_is_dynamic8(m.format) ? adamw8bit : adamw)(w, m, v, g, a, 0);
        device_get(out, w.data, (size_t)n * sizeof *out);
        worst = fmax(worst, fabs((double)out[1]));
    }
    release();
    return worst;
}

/* The bound holds. If it is above 10, some gradients come within a factor of three of it. */
TEST(test_bound)
{
    const double B = (1 - BETA1) / sqrt((1 - BETA2) * (1 - BETA1 * BETA1 / BETA2));
    for (int i = 0; i < WAYS; i++)
        for (double G = 1e-4; G <= 1; G *= 100) {
            const Way *k = &ways[i];
            const double r = fmax(sqrt(k->zero / (1 - BETA2)), k->stays), bound = B + G / EPS * r;
            double worst = 0;
            for (double small = G; small > 1e-5 * G; small *= 0.75)
                for (int late = 0; late <= 60; late += 60)
                    worst = fmax(worst, worst_update(k, G, small, late, k->stays > 0 ? 600 : 10));
            printf("m in %s, v in %s, gradients of %g: updates up to %.3g, bound %.3g\n",
                   format_name(k->m), format_name(k->v), G, worst, bound);
            assert_true(worst <= ROUNDING * bound && (bound < 10 || worst >= bound / 3));
        }
}

/* ---- every optimizer and recipe -------------------------------------------------------------- */

enum { STEPS = 24, EVERY = 10 };

/* Makes gradients of a unit of size 1e-3. In blocks, all weights have gradients. In other units,
 * every second row has gradients only in each tenth step. */
static void put_gradients(const ParamStore *store, int u, int step)
{
    const Shard *s = &store->shard[u];
    float *g = keep(s->slice[TRAINED].count * sizeof *g);
    for (int i = 0; i < store->shape[u].num_params; i++) {
        const Param *p = &store->shape[u].param[i];
        for (size_t e = 0; e < param_numel(p); e++) {
            const bool rare = !store->shape[u].kind->is_layer && e / (size_t)p->cols % 2 == 1;
            const double x = uniform((uint64_t)step, p->offset + e, 1e-12f, 1),
                         y = uniform(~(uint64_t)step, p->offset + e, 0, 1);
            g[p->offset + e] = rare && step % EVERY != 3
                                   ? 0
                                   : (float)(1e-3 * sqrt(-2 * log(x)) * cos(2 * M_PI * y));
        }
    }
    put(s->grad, g);
}

/* Returns the largest update of any weight in one step of the optimizer. */
static double largest_update(const char *optimizer, const char *recipe)
{
    static ModelConfig architecture_of_run;
    Config c = { 0 };
    Model m = { 0 };
    ParamStore store = { 0 };
    double most = 0;
    architecture_of_run = architecture(LLAMA);
    model_config(&c, &architecture_of_run, recipe, 2);
    c.optimizer.name = (char *)optimizer;
    c.optimizer.weight_decay = 0;
    c.optimizer.beta1 = BETA1, c.optimizer.beta2 = BETA2, c.optimizer.eps = EPS;
    c.recipe.master = c.recipe.grads = F;
    model_plan(&m, &store, &c, (ShardChoice){ 1, 0, false });
    model_alloc(&m, &store, &c);
    store_zero_states(&store);
    for (int step = 1; step <= STEPS; step++) {
        for (int u = 0; u < store.num_units; u++) {
            put_gradients(&store, u, step);
            fill(store.shard[u].slice[TRAINED].stored, 1, 0, 0);
        }
        optimizer_step(&store, &c, step, 1, 1);
        for (int u = 0; u < store.num_units; u++) {
            const double *w = values(store.shard[u].slice[TRAINED].stored);
            for (int i = 0; i < store.shape[u].num_params; i++) {
                const Param *p = &store.shape[u].param[i];
                for (size_t e = 0;
                     e < param_numel(p) && !(p->is_operand && store.optimizer->orthogonalizes); e++)
                    most = fmax(most, fabs(w[p->offset + e]));
            }
        }
        release();
    }
    model_free(&m, &store);
    return most;
}

TEST(test_optimizers)
{
    static const char *const optimizers[] = { "adamw", "adamw8bit", "muon" };
    const double exact = largest_update("adamw", "f32");
    for (const Recipe *r = recipes; r->name; r++)
        for (int i = 0; i < 3; i++) {
            const double most = largest_update(optimizers[i], r->name);
            if (most > ROUNDING * exact)
                fail_msg("%s of %s updates by up to %.3g; adamw with F32 moments by %.3g",
                         optimizers[i], r->name, most, exact);
        }
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
