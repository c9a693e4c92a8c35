/* Where flat units lie: what each rank owns of weights, gradients and optimizer states, the memory for gathered weights and for
 * gradients that are not summed yet, and all views of them. fsdp.h moves them. */
#pragma once
#include "kernels/device.h"
#include "model/optimizer.h"
#include "model/params.h"

/* This rank's part of one unit: elements [first, first + count) of the trained region, in all tensors, (1, count) each; and as many
 * of the frozen one. */
typedef struct {
    size_t first, count;
    Tensor master, grad, state[MAX_STATES];    /* grad.empty: no micro-batch of this step is in it */
    size_t frozen_first, frozen_count;
    Tensor frozen;
    size_t base_first, base_count;     /* of the region BASE ...                               */
    void  *base;                       /* ... base_bytes of them                               */
} Shard;

/* Which copies of an FP8 weight the next use reads: W in forward, W^T in backward. Other formats have one for both. AS_STORED: what
 * these are made from was gathered. */
typedef enum { FOR_FORWARD = 1, FOR_BACKWARD = 2, AS_STORED = 4 } Use;

/* A gathered unit's memory: (1, n) in its compute format, n the largest unit that it serves. */
typedef struct {
    Tensor      flat;                  /* data_t: the transposed copies of FP8 operands; may be data, for one use at a time */
    void       *raw;                   /* the gathered region BASE as stored, where that is not what computes */
    size_t      raw_bytes;
    int         unit, has;             /* whose weights, -1: nobody's; for which uses they are there */
    DeviceMark *ready, *released;
} WeightBuffer;

/* A unit's gradients before they are summed over the shard group. */
typedef struct {
    Tensor      flat;                  /* (1, n) in the recipe's format of gradients */
    int         unit;                  /* who fills it; -1: nobody */
    DeviceMark *filled, *reduced;
} GradBuffer;

typedef struct {
    int         num_units;             /* L + 2 */
    UnitShape  *shape;                 /* [num_units] */
    Shard      *shard;                 /* [num_units] */
    Unit       *unit, *dunit;          /* [num_units] weights in compute format, and gradients */
    WeightBuffer *weight_buffer;       /* [num_buffers]: those that units share, then one per unit */
    GradBuffer *grad_buffer;           /* [num_buffers] */
    Tensor      scales;                /* (1, 4 per FP8 operand): their scales, 16 bytes apart; those of frozen ones last */
    int         trained_scales;        /* columns of `scales` in front of those */
    Tensor      base_scales;           /* (1, 4 per matrix of the blocks) of region BASE: of FP8 operands and of stored E4M3 */
    Tensor      replicated;            /* (1, n): what block units with FP8 operands have besides them, norm weights and adapters:
                                          whole on each rank */
    float      *square_sum;            /* device memory: sum of the squares of this rank's gradients; between steps a flag of
                                          whoever looks through the shards */
    Recipe      recipe;
    const Optimizer *optimizer;        /* whose states the shards have */
    BaseFormat  base;                  /* how the region BASE is stored */
    bool        plain_nf4;             /* NF4 without double quantization */
    bool        tied;
    int         first_trained;         /* the first unit with a trained parameter: backward ends there */
    int         shards, rank;          /* ranks of a shard group, and this one's place in it */
    bool        sum_once;              /* gradients are summed over them once per step */
    int         kept;                  /* units 0 .. kept - 1 are gathered once per step */
    Arena       gathered;              /* memory of the weight buffers, if shards > 1 */
    DeviceMark *updated, *reduced;
} Fsdp;

/* Whose part is planned, and with which choice of memory. */
typedef struct {
    int  shards, rank;                 /* ranks of a shard group, and the place in it */
    bool sum_once;                     /* gradients are summed over them once per step, not with every micro-batch */
    int  kept;                         /* units whose weights stay once they are gathered: 0 .. kept - 1 */
} Placement;

/* Places one rank's part of every unit in the arena; called twice, to measure and to place. */
void        fsdp_plan   (Fsdp *f, Arena *a, const Config *c, Placement p);
void        fsdp_place_gathered(Fsdp *f);                  /* between the two: allocates what fsdp_plan measured beside `a` */
size_t      fsdp_weight_bytes(const Fsdp *f);              /* of copies for computing */
size_t      fsdp_grad_bytes  (const Fsdp *f);              /* of accumulated gradients and their buffers */
size_t      fsdp_state_bytes (const Fsdp *f);              /* of the optimizer's states */
void        fsdp_free   (Fsdp *f);

/* The part of a parameter that this rank owns: elements *first .. *first + n of the parameter; returns n, maybe 0, as for the
 * region BASE, of which base.h knows. */
size_t      shard_part(const Shard *s, const Param *p, size_t *first);
/* Elements from `first` on, counted in the trained region, of one of the shard's flat tensors. */
Tensor      shard_view(const Shard *s, Tensor t, size_t first, size_t n);
/* n elements of a parameter, of this rank's part, from its `first` on, as they are stored: master weights or frozen ones. */
Tensor      shard_weights(const Shard *s, const Param *p, size_t first, size_t n);

/* ---- what the verbs ask about the placement ---------------------------------------------------------------- */

/* Buffers that units take turns with (fsdp_plan.c, shared_buffer) come first, then one of each unit's own. */
enum { SHARED_BUFFERS = 4 };

static inline int num_buffers(const Fsdp *f)
{
    return SHARED_BUFFERS + f->num_units;
}

WeightBuffer *weight_buffer(const Fsdp *f, int unit);      /* NULL: the stored weights are the weights */
GradBuffer   *grad_buffer  (const Fsdp *f, int unit);      /* NULL: gradients are added to the shard's */
bool        is_gathered  (const Fsdp *f, int unit, const Param *p);    /* p stands in the unit's buffer */
bool        is_replicated(const Fsdp *f, int unit, const Param *p);    /* ... in f->replicated */

/* A region's place in its unit's buffer: elements from *first on; returns their number, 0 if it does not stand there. */
size_t      region_in_buffer(const Fsdp *f, int unit, Region r, size_t *first);

/* The matrices that are stored as lora.base says (base.h): bytes of so many elements of the region BASE; whether they are the codes
 * that forward's GEMMs read, and whether what a unit gathers and makes of them stays for good, for they never change; the scale of
 * each. */
size_t      base_bytes   (const Fsdp *f, size_t numel);
bool        base_is_operand(const Fsdp *f);
bool        base_stays   (const Fsdp *f, int unit);
float      *base_scale   (const Fsdp *f, int unit, const Param *p);
