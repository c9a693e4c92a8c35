/* Sizes and positions in a planned ParamStore. */
#pragma once
#include "model/store/store_types.h"

/* Bytes of operands and gathered weights. */
size_t store_weight_bytes(const ParamStore *store);
/* Bytes of accumulated gradients and their buffers. */
size_t store_grad_bytes(const ParamStore *store);
/* Bytes of the optimizer's states. */
size_t store_state_bytes(const ParamStore *store);

/* The stored elements of a parameter that this rank owns: they begin at *first. Returns their
 * number, which may be 0. */
size_t shard_part(const Shard *s, const Param *p, size_t *first);
/* The range of TRAINED that has the optimizer's k-th state, and the state of this range. */
Slice shard_state(const Shard *s, int k);
/* sets before[k] and after[k] */
void shard_divide_state(const ParamStore *store, int unit, int k);
/* The group of ranks over which a unit is sharded. */
Ranks fsdp_group(const ParamStore *store, int unit);
int fsdp_shards(const ParamStore *store, int unit); /* size of this group */
int fsdp_rank(const ParamStore *store, int unit);   /* this rank's number in this group */
/* The ranks over which a unit of this rank can be sharded. */
Ranks fsdp_all(const ParamStore *store);
/* The elements of replicated parameters in this rank's slice of TRAINED. Every tensor rank has a
 * copy of these parameters. *first: their first element in the region. Returns the number of their
 * elements. */
size_t fsdp_copied(const ParamStore *store, int unit, size_t *first);
/* Whether this rank's pipeline stage has the unit. */
bool store_holds(const ParamStore *store, int unit);
bool store_on_host(const ParamStore *store, int unit, Hosted h);
/* Bytes of this rank's host memory for h; h == NUM_HOSTED: for all kinds together. */
size_t store_host_bytes(const ParamStore *store, Hosted h);
/* The ShardChoice with which the store was planned, except `slots`, which is 0. */
ShardChoice store_shard_choice(const ParamStore *store);

/* Maximum number of elements of a bucket, which the optimizer updates at once; a multiple of
 * PARAM_ALIGN. Tests make it small, so that small parameters have several buckets. */
extern size_t update_bucket;
size_t store_update_bucket_bytes(const ParamStore *store); /* bytes of the largest bucket */
/* (1, n): elements of t, a flat tensor of this slice, from element `first` of the region on. */
Tensor slice_view(const Slice *s, Tensor t, size_t first, size_t n);
/* n stored elements of a parameter, from element `first` of this rank's elements on. */
Tensor shard_weights(const Shard *s, const Param *p, size_t first, size_t n);
