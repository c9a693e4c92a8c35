/* What is where, and how much, of a planned ParamStore. */
#pragma once
#include "model/store/store_types.h"

size_t store_weight_bytes(const ParamStore *store); /* of copies for computing */
/* of accumulated gradients and their buffers */
size_t store_grad_bytes(const ParamStore *store);
size_t store_state_bytes(const ParamStore *store); /* of the optimizer's states */

/* The part of a parameter that this rank stores: elements *first .. *first + n of what is stored of
 * it; returns n, maybe 0. */
size_t shard_part(const Shard *s, const Param *p, size_t *first);
/* The part of TRAINED that has the optimizer's k-th state; `stored` is that state. */
Slice shard_state(const Shard *s, int k);
/* sets before[k] and after[k] */
void shard_divide_state(const ParamStore *store, int unit, int k);
/* The ranks over which a unit is sharded, their number, and this one's rank: those that have its
 * parameters, or a part of each. */
Ranks fsdp_group(const ParamStore *store, int unit);
int fsdp_shards(const ParamStore *store, int unit);
int fsdp_rank(const ParamStore *store, int unit);
/* all that have a part of some unit */
Ranks fsdp_all(const ParamStore *store);
/* The elements of this rank's part of TRAINED, from *first of the region on, that all tensor ranks
 * have; returns their number. */
size_t fsdp_copied(const ParamStore *store, int unit, size_t *first);
/* this rank's stage has the unit */
bool store_holds(const ParamStore *store, int unit);
bool store_on_host(const ParamStore *store, int unit, Hosted h);
/* of this rank; those of NUM_HOSTED are of all */
size_t store_host_bytes(const ParamStore *store, Hosted h);
/* that the store was planned with; slots: 0 */
ShardChoice store_shard_choice(const ParamStore *store);

/* A part that the optimizer updates has up to update_part elements, a multiple of PARAM_ALIGN. Tests
 * make it small, so that small parameters have several parts. */
extern size_t update_part;
size_t store_update_part_bytes(const ParamStore *store); /* of the largest part */
/* (1, n), elements of t, a flat tensor of this slice, from element `first` of the region on. */
Tensor slice_view(const Slice *s, Tensor t, size_t first, size_t n);
/* n elements of a parameter, of this rank's part, as they are stored, from its `first` on. */
Tensor shard_weights(const Shard *s, const Param *p, size_t first, size_t n);
