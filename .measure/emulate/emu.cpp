#include "emu.h"
#include <vector>
#include <map>
#include <string>
#include <algorithm>
#include <random>
#include <sys/mman.h>
extern "C" void __asan_poison_memory_region(void const volatile *, size_t); extern "C" void __asan_unpoison_memory_region(void const volatile *, size_t);
#define ASAN_POISON_MEMORY_REGION __asan_poison_memory_region
#define ASAN_UNPOISON_MEMORY_REGION __asan_unpoison_memory_region
int emu_ulps = 0;
extern "C" { int emu_seed = 1; int emu_sms = 3; long emu_launches; int emu_errors; int emu_note_exit; const char *emu_only; }
extern "C" void emu_set_ulps(int u) { emu_ulps = u; }
namespace emu {
thread_local Idx tid, bid; Idx bdim, gdim; char *dyn;
enum State { RUN, WARP, BLOCK, DONE };
struct Fiber { void *sp; char *stack; State state; const char *what; uint64_t v; uint64_t all[32]; };
static Fiber fibers[1024]; static void *main_sp; static int current; static const std::function<void()> *body; static const char *kernel;
static const size_t STACK = 256 << 10;
extern "C" void emu_switch(void **from, void *to);
__asm__(".text\n.globl emu_switch\n.hidden emu_switch\nemu_switch:\n push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        " mov %rsp,(%rdi)\n mov %rsi,%rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
static void yield_as(State s) { fibers[current].state = s; int me = current; emu_switch(&fibers[me].sp, main_sp); }
static void entry() { (*body)(); fibers[current].state = DONE; void *x; emu_switch(&x, main_sp); abort(); }
static void error(const char *m, const char *w) { fprintf(stderr, "EMU %s: %s (%s) block %u %u\n", kernel, m, w ? w : "", bid.x, bid.y); emu_errors++; }
void block_barrier() { fibers[current].what = "syncthreads"; yield_as(BLOCK); }
void warp_gather(uint64_t v, uint64_t (&all)[32], const char *what) {
    Fiber &f = fibers[current]; f.v = v; f.what = what; yield_as(WARP); memcpy(all, fibers[current].all, sizeof all); }
uint64_t exchange(uint64_t v, int from, const char *what) { uint64_t a[32]; warp_gather(v, a, what); return a[from]; }
static struct Counts { std::map<std::string, long> m; ~Counts() { if (getenv("COUNTS")) for (auto &k : m) fprintf(stderr, "  %s %ld\n", k.first.c_str(), k.second); } } counts;
void run(const char *name, Cfg c, const std::function<void()> &f) { counts.m[name]++;
    kernel = name; body = &f; emu_launches++;
    const int n = c.block.x; bdim = { c.block.x, c.block.y, c.block.z }; gdim = { c.grid.x, c.grid.y, c.grid.z };
    if (!c.grid.x || !c.grid.y || c.grid.y > 65535 || n < 1 || n > 1024 || c.block.y != 1 || c.grid.z != 1 || c.bytes > 227 * 1024) { error("bad launch", name); return; }
    static std::mt19937 rng; rng.seed(emu_seed);
    std::vector<unsigned> blocks(c.grid.x * c.grid.y); for (size_t i = 0; i < blocks.size(); i++) blocks[i] = i;
    if (emu_seed) std::shuffle(blocks.begin(), blocks.end(), rng);
    const int warps = (n + 31) / 32; std::vector<int> order(warps); for (int i = 0; i < warps; i++) order[i] = i;
    for (unsigned b : blocks) {
        bid = { b % c.grid.x, b / c.grid.x, 0 };
        dyn = (char *)aligned_alloc(16, c.bytes ? (c.bytes + 15) / 16 * 16 : 16); if (c.bytes % 16) ASAN_POISON_MEMORY_REGION(dyn + c.bytes, 16 - c.bytes % 16); memset(dyn, 0xff, c.bytes);
        for (int i = 0; i < n; i++) {
            Fiber &x = fibers[i];
            if (!x.stack) x.stack = (char *)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            else ASAN_UNPOISON_MEMORY_REGION(x.stack, STACK);
            uint64_t *s = (uint64_t *)(x.stack + STACK - 64); s[0] = (uint64_t)entry; s[1] = 0; s -= 6; memset(s, 0, 48);
            x.sp = s; x.state = RUN; x.what = 0;
        }
        int done = 0;
        while (done < n) {
            if (emu_seed) std::shuffle(order.begin(), order.end(), rng);
            bool progress = false;
            for (int w : order) for (;;) {
                const int first = 32 * w, end = std::min(n, first + 32);
                int rotate = emu_seed ? (int)(rng() % 32) : 0; bool ran = false;
                for (int l = 0; l < 32; l++) {
                    const int i = first + (emu_seed % 2 ? 31 - (l + rotate) % 32 : (l + rotate) % 32);
                    if (i >= end || fibers[i].state != RUN) continue;
                    current = i; tid = { (unsigned)i, 0, 0 }; emu_switch(&main_sp, fibers[i].sp);
                    if (fibers[i].state == DONE) done++;
                    ran = progress = true;
                }
                int waits = 0; const char *what = 0; bool differ = false;
                for (int i = first; i < end; i++) if (fibers[i].state == WARP) { if (waits && strcmp(what, fibers[i].what)) differ = true; waits++; what = fibers[i].what; }
                if (waits) {
                    if (waits != 32 || differ) { error(differ ? "lanes at different collectives" : "not all lanes at a collective", what); }
                    if (waits != 32) { uint64_t all[32] = {}; (void)all; }
                    for (int i = first; i < end; i++) if (fibers[i].state == WARP)
                        for (int k = 0; k < 32; k++) fibers[i].all[k] = first + k < end && fibers[first + k].state != DONE ? fibers[first + k].v : 0xdeadbeef;
                    for (int i = first; i < end; i++) if (fibers[i].state == WARP) fibers[i].state = RUN;
                    progress = true; continue;
                }
                if (!ran) break;
            }
            int waits = 0; for (int i = 0; i < n; i++) waits += fibers[i].state == BLOCK;
            if (waits && waits + done == n) {
                if (done) { error("threads have left at a barrier", ""); }
                for (int i = 0; i < n; i++) if (fibers[i].state == BLOCK) fibers[i].state = RUN;
            } else if (!progress) { error("deadlock", ""); abort(); }
        }
        free(dyn);
    }
}
}
static float bf(uint32_t w, int h) { return __uint_as_float(h ? w & 0xffff0000u : w << 16); }
void emu_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint64_t lo[32], hi[32], bb[32];
    emu::warp_gather((uint64_t)a[1] << 32 | a[0], lo, "mma"); emu::warp_gather((uint64_t)a[3] << 32 | a[2], hi, "mma");
    emu::warp_gather((uint64_t)b1 << 32 | b0, bb, "mma");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 4; k++) {
        const int row = g + (k / 2) * 8, col = 2 * t + k % 2; float s = d[k];
        for (int j = 0; j < 16; j++) {
            const uint64_t aw = (j < 8 ? lo : hi)[(row % 8) * 4 + j % 8 / 2];
            const float av = bf(row >= 8 ? (uint32_t)(aw >> 32) : (uint32_t)aw, j % 2);
            const uint64_t bw = bb[col * 4 + j % 8 / 2]; const float bv = bf(j >= 8 ? (uint32_t)(bw >> 32) : (uint32_t)bw, j % 2);
            s += av * bv;
        }
        d[k] = s;
    }
}
/* ---- device ---- */
#include "kernels/cuda/cuda.h"
extern "C" {
void *device_scratch(size_t bytes, int slot) { static void *p[SCRATCH_SLOTS]; static size_t n[SCRATCH_SLOTS];
    if (slot != SCRATCH_AMAX) { free(p[slot]); p[slot] = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256); memset(p[slot], 0xff, bytes);
        ASAN_POISON_MEMORY_REGION((char *)p[slot] + bytes, (bytes + 255) / 256 * 256 - bytes); return p[slot]; }
    if (n[slot] < bytes) { free(p[slot]); p[slot] = aligned_alloc(256, (bytes + 255) / 256 * 256); memset(p[slot], 0xff, bytes); n[slot] = bytes; } return p[slot]; }
cudaStream_t device_stream(void) { return 0; }
int device_sm_count(void) { return emu_sms; }
void device_zero(void *p, size_t n) { memset(p, 0, n); }
void device_copy(void *to, const void *from, size_t n) { memcpy(to, from, n); }
void cuda_check(cudaError_t s, const char *c, const char *f, int l) { if (s) { printf("cuda_check %s\n", c); } }
void cuda_check_launch(const char *, int) {}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t) { memset(p, v, n); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *p, const void *q, size_t n, cudaMemcpyKind, cudaStream_t) { memcpy(p, q, n); return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t) {
    for (size_t i = 0; i < h; i++) memcpy((char *)d + i * dp, (const char *)s + i * sp, w); return cudaSuccess; }
cudaError_t cudaMemset2DAsync(void *d, size_t dp, int v, size_t w, size_t h, cudaStream_t) { for (size_t i = 0; i < h; i++) memset((char *)d + i * dp, v, w); return cudaSuccess; }
}
