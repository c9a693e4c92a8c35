/* Compares the backward of every operation with central differences of its forward, in F32.
 *
 * For L = sum cot * y with random cot, D(h) = (L(x+h) - L(x-h)) / 2h. Its truncation error is about
 * (D(2h) - D(h)) / 3, so |D(2h) - D(h)| bounds it while the cubic term dominates. Outputs that a
 * perturbation does not change cancel exactly; each other output has an error of k u max|y|, with k
 * given at the operation, which D(h) divides by h. */
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/routing.h"

enum { MAX_SAMPLES = 200 };
static const Format F = { F32, 0 };
static const float STEP = 0x1p-6f;

/* The function y = f(inputs); `forward` reads and writes its tensors. */
typedef struct {
    const char *name;
    void (*forward)(void);
    Tensor y, cot;
    double noise; /* k: error of an output in units of u max|y| */
} Function;

/* ---- differences ----------------------------------------------------------------------------- */

static double *forward_at(const Function *f, Tensor x, size_t i, float value)
{
    device_put((float *)x.data + i, &value, sizeof value);
    f->forward();
    return values(f->y);
}

/* D(h) at element i; *noise: its error bound. */
static double difference(const Function *f, Tensor x, size_t i, float at, float h, double *noise)
{
    const int mark = num_kept;
    const double *cot = values(f->cot), *up = forward_at(f, x, i, at + h),
                 *down = forward_at(f, x, i, at - h);
    double sum = 0, largest = 0, changed = 0, width = (double)(at + h) - (double)(at - h);
    for (size_t j = 0; j < tensor_numel(f->y); j++) {
        sum += cot[j] * (up[j] - down[j]);
        largest = fmax(largest, fmax(fabs(up[j]), fabs(down[j])));
        changed += up[j] != down[j] ? fabs(cot[j]) : 0;
    }
    *noise = changed * f->noise * U24 * largest * 2 / width;
    for (int k = mark; k < num_kept; k++)
        free(kept[k].memory);
    num_kept = mark;
    return sum / width;
}

/* x is perturbed; dx has the analytic gradient. Checks at most MAX_SAMPLES elements, spread
 * evenly. */
static void check_gradient(const Function *f, const char *of, Tensor x, Tensor dx)
{
    const size_t numel = tensor_numel(x), stride = numel / MAX_SAMPLES + 1;
    const double *X = values(x), *D = values(dx);
    /* the analytic gradient has terms up to this size, and an error of k u of this size */
    double largest = 0;
    for (size_t i = 0; i < numel; i++)
        largest = fmax(largest, fabs(D[i]));
    for (size_t i = 0; i < numel; i += stride) {
        double noise, wide_noise;
        double d = difference(f, x, i, (float)X[i], STEP, &noise);
        double wide = difference(f, x, i, (float)X[i], 2 * STEP, &wide_noise);
        float at = (float)X[i];
        device_put((float *)x.data + i, &at, sizeof at);
        double limit = fabs(wide - d) + noise + wide_noise + f->noise * U24 * largest;
        if (!(fabs(D[i] - d) <= limit))
            fail_msg("%s: gradient of %s[%zu] is %.7g, by differences %.7g; off by %.2g, at most "
                     "%.2g is explained",
                     f->name, of, i, D[i], d, fabs(D[i] - d), limit);
    }
    f->forward();
}

/* ---- the operations, on tensors that stay in place while they are perturbed ------------------ */

static struct {
    Tensor x, w, add, y, qnorm, knorm, losses;
    float *stats;
    Norm norm;
    Attention attention;
    Documents documents;
    const int *ints;
    const TokenAt *tokens;
    int vocab;
    Routing routing;
    bool normalize;
} now;

static Tensor filled(int rows, int cols, uint64_t seed)
{
    return make_filled(F, rows, cols, seed, -1, 1);
}

static Tensor zeros(int rows, int cols)
{
    return make_filled(F, rows, cols, 0, 0, 0);
}

static void run_norm(void)
{
    norm_forward(now.y, now.x, now.stats, now.x, now.w, now.add, now.norm, FROM_SAVED);
}

/* k: a sum of C terms for rstd, then four operations */
static void norm_case(NormKind kind, bool weight, bool residual, int N, int C)
{
    now.norm = (Norm){ kind, 1e-5f };
    now.x = filled(N, C, 1), now.y = make(F, N, C), now.stats = make(F, N, 2).data;
    now.w = weight ? make_filled(F, 1, C, 2, 0.5f, 1.5f) : NONE;
    now.add = residual ? filled(N, C, 3) : NONE;
    const Function f = { "norm", run_norm, now.y, filled(N, C, 4), C + 16 };
    Tensor dx = zeros(N, C), dw = weight ? zeros(1, C) : NONE;
    f.forward();
    norm_backward(dx, NULL, dw, f.cot, now.x, now.stats, now.w, now.norm, true);
    check_gradient(&f, "x", now.x, dx);
    if (weight)
        check_gradient(&f, "w", now.w, dw);
    if (residual)
        check_gradient(&f, "residual", now.add, f.cot);
    release();
}

TEST(test_norm)
{
    for (int i = 0; i < 8; i++) {
        norm_case(i & 1 ? LAYER_NORM : RMS_NORM, i & 2, i & 4, 3, 16);
        if (on_cpu()) {
            norm_case(i & 1 ? LAYER_NORM : RMS_NORM, i & 2, i & 4, 1, 7);
            norm_case(i & 1 ? LAYER_NORM : RMS_NORM, i & 2, i & 4, 5, 13);
        }
    }
}

static void run_matmul(void)
{
    matmul(now.y, now.x, now.w, now.add);
}

/* k: a sum of C products, which exceed |y| by a factor below C */
static void matmul_case(int N, int C, int O)
{
    now.x = filled(N, C, 1), now.w = filled(O, C, 2), now.add = filled(N, O, 3),
    now.y = make(F, N, O);
    const Function f = { "matmul", run_matmul, now.y, filled(N, O, 4), C * (C + 2) };
    Tensor dx = zeros(N, C), dw = zeros(O, C);
    f.forward();
    matmul_dx(dx, f.cot, now.w, true);
    matmul_dw(dw, f.cot, now.x);
    check_gradient(&f, "x", now.x, dx);
    check_gradient(&f, "w", now.w, dw);
    check_gradient(&f, "add", now.add, f.cot);
    Tensor db = zeros(O, 1);
    now.add = filled(O, 1, 5);
    f.forward();
    matmul_db(db, f.cot);
    check_gradient(&f, "bias", now.add, db);
    release();
}

TEST(test_matmul)
{
    matmul_case(8, 16, 8);
    if (on_cpu()) {
        matmul_case(1, 1, 1);
        matmul_case(1, 7, 3);
        matmul_case(5, 3, 9);
    }
}

static void run_embedding(void)
{
    embedding_forward(now.y, now.tokens, now.w);
}

TEST(test_embedding)
{
    enum { N = 6, C = 8, V = 5 };
    const int tokens[N] = { 4, 0, 4, 2, 0, 4 };
    now.tokens = put_sorted(tokens, N, V);
    now.w = filled(V, C, 1), now.y = make(F, N, C);
    const Function f = { "embedding", run_embedding, now.y, filled(N, C, 2), 1 };
    Tensor dw = zeros(V, C);
    embedding_backward(dw, now.tokens, f.cot);
    check_gradient(&f, "w", now.w, dw);
    release();
}

static void run_swiglu(void)
{
    swiglu_forward(now.y, now.x, now.x, NO_PRODUCT, FROM_SAVED);
}

/* k: five operations and expf */
static void swiglu_case(int N, int width)
{
    now.x = make_filled(F, N, 2 * width, 1, -3, 3), now.y = make(F, N, width);
    const Function f = { "swiglu", run_swiglu, now.y, filled(N, width, 2), 12 };
    Tensor dx = make(F, N, 2 * width);
    swiglu_backward(dx, NONE, f.cot, NO_PRODUCT, now.x);
    check_gradient(&f, "gate_up", now.x, dx);
    release();
}

TEST(test_swiglu)
{
    swiglu_case(4, 16);
    if (on_cpu()) {
        swiglu_case(1, 1);
        swiglu_case(3, 5);
    }
}

static void run_loss(void)
{
    float *losses = now.losses.data;
    cross_entropy(now.x, losses, losses + now.x.rows, now.ints, NULL, now.vocab, 1, 1, 0, false);
}

/* k: a sum of `vocab` exponentials; |max - min| <= 6 in exp's argument; zloss doubles k. weighted:
 * rows have factors, also negative ones */
static void loss_case(int N, int V, int vocab, float scale, float z_weight, bool weighted)
{
    int *target = keep(sizeof *target * (size_t)N);
    float *cot = keep(sizeof *cot * 2 * (size_t)N);
    Tensor weight = make_filled(F, 1, N, 7, -2, 2);
    const double *factor = values(weight);
    for (int n = 0; n < N; n++) {
        const float own = weighted ? scale * (float)factor[n] : scale;
        target[n] = n % 3 == 1 ? -1 : (int)(random_bits(5, (uint64_t)n) % (uint64_t)vocab);
        cot[n] = own, cot[N + n] = own * z_weight;
    }
    now.ints = put_ints(target, (size_t)N), now.vocab = vocab;
    now.x = make_filled(F, N, V, 1, -3, 3), now.losses = make(F, 2, N);
    Function f = { "cross_entropy", run_loss, now.losses, make(F, 2, N), 2 * (vocab + 30) };
    put(f.cot, cot);
    Tensor grad = make_filled(F, N, V, 1, -3, 3), scratch = make(F, 2, N);
    cross_entropy(grad, scratch.data, (float *)scratch.data + N, now.ints,
                  weighted ? weight.data : NULL, vocab, 1, scale, z_weight, true);
    check_gradient(&f, "logits", now.x, grad);
    release();
}

TEST(test_loss)
{
    loss_case(4, 16, 13, 0.5f, 0, false);
    loss_case(4, 16, 16, 0.5f, 0.1f, false);
    loss_case(4, 16, 13, 0.5f, 0, true);
    if (on_cpu()) {
        loss_case(1, 3, 2, 1, 0.01f, false);
        loss_case(7, 11, 9, 2, 0.1f, true);
    }
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Logits that differ by 0.4 or more within a row, so that a perturbation does not change the choice
 * of experts. */
static Tensor logits_apart(int N, int E)
{
    Tensor t = make(F, N, E);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (int i = 0; i < N * E; i++)
        x[i] = 0.5f * (float)((i % E * 3 + i / E) % E) - 1 + uniform(1, (size_t)i, 0, 0.1f);
    put(t, x);
    return t;
}

static void run_route(void)
{
    route(now.routing, now.x, NULL, now.normalize);
}

static void run_stats(void)
{
    router_stats(now.y, now.x, now.routing);
}

/* k: exp of differences up to 4, a sum of E exponentials, and a quotient by a sum of k of them */
static void weights_case(int N, int E, int k, bool normalize)
{
    now.x = logits_apart(N, E), now.normalize = normalize;
    const Routed g = route_on_host(now.x, k, normalize);
    now.routing = make_routing(N, E, k);
    now.y = tensor_at(now.routing.weight, F, N, k);
    const Function f = { "route", run_route, now.y, filled(N, k, 2), 2 * (E + k + 20) };
    Tensor dx = make(F, N, E), dweight = zeros(1, g.rows);
    const double *cot = values(f.cot);
    for (int i = 0; i < N * k; i++)
        device_put((float *)dweight.data + g.host.row[i], &(float){ (float)cot[i] }, sizeof(float));
    f.forward();
    route_backward(dx, dweight.data, now.x, now.routing, normalize, NONE, 0, 0);
    check_gradient(&f, "logits", now.x, dx);
    release();
}

/* The losses are sums over router_stats' columns, weighted with the counts and with z. k: as above,
 * and a sum over the tokens of a group. */
static void losses_case(int N, int E, int k, int groups, float balance, float z)
{
    const int width = router_stats_width(E);
    now.x = logits_apart(N, E), now.y = make(F, groups, width);
    const Routed g = route_on_host(now.x, k, false);
    now.routing = g.device;
    const Function f = { "router_stats", run_stats, now.y, make(F, groups, width),
                         2 * (E + N / groups + 40) };
    f.forward();
    Tensor dx = make(F, N, E), counts = make(F, groups, width), dweight = zeros(1, g.rows);
    float *cot = keep(tensor_numel(f.cot) * sizeof *cot);
    const double *stats = values(now.y);
    for (int i = 0; i < groups * width; i++)
        cot[i] = i % width == 2 * E                    ? z
                 : i % width >= E && i % width < 2 * E ? balance * (float)stats[i - E]
                                                       : 0;
    put(f.cot, cot);
    device_copy(counts.data, now.y.data, tensor_bytes(counts));
    route_backward(dx, dweight.data, now.x, now.routing, true, counts, balance, z);
    check_gradient(&f, "logits", now.x, dx);
    release();
}

TEST(test_router)
{
    for (int normalize = 0; normalize < 2; normalize++) {
        weights_case(6, 8, 3, normalize);
        weights_case(5, 4, 1, normalize);
        weights_case(3, 5, 5, normalize);
    }
    losses_case(8, 7, 2, 2, 0.25f, 0);
    losses_case(8, 7, 2, 4, 0, 0.5f);
    losses_case(6, 4, 1, 1, 0.25f, 0.5f);
}

static void run_experts_swiglu(void)
{
    experts_swiglu(now.y, now.x, now.x, now.routing, FROM_SAVED);
}

/* Every expert gets all tokens; their number needs no padding. k: six operations and expf. */
TEST(test_experts_swiglu)
{
    enum { N = EXPERT_ROWS, E = 2, K = 2, WIDTH = 16 };
    const Routed g = route_on_host(logits_apart(N, E), K, false);
    now.routing = g.device;
    now.x = make_filled(F, g.rows, 2 * WIDTH, 1, -3, 3), now.y = zeros(g.rows, WIDTH);
    const Function f = { "experts_swiglu", run_experts_swiglu, now.y, filled(g.rows, WIDTH, 2),
                         14 };
    Tensor dx = zeros(g.rows, 2 * WIDTH), dweight = zeros(1, g.rows),
           weight = tensor_at(g.device.weight, F, N, K), sorted = make(F, N, K);
    experts_swiglu_backward(dx, NONE, dweight.data, f.cot, now.x, g.device);
    for (int i = 0; i < N * K; i++)
        device_copy((float *)sorted.data + i, (float *)dweight.data + g.host.row[i], sizeof(float));
    f.forward();
    check_gradient(&f, "gate_up", now.x, dx);
    check_gradient(&f, "weight", weight, sorted);
    release();
}

/* ---- rope and attention ---------------------------------------------------------------------- */

static Attention attention_of(int B, int T, int H, int K, int D)
{
    float *host = keep(sizeof *host * (size_t)(T * D));
    Tensor table = make(F, T, D);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            host[t * D + 2 * i] = (float)cos(t * pow(100, -2.0 * i / D));
            host[t * D + 2 * i + 1] = (float)sin(t * pow(100, -2.0 * i / D));
        }
    put(table, host);
    return (Attention){ .B = B,
                        .T = T,
                        .H = H,
                        .K = K,
                        .D = D,
                        .scale = 1 / sqrtf((float)D),
                        .norm = { RMS_NORM, 1e-5f },
                        .rope = table.data };
}

static void run_rope(void)
{
    rope_forward(now.y, now.x, now.qnorm.data ? now.stats : NULL, now.x, NO_PRODUCT, now.qnorm,
                 now.knorm, now.attention, FROM_SAVED);
}

/* Moves elements away from the limit, where the clamp has no derivative. */
static void fill_beside(Tensor t, uint64_t seed, float limit)
{
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++) {
        x[i] = uniform(seed, i, -1, 1);
        if (fabsf(fabsf(x[i]) - limit) < 3 * STEP)
            x[i] *= 0.5f;
    }
    put(t, x);
}

typedef enum { NO_NORM, WHOLE, BY_HEAD } Norms;

/* k: a sum of up to H*D terms for the norm's rstd, then six operations */
static void rope_case(float clip, Norms norms, int B, int T, int H, int K, int D)
{
    const int N = B * T, S = (H + 2 * K) * D, Q = norms == BY_HEAD ? D : H * D,
              KW = norms == BY_HEAD ? D : K * D;
    now.attention = attention_of(B, T, H, K, D);
    now.attention.clip = clip;
    now.x = make(F, N, S), now.y = make(F, N, S),
    now.stats = make(F, N, norms == BY_HEAD ? H + K : 2).data;
    fill_beside(now.x, 1, clip);
    now.qnorm = norms ? make_filled(F, 1, Q, 2, 0.5f, 1.5f) : NONE;
    now.knorm = norms ? make_filled(F, 1, KW, 3, 0.5f, 1.5f) : NONE;
    const Function f = { "rope", run_rope, now.y, filled(N, S, 4), H * D + 20 };
    Tensor dx = make(F, N, S), dq = norms ? zeros(1, Q) : NONE, dk = norms ? zeros(1, KW) : NONE;
    f.forward();
    rope_backward(dx, dq, dk, f.cot, now.x, norms ? now.stats : NULL, now.qnorm, now.knorm,
                  now.attention);
    check_gradient(&f, "x", now.x, dx);
    if (norms) {
        check_gradient(&f, "qnorm", now.qnorm, dq);
        check_gradient(&f, "knorm", now.knorm, dk);
    }
    release();
}

TEST(test_rope)
{
    for (int i = 0; i < 6; i++) {
        const float clip = i % 2 ? 0.6f : 0;
        const Norms norms = (Norms)(i / 2);
        rope_case(clip, norms, 2, 4, 4, 2, 8);
        if (on_cpu()) {
            rope_case(clip, norms, 1, 1, 1, 1, 2);
            rope_case(clip, norms, 2, 3, 3, 1, 6);
        }
        if (norms == BY_HEAD) {
            rope_case(clip, norms, 1, 3, 4, 2, 16);
            rope_case(clip, norms, 1, 2, 3, 1, 24);
            rope_case(clip, norms, 1, 2, 2, 1, 128);
        }
    }
}

static void run_attention(void)
{
    attention_forward(now.y, now.stats, now.x, now.attention, now.documents);
}

/* k: scores are sums of D products below 1, scaled: 2 sqrt(D) (D + 2), twice in exp; the mean of v
 * has T + 2 terms */
static void attention_case(const int *start, int B, int T, int H, int K, int D, int window)
{
    const int N = B * T, S = (H + 2 * K) * D, O = H * D;
    now.attention = attention_of(B, T, H, K, D);
    now.attention.window = window;
    now.documents = (Documents){ 0 };
    if (start) {
        while (start[now.documents.count] < N)
            now.documents.count++;
        now.documents.longest = T;
        now.documents.host_start = start;
        now.documents.start = put_ints(start, (size_t)now.documents.count + 1);
    }
    now.x = filled(N, S, 1), now.y = make(F, N, O), now.stats = make(F, N, H).data;
    const Function f = { "attention", run_attention, now.y, filled(N, O, 2),
                         4 * sqrt(D) * (D + 2) + 2 * (T + 12) };
    Tensor dx = make(F, N, S);
    f.forward();
    attention_backward(dx, f.cot, now.x, now.y, now.stats, now.attention, now.documents);
    check_gradient(&f, "qkv", now.x, dx);
    release();
}

TEST(test_attention)
{
    static const int documents[] = { 0, 3, 4, 8, 10, 16 }, singles[] = { 0, 1, 2, 3, 4, 5, 6 };
    attention_case(NULL, 2, 8, 4, 2, 8, 0);
    attention_case(NULL, 2, 8, 4, 2, 8, 3);
    attention_case(documents, 2, 8, 4, 2, 8, 0);
    attention_case(documents, 2, 8, 4, 2, 8, 2);
    if (on_cpu()) {
        attention_case(NULL, 1, 1, 1, 1, 2, 0);
        attention_case(NULL, 2, 5, 3, 1, 6, 0);
        attention_case(NULL, 2, 5, 3, 1, 6, 1);
        attention_case(NULL, 1, 5, 2, 2, 3, 0);
        attention_case(singles, 2, 3, 2, 1, 4, 0);
    }
}

/* The argument: a test to leave out; scripts/gpu.sh gives it under racecheck. */
int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_skip_filter(argv[1]);
    return run_all_tests(start_device, NULL);
}
