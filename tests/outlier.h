/* A model whose SwiGLU has an outlier in every block, as in arXiv 2409.12517: the rows of gate and
 * up of one channel are parallel and large. Each block has its outlier in another channel. */
#pragma once
#include "kernels/values.h"
#include "model/store/param_store.h"
#include "model/store/param_store_sizes.h"
#include "tests/models.h"

static inline int outlier_of(int layer)
{
    return 7 + 2 * layer;
}

static inline bool is_outlier(const Param *p, int layer, size_t i)
{
    const int row = (int)(i / (size_t)p->cols);
    return row == outlier_of(layer) || row == p->projection[1].first + outlier_of(layer);
}

/* Sets this rank's part of both rows to `size` times the same random direction. */
static inline void grow_outlier(ParamStore *store, float size)
{
    for (int u = 0; u < store->num_units; u++)
        for (int k = 0; k < store->shape[u].num_params; k++) {
            const Param *p = &store->shape[u].param[k];
            size_t first, n = shard_part(&store->shard[u], p, &first);
            for (size_t i = first; strcmp(p->name, "gate_up") == 0 && i < first + n; i++) {
                const Tensor t = shard_weights(&store->shard[u], p, i, 1);
                float x = size * test_uniform(3, i % (size_t)p->cols);
                uint32_t bits[2] = { 0 };
                Tensor host = t;
                host.data = bits;
                if (!is_outlier(p, store->shape[u].number, i))
                    continue;
                tensor_store(host, 0, &x, 1);
                device_put(t.data, bits, dtype_size(t.format.dtype));
            }
        }
    store_loaded(store);
}
