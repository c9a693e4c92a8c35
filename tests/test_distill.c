/* Compares distillation with its definition in double, whose gradient is a central difference, and
 * the choice of columns with sorting and with sums of probabilities; on CUDA also with the CPU's
 * record. */
#include "tests/test.h"
#include "tests/fp8.h"

/* rows and columns of the logits, and of an FP8 gradient; soft labels */
static const struct {
    int N, V, rows, cols, k;
} shapes[] = { { 5, 40, 16, 48, 7 }, { 3, 91, 16, 96, 64 }, { 6, 264, 16, 272, 3 } };
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct {
    int N, V, vocab, k, *target, *column;
    float *probability, *tail;
    Distillation d;
    double scale;
} Case;

/* Labels of random columns, in descending steps. Rows: 1 has no labels, 2 no tail, 3 is masked. */
static void make_labels(Case *c)
{
    c->target = keep(sizeof(int) * (size_t)c->N);
    c->column = keep(sizeof(int) * (size_t)(c->N * c->k));
    c->probability = keep(sizeof(float) * (size_t)(c->N * c->k));
    c->tail = keep(sizeof(float) * (size_t)c->N);
    for (int n = 0; n < c->N; n++) {
        const int used = n % 4 == 1 ? 0 : n % 4 == 2 ? c->k : c->k - 1;
        double sum = 0;
        c->target[n] = n % 4 == 3 ? -1 : (5 * n + 2) % c->vocab;
        c->tail[n] = n % 4 == 2 || used == 0 ? 0 : 0.0625f + 0.125f * (float)n;
        for (int i = 0; i < used; i++)
            sum += 1 + i % 5;
        for (int i = 0; i < c->k; i++) {
            const int at = n * c->k + i;
            /* 3 is no divisor of the vocabularies, so the columns differ */
            c->column[at] = i < used ? (3 * i + n) % c->vocab : -1;
            c->probability[at] = (float)((1 + i % 5) / sum * (1 - c->tail[n]));
        }
    }
}

static double log_sum_exp(const double *x, int n, double divisor)
{
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++)
        max = fmax(max, x[j] / divisor);
    for (int j = 0; j < n; j++)
        sum += exp(x[j] / divisor - max);
    return max + log(sum);
}

static double part(bool reverse, double t, double q)
{
    return reverse ? q * log(q / t) : t > 0 ? t * log(t / q) : 0;
}

static double divergence(const Case *c, int n, const double *x)
{
    const double z = log_sum_exp(x, c->vocab, c->d.temperature), least = LEAST_TAIL;
    double value = 0, rest = 1;
    int used = 0;
    for (int i = 0; i < c->k; i++)
        if (c->column[n * c->k + i] >= 0) {
            const double q = exp(x[c->column[n * c->k + i]] / c->d.temperature - z);
            value += part(c->d.reverse, c->probability[n * c->k + i], q);
            rest -= q;
            used++;
        }
    const double tail = c->d.reverse ? fmax(c->tail[n], least) : c->tail[n];
    return used ? value + part(c->d.reverse, tail, rest) : 0;
}

static double cross_entropy_of(const Case *c, int n, const double *x)
{
    return log_sum_exp(x, c->vocab, 1) - x[c->target[n]];
}

static double objective(const Case *c, int n, const double *x)
{
    return c->d.ce * cross_entropy_of(c, n, x) +
           c->d.kl * c->d.temperature * c->d.temperature * divergence(c, n, x);
}

typedef struct {
    double *loss, *divergence, *grad, *loss_bound, *divergence_bound, *grad_bound;
} Result;

/* log p has an error of e (loss.h), so p, q and t / q have relative errors of e + 8 u; q of the tail
 * has an absolute error of e + 8 u times the other q, and of k u. An outcome's part of the divergence
 * and r have errors of the errors of log q, times their weights. */
static void bound_row(const Case *c, int n, const double *x, Result *r)
{
    double max = -INFINITY, min = INFINITY, z = log_sum_exp(x, c->vocab, 1), rest = 1, largest = 1;
    const double T = c->d.temperature, zt = log_sum_exp(x, c->vocab, T);
    for (int j = 0; j < c->vocab; j++)
        max = fmax(max, x[j]), min = fmin(min, x[j]);
    const double e =
        U24 * (c->vocab + 8 +
               (max - min + 2 * (fabs(max) + fabs(min)) + fabs(z) + fabs(zt)) * 4 / fmin(T, 1));
    for (int i = 0; i < c->k; i++)
        if (c->column[n * c->k + i] >= 0) {
            const double log_q = x[c->column[n * c->k + i]] / T - zt;
            rest -= exp(log_q);
            largest = fmax(largest, fabs(log_q - log(c->probability[n * c->k + i])));
        }
    const double p = e + 8 * U24, of_rest = (p + c->k * U24) / fmax(rest, LEAST_TAIL),
                 tail = c->d.reverse ? rest : c->tail[n];
    largest = fmax(largest, fabs(log(fmax(rest, LEAST_TAIL)) - log(fmax(c->tail[n], LEAST_TAIL))));
    r->loss_bound[n] = e + 4 * U24 * (fabs(z) + fabs(x[c->target[n]]));
    /* errors of r of all outcomes, and of S; S and r are at most `largest` + 1 */
    const double of_r =
        p * (largest + 2) + of_rest * tail * (largest + 2) + (c->k + 8) * U24 * (largest + 2);
    r->divergence_bound[n] = of_r;
    for (int j = 0; j < c->vocab; j++) {
        const double pj = exp(x[j] - z), qj = exp(x[j] / T - zt),
                     ratio = c->tail[n] / fmax(rest, LEAST_TAIL);
        r->grad_bound[n * c->V + j] =
            c->scale *
                (c->d.ce * (2 * p * pj + 4 * U24 * (j == c->target[n])) +
                 c->d.kl * T *
                     (qj * (2 * of_r + of_rest * (ratio + 1) + 4 * p * (largest + ratio + 2)) +
                      8 * U24)) +
            1e-8 * c->scale; /* the central difference */
    }
}

static Result reference(const Case *c, const double *logits)
{
    const size_t row = sizeof(double) * (size_t)c->N, all = row * (size_t)c->V;
    Result r = { keep(row), keep(row), keep(all), keep(row), keep(row), keep(all) };
    const double h = 1e-4;
    for (int n = 0; n < c->N; n++) {
        if (c->target[n] < 0)
            continue;
        double *x = keep(sizeof *x * (size_t)c->V);
        memcpy(x, logits + n * c->V, sizeof *x * (size_t)c->V);
        r.loss[n] = cross_entropy_of(c, n, x);
        r.divergence[n] = divergence(c, n, x);
        bound_row(c, n, x, &r);
        for (int j = 0; j < c->vocab; j++) {
            const double at = x[j];
            x[j] = at + h;
            const double up = objective(c, n, x);
            x[j] = at - h;
            r.grad[n * c->V + j] = c->scale * (up - objective(c, n, x)) / (2 * h);
            x[j] = at;
        }
    }
    return r;
}

static double *widen(const double *x, int shape)
{
    const int V = shapes[shape].V, cols = shapes[shape].cols;
    double *y = keep(sizeof *y * (size_t)(shapes[shape].rows * cols));
    for (int n = 0; n < shapes[shape].N; n++)
        for (int j = 0; j < V; j++)
            y[n * cols + j] = x[n * V + j];
    return y;
}

static void distill_case(int shape, Distillation d, Format input, Format output)
{
    Case c = { shapes[shape].N, shapes[shape].V, shapes[shape].V - 3,
               shapes[shape].k, .d = d,          .scale = 0.125 };
    const bool fp8 = format_is_fp8(output);
    char name[128], part_name[160];
    snprintf(name, sizeof name, "distill/%dx%d-%s-%g-%g-%s-%s", c.N, c.V,
             d.reverse ? "reverse" : "forward", d.temperature, d.ce, format_name(input),
             format_name(output));
    make_labels(&c);
    Tensor logits = make_filled(input, c.N, c.V, 1, -4, 4), loss = make_f32(1, c.N),
           kl = make_f32(1, c.N), gradient = logits, probability = make_f32(c.N, c.k),
           tail = make_f32(1, c.N);
    put(probability, c.probability), put(tail, c.tail);
    const SoftLabels labels = { c.k, put_ints(c.column, (size_t)(c.N * c.k)), probability.data,
                                tail.data };
    int *target = put_ints(c.target, (size_t)c.N);
    const Result r = reference(&c, values(logits));
    TWICE(distill(NONE, 0, logits, loss.data, kl.data, target, labels, d, c.vocab, (float)c.scale),
          loss, kl, logits);
    check_close(name, loss, r.loss, r.loss_bound);
    check_close(name, kl, r.divergence, r.divergence_bound);
    if (fp8)
        gradient = make(output, shapes[shape].rows, shapes[shape].cols);
    TWICE(distill(gradient, 4 * (float)c.scale, logits, loss.data, kl.data, target, labels, d,
                  c.vocab, (float)c.scale),
          gradient, loss, kl);
    snprintf(part_name, sizeof part_name, "%s-divergence", name);
    check_close(part_name, kl, r.divergence, r.divergence_bound);
    golden_check(part_name, kl, r.divergence_bound);
    double *bound = fp8 ? widen(r.grad_bound, shape) : r.grad_bound;
    if (fp8)
        check_codes(name, gradient, widen(r.grad, shape), bound);
    else
        check_close(name, gradient, r.grad, bound);
    const double smallest = fp8 ? fp8_table(output.dtype)[1] * operand_scale(gradient) : 0;
    for (size_t i = 0; i < tensor_numel(gradient) && fp8; i++)
        bound[i] += bound[i] > 0 ? smallest / 2 : 0;
    golden_check(name, gradient, bound);
    release();
}

TEST(test_distill)
{
    const Format f32 = { F32, 0 }, bf16 = { BF16, 0 }, e4m3 = { E4M3, 0 }, e5m2 = { E5M2, 0 };
    for (int s = 0; s < SHAPES; s++)
        for (int i = 0; i < 4; i++) {
            const Distillation d = { i % 2, i < 2 ? 1 : 2, 0.75f, i % 2 ? 0.25f : 0 };
            distill_case(s, d, f32, f32);
            distill_case(s, d, bf16, bf16);
            distill_case(s, d, bf16, i % 2 ? e4m3 : e5m2);
        }
}

/* ---- columns --------------------------------------------------------------------------------- */

static int *masked_targets(int N)
{
    int *target = keep(sizeof *target * (size_t)N);
    for (int n = 0; n < N; n++)
        target[n] = n % 3 == 1 ? -1 : n;
    return target;
}

/* Rounding: the error of log p in loss.h, and for the entropy a weighted mean of it and of |x|. */
static void columns_case(Format f, int V, int k, float temperature)
{
    enum { N = 4 };
    const int vocab = V - 1, *host = masked_targets(N);
    Tensor logits = make_filled(f, N, V, 3, -6, 6), column = make_f32(N, k), logp = make_f32(N, k),
           entropy = make_f32(1, N);
    int *target = put_ints(host, N), *columns = column.data;
    const double *x = values(logits);
    row_entropy(entropy.data, logits, target, vocab, temperature);
    for (int draws = 0; draws < 2; draws++) {
        if (draws)
            TWICE(draw_columns(columns, logp.data, logits, target, vocab, temperature, k, 9),
                  column, logp);
        else if (k <= vocab)
            TWICE(top_columns(columns, logp.data, logits, target, vocab, temperature, k), column,
                  logp);
        else
            continue;
        const int *found = tensor_snapshot(column);
        const double *found_logp = values(logp), *found_entropy = values(entropy);
        for (int n = 0; n < N; n++) {
            const double *row = x + n * V, z = log_sum_exp(row, vocab, temperature),
                         e = U24 * (vocab + 60 + 24 / temperature) * 2;
            double sum = 0, H = 0, *before = keep(sizeof *before * (size_t)(vocab + 1));
            float draw[MOST_SOFT];
            for (int j = 0; j < vocab; j++) {
                const double log_p = row[j] / temperature - z;
                H -= exp(log_p) * log_p;
                before[j + 1] = sum += exp(log_p);
            }
            for (int i = 0; i < k; i++) { /* ascending */
                int at = i;
                const float u = random_unit(9, (uint64_t)(n * k + i));
                for (; at > 0 && draw[at - 1] > u; at--)
                    draw[at] = draw[at - 1];
                draw[at] = u;
            }
            assert_true(fabs(found_entropy[n] - (host[n] < 0 ? 0 : H)) <=
                        e * (12 / temperature + log(vocab)));
            for (int i = 0; i < k; i++) {
                const int c = found[n * k + i];
                if (host[n] < 0) {
                    assert_int_equal(c, -1);
                    continue;
                }
                assert_true(c >= 0 && c < vocab);
                assert_true(fabs(found_logp[n * k + i] - (row[c] / temperature - z)) <= e);
                if (draws)
                    assert_true(before[c] <= draw[i] + e && draw[i] - e <= before[c + 1]);
            }
        }
        if (!draws) {
            for (int n = 0; n < N;
                 n += 3) { /* each has a rank below k: columns above it, or equal before it */
                for (int i = 0; i < k; i++) {
                    const int c = found[n * k + i];
                    int rank = 0;
                    for (int j = 0; j < vocab; j++)
                        rank +=
                            x[n * V + j] > x[n * V + c] || (x[n * V + j] == x[n * V + c] && j < c);
                    assert_true(rank < k);
                    for (int other = 0; other < i; other++)
                        assert_int_not_equal(found[n * k + other], c);
                }
            }
            char name[64];
            snprintf(name, sizeof name, "top_columns/%d-%d-%s", V, k, format_name(f));
            golden_check(name, column, NULL);
        }
    }
    release();
}

TEST(test_columns)
{
    const Format f32 = { F32, 0 }, bf16 = { BF16, 0 };
    columns_case(f32, 40, 5, 1);
    columns_case(f32, 40, 39, 0.5f);
    columns_case(bf16, 1000, 64, 1); /* many equal logits */
    columns_case(bf16, 37, 256, 2);
    columns_case(f32, 3000, MOST_SOFT, 1);
}

TEST(test_errors)
{
    const Format f = { BF16, 0 };
    Tensor logits = make(f, 2, 32), other = make(f, 2, 32), floats = make_f32(2, 2);
    int *ids = put_ints((int[]){ 1, -1 }, 2);
    float *x = floats.data;
    const SoftLabels labels = { 1, ids, x, x };
    const Distillation d = { false, 1, 1, 0 };
    DIES("neither the logits nor FP8", distill(other, 1, logits, x, x + 2, ids, labels, d, 32, 1));
    DIES("vocabulary of 33", distill(NONE, 1, logits, x, x + 2, ids, labels, d, 33, 1));
    DIES("513 columns; at most 512", draw_columns(ids, x, logits, ids, 32, 1, 513, 1));
    DIES("the 33 largest of 32 columns", top_columns(ids, x, logits, ids, 32, 1, 33));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
