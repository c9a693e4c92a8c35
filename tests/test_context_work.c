/* Which documents context ranks exchange: counts pairs one by one, compares with the time of every
 * other choice, and checks cases with a known answer. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "kernels/random.h"
#include "model/parallel/context_work.h"
#include "tests/models.h"

enum { MOST = 10, MOST_GROUP = 4 };

/* Returns the i-th random number of a seed, from 0 to `below` - 1. */
static int draw(uint64_t seed, int i, int below)
{
    return (int)(random_bits(seed, (uint64_t)i) % (uint64_t)below);
}

/* A query attends to all keys up to its own, or to a window of them. The formula counts half a key
 * less for each query, except for queries with a full window. */
TEST(test_pairs)
{
    ModelConfig m = architecture(LLAMA);
    m.sliding_window = 7;
    m.layer_types = (LayerTypes){ .count = 2, .slides = { true, false } };
    m.n_layers = 4;
    for (int tokens = 1; tokens < 40; tokens++) {
        double pairs = 0;
        for (int q = 0; q < tokens; q++)
            pairs += ((q < 7 ? q + 0.5 : 7) + (q + 0.5)) / 2;
        assert_true(fabs(context_pairs(&m, tokens) - pairs) < 1e-9);
    }
}

/* Llama-3-8B on two ranks. A token has 6 x 128 x (32 + 2 x 8 + 32) bytes. Half of them are sent,
 * and each byte takes as long as 1500 operations. A pair has 7 products of 2 x 128 operations in
 * each of 32 heads. */
TEST(test_tokens)
{
    ModelConfig m = architecture(LLAMA);
    m.n_heads = 32, m.n_kv_heads = 8, m.head_dim = 128;
    assert_true(fabs(context_token_pairs(&m, 2) - 6 * 128 * 80 / 2 * 1500.0 / (7 * 2 * 128 * 32)) <
                1e-9);
    m.n_kv_heads = 1; /* each of the four ranks gets a copy of this head */
    assert_true(fabs(context_token_pairs(&m, 4) -
                     6 * 128 * 72 * 0.75 * 1500.0 / (7 * 2 * 128 * 32)) < 1e-9);
}

/* Returns the time if documents skip the exchange, on each rank those with the fewest pairs first,
 * as long as their sum is at most `level` pairs. */
static double time_at(const OwnDocument *d, int count, const ContextWork *w, double level)
{
    double exchanged[MOST_GROUP], pairs = w->pairs, highest = 0, most = 0;
    memcpy(exchanged, w->exchanged, sizeof *exchanged * (size_t)w->ranks);
    for (int r = 0; r < w->ranks; r++) {
        double own = 0;
        for (double last = -1;;) {
            const OwnDocument *next = NULL;
            for (int i = 0; i < count; i++)
                if (d[i].rank == r && d[i].pairs > last && (!next || d[i].pairs < next->pairs))
                    next = &d[i];
            if (!next)
                break;
            last = next->pairs;
            if (own + next->pairs <= level) {
                own += next->pairs;
                highest = fmax(highest, own);
            } else {
                exchanged[r] += next->tokens;
                pairs += next->pairs;
            }
        }
        most = fmax(most, exchanged[r]);
    }
    return highest + pairs / w->ranks + w->token_pairs * most;
}

/* Random documents of different lengths; the pairs of a document are its length squared. */
TEST(test_least_time)
{
    int all = 0, none = 0, some = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        OwnDocument d[MOST], sorted[MOST];
        double exchanged[MOST_GROUP], left[MOST_GROUP];
        const int count = draw(seed, 0, MOST + 1), ranks = 2 + draw(seed, 1, MOST_GROUP - 1);
        for (int r = 0; r < ranks; r++)
            exchanged[r] = left[r] = draw(seed, 2 + r, 300);
        for (int i = 0; i < count; i++) {
            const int tokens = 1 + i + MOST * draw(seed, 20 + 2 * i, 60);
            d[i] = (OwnDocument){ i, draw(seed, 21 + 2 * i, ranks), tokens, (double)tokens * tokens,
                                  0 };
        }
        const ContextWork w = { ranks, 1e4, exchanged, draw(seed, 10, 1000) };
        ContextWork changed = w;
        changed.exchanged = left;
        memcpy(sorted, d, sizeof d);
        const int chosen = context_leave_out(sorted, count, &changed);
        double level = 0, least = time_at(d, count, &w, 0);
        for (int i = 0; i < chosen; i++)
            level = fmax(level, sorted[i].level);
        for (int i = 0; i < count; i++)
            assert_int_equal(i < chosen, chosen > 0 && sorted[i].level <= level);
        /* every level is the sum of some documents */
        for (int subset = 0; subset < 1 << count; subset++) {
            double sum = 0;
            for (int i = 0; i < count; i++)
                sum += subset >> i & 1 ? d[i].pairs : 0;
            least = fmin(least, time_at(d, count, &w, sum));
        }
        if (fabs(time_at(d, count, &w, level) - least) > 1e-9 * least)
            fail_msg("seed %d: %d of %d documents stay, which takes %.17g instead of %.17g",
                     (int)seed, chosen, count, time_at(d, count, &w, level), least);
        all += count > 0 && chosen == count;
        none += count > 0 && chosen == 0;
        some += chosen > 0 && chosen < count;
    }
    assert_true(all > 20 && none > 20 && some > 20);
}

/* Short documents skip the exchange. A long document of a single rank does not. Long documents of
 * all ranks do. */
TEST(test_long_documents)
{
    enum { LONG = 60000, SHORT = 500 };
    for (int both = 0; both < 2; both++) {
        double exchanged[2] = { 0 };
        OwnDocument d[] = { { 0, 0, LONG, (double)LONG * LONG / 2, 0 },
                            { 1, 0, SHORT, (double)SHORT * SHORT / 2, 0 },
                            { 2, 1, SHORT, (double)SHORT * SHORT / 2, 0 },
                            { 3, 1, LONG, (double)LONG * LONG / 2, 0 } };
        const int count = both ? 4 : 3;
        ContextWork w = { 2, 0, exchanged, 800 };
        assert_int_equal(context_leave_out(d, count, &w), both ? 4 : 2);
        for (int i = 0; i < 2; i++)
            assert_int_equal(d[i].tokens, SHORT);
    }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
