/* Finds values that are not finite: a checkpoint must not contain such values. */
#include "model/checkpoint/layout_finite.h"

#include <string.h>

#include "kernels/kernels.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"

/* Checks entries first .. end - 1 of this rank. Stores the flag in the memory of gradient norms,
 * because there may be no free memory. */
static bool has_not_finite(const Layout *l, const ParamStore *store, int first, int end)
{
    int found = 0, *flag = (int *)store->square_sum;
    device_put(flag, &found, sizeof found);
    for (int i = first; i < end; i++) {
        const LayoutEntry *p = &l->entry[i];
        if (p->kind == ENTRY_SCALE)
            continue; /* scales are checked with their state */
        const Tensor t = layout_part(p, &store->shard[p->unit]);
        if (t.data)
            find_not_finite(flag, t,
                            p->kind == ENTRY_STATE &&
                                strcmp(store->optimizer->state[p->state].name, "exp_avg_sq") == 0);
    }
    device_get(&found, flag, sizeof found);
    return found;
}

const char *layout_not_finite(const Layout *l, const ParamStore *store)
{
    int first = has_not_finite(l, store, 0, l->num_entries) ? 0 : l->num_entries;
    while (first < l->num_entries && !has_not_finite(l, store, first, first + 1))
        first++;
    double least = -first;
    comm_max(&least, 1);
    return -least < l->num_entries ? l->entry[(int)-least].name : NULL;
}
