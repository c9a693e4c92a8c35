/* Takes and compares the results of runs on ranks: whole parameters, collected from the parts of
 * all ranks, and the bytes of one rank. */
#pragma once
#include <string.h>

#include "model/store/param_store_sizes.h"
#include "tests/ranks_case.h"

enum { MOST_UNITS = 10 };

/* ---- whole weights and gradients ------------------------------------------------------------- */

typedef enum { WEIGHTS, GRADIENTS } Kind;

/* Values of whole parameters, as one rank alone would hold them, for the units of this rank's
 * stage. NULL: the parameter has no values of this kind. Valid until release(). */
typedef struct {
    int units;
    double *x[MOST_UNITS][NUM_PARAMS];
    size_t numel[MOST_UNITS][NUM_PARAMS];
    Region region[MOST_UNITS][NUM_PARAMS];
    const char *name[MOST_UNITS][NUM_PARAMS];
} Whole;

/* Returns the values of a whole parameter: a sum over RANKS_STAGE, in which one rank contributes
 * the value of each element and the other ranks contribute 0. */
static inline double *whole_values(const ParamStore *store, int u, const Param *p, Kind kind)
{
    const Shard *s = &store->shard[u];
    const bool copy =
        store->shape[u].tensor_ranks > 1 && p->tensor_ranks == 1 && store->tensor_rank > 0;
    const size_t numel = param_numel(p) * (size_t)p->tensor_ranks;
    size_t first, whole, n = copy ? 0 : shard_part(s, p, &first);
    double *x = keep(numel * sizeof *x);
    const int mark = num_kept;
    const double *part =
        n ? values(kind == GRADIENTS ? slice_view(&s->slice[TRAINED], s->grad, p->offset + first, n)
                                     : shard_weights(s, p, first, n))
          : NULL;
    for (size_t i = 0; i < n; i++) {
        param_run(p, first + i, &whole);
        assert_true(whole < numel);
        x[whole] = part[i];
    }
    release_from(mark);
    comm_sum_over(x, (int)numel, RANKS_STAGE);
    return x;
}

/* The matrices of region QUANTIZED have no values here; Stored has their bytes. */
static inline Whole take_whole(const Run *r, Kind kind)
{
    const ParamStore *store = &r->store;
    Whole w = { .units = store->num_units };
    assert_true(w.units <= MOST_UNITS);
    for (int u = 0; u < w.units; u++)
        for (int i = 0; i < store->shape[u].num_params && store_holds(store, u); i++) {
            const Param *p = &store->shape[u].param[i];
            if (p->region == QUANTIZED || (kind == GRADIENTS && p->region != TRAINED))
                continue;
            w.x[u][p->id] = whole_values(store, u, p, kind);
            w.numel[u][p->id] = param_numel(p) * (size_t)p->tensor_ranks;
            w.region[u][p->id] = p->region;
            w.name[u][p->id] = p->name;
        }
    return w;
}

/* Returns |found - expected| / |expected| over all values together. */
static inline double whole_difference(const Whole *found, const Whole *expected)
{
    double x[2] = { 0 };
    for (int u = 0; u < found->units; u++)
        for (int i = 0; i < NUM_PARAMS; i++)
            for (size_t k = 0; found->x[u][i] && k < found->numel[u][i]; k++) {
                x[0] += pow(found->x[u][i][k] - expected->x[u][i][k], 2);
                x[1] += pow(expected->x[u][i][k], 2);
            }
    assert_true(x[1] > 0);
    return sqrt(x[0] / x[1]);
}

/* Checks that the trained values in `found` differ from `expected` by at most `bound` times the
 * largest value of their unit. bound 0: the values must be equal. Returns the number of compared
 * values. */
static inline size_t check_whole(const char *what, const Whole *found, const Whole *expected,
                                 double bound)
{
    size_t count = 0;
    for (int u = 0; u < found->units; u++) {
        double size = 0;
        for (int i = 0; i < NUM_PARAMS && bound > 0; i++)
            for (size_t k = 0; k < expected->numel[u][i]; k++)
                size = fmax(size, fabs(expected->x[u][i][k]));
        for (int i = 0; i < NUM_PARAMS; i++)
            for (size_t k = 0; found->region[u][i] == TRAINED && k < found->numel[u][i];
                 k++, count++)
                if (!(fabs(found->x[u][i][k] - expected->x[u][i][k]) <= bound * size))
                    fail_msg("%s: unit %d, %s, element %zu: %.9g, expected %.9g (largest %g)", what,
                             u, found->name[u][i], k, found->x[u][i][k], expected->x[u][i][k],
                             size);
    }
    return count;
}

/* ---- this rank's bytes ----------------------------------------------------------------------- */

/* This rank's bytes of each region of each unit, valid until release(). */
typedef struct {
    char *bytes[MOST_UNITS][NUM_REGIONS];
    size_t size[MOST_UNITS][NUM_REGIONS];
} Stored;

static inline Stored take_stored(const ParamStore *store)
{
    Stored x = { 0 };
    assert_true(store->num_units <= MOST_UNITS);
    for (int u = 0; u < store->num_units; u++)
        for (Region g = 0; g < NUM_REGIONS; g++) {
            const Slice *s = &store->shard[u].slice[g];
            x.size[u][g] = s->count * (g == QUANTIZED ? 1 : dtype_size(s->stored.format.dtype));
            x.bytes[u][g] = keep(x.size[u][g]);
            if (x.size[u][g] > 0)
                device_get(x.bytes[u][g], s->stored.data, x.size[u][g]);
        }
    return x;
}

/* Checks that the bytes of region `first` and of all later regions are the same. */
static inline void check_stored(const char *what, const Stored *now, const Stored *before,
                                Region first)
{
    for (int u = 0; u < MOST_UNITS; u++)
        for (Region g = first; g < NUM_REGIONS; g++) {
            assert_int_equal(now->size[u][g], before->size[u][g]);
            check_same_bytes(what, now->bytes[u][g], before->bytes[u][g], now->size[u][g]);
        }
}

/* Checks that each trained parameter has changed. An adapter must have changed on every rank that
 * holds a part of it. Any other parameter must have changed on some rank only, because not all
 * tokens occur. */
static inline void check_trained(const char *what, const ParamStore *store, const Stored *now,
                                 const Stored *before)
{
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            const Slice *s = &store->shard[u].slice[TRAINED];
            const size_t size = dtype_size(s->stored.format.dtype);
            size_t first, n = p->region == TRAINED ? shard_part(&store->shard[u], p, &first) : 0;
            const size_t at = n ? (p->offset + first - s->first) * size : 0;
            double changed = n ? memcmp(now->bytes[u][TRAINED] + at, before->bytes[u][TRAINED] + at,
                                        n * size) != 0
                               : 0;
            if (p->region == TRAINED && !p->is_adapter)
                comm_max(&changed, 1);
            if (changed == 0 && (p->is_adapter ? n > 0 : p->region == TRAINED))
                fail_msg("%s: %s of unit %d is trained but has not changed", what, p->name, u);
        }
}
