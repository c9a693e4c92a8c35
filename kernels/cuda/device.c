/* The GPU: choice, memory, copies, time. A queue is a stream. The streams of collectives have the
 * higher priority, so that their few thread blocks start before those of a kernel that fills the
 * GPU.
 *
 * Copies between host and device go through a ring of pinned buffers. A copy from pageable memory
 * would make the driver wait for the stream. With the ring, device_put returns as soon as the bytes
 * are in a pinned buffer, and the host waits only when it is STAGING_BUFFERS buffers ahead of the
 * device. */
#include "kernels/cuda/cuda.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/nvml.h"
#include "kernels/runtime/queues.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STAGING_BUFFERS = 32, STAGING_DEPTH = 4 };
static const size_t STAGING_BYTES = 1 << 20;

struct DeviceMark {
    cudaEvent_t event;
};

static struct {
    struct cudaDeviceProp prop;
    int number;
    char address[32];
    cudaStream_t queue[NUM_QUEUES], stream; /* stream: the stream of the current queue */
    Queue current;
    bool merged;
    struct {
        void *data;
        size_t bytes;
    } scratch[SCRATCH_SLOTS];
    /* event: the last copy from or to this buffer is done */
    struct {
        char *data;
        cudaEvent_t event;
    } staging[STAGING_BUFFERS];
    unsigned next_staging;
} dev;

/* ---- checks ---------------------------------------------------------------------------------- */

void cuda_check(cudaError_t status, const char *call, const char *file, int line)
{
    if (status != cudaSuccess)
        die_fault("%s:%d: %s: %s (%s)", file, line, call, cudaGetErrorString(status),
                  cudaGetErrorName(status));
}

void cuda_check_launch(const char *file, int line)
{
    cuda_check(cudaGetLastError(), "kernel launch", file, line);
#ifdef DEBUG
    cuda_check(cudaStreamSynchronize(dev.stream), "kernel", file, line);
#endif
}

/* ---- the device ------------------------------------------------------------------------------ */

static int count_devices(void)
{
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver)
        die("this machine has no NVIDIA driver, or one too old for CUDA %d.%d, which this program "
            "was built with: "
            "see nvidia-smi, and install or update the driver; without a GPU, build with "
            "BACKEND=cpu",
            CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (status != cudaSuccess || count == 0)
        die("no usable NVIDIA GPU (%s): see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES "
            "does not hide it; "
            "without a GPU, build with BACKEND=cpu",
            cudaGetErrorString(status));
    return count;
}

/* NOTE: with one or two ranks mpirun binds each rank to one core, where threads of the loader, of
 * checkpoints and of NCCL would delay the thread that launches kernels. A rank with fewer than four
 * cores undoes this binding. */
static void take_cores(void)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) >= 4)
        return;
    memset(&cores, 0xff, sizeof cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

static int capability(void)
{
    return 10 * dev.prop.major + dev.prop.minor;
}

static void check_capability(void)
{
    const int has = capability();
    if (has < 80)
        die("GPU %d (%s) has compute capability %d.%d; this program needs 8.0 or later (A100, "
            "GeForce RTX 30 and later ones). "
            "Use such a GPU, or build with BACKEND=cpu",
            dev.number, dev.prop.name, dev.prop.major, dev.prop.minor);
    if (!image_found())
        die("GPU %d (%s) has compute capability %d.%d; this program was built for other GPUs: "
            "ARCH=\"%s\". Build with make BACKEND=cuda ARCH=%d%s. For several kinds of GPU, list "
            "all: ARCH=\"89 90a\"",
            dev.number, dev.prop.name, dev.prop.major, dev.prop.minor, image_architectures(), has,
            has == 90 ? "a" : "");
}

void device_init(int local_rank)
{
    int count = count_devices();
    /* all ranks of the host fail together, so only one of them prints the error */
    if (comm_local_size() > count)
        die("%d ranks run on this host, which has %d visible GPU%s. Start at most %d per host, for "
            "example mpirun -n %d, or "
            "--map-by ppr:%d:node over several hosts, and let every rank see all GPUs "
            "(CUDA_VISIBLE_DEVICES)",
            comm_local_size(), count, count == 1 ? "" : "s", count, count, count);
    CUDA_CHECK(cudaGetDeviceProperties(&dev.prop, local_rank));
    dev.number = local_rank;
    CUDA_CHECK(cudaSetDevice(local_rank));
    CUDA_CHECK(cudaDeviceGetPCIBusId(dev.address, sizeof dev.address, local_rank));
    check_capability();
    take_cores();
    int least, greatest;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    for (int q = 0; q < NUM_QUEUES; q++)
        CUDA_CHECK(cudaStreamCreateWithPriority(&dev.queue[q], cudaStreamNonBlocking,
                                                q == QUEUE_COMPUTE ? least : greatest));
    device_queue(QUEUE_COMPUTE);

    char *pinned;
    CUDA_CHECK(cudaMallocHost((void **)&pinned, STAGING_BUFFERS * STAGING_BYTES));
    for (int i = 0; i < STAGING_BUFFERS; i++) {
        dev.staging[i].data = pinned + i * STAGING_BYTES;
        CUDA_CHECK(cudaEventCreateWithFlags(&dev.staging[i].event, cudaEventDisableTiming));
    }
}

cudaStream_t device_stream(void)
{
    return dev.stream;
}

void backend_device_queue(Queue q)
{
    dev.current = q;
    dev.stream = dev.queue[dev.merged ? QUEUE_COMPUTE : q];
}

Queue device_current_queue(void)
{
    return dev.current;
}

void device_merge_queues(bool merge)
{
    device_sync();
    dev.merged = merge;
    device_queue(QUEUE_COMPUTE);
}

int device_sm_count(void)
{
    return dev.prop.multiProcessorCount;
}

int device_count(void)
{
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const char *device_build(void)
{
    static char text[256];
    snprintf(text, sizeof text, "cuda, compute capability %s", image_architectures());
    return text;
}

const char *device_name(void)
{
    return dev.prop.name;
}

bool device_has_fp8(void)
{
    return capability() >= 89;
}

/* Dense rates of tensor cores that add in F32. The F32 rates are those of CUDA cores, because no
 * operation runs in TF32. A rate of 0 is unknown. The names that end with a space match variants
 * with other rates, such as RTX 4090 D and RTX 4090 Laptop GPU. [Data sheets of A100, L40S, H100,
 * H200, HGX B200 and GB200 NVL72; white papers of Ada 2.1, appendix A, and RTX Blackwell, table
 * 3] */
typedef struct {
    const char *name;
    double f32, bf16, fp8;
} Peak;

static const Peak *find_peak(void)
{
    static const Peak peaks[] = {
        { "H200 NVL", 60.0e12, 835.5e12, 1671.0e12 },  { "H200", 66.9e12, 989.4e12, 1978.9e12 },
        { "H100 PCIe", 51.2e12, 756.4e12, 1513.0e12 }, { "H100 NVL", 60.0e12, 835.5e12, 1671.0e12 },
        { "H100", 66.9e12, 989.4e12, 1978.9e12 },      { "GB200", 80.0e12, 2500.0e12, 5000.0e12 },
        { "B200", 75.0e12, 2250.0e12, 4500.0e12 },     { "NVIDIA A100", 19.5e12, 312.0e12, 0 },
        { "L40S", 91.6e12, 362.1e12, 733.0e12 },       { "RTX 4090 ", 0, 0, 0 },
        { "RTX 4090", 82.6e12, 165.2e12, 330.3e12 },   { "RTX 5090 ", 0, 0, 0 },
        { "RTX 5090", 104.8e12, 209.5e12, 419.0e12 },
    };
    for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; i++)
        if (strstr(dev.prop.name, peaks[i].name))
            return &peaks[i];
    return NULL;
}

double device_peak_flops(int bits)
{
    const Peak *p = find_peak();
    if (!p)
        return 0;
    return bits == 32 ? p->f32 : bits == 16 ? p->bf16 : p->fp8;
}

/* ---- memory ---------------------------------------------------------------------------------- */

size_t device_memory_total(void)
{
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return total;
}

size_t device_memory_used(void)
{
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return total - available;
}

const char *device_address(void)
{
    return dev.address;
}

bool device_health(DeviceHealth *h)
{
    static enum { UNKNOWN, THERE, MISSING } library;
    if (library == UNKNOWN)
        library = nvml_open(dev.address) ? THERE : MISSING;
    if (library == THERE)
        nvml_read(h);
    return library == THERE;
}

static void *allocate(size_t bytes, const char *what)
{
    void *p;
    cudaError_t status = cudaMalloc(&p, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) {
        size_t available = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&available, &total);
        die("out of GPU memory: %.2f GiB asked for %s, %.2f of %.2f GiB free on this %s. Reduce "
            "device_train_microbatch_size, choose a recipe that stores or keeps less, or use more "
            "GPUs",
            (double)bytes / (1 << 30), what, (double)available / (1 << 30),
            (double)total / (1 << 30), dev.prop.name);
    }
    cuda_check(status, "cudaMalloc", __FILE__, __LINE__);
    return p;
}

void *device_alloc(size_t bytes)
{
    void *p = allocate(bytes, "tensors");
    backend_device_zero(p, bytes);
    return p;
}

void device_free(void *p)
{
    if (p) /* NOTE: a dry run has no memory, and may have no GPU */
        CUDA_CHECK(cudaFree(p));
}

void backend_device_copy(void *dst, const void *src, size_t bytes)
{
    CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, dev.stream));
}

void backend_device_zero(void *dst, size_t bytes)
{
    CUDA_CHECK(cudaMemsetAsync(dst, 0, bytes, dev.stream));
}

void device_sync(void)
{
    for (int q = 0; q < NUM_QUEUES; q++)
        CUDA_CHECK(cudaStreamSynchronize(dev.queue[q]));
}

void *device_scratch(size_t bytes, int slot)
{
    CHECK(slot >= 0 && slot < SCRATCH_SLOTS, "slot %d", slot);
    CHECK(dev.current == QUEUE_COMPUTE, "scratch memory outside the compute queue");
    if (bytes > dev.scratch[slot].bytes) {
        device_sync();
        CUDA_CHECK(cudaFree(dev.scratch[slot].data));
        dev.scratch[slot].data = allocate(bytes, "scratch memory");
        dev.scratch[slot].bytes = bytes;
    }
    return dev.scratch[slot].data;
}

void *attention_scratch(Attention a, size_t bytes)
{
    return a.scratch && bytes <= a.scratch_bytes ? a.scratch
                                                 : device_scratch(bytes, SCRATCH_ATTENTION_OWN);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Returns the number of the next pinned buffer, after its last copy is done. */
static unsigned acquire_staging(void)
{
    unsigned i = dev.next_staging++ % STAGING_BUFFERS;
    CUDA_CHECK(cudaEventSynchronize(dev.staging[i].event));
    return i;
}

static size_t chunk_bytes(size_t bytes, size_t at)
{
    return bytes - at < STAGING_BYTES ? bytes - at : STAGING_BYTES;
}

void backend_device_put(void *dst, const void *src, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += STAGING_BYTES) {
        unsigned i = acquire_staging();
        size_t n = chunk_bytes(bytes, at);
        memcpy(dev.staging[i].data, (const char *)src + at, n);
        CUDA_CHECK(cudaMemcpyAsync((char *)dst + at, dev.staging[i].data, n, cudaMemcpyDefault,
                                   dev.stream));
        CUDA_CHECK(cudaEventRecord(dev.staging[i].event, dev.stream));
    }
}

/* Keeps STAGING_DEPTH chunks in flight, so that the host's memcpy overlaps with transfers. */
void backend_device_get(void *dst, const void *src, size_t bytes)
{
    if (device_is_pinned(dst)) {
        CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, dev.stream));
        CUDA_CHECK(cudaStreamSynchronize(dev.stream));
        return;
    }
    size_t chunks = ceil_div(bytes, STAGING_BYTES);
    unsigned staging[STAGING_DEPTH];
    for (size_t c = 0; c < chunks + STAGING_DEPTH; c++) {
        unsigned *s = &staging[c % STAGING_DEPTH];
        if (c >= STAGING_DEPTH && c - STAGING_DEPTH < chunks) {
            size_t at = (c - STAGING_DEPTH) * STAGING_BYTES;
            CUDA_CHECK(cudaEventSynchronize(dev.staging[*s].event));
            memcpy((char *)dst + at, dev.staging[*s].data, chunk_bytes(bytes, at));
        }
        if (c < chunks) {
            size_t at = c * STAGING_BYTES, n = chunk_bytes(bytes, at);
            *s = acquire_staging();
            CUDA_CHECK(cudaMemcpyAsync(dev.staging[*s].data, (const char *)src + at, n,
                                       cudaMemcpyDefault, dev.stream));
            CUDA_CHECK(cudaEventRecord(dev.staging[*s].event, dev.stream));
        }
    }
    CUDA_CHECK(cudaStreamSynchronize(dev.stream));
}

/* ---- time ------------------------------------------------------------------------------------ */

DeviceMark *backend_device_mark(DeviceMark *mark)
{
    if (!mark) {
        mark = xmalloc(sizeof *mark);
        CUDA_CHECK(cudaEventCreate(&mark->event));
    }
    CUDA_CHECK(cudaEventRecord(mark->event, dev.stream));
    return mark;
}

void backend_device_wait(DeviceMark *m)
{
    if (m)
        CUDA_CHECK(cudaStreamWaitEvent(dev.stream, m->event, 0));
}

/* NOTE: the current device of a new thread is device 0. Without cudaSetDevice the query would
 * create a context on device 0. */
bool device_reached(const DeviceMark *m)
{
    CUDA_CHECK(cudaSetDevice(dev.number));
    return cudaEventQuery(m->event) != cudaErrorNotReady;
}

void backend_device_unmark(DeviceMark *m)
{
    if (m)
        CUDA_CHECK(cudaEventDestroy(m->event));
    free(m);
}

double device_elapsed(DeviceMark *from, DeviceMark *to)
{
    float ms;
    CUDA_CHECK(cudaEventSynchronize(to->event));
    CUDA_CHECK(cudaEventElapsedTime(&ms, from->event, to->event));
    return ms;
}
