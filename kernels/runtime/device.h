/* The device: memory, copies, time. One per process. Work is queued and done in order; a call returns at once unless it
 * says that it waits. Errors end the program with a message. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

void        device_init(int local_rank);        /* chooses the GPU of that number; says so if there is none */
int         device_count(void);                 /* devices of this host that device_init could choose from, maybe 0 */
const char *device_build(void);                 /* which back end this program has: "cpu", "cuda, compute capability 80 90a" */
const char *device_name(void);                  /* "NVIDIA H200", "cpu" */
bool        device_has_fp8(void);               /* whether there are GEMMs of FP8 operands; storing FP8 needs none */
double      device_peak_flops(int bits);        /* data-sheet dense FLOP/s of GEMMs whose operands have so many; 0: unknown */
size_t      device_memory_total(void);          /* bytes (CPU: an equal share of the machine's for each of its ranks) */
size_t      device_memory_used(void);           /* bytes of the device in use now, by whomever (CPU: this process) */
const char *device_address(void);               /* "0000:3B:00.0": where the GPU is in its host; "" for the CPU */

/* What is wrong with a GPU. The first NUM_SLOWDOWNS lower its clock now: it is hot (its driver lowers the clock a little), too hot,
 * the power brake of its server is set, or another reason of its hardware (all three: to half or less). The others last: errors of
 * its memory that could not be corrected, rows of it that are remapped at the next reset, and such that could not be. */
typedef enum {
    FAULT_HOT, FAULT_TOO_HOT, FAULT_POWER_BRAKE, FAULT_SLOWDOWN, NUM_SLOWDOWNS,
    FAULT_ECC = NUM_SLOWDOWNS, FAULT_REMAP_PENDING, FAULT_REMAP_FAILED, NUM_FAULTS
} DeviceFault;

/* A GPU as its driver sees it now; what that does not tell is NAN. */
typedef struct {
    double   power, power_limit;                /* watts */
    double   energy;                            /* joules, and ECC errors, since the driver was loaded */
    double   temperature;                       /* degrees Celsius */
    double   sm_clock, memory_clock;            /* MHz */
    double   power_capped;                      /* 1: the clock is lower than it could be, to stay within power_limit; else 0 */
    double   ecc_corrected, ecc_uncorrected;
    unsigned faults;                            /* 1u << DeviceFault */
} DeviceHealth;

/* False: nothing is known (the CPU; no NVML). Takes some milliseconds of the calling thread, one thread at a time. */
bool device_health(DeviceHealth *h);

/* Queues run side by side, each in order. All operations go to the current one, at first QUEUE_COMPUTE; only that one may
 * run operations that need scratch memory. device_merge_queues: all are one from now on, for finding a missing wait. */
typedef enum { QUEUE_COMPUTE, QUEUE_GATHER, QUEUE_REDUCE, QUEUE_OFFLOAD, QUEUE_FETCH, NUM_QUEUES } Queue;
void  device_queue(Queue q);
Queue device_current_queue(void);
void  device_merge_queues(bool merge);

void *device_alloc(size_t bytes);               /* 256-byte aligned, zeroed; never NULL: says what was asked and what is free */
void  device_free (void *p);
void  device_put  (void *dst, const void *src, size_t bytes);   /* host to device; src may be reused on return */
void  device_get  (void *dst, const void *src, size_t bytes);   /* device to host; waits for all work of the current queue */
void  device_copy (void *dst, const void *src, size_t bytes);   /* of device memory and device_host_alloc's; the two may not overlap */
void  device_zero (void *dst, size_t bytes);
void  device_sync (void);                       /* waits for all queued work, of all queues */

/* Pinned host memory, zeroed: copies to and from the device run at the full speed of the bus, next to computation. Allocating it takes long.
 * If the system pins no such piece: with a name, what it is for, the program ends with a message; with NULL it is plain memory, which
 * only device_get and device_put take. */
void *device_host_alloc(size_t bytes, const char *what);
void  device_host_free (void *p);

/* A point in the current queue. device_wait: what is queued in the current queue from now on runs after it (NULL: nothing to
 * wait for); the host goes on. device_elapsed: milliseconds of device time between two marks; waits for `to`. */
typedef struct DeviceMark DeviceMark;
DeviceMark *device_mark   (DeviceMark *reuse);  /* NULL: a new mark */
void        device_wait   (DeviceMark *m);
bool        device_reached(const DeviceMark *m);       /* now; any thread may ask */
void        device_unmark (DeviceMark *m);      /* frees it */
double      device_elapsed(DeviceMark *from, DeviceMark *to);
