/* The "device" of this back end is the CPU: device memory is host memory, and an operation is
 * finished when its call returns, so all queues run in program order. */
#include "kernels/runtime/device.h"

#include <cblas.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/queues.h"

/* OpenBLAS gets this rank's share of the cores, unless OPENBLAS_NUM_THREADS is set. NOTE: with one
 * or two ranks mpirun binds each rank to one core, and OpenBLAS would run all its threads on that
 * core. The ranks undo this binding (limits of a cgroup still apply) and share the cores evenly. */
void device_init(int local_rank)
{
    (void)local_rank;
    cpu_set_t cores;
    memset(&cores, 0xff, sizeof cores);
    sched_setaffinity(0, sizeof cores, &cores);
    int count = 1;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0)
        count = CPU_COUNT(&cores);
    int threads = count / comm_local_size();
    if (!getenv("OPENBLAS_NUM_THREADS"))
        openblas_set_num_threads(threads > 1 ? threads : 1);
}

int device_count(void)
{
    return 1;
}

const char *device_build(void)
{
    return "cpu";
}

const char *device_name(void)
{
    return "cpu";
}

bool device_has_fp8(void)
{
    return true;
}

/* Returns the rate of the fastest of some SGEMMs, measured once, for 10 ms. GEMMs of all formats
 * run in F32, so `bits` has no effect. */
double device_peak_flops(int bits)
{
    static double best;
    enum { SIZE = 512, MATRIX = SIZE * SIZE };
    (void)bits;
    if (best > 0)
        return best;
    float *a = xcalloc(3 * MATRIX, sizeof *a);
    for (double start = clock_seconds(); best == 0 || clock_seconds() - start < 0.01;) {
        double t = clock_seconds();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, SIZE, SIZE, SIZE, 1, a, SIZE,
                    a + MATRIX, SIZE, 0, a + 2 * MATRIX, SIZE);
        double rate = 2.0 * SIZE * SIZE * SIZE / (clock_seconds() - t);
        best = rate > best ? rate : best;
    }
    free(a);
    return best;
}

static size_t memory_of_machine(void)
{
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

size_t device_memory_total(void)
{
    return memory_of_machine() / (size_t)comm_local_size();
}

size_t device_memory_used(void)
{
    unsigned long size, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%lu %lu", &size, &resident) != 2)
            resident = 0;
        fclose(f);
    }
    return (size_t)resident * (size_t)sysconf(_SC_PAGESIZE);
}

const char *device_address(void)
{
    return "";
}

bool device_health(DeviceHealth *h)
{
    (void)h;
    return false;
}

void *device_alloc(size_t bytes)
{
    size_t rounded = bytes ? (bytes + 255) & ~(size_t)255 : 256;
    void *p = aligned_alloc(256, rounded);
    if (!p)
        die("out of memory: %.2f GiB asked for, %.2f GiB of %.2f GiB are free; use a smaller model "
            "or micro-batch",
            (double)bytes / 0x1p30,
            (double)sysconf(_SC_AVPHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 0x1p30,
            (double)memory_of_machine() / 0x1p30);
    return memset(p, 0, rounded);
}

void device_free(void *p)
{
    free(p);
}

void *device_host_alloc(size_t bytes, const char *what)
{
    (void)what;
    return xcalloc(bytes ? bytes : 1, 1);
}

void device_host_free(void *p)
{
    free(p);
}

void backend_device_put(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

void backend_device_get(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

void backend_device_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

void backend_device_zero(void *dst, size_t bytes)
{
    memset(dst, 0, bytes);
}

void device_sync(void)
{
}

static Queue current = QUEUE_COMPUTE;

void backend_device_queue(Queue q)
{
    current = q;
}

Queue device_current_queue(void)
{
    return current;
}

void device_merge_queues(bool merge)
{
    (void)merge;
}

static struct {
    float *memory;
    size_t floats;
} slots[SLOTS];

float *cpu_scratch(int slot, size_t floats)
{
    CHECK(slot >= 0 && slot < SLOTS, "slot %d", slot);
    if (floats > slots[slot].floats) {
        device_free(slots[slot].memory);
        slots[slot].memory = device_alloc(floats * sizeof(float));
        slots[slot].floats = floats;
    }
    return slots[slot].memory;
}

struct DeviceMark {
    double at;
};

DeviceMark *backend_device_mark(DeviceMark *reuse)
{
    DeviceMark *m = reuse ? reuse : xmalloc(sizeof *m);
    m->at = clock_seconds();
    return m;
}

void backend_device_wait(DeviceMark *m)
{
    (void)m;
}

bool device_reached(const DeviceMark *m)
{
    (void)m;
    return true;
}

void backend_device_unmark(DeviceMark *m)
{
    free(m);
}

double device_elapsed(DeviceMark *from, DeviceMark *to)
{
    return 1e3 * (to->at - from->at);
}
