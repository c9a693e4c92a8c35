/* The parameters of a block define how they may be cut. Pieces made by `split` and `part` compute
 * the result of the whole parameter: the pieces' results are concatenated or added. In double
 * precision, with layers that this file implements again. */
#include <math.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "tests/models.h"

enum { RANK = 3, ROWS_MOST = 512, PIECES = 2 };

/* A parameter in row-major order, or a piece of it. */
typedef struct {
    const Param *p;
    double *w;
    int rows, cols;
} Matrix;

static const Param *find_param(const UnitLayout *s, const char *name)
{
    for (int i = 0; i < s->num_params; i++)
        if (strcmp(s->param[i].name, name) == 0)
            return &s->param[i];
    fail_msg("no parameter %s", name);
    return NULL;
}

/* Returns piece `piece` of `pieces`. Each part gives the same fraction of its rows, because each
 * part is a separate output of a layer. */
static Matrix cut(const UnitLayout *s, const char *name, int piece, int pieces)
{
    const Param *p = find_param(s, name);
    const int split_rows = p->split == SPLIT_ROWS ? pieces : 1,
              split_cols = p->split == SPLIT_COLUMNS ? pieces : 1;
    Matrix m = { p, keep(param_numel(p) * sizeof(double)), 0, p->cols / split_cols };
    for (int i = 0; i < p->num_projections; i++) {
        const int n = p->projection[i].rows / split_rows,
                  first = p->projection[i].first + (split_rows > 1 ? piece * n : 0);
        for (int r = 0; r < n; r++, m.rows++)
            for (int c = 0; c < m.cols; c++) {
                const int col = c + (split_cols > 1 ? piece * m.cols : 0);
                m.w[m.rows * m.cols + c] =
                    test_uniform((uint64_t)p->id, (uint64_t)((first + r) * p->cols + col));
            }
    }
    return m;
}

/* y = x w^T */
static void multiply(double *y, const double *x, Matrix m)
{
    for (int r = 0; r < m.rows; r++) {
        y[r] = 0;
        for (int c = 0; c < m.cols; c++)
            y[r] += x[c] * m.w[r * m.cols + c];
    }
}

/* y = x w^T + (x A^T) B^T; part i of B reads the i-th RANK outputs of A */
static int linear(double *y, const double *x, const UnitLayout *s, const char *name, int piece,
                  int pieces)
{
    char a[16], b[16];
    double xa[3 * RANK];
    snprintf(a, sizeof a, "%s_a", name);
    snprintf(b, sizeof b, "%s_b", name);
    const Matrix w = cut(s, name, piece, pieces), down = cut(s, a, piece, pieces),
                 up = cut(s, b, piece, pieces);
    multiply(y, x, w);
    multiply(xa, x, down);
    for (int r = 0; r < up.rows; r++)
        for (int j = 0; j < RANK; j++)
            y[r] += xa[r / (up.rows / up.p->num_projections) * RANK + j] * up.w[r * RANK + j];
    return w.rows;
}

/* Returns the contribution of one piece to the output of two layers. The `parts` outputs of the
 * first layer are multiplied element by element. */
static void two_layers(double *sum, const double *x, const UnitLayout *s, const char *first,
                       const char *second, int parts, int piece, int pieces)
{
    double y[ROWS_MOST], z[ROWS_MOST], out[ROWS_MOST];
    const int width = linear(y, x, s, first, piece, pieces) / parts;
    for (int i = 0; i < width; i++) {
        z[i] = 1;
        for (int k = 0; k < parts; k++)
            z[i] *= y[k * width + i];
    }
    const int rows = linear(out, z, s, second, piece, pieces);
    for (int i = 0; i < rows; i++)
        sum[i] += out[i];
}

/* With magnitudes below 1, a layer of n inputs and its adapter give less than n (1 + RANK). A
 * product of k sums of up to n numbers has an error of k n roundings of the product of their
 * magnitudes. */
TEST(test_split)
{
    static const struct {
        const char *first, *second;
        int parts;
    } layers[] = { { "qkv", "out", 3 }, { "gate_up", "down", 2 } };
    const ModelConfig m = with_adapters(architecture(LLAMA), RANK, ALL_MODULES, BASE_AS_FROZEN);
    UnitLayout s;
    unit_shape(&s, &m, 1, 1);
    for (int l = 0; l < 2; l++) {
        double x[ROWS_MOST], whole[ROWS_MOST] = { 0 }, pieces[ROWS_MOST] = { 0 };
        for (int i = 0; i < m.d_model; i++)
            x[i] = test_uniform(77, (uint64_t)i);
        two_layers(whole, x, &s, layers[l].first, layers[l].second, layers[l].parts, 0, 1);
        for (int i = 0; i < PIECES; i++)
            two_layers(pieces, x, &s, layers[l].first, layers[l].second, layers[l].parts, i,
                       PIECES);
        const double n = m.d_model + m.mlp_width + 2 * RANK, gain = 1 + RANK, k = layers[l].parts;
        const double most = m.mlp_width * gain * pow(m.d_model * gain, k),
                     bound = (k + 1) * n * 0x1p-53 * most;
        for (int i = 0; i < m.d_model; i++)
            if (!(fabs(whole[i] - pieces[i]) <= bound))
                fail_msg("%s and %s: output %d is %g, in pieces %g", layers[l].first,
                         layers[l].second, i, whole[i], pieces[i]);
        release();
    }
    free(s.param);
}

/* Parts are consecutive rows, and cover all rows except the vocabulary's padding. */
TEST(test_parts)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = with_adapters(
            architecture(a), RANK, 1 << LORA_K | 1 << LORA_V | 1 << LORA_DOWN, BASE_AS_FROZEN);
        for (int u = 0; u < unit_count(&m); u++) {
            UnitLayout s;
            unit_shape(&s, &m, u, 1);
            for (int i = 0; i < s.num_params; i++) {
                const Param *p = &s.param[i];
                int rows = 0;
                for (int k = 0; k < p->num_projections; rows += p->projection[k++].rows)
                    assert_int_equal(p->projection[k].first, rows);
                assert_int_equal(rows, p->has_padding ? m.vocab_size : p->rows);
            }
            free(s.param);
        }
    }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
