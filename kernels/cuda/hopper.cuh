/* Functions for features of compute capability 9.0 only [PTX ISA 8.0, sec. 9.7]: barriers in shared
 * memory that count bytes, copies between global and shared memory by the tensor memory accelerator
 * (TMA), and asynchronous products of tiles (wgmma), which the 128 threads of a warpgroup start
 * together.
 *
 * Tiles of BF16 in shared memory are panels of 64 columns: a row takes 128 bytes, rows are
 * contiguous, and the 16-byte chunk c of row r is at position c ^ r % 8 (the "128-byte swizzle"). A
 * tile starts at a multiple of 1024 bytes. Panels of FP8 have 128 columns.
 *
 * wgmma computes d (64, N) += a (64, 16) b (16, N). If an operand is read "by rows", the rows of
 * its tile are rows of a or columns of b, and the sum runs along the tile's rows. If it is read "by
 * columns", the sum runs across the tile's rows. Each thread holds a part of d. In d[4j .. 4j+3],
 * lane l of warp w of the warpgroup has two numbers of row 16w + l/4, then two numbers of the row 8
 * below, in columns 8j + 2(l%4) and 8j + 2(l%4) + 1. An operand a in registers consists of pairs of
 * BF16 in the same layout. So d of one product, rounded to BF16, can be a of the next product.
 *
 * Asynchronous copies and products access memory through the async proxy. Between an ordinary write
 * to shared memory and an asynchronous read, fence_async is needed. If one of the two accesses is
 * in global memory, fence_async_global is needed. The fence may be on either side of the barrier
 * between the two accesses, in the thread block that reads. [Lustig 2022, Mixed-Proxy Extensions
 * for the NVIDIA PTX Memory Consistency Model] says so for other proxies, and the PTX ISA does not
 * contradict it for the async proxy. Here the fence comes after the barrier, in the thread that
 * starts the read. There it does not delay the writer. Before the barrier, the writer would wait
 * for all of its pending accesses. */
#pragma once
#include <cuda.h>

#include "kernels/cuda/cuda.h"

typedef uint64_t Barrier; /* in shared memory */

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- barriers -------------------------------------------------------------------------------- */

/* Initializes a barrier whose phases end after `arrivals` arrivals and all announced bytes. A phase
 * is identified by its parity. The first phase has parity 0. */
__device__ inline void barrier_init(Barrier *b, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}

/* Needed between barrier_init and the first use of the barrier by TMA. */
__device__ inline void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

/* Arrives at the same barrier of another block of the cluster; block: its number in the cluster.
 * NOTE: this arrival is sufficient after reads that the thread has waited for. Its stores need not
 * be visible in the other block, and .release.cluster would wait for them. */
__device__ inline void barrier_arrive_at(Barrier *b, int block)
{
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(b)),
                 "r"(block)
                 : "memory");
}

/* Writes a number to the same address of another block of the cluster, and counts its four bytes at
 * the barrier of that block. */
__device__ inline void store_at(int *to, int number, Barrier *b, int block)
{
    asm volatile(
        "{\n.reg .b32 place, word;\nmapa.shared::cluster.u32 place, %0, "
        "%3;\nmapa.shared::cluster.u32 word, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %1, [word];\n}" ::"r"(
            shared_address(to)),
        "r"(number), "r"(shared_address(b)), "r"(block)
        : "memory");
}

/* Arrives, and announces bytes that TMA or store_at will write. */
__device__ inline void barrier_expect(Barrier *b, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}

/* Waits for the end of the phase with this parity. Until the first phase has ended, a wait with
 * parity 1 returns at once. */
__device__ inline void barrier_wait(Barrier *b, int parity)
{
    uint32_t done;
    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], "
                     "%2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(b)), "r"(parity)
                     : "memory");
    while (!done);
}

/* Synchronizes all threads of a cluster of BLOCKS blocks. */
template <int BLOCKS>
__device__ inline void cluster_barrier()
{
    if (BLOCKS == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Called before a block ends, because another block of the cluster may still arrive at its
 * barriers. */
template <int BLOCKS>
__device__ inline void cluster_end()
{
    if (BLOCKS > 1)
        cluster_barrier<BLOCKS>();
}

/* Makes one arrival for a warp, after all earlier accesses of its lanes. */
__device__ inline void barrier_arrive_warp(Barrier *b)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(b);
}

/* As barrier_arrive_warp, at this barrier of all BLOCKS blocks of the cluster. The lanes must have
 * waited for their reads. NOTE: with several blocks the lanes must have converged after this wait,
 * as they have after products. */
template <int BLOCKS>
__device__ inline void barrier_arrive_everywhere(Barrier *b)
{
    const int lane = threadIdx.x % 32;
    if (BLOCKS == 1)
        barrier_arrive_warp(b);
    else if (lane < BLOCKS)
        barrier_arrive_at(b, lane);
}

/* A position in a ring of stages, and the parity of the position's phase. */
template <int STAGES>
struct Ring {
    int stage = 0, parity = 0;

    __device__ Ring take()
    {
        const Ring now = *this;
        if (++stage == STAGES)
            stage = 0, parity ^= 1;
        return now;
    }
};

/* Synchronizes `threads` threads of the block. Barrier 0 is __syncthreads's. */
__device__ inline void named_barrier(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* Arrives without waiting. `threads` is the same number as in named_barrier. */
__device__ inline void named_barrier_arrive(int number, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* NOTE: without the state space in its name this fence would also wait for the block's writes to
 * global memory, about a thousand cycles. */
__device__ inline void fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void fence_async_global()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ inline void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Loads a box of the map's shape, from (x, y, z) on. Elements outside the tensor become 0. */
__device__ inline void load_box(void *to, const CUtensorMap *map, int x, int y, int z, Barrier *b)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(b))
                 : "memory");
}

/* As load_box, into this address of each block of the cluster whose bit is set in `blocks`. Each of
 * these blocks counts the bytes at its own barrier. */
__device__ inline void load_box_everywhere(void *to, const CUtensorMap *map, int x, int y, int z,
                                           Barrier *b, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(b)), "h"(blocks)
                 : "memory");
}

/* The same two functions for a tensor of five dimensions, from (x, 0, 0, 0, y) on. */
__device__ inline void load_box(void *to, const CUtensorMap *map, int x, int y, Barrier *b)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %3, %3, %4}], [%5];" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(0), "r"(y), "r"(shared_address(b))
                 : "memory");
}

__device__ inline void load_box_everywhere(void *to, const CUtensorMap *map, int x, int y,
                                           Barrier *b, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "multicast::cluster "
                 "[%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"(x), "r"(0), "r"(y), "r"(shared_address(b)), "h"(blocks)
                 : "memory");
}

/* Stores a box of the map's shape, from (x, y, z) on. Elements outside the tensor are not
 * written. */
__device__ inline void store_box(const CUtensorMap *map, int x, int y, int z, const void *from)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::
            "l"(map),
        "r"(x), "r"(y), "r"(z), "r"(shared_address(from))
        : "memory");
}

__device__ inline void store_box(const CUtensorMap *map, int x, int y, const void *from)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %2, %2, "
                 "%3}], [%4];" ::"l"(map),
                 "r"(x), "r"(0), "r"(y), "r"(shared_address(from))
                 : "memory");
}

/* `bytes` and both addresses must be multiples of 16. */
__device__ inline void load_bytes(void *to, const void *from, int bytes, Barrier *b)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b))
        : "memory");
}

__device__ inline void store_bytes(void *to, const void *from, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

__device__ inline void add_floats(float *to, const float *from, int bytes)
{
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
}

/* For stores and adds of one thread. copies_commit ends a group of copies. copies_wait_read waits
 * until all groups but the last N have read their source. copies_wait waits until all groups are
 * done. */
__device__ inline void copies_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N>
__device__ inline void copies_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ inline void copies_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* A number in global memory that orders the copies of different blocks. A thread that has read the
 * value of turn_set sees the copies that its writer had waited for. */
__device__ inline void turn_wait(const int *turn, int value)
{
    int now;
    do
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != value);
    fence_async_global();
}

__device__ inline void turn_set(int *turn, int value)
{
    fence_async_global();
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

/* ---- products -------------------------------------------------------------------------------- */

/* Sets the number of registers per thread of a warpgroup. All of its warps must call this
 * function. */
template <int N>
__device__ inline void registers_grow()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void registers_shrink()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* Describes an operand in shared memory with contiguous groups of 8 rows. panel: bytes between
 * panels, for an operand by columns that has several panels. Add operand_step(bytes) to advance.
 * The result is the lower half of wgmma's descriptor; the upper half is constant. */
__device__ inline uint32_t operand(const void *tile, int panel)
{
    uint32_t low = (shared_address(tile) & 0x3ffff) >> 4 | (uint32_t)(panel >> 4) << 16;
    /* NOTE: without this statement the compiler finds that adding steps never carries into the
     * upper half, and adds in 64 bits, at three times the cost */
    asm("" : "+r"(low));
    return low;
}
__device__ constexpr uint32_t operand_step(int bytes)
{
    return (uint32_t)bytes >> 4;
}
__device__ inline uint64_t descriptor(uint32_t operand)
{
    const uint32_t group = 8 * 128, swizzle_128 = 1;
    return (uint64_t)(group >> 4 | swizzle_128 << 30) << 32 | operand;
}

/* The step to the k-th 16 terms of a sum. step_by_rows goes along the rows of an operand by rows,
 * whose panels are `panel` bytes apart. step_by_columns goes down the rows of an operand by
 * columns. */
__device__ constexpr uint32_t step_by_rows(int k, int panel)
{
    return operand_step(k / 4 * panel + k % 4 * 32);
}
__device__ constexpr uint32_t step_by_columns(int k)
{
    return operand_step(k * 16 * 128);
}

/* Needed before the first product, and after ordinary code has changed registers of products. */
__device__ inline void products_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until all groups of products except the last N are done. NOTE: the assembler moves this
 * wait before ordinary computations that could overlap. The wait stays in place if it follows these
 * computations in both branches of an `if`. The compiler keeps both branches if their CALL
 * differs. */
template <int N, int CALL = 0>
__device__ inline void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;    // %1" ::"n"(N), "n"(CALL) : "memory");
}

/* NOTE: the compiler does not know that products change registers until the wait. This function
 * keeps the compiler from moving accesses to these registers across the wait. */
template <int N>
__device__ inline void keep_in_place(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(x[i])::"memory");
}

template <int N>
__device__ inline void keep_in_place(uint32_t (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(x[i])::"memory");
}

#define D8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(d, i) D8(d, i), D8(d, i + 8), D8(d, i + 16), D8(d, i + 24)
#define NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,%26,%27,%28," \
    "%29,%30,%31"
#define NAMES_64 \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%" \
             "52,%53,%54,%55,%56," \
             "%57,%58,%59,%60,%61,%62,%63"

#define NAMES_128 \
    NAMES_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85" \
    ",%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105" \
    ",%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122" \
    ",%123,%124,%125,%126,%127"

/* d = a b, or d += a b if `add`. If A_COLUMNS is 1, a is by columns; if B_COLUMNS is 1, b is by
 * columns. */
template <int A_COLUMNS, int B_COLUMNS>
__device__ inline void product(float (&d)[32], uint32_t a, uint32_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, "
                 "0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, "
                 "%32, %33, p, 1, 1, %35, %36;\n}"
                 : D32(d, 0)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)add), "n"(A_COLUMNS),
                   "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ inline void product(float (&d)[64], uint32_t a, uint32_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, "
                 "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, "
                 "%64, %65, p, 1, 1, %67, %68;\n}"
                 : D32(d, 0), D32(d, 32)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)add), "n"(A_COLUMNS),
                   "n"(B_COLUMNS));
}

template <int A_COLUMNS, int B_COLUMNS>
__device__ inline void product(float (&d)[128], uint32_t a, uint32_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, "
                 "0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128 "}, "
                 "%128, %129, p, 1, 1, %131, %132;\n}"
                 : D32(d, 0), D32(d, 32), D32(d, 64), D32(d, 96)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)add), "n"(A_COLUMNS),
                   "n"(B_COLUMNS));
}

/* The product for FP8, with a in format A and b in E4M3, both by rows. 32 terms of a sum are 32
 * bytes. The tensor cores add in short accumulators. */
#define PRODUCT_FP8(kinds) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32." kinds " {" NAMES_128 \
                 "}, %128, %129, p, 1, 1;\n}" \
                 : D32(d, 0), D32(d, 32), D32(d, 64), D32(d, 96) \
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)add))
template <DType A>
__device__ inline void product_fp8(float (&d)[128], uint32_t a, uint32_t b, bool add)
{
    if (A == E4M3)
        PRODUCT_FP8("e4m3.e4m3");
    else
        PRODUCT_FP8("e5m2.e4m3");
}
#undef PRODUCT_FP8

#define PRODUCT_FP8(kinds) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32." kinds " {" NAMES_64 \
                 "}, %64, %65, p, 1, 1;\n}" \
                 : D32(d, 0), D32(d, 32) \
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)add))
template <DType A>
__device__ inline void product_fp8(float (&d)[64], uint32_t a, uint32_t b, bool add)
{
    if (A == E4M3)
        PRODUCT_FP8("e4m3.e4m3");
    else
        PRODUCT_FP8("e5m2.e4m3");
}
#undef PRODUCT_FP8

/* d = a b, or d += a b if `add`, with a in registers and b by rows. */
__device__ inline void product(float (&d)[32], const uint32_t *a, uint32_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, "
                 "0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
                 : D32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "r"((int)add));
}

__device__ inline void product(float (&d)[64], const uint32_t *a, uint32_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, "
                 "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, "
                 "{%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
                 : D32(d, 0), D32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)), "r"((int)add));
}

/* d += a b, with a in registers and b by columns. */
__device__ inline void product_add(float (&d)[32], const uint32_t *a, uint32_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : D32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
}

__device__ inline void product_add(float (&d)[64], const uint32_t *a, uint32_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : D32(d, 0), D32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
}

#undef D8
#undef D32
#undef NAMES_32
#undef NAMES_64
#undef NAMES_128

/* ---- in a warp ------------------------------------------------------------------------------- */

/* Tells the compiler that x is equal in all lanes. Then operands computed from x stay in uniform
 * registers. */
__device__ inline int uniform(int x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

/* Stores four 8 x 8 matrices of BF16, in wgmma's register layout, to shared memory. a[i] of all
 * lanes is matrix i. Lane 8i + r has the address of row r (16 bytes) of matrix i. */
__device__ inline void store_matrices(void *row, const uint32_t *a)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

/* Stores each matrix transposed. Lane 8i + r has the address of column r of matrix i. */
__device__ inline void store_matrices_transposed(void *column, const uint32_t *a)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(column)),
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

/* Loads four matrices that store_matrices stored. */
__device__ inline void load_matrices(uint32_t *a, const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared_address(row))
                 : "memory");
}

#endif

/* ---- launch ---------------------------------------------------------------------------------- */

/* Launches `clusters` clusters of `blocks` blocks with `bytes` of dynamic shared memory each.
 * LAUNCH_CHECK must follow. */
template <class... Parameters, class... Arguments>
inline void launch_clusters(void (*kernel)(Parameters...), int clusters, int blocks, int threads,
                            size_t bytes, Arguments... arguments)
{
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = { (unsigned)blocks, 1, 1 };
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(clusters * blocks));
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = bytes;
    config.stream = device_stream();
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}
