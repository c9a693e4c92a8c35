#include "model/run/average.h"

#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/config/files.h"
#include "model/store/fsdp.h"
#include "model/run/agree.h"

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

void average_step(ParamStore *store, const Config *c, TrainState *s)
{
    const long last = c->average.last, every = c->average.every;
    if (!is_due(s->step, every))
        return;
    const bool begins = (s->step / every - 1) % last == 0,
               others = s->average.last != last || s->average.every != every;
    s->average.count = begins || others ? 1 : s->average.count + 1;
    s->average.last = last;
    s->average.every = every;
    for (int u = 0; u < store->num_units; u++)
        if (has_any(store, u))
            average_weights(mean_of(store, u), weights_of(store, u), 1 / (float)s->average.count);
}

bool average_is_complete(const Config *c, const TrainState *s)
{
    return is_due(s->step, c->average.last * c->average.every) &&
           s->average.count == c->average.last && s->average.last == c->average.last &&
           s->average.every == c->average.every;
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
