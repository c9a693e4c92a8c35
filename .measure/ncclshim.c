/* Stand-in for NCCL over shared memory, so that several ranks can use one GPU (which NCCL refuses). Preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef FAKE
typedef int cudaError_t; typedef void *cudaStream_t;
#define cudaSuccess 0
static cudaError_t cudaStreamSynchronize(cudaStream_t s) { (void)s; return 0; }
static cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, int k, cudaStream_t q) { (void)k; (void)q; memmove(d, s, n); return 0; }
static cudaError_t cudaMalloc(void **p, size_t n) { *p = malloc(n); return 0; }
static cudaError_t cudaFree(void *p) { free(p); return 0; }
#define cudaMemcpyDefault 4
#else
#include <cuda_runtime.h>
#endif
typedef enum { ncclSuccess = 0, ncclSystemError = 2 } ncclResult_t;
enum { I8 = 0, U8 = 1, F32T = 7, BF16T = 9 };
enum { SUM = 0, MAX = 2 };
#define CHUNK (4u << 20)
#define MAXR 8
typedef struct { atomic_uint arrived, phase; int color[MAXR], key[MAXR]; atomic_uint ready; } Head;
typedef struct Comm { Head *h; uint8_t *slot; int n, rank, splits; char name[100]; size_t bytes; } Comm;
typedef struct { char internal[128]; } ncclUniqueId;

#define D(call) do { if ((call) != cudaSuccess) { fprintf(stderr, "shim: %s\n", #call); abort(); } } while (0)

static void barrier(Comm *c)
{
    unsigned p = atomic_load(&c->h->phase);
    if (atomic_fetch_add(&c->h->arrived, 1) + 1 == (unsigned)c->n) {
        atomic_store(&c->h->arrived, 0);
        atomic_fetch_add(&c->h->phase, 1);
    } else
        while (atomic_load(&c->h->phase) == p)
            sched_yield();
}

static Comm *join(const char *name, int n, int rank)
{
    Comm *c = calloc(1, sizeof *c);
    c->n = n; c->rank = rank; c->bytes = 4096 + (size_t)n * CHUNK;
    snprintf(c->name, sizeof c->name, "%s", name);
    int fd = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)c->bytes) != 0) { perror("shim shm"); abort(); }
    void *m = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (m == MAP_FAILED) { perror("shim mmap"); abort(); }
    close(fd);
    c->h = m; c->slot = (uint8_t *)m + 4096;
    barrier(c);
    if (rank == 0) shm_unlink(name);
    barrier(c);
    return c;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    int r = 0, fd = open("/dev/urandom", O_RDONLY);
    if (read(fd, &r, sizeof r) != sizeof r) abort();
    close(fd);
    snprintf(id->internal, sizeof id->internal, "/shim-%d-%08x", getpid(), r);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(Comm **c, int n, ncclUniqueId id, int rank)
{
    *c = join(id.internal, n, rank);
    if (rank == 0) fprintf(stderr, "shim: %d ranks\n", n);
    return ncclSuccess;
}
ncclResult_t ncclCommSplit(Comm *c, int color, int key, Comm **out, void *config)
{
    (void)config;
    c->h->color[c->rank] = color; c->h->key[c->rank] = key;
    barrier(c);
    int n = 0, rank = 0;
    for (int i = 0; i < c->n; i++)
        if (c->h->color[i] == color) {
            n++;
            rank += c->h->key[i] < key || (c->h->key[i] == key && i < c->rank);
        }
    barrier(c);
    char name[100];
    snprintf(name, sizeof name, "%s.%d.%d", c->name, ++c->splits, color);
    *out = join(name, n, rank);
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(Comm *c) { munmap(c->h, c->bytes); free(c); return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(Comm *c, ncclResult_t *e) { (void)c; *e = ncclSuccess; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) { (void)r; return "shim"; }
const char *ncclGetLastError(Comm *c) { (void)c; return "shim"; }
ncclResult_t ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclMemFree(void *p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclCommWindowRegister(Comm *c, void *p, size_t n, void **w, int flags)
{ (void)c; (void)n; (void)flags; *w = p; return ncclSuccess; }
ncclResult_t ncclCommWindowDeregister(Comm *c, void *w) { (void)c; (void)w; return ncclSuccess; }

static float bf(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to_bf(float f)
{
    uint32_t u; memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
/* elements [from, from+n) of all slots, at byte offset 0, into out */
static void combine(Comm *c, void *out, size_t n, int type, int op)
{
    for (size_t i = 0; i < n; i++) {
        float s = 0;
        for (int r = 0; r < c->n; r++) {
            const uint8_t *p = c->slot + (size_t)r * CHUNK;
            float v = type == F32T ? ((const float *)p)[i] : bf(((const uint16_t *)p)[i]);
            s = r == 0 ? v : op == MAX ? (v > s || v != v ? v : s) : s + v;
            if (type == BF16T) s = bf(to_bf(s));
        }
        if (type == F32T) ((float *)out)[i] = s; else ((uint16_t *)out)[i] = to_bf(s);
    }
}
static size_t width(int type) { return type == F32T ? 4 : type == BF16T ? 2 : 1; }

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, int type, int op, Comm *c, cudaStream_t s)
{
    static _Thread_local uint8_t sum[CHUNK];
    D(cudaStreamSynchronize(s));
    const size_t w = width(type), most = CHUNK / w;
    for (size_t at = 0; at < count; at += most) {
        size_t n = count - at < most ? count - at : most;
        D(cudaMemcpyAsync(c->slot + (size_t)c->rank * CHUNK, (const uint8_t *)in + at * w, n * w, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
        barrier(c);
        combine(c, sum, n, type, op);
        D(cudaMemcpyAsync((uint8_t *)out + at * w, sum, n * w, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
        barrier(c);
    }
    return ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, Comm *c, cudaStream_t s)
{
    static _Thread_local uint8_t sum[CHUNK];
    D(cudaStreamSynchronize(s));
    const size_t w = width(type), most = CHUNK / w;
    for (int to = 0; to < c->n; to++)
        for (size_t at = 0; at < count; at += most) {
            size_t n = count - at < most ? count - at : most;
            D(cudaMemcpyAsync(c->slot + (size_t)c->rank * CHUNK, (const uint8_t *)in + ((size_t)to * count + at) * w, n * w, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
            barrier(c);
            if (to == c->rank) {
                combine(c, sum, n, type, op);
                D(cudaMemcpyAsync((uint8_t *)out + at * w, sum, n * w, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
            }
            barrier(c);
        }
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, int type, Comm *c, cudaStream_t s)
{
    D(cudaStreamSynchronize(s));
    const size_t bytes = count * width(type);
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        D(cudaMemcpyAsync(c->slot + (size_t)c->rank * CHUNK, (const uint8_t *)in + at, n, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
        barrier(c);
        for (int r = 0; r < c->n; r++)
            D(cudaMemcpyAsync((uint8_t *)out + (size_t)r * bytes + at, c->slot + (size_t)r * CHUNK, n, cudaMemcpyDefault, s)); D(cudaStreamSynchronize(s));
        barrier(c);
    }
    return ncclSuccess;
}
#ifndef FAKE
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceCount(int *n) { *n = 4; return cudaSuccess; }
cudaError_t cudaSetDevice(int n)
{ (void)n; static cudaError_t (*f)(int); if (!f) f = dlsym(RTLD_NEXT, "cudaSetDevice"); return f(0); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n)
{ (void)n; static cudaError_t (*f)(struct cudaDeviceProp *, int); if (!f) f = dlsym(RTLD_NEXT, "cudaGetDeviceProperties"); return f(p, 0); }
cudaError_t cudaDeviceGetPCIBusId(char *p, int l, int n)
{ (void)n; static cudaError_t (*f)(char *, int, int); if (!f) f = dlsym(RTLD_NEXT, "cudaDeviceGetPCIBusId"); return f(p, l, 0); }
#else
#include <sys/wait.h>
int main(void)
{
    ncclUniqueId id; ncclGetUniqueId(&id);
    int n = 3; pid_t p[3];
    for (int r = 0; r < n; r++) if (!(p[r] = fork())) {
        Comm *c, *s; ncclCommInitRank(&c, n, id, r); ncclCommSplit(c, r == 0, r, &s, NULL);
        size_t N = 3000001; float *x = malloc(N * n * 4), *y = malloc(N * n * 4);
        for (size_t i = 0; i < N * n; i++) x[i] = (float)(i % 1000) * (r + 1);
        ncclReduceScatter(x, y, N, F32T, SUM, c, 0);
        for (size_t i = 0; i < N; i++) if (y[i] != (float)((i + r * N) % 1000) * 6) { printf("rs %d %zu\n", r, i); exit(1); }
        memcpy(y + r * N, x + r * N, N * 4); ncclAllGather(y + r * N, y, N * 4, U8, c, 0);
        for (size_t i = 0; i < N * n; i++) if (y[i] != (float)(i % 1000) * (float)(i / N + 1)) { printf("ag %d %zu\n", r, i); exit(1); }
        ncclAllReduce(x, x, N, F32T, MAX, c, 0);
        for (size_t i = 0; i < N; i++) if (x[i] != (float)(i % 1000) * 3) { printf("ar\n"); exit(1); }
        int m = s->n; exit(m != (r == 0 ? 1 : 2) || s->rank != (r == 2));
    }
    int bad = 0; for (int r = 0; r < n; r++) { int st; waitpid(p[r], &st, 0); bad |= st; }
    printf("bad %d\n", bad); return bad;
}
#endif
