/* Pinned host memory, in large pages, on the NUMA node of the GPU. */
#include "kernels/cuda/cuda.h"

#include <ctype.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_RANGES = 16, LARGE_PAGE = 2 << 20, TOUCHERS = 8 };

static struct {
    char *at;
    size_t bytes;
} range[MAX_RANGES];

/* Returns the NUMA node of the GPU's PCI address; -1: unknown. */
static int gpu_node(void)
{
    char path[96];
    int node = -1;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", device_address());
    for (char *c = path; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    FILE *f = fopen(path, "r");
    if (f) {
        if (fscanf(f, "%d", &node) != 1)
            node = -1;
        fclose(f);
    }
    return node;
}

/* NOTE: containers may forbid mbind. Then pages are on the node of the thread that first touches
 * them. */
static void prefer_gpu_node(void *p, size_t bytes)
{
    const int node = gpu_node(), bits = 8 * (int)sizeof(unsigned long);
    if (node < 0 || node >= bits)
        return;
    const unsigned long mask = 1ul << node;
    (void)syscall(SYS_mbind, p, bytes, MPOL_PREFERRED, &mask, (unsigned long)bits + 1, 0u);
}

typedef struct {
    char *from, *to;
} Range;

static void *touch(void *range)
{
    const Range *r = range;
    for (volatile char *p = r->from; p < r->to; p += 4096)
        *p = 0;
    return NULL;
}

/* Touches all pages by several threads. One thread takes some 10 seconds for 40 GiB. */
static void touch_all(char *p, size_t bytes)
{
    pthread_t thread[TOUCHERS];
    Range range[TOUCHERS];
    bool started[TOUCHERS];
    const size_t each = bytes / TOUCHERS / LARGE_PAGE * LARGE_PAGE;
    for (int i = 0; i < TOUCHERS; i++) {
        range[i] = (Range){ p + (size_t)i * each,
                            i == TOUCHERS - 1 ? p + bytes : p + (size_t)(i + 1) * each };
        started[i] = pthread_create(&thread[i], NULL, touch, &range[i]) == 0;
        if (!started[i])
            touch(&range[i]);
    }
    for (int i = 0; i < TOUCHERS; i++)
        if (started[i])
            pthread_join(thread[i], NULL);
}

static char *pin(size_t bytes)
{
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    prefer_gpu_node(p, bytes);
    touch_all(p, bytes);
    if (cudaHostRegister(p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) ==
        cudaSuccess)
        return p;
    cudaGetLastError();
    munmap(p, bytes);
    return NULL;
}

void *device_host_alloc(size_t bytes, const char *what)
{
    const size_t whole = (bytes / LARGE_PAGE + 1) * LARGE_PAGE;
    int i = 0;
    while (i < MAX_RANGES && range[i].at)
        i++;
    CHECK(i < MAX_RANGES, "device_host_alloc: more than %d allocations", MAX_RANGES);
    char *p = pin(whole);
    if (!p && what)
        die("the system does not pin %.2f GiB of host memory for %s. ulimit -l, the container or "
            "the container's memory limit may forbid it. offload.activations=never, and likewise "
            "the other keys of offload, keep this memory on the GPU",
            (double)bytes / (1 << 30), what);
    if (!p)
        return xcalloc(bytes ? bytes : 1, 1);
    range[i].at = p;
    range[i].bytes = whole;
    return p;
}

static int find_range(const void *p)
{
    for (int i = 0; i < MAX_RANGES; i++)
        if (range[i].at && (const char *)p >= range[i].at &&
            (const char *)p < range[i].at + range[i].bytes)
            return i;
    return -1;
}

bool device_is_pinned(const void *p)
{
    return find_range(p) >= 0;
}

void device_host_free(void *p)
{
    const int i = find_range(p);
    if (i < 0) {
        free(p);
        return;
    }
    CUDA_CHECK(cudaHostUnregister(p));
    munmap(p, range[i].bytes);
    range[i].at = NULL;
}
