/* The device: memory, copies, time. A process has one device. Work is queued and done in order. A
 * call returns at once unless its comment says that it waits. Errors end the program with a
 * message. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* selects the GPU with this number; dies if it does not exist */
void device_init(int local_rank);
/* number of devices of this host that device_init can select, perhaps 0 */
int device_count(void);
const char *
device_build(void); /* the back end of this program: "cpu", "cuda, compute capability 80 90a" */
const char *device_name(void); /* "NVIDIA H200", "cpu" */
/* true if the device has GEMMs of FP8 operands; FP8 storage always works */
bool device_has_fp8(void);
/* dense FLOP/s from data sheets of GEMMs whose operands have `bits` bits; 0: unknown */
double device_peak_flops(int bits);
/* bytes of device memory (CPU: the machine's memory, divided by its ranks) */
size_t device_memory_total(void);
/* bytes that all processes use now (CPU: only this process) */
size_t device_memory_used(void);
const char *device_address(void); /* PCI address, "0000:3B:00.0"; CPU: "" */

/* What is wrong with a GPU. The first NUM_SLOWDOWNS faults lower its clock now: the GPU is hot, the
 * GPU is too hot, its server's power brake is set, or there is another hardware reason. For a hot
 * GPU the driver lowers the clock a little; the other three faults lower it to half or less. The
 * remaining faults are permanent: uncorrectable memory errors, rows to be remapped at the next
 * reset, and rows that could not be remapped. */
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

/* State of a GPU as its driver reports it. Unknown values are NAN. */
typedef struct {
    double power, power_limit; /* watts */
    /* joules, and numbers of ECC errors, since the driver was loaded */
    double energy;
    double temperature;            /* degrees Celsius */
    double sm_clock, memory_clock; /* MHz */
    double power_capped;           /* 1 if power_limit lowers the clock, else 0 */
    double ecc_corrected, ecc_uncorrected;
    unsigned faults; /* bits 1u << DeviceFault */
} DeviceHealth;

/* Returns false if the state is unknown (CPU, or no NVML). Takes some milliseconds of the calling
 * thread. Only one thread may call it at a time. */
bool device_health(DeviceHealth *h);

/* Queues run concurrently; each queue runs in order. All operations go to the current queue, which
 * is QUEUE_COMPUTE at first. Only QUEUE_COMPUTE may run operations that need scratch memory.
 * device_merge_queues makes all queues one queue, to find a missing wait. */
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

/* 256-byte aligned and zeroed; dies if memory is short, and never returns NULL */
void *device_alloc(size_t bytes);
void device_free(void *p);
/* host to device; src may be reused on return */
void device_put(void *dst, const void *src, size_t bytes);
/* device to host; waits for all work of the current queue */
void device_get(void *dst, const void *src, size_t bytes);
/* dst and src are device memory or device_host_alloc memory, and must not overlap */
void device_copy(void *dst, const void *src, size_t bytes);
void device_zero(void *dst, size_t bytes);
void device_sync(void); /* waits for all queued work of all queues */

/* Allocates pinned host memory, zeroed. Copies to and from the device then run at the full speed of
 * the bus, in parallel with computation. Allocation is slow. what: the purpose of the memory, for
 * the error message if the system cannot pin it. If `what` is NULL, memory that cannot be pinned is
 * plain memory, only for device_get and device_put. */
void *device_host_alloc(size_t bytes, const char *what);
void device_host_free(void *p);

/* A mark is a point in a queue. After device_wait(m), later work of the current queue runs after
 * the mark m (NULL: no wait); the host does not wait. device_elapsed waits for `to`, and returns
 * the milliseconds of device time between two marks. */
typedef struct DeviceMark DeviceMark;
DeviceMark *device_mark(DeviceMark *reuse); /* NULL: a new mark */
void device_wait(DeviceMark *m);
bool device_reached(const DeviceMark *m); /* any thread may call it */
void device_unmark(DeviceMark *m);        /* frees the mark */
double device_elapsed(DeviceMark *from, DeviceMark *to);

/* Switches to queue q, whose later work runs after all work that the current queue has. Returns the
 * mark. */
static inline DeviceMark *device_follow(Queue q, DeviceMark *reuse)
{
    DeviceMark *m = device_mark(reuse);
    device_queue(q);
    device_wait(m);
    return m;
}
