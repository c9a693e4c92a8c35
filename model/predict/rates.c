#include "model/predict/rates.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/error.h"

/* Rates: FLOP/s of products, bytes/s, seconds, and shares. "fitted": to measured steps
 * (2026-11-28-predicted-times.md and 2026-11-30-published-steps.md in tests/history); "CUPTI": measured on kernels inside steps
 * (2026-11-23-before-and-after.md in the same folder). */
typedef enum {
    RATE_FP8,
    RATE_BF16,
    RATE_F32, /* GEMMs, by operand format */
    RATE_ATTENTION,
    RATE_ATTENTION_BACKWARD,
    RATE_MEMORY,  /* bytes of all operations except the operations of adapters */
    RATE_ADAPTER, /* bytes of operations of adapters */
    /* share of a GEMM's memory time that does not overlap with its products */
    RATE_EXPOSED,
    RATE_START,      /* time to start an operation */
    RATE_HOST,       /* copies between host and device */
    RATE_UPDATE,     /* copies of an update, in both directions at once; rate of each direction */
    RATE_HOST_TAKES, /* share of a copy's time that concurrent computation loses */
    RATE_GATHER,     /* rings of all-gathers inside a host */
    RATE_SUM,        /* rings of sums inside a host */
    RATE_PEER,       /* messages between two GPUs */
    RATE_SUM_TAKES,  /* as RATE_HOST_TAKES, for sums */
    RATE_CODES_TAKE, /* the same, for exchanges of gradients inside a host */
    RATE_NEAR,       /* time of one step of a ring inside a host */
    RATE_FAR,        /* time of one step of a ring between hosts */
    NUM_RATES
} Rate;

static const double rates[NUM_RATES] = {
    [RATE_FP8] = 1395e12, /* fitted to 7B and 8B; 1,359 to 1,453 by CUPTI */
    [RATE_BF16] = 715e12, /* CUPTI, the head's GEMMs */
    [RATE_F32] = 40e12,   /* not measured */
    /* time at 2 x 8192 minus time at 8 x 2048 tokens; 7 % less than the value by CUPTI */
    [RATE_ATTENTION] = 663e12,
    [RATE_ATTENTION_BACKWARD] = 544e12, /* time at 2 x 8192 minus time at 8 x 2048 tokens */
    /* fitted; 3.6 by CUPTI on an H200, whose memory is faster */
    [RATE_MEMORY] = 3.3e12,
    [RATE_ADAPTER] = 2.0e12, /* fitted to adapters of 7B */
    /* SwiGLU's backward adds 0.31 ms to the GEMM in whose kernel it is */
    [RATE_EXPOSED] = 0.5,
    [RATE_START] = 2.5e-6, /* idle time between kernels, CUPTI */
    [RATE_HOST] = 54.4e9,  /* pinned memory, PCIe 5 */
    /* fitted to moments of 7B on the host: 13.9 GB in each direction in 0.42 s */
    [RATE_UPDATE] = 33e9,
    /* a loop of GEMMs loses 13 % while copies run in both directions */
    [RATE_HOST_TAKES] = 0.1,
    [RATE_GATHER] = 335e9, /* NCCL's copy engines, four H200s */
    /* NCCL, BF16, 256 and 512 MiB on two H200s; 308e9 on four */
    [RATE_SUM] = 240e9,
    /* NCCL in a window, 192 and 256 MiB between two H200s */
    [RATE_PEER] = 340e9,
    /* fitted to sums of every micro-batch on two H100s */
    [RATE_SUM_TAKES] = 1,
    /* exchange in a window next to a GEMM: +0.458 ms for 0.401 ms (2026-11-28-exchanges.md) */
    [RATE_CODES_TAKE] = 1.14,
    [RATE_NEAR] = 3e-6, /* not measured */
    [RATE_FAR] = 18e-6, /* fitted to published steps of 8 to 512 H100s */
};

static double rate(Rate r)
{
    return rates[r];
}

double rates_peak(int bits)
{
    return bits == 8 ? 1978.9e12 : bits == 16 ? 989.4e12 : 66.9e12;
}

/* ---- one device ------------------------------------------------------------------------------ */

static bool is_attention(const Event *e)
{
    return strncmp(e->operation, "attention", 9) == 0;
}

static double products_per_second(const Event *e)
{
    if (is_attention(e))
        return rate(strcmp(e->operation, "attention_backward") ? RATE_ATTENTION
                                                               : RATE_ATTENTION_BACKWARD);
    return rate(e->bits == 8 ? RATE_FP8 : e->bits == 16 ? RATE_BF16 : RATE_F32);
}

/* A GEMM moves a part of its bytes while it computes products. */
static double device_seconds(const Event *e)
{
    const double bytes = e->bytes * (e->flops > 0 && !is_attention(e) ? rate(RATE_EXPOSED) : 1);
    const bool adapter = strncmp(e->operation, "lora", 4) == 0;
    const double passes = rate(RATE_START) + bytes / rate(adapter ? RATE_ADAPTER : RATE_MEMORY);
    return e->flops > 0 ? passes + e->flops / products_per_second(e) : passes;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* How many ranks of this rank's group g are on this rank's host. */
static int neighbours_on_host(const Topology *p, Ranks g)
{
    const int first = p->rank / p->gpus_per_host * p->gpus_per_host,
              group = mesh_group(&p->mesh, p->rank, g);
    int n = 0;
    for (int r = first; r < first + p->gpus_per_host && r < mesh_ranks(&p->mesh); r++)
        n += mesh_group(&p->mesh, r, g) == group;
    return n;
}

/* Whether the rank that is this many stages away, in the ring of stages, is on the same host. */
static bool is_on_host(const Topology *p, int stages)
{
    const int all = p->mesh.size[MESH_PIPELINE], each = mesh_ranks(&p->mesh) / all;
    const int other = (p->rank + stages * each + mesh_ranks(&p->mesh)) % mesh_ranks(&p->mesh);
    return other / p->gpus_per_host == p->rank / p->gpus_per_host;
}

static double network(const Topology *p)
{
    CHECK(p->network > 0, "ranks are on several hosts, but the speed of the network is not given");
    return p->network * 1e9;
}

/* The time of a ring's steps without their bytes. */
static double ring_latency(const Event *e, const Topology *p)
{
    const int size = mesh_group_size(&p->mesh, e->ranks),
              hosts = size / neighbours_on_host(p, e->ranks);
    return (e->what == SENT_SUMS ? 2 : 1) *
           ((size - hosts) * rate(RATE_NEAR) + (hosts > 1 ? hosts * rate(RATE_FAR) : 0));
}

/* A ring enters a host once, over the links of all of its ranks on this host. */
static double ring_seconds(const Event *e, const Topology *p)
{
    const int here = neighbours_on_host(p, e->ranks);
    const double inside = rate(e->what == SENT_GATHERS ? RATE_GATHER : RATE_SUM);
    const bool far = mesh_group_size(&p->mesh, e->ranks) > here;
    return e->bytes / (far ? fmin(inside, here * network(p)) : inside) + ring_latency(e, p);
}

/* Data for ranks of other hosts goes over the rank's own link. */
static double exchange_seconds(const Event *e, const Topology *p)
{
    const int size = mesh_group_size(&p->mesh, e->ranks), here = neighbours_on_host(p, e->ranks);
    const double outside = (double)(size - here) / (size - 1);
    const double inside = rate(RATE_NEAR) + e->bytes * (1 - outside) / rate(RATE_PEER);
    return outside > 0 ? fmax(inside, rate(RATE_FAR) + e->bytes * outside / network(p)) : inside;
}

static double message_seconds(const Event *e, const Topology *p)
{
    if (e->receives)
        return 0;
    return is_on_host(p, e->neighbour == 0 ? 1 : -1) ? rate(RATE_NEAR) + e->bytes / rate(RATE_PEER)
                                                     : rate(RATE_FAR) + e->bytes / network(p);
}

double rates_seconds(const Event *e, const Topology *p)
{
    if (e->work == WORK_DEVICE)
        return device_seconds(e);
    if (e->work == WORK_HOST)
        return rate(RATE_START) + e->bytes / rate(e->unit == UNIT_UPDATE ? RATE_UPDATE : RATE_HOST);
    switch (e->what) {
    case SENT_EXCHANGES:
    case SENT_CODES: return exchange_seconds(e, p);
    case SENT_MESSAGES: return message_seconds(e, p);
    default: return ring_seconds(e, p);
    }
}

/* The kernel of a sum occupies its multiprocessors during all steps of its ring. */
double rates_taken(const Event *e, const Topology *p)
{
    if (e->queue == QUEUE_COMPUTE || e->kind != EVENT_WORK)
        return 0;
    if (e->work == WORK_HOST)
        return rate(RATE_HOST_TAKES) * rates_seconds(e, p);
    if (e->work == WORK_RANKS && (e->what == SENT_SCATTERED_SUMS || e->what == SENT_SUMS))
        return rate(RATE_SUM_TAKES) * (e->bytes / rate(RATE_SUM) + ring_latency(e, p));
    if (e->work == WORK_RANKS && e->what == SENT_CODES)
        return rate(RATE_CODES_TAKE) * e->bytes / rate(RATE_PEER);
    if (strncmp(e->operation, "wire", 4) == 0)
        return device_seconds(e);
    return 0;
}
