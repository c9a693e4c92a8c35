#include "model/run/average.h"

#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/formats/file.h"
#include "model/store/fsdp.h"
#include "kernels/runtime/agree.h"

static Tensor mean_of(const ParamStore *store, int u)
{
    return store->shard[u].state[store->optimizer->num_states - 1];
}

static Tensor weights_of(const ParamStore *store, int u)
{
    return store->shard[u].slice[TRAINED].stored;
}

static bool has_any(const ParamStore *store, int u)
{
    return store->shard[u].slice[TRAINED].count > 0;
}

/* Number of snapshots in the average, by the settings of `c`. */
static long snapshots(const ParamStore *store, const Config *c)
{
    const StateCounts *n = &store->counts;
    return n->average.last == c->average.last && n->average.every == c->average.every
               ? n->average.count
               : 0;
}

void average_step(ParamStore *store, const Config *c, long step)
{
    const long last = c->average.last, every = c->average.every;
    if (!is_due(step, every))
        return;
    const bool begins = (step / every - 1) % last == 0;
    const long count = begins ? 1 : snapshots(store, c) + 1;
    for (int u = 0; u < store->num_units; u++)
        if (has_any(store, u))
            average_weights(mean_of(store, u), weights_of(store, u), 1 / (float)count);
    store->counts.average.last = last;
    store->counts.average.every = every;
    store->counts.average.count = count;
    if (is_due(step, last * every) && count < last)
        warn("step %ld: no average is written: the average has only %ld of %ld snapshots, because "
             "the run "
             "did not load an average with the earlier snapshots",
             step, count, last);
}

bool average_is_complete(const ParamStore *store, const Config *c, const TrainState *s)
{
    /* with reset_trainer_state, the snapshots come from steps before the reset */
    const bool began_anew = s->step == 0;
    return !began_anew && is_due(s->step, c->average.last * c->average.every) &&
           snapshots(store, c) == c->average.last;
}

bool average_is_written(const Config *c, const TrainState *s)
{
    char *path = xasprintf("%s/step%ld-average", c->save_folder, s->step);
    const bool written = agree_any(comm_rank() == 0 && file_exists(path));
    free(path);
    return written;
}

AverageBackup average_enter(ParamStore *store)
{
    size_t bytes = 0, at = 0;
    for (int u = 0; u < store->num_units; u++)
        bytes += has_any(store, u) ? tensor_bytes(weights_of(store, u)) : 0;
    AverageBackup k = { device_host_alloc(bytes, NULL) };
    for (int u = 0; u < store->num_units; u++) {
        const Tensor w = weights_of(store, u);
        if (!has_any(store, u))
            continue;
        device_get(k.weights + at, w.data, tensor_bytes(w));
        at += tensor_bytes(w);
        quantize(w, mean_of(store, u));
    }
    store_loaded(store);
    return k;
}

void average_leave(ParamStore *store, AverageBackup k)
{
    size_t at = 0;
    for (int u = 0; u < store->num_units; u++) {
        const Tensor w = weights_of(store, u);
        if (!has_any(store, u))
            continue;
        device_put(w.data, k.weights + at, tensor_bytes(w));
        at += tensor_bytes(w);
    }
    store_loaded(store);
    device_host_free(k.weights);
}
