/* The device: memory, copies, time. One per process. Work is queued and done in order; a call
 * returns at once unless it says that it waits. Errors end the program with a message. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* selects the GPU of that number; dies if there is none */
void device_init(int local_rank);
/* devices of this host that device_init can select, maybe 0 */
int device_count(void);
const char *
device_build(void); /* the back end of this program: "cpu", "cuda, compute capability 80 90a" */
const char *device_name(void); /* "NVIDIA H200", "cpu" */
/* whether it has GEMMs of FP8 operands; FP8 storage always works */
bool device_has_fp8(void);
/* data-sheet dense FLOP/s of GEMMs with operands of `bits`; 0: unknown */
double device_peak_flops(int bits);
/* bytes (CPU: the machine's, divided by its ranks) */
size_t device_memory_total(void);
/* bytes in use now by all processes (CPU: this one) */
size_t device_memory_used(void);
const char *device_address(void); /* PCI address, "0000:3B:00.0"; CPU: "" */

/* What is wrong with a GPU. The first NUM_SLOWDOWNS lower its clock now: it is hot (the driver
 * lowers the clock a little), too hot, its server's power brake is set, or another hardware reason
 * (all three: to half or less). The others are permanent: uncorrectable memory errors, rows to be
 * remapped at the next reset, and rows that could not be remapped. */
typedef enum {
    FAULT_HOT,
    FAULT_TOO_HOT,
    FAULT_POWER_BRAKE,
    FAULT_SLOWDOWN,
    NUM_SLOWDOWNS,
    FAULT_ECC = NUM_SLOWDOWNS,
    FAULT_REMAP_PENDING,
    FAULT_REMAP_FAILED,
    NUM_FAULTS
} DeviceFault;

/* State of a GPU as reported by its driver; unknown values are NAN. */
typedef struct {
    double power, power_limit; /* watts */
    /* since the driver was loaded: joules, and ECC errors */
    double energy;
    double temperature;            /* degrees Celsius */
    double sm_clock, memory_clock; /* MHz */
    double power_capped;           /* 1: power_limit lowers the clock; else 0 */
    double ecc_corrected, ecc_uncorrected;
    unsigned faults; /* 1u << DeviceFault */
} DeviceHealth;

/* False: unknown (CPU; no NVML). Takes some milliseconds of the calling thread, one thread at a
 * time. */
bool device_health(DeviceHealth *h);

/* Queues run concurrently, each in order. All operations go to the current queue, initially
 * QUEUE_COMPUTE; only QUEUE_COMPUTE may run operations that need scratch memory.
 * device_merge_queues: all become one queue, to find a missing wait. */
typedef enum {
    QUEUE_COMPUTE,
    QUEUE_GATHER,
    QUEUE_REDUCE,
    QUEUE_OFFLOAD,
    QUEUE_FETCH,
    QUEUE_SEND,
    QUEUE_TENSOR,
    NUM_QUEUES
} Queue;
void device_queue(Queue q);
Queue device_current_queue(void);
void device_merge_queues(bool merge);

/* 256-byte aligned, zeroed; dies if memory is short, never NULL */
void *device_alloc(size_t bytes);
void device_free(void *p);
/* host to device; src may be reused on return */
void device_put(void *dst, const void *src, size_t bytes);
/* device to host; waits for all work of the current queue */
void device_get(void *dst, const void *src, size_t bytes);
/* device or device_host_alloc memory; the two may not overlap */
void device_copy(void *dst, const void *src, size_t bytes);
void device_zero(void *dst, size_t bytes);
void device_sync(void); /* waits for all queued work, of all queues */

/* Pinned host memory, zeroed: copies to and from the device run at the full speed of the bus, in
 * parallel with computation. Allocation is slow. what: its purpose, for the error message if the
 * system cannot pin it; NULL: then it is plain memory, only for device_get and device_put. */
void *device_host_alloc(size_t bytes, const char *what);
void device_host_free(void *p);

/* A point in the current queue. device_wait: later work of the current queue runs after the mark
 * (NULL: no wait); the host does not wait. device_elapsed: milliseconds of device time between two
 * marks; waits for `to`. */
typedef struct DeviceMark DeviceMark;
DeviceMark *device_mark(DeviceMark *reuse); /* NULL: a new mark */
void device_wait(DeviceMark *m);
bool device_reached(const DeviceMark *m); /* for any thread */
void device_unmark(DeviceMark *m);        /* frees it */
double device_elapsed(DeviceMark *from, DeviceMark *to);

/* Switches to queue q, after all that the current queue has; returns the mark. */
static inline DeviceMark *device_follow(Queue q, DeviceMark *reuse)
{
    DeviceMark *m = device_mark(reuse);
    device_queue(q);
    device_wait(m);
    return m;
}
