/* Shared by kernel tests: inputs from an integer hash, tensors between canaries, comparison with a
 * double reference, operations run twice, and errors in a child process. It uses only kernels.h and
 * device.h, so that a test is written once and linked with either back end. */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "kernels/random.h"
#include "kernels/runtime/device.h"
#include "tests/test.h"

#define U24 0x1p-24 /* unit roundoff of F32 */

static const Tensor NONE = { 0 };
static const LoraProduct NO_PRODUCT = { 0 };

/* The formats of a pass; a kernel test runs once per row. */
typedef struct {
    const char *name;
    Format act, weight, grad;
} FormatRow;
static const FormatRow format_rows[] = {
    { "f32", { F32, 0 }, { F32, 0 }, { F32, 0 } },
    { "bf16", { BF16, 0 }, { BF16, 0 }, { BF16, 0 } },
    { "bf16-f32-grads", { BF16, 0 }, { BF16, 0 }, { F32, 0 } },
};
enum { FORMAT_ROWS = sizeof format_rows / sizeof format_rows[0] };

static inline bool on_cpu(void)
{
    return strcmp(device_name(), "cpu") == 0;
}

static inline double unit_roundoff(Format f)
{
    return f.dtype == F32 ? 0x1p-24 : f.dtype == BF16 ? 0x1p-8 : f.dtype == E4M3 ? 0x1p-4 : 0x1p-3;
}

/* ---- memory until release() ------------------------------------------------------------------ */

enum { CANARY = 256, MAX_KEPT = 4096 };
static struct {
    void *memory;
    size_t bytes;
    bool device;
} kept[MAX_KEPT];
static int num_kept;

static inline void *keep(size_t bytes)
{
    assert_true(num_kept < MAX_KEPT);
    void *p = calloc(bytes + 1, 1);
    assert_non_null(p);
    kept[num_kept].device = false;
    kept[num_kept++].memory = p;
    return p;
}

/* Returns device memory between two canaries of bytes 0xa5. Each byte of the memory itself is 0xcd
 * at first. */
static inline void *guarded(size_t bytes)
{
    assert_true(num_kept < MAX_KEPT);
    char *host = malloc(bytes + 2 * CANARY), *p = device_alloc(bytes + 2 * CANARY);
    memset(host, 0xa5, bytes + 2 * CANARY);
    memset(host + CANARY, 0xcd, bytes);
    device_put(p, host, bytes + 2 * CANARY);
    free(host);
    kept[num_kept].device = true;
    kept[num_kept].bytes = bytes;
    kept[num_kept++].memory = p;
    return p + CANARY;
}

static inline void check_canary(int i)
{
    unsigned char before[CANARY], after[CANARY];
    char *p = kept[i].memory;
    device_get(before, p, CANARY);
    device_get(after, p + CANARY + kept[i].bytes, CANARY);
    for (int j = 0; j < CANARY; j++)
        if (before[j] != 0xa5 || after[j] != 0xa5)
            fail_msg("memory outside a tensor was written: buffer %d of %zu bytes, %s", i,
                     kept[i].bytes, before[j] != 0xa5 ? "before it" : "after it");
}

/* Checks the canaries of all pieces of memory from number `first` on, and frees these pieces. */
static inline void release_from(int first)
{
    for (int i = first; i < num_kept; i++)
        if (kept[i].device)
            check_canary(i);
    for (int i = first; i < num_kept; i++) {
        if (kept[i].device)
            device_free(kept[i].memory);
        else
            free(kept[i].memory);
    }
    num_kept = first;
}

/* As release_from, for all memory. Called at the end of each test and each case. */
static inline void release(void)
{
    release_from(0);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static inline Tensor make(Format f, int rows, int cols)
{
    Tensor t = { .format = f, .rows = rows, .cols = cols };
    t.data = guarded(tensor_numel(t) * dtype_size(f.dtype));
    if (format_has_scales(f) && f.group)
        t.scale = guarded(format_scale_bytes(f, tensor_numel(t)));
    else if (format_is_fp8(f))
        t.scale = guarded(16);
    return t;
}

static inline Tensor make_f32(int rows, int cols)
{
    return make((Format){ F32, 0 }, rows, cols);
}

/* Returns a copy in host memory: codes, transposed codes and scales, one after the other. If the
 * tensor has one scale, only the first 4 of the 16 bytes of the scale are set. */
static inline void *tensor_snapshot(Tensor t)
{
    size_t codes = tensor_numel(t) * dtype_size(t.format.dtype), at = codes;
    char *bytes = keep(tensor_bytes(t));
    device_get(bytes, t.data, codes);
    if (t.data_t) {
        device_get(bytes + at, t.data_t, codes);
        at += codes;
    }
    if (t.scale)
        device_get(bytes + at, t.scale, t.format.group ? tensor_bytes(t) - at : sizeof(float));
    return bytes;
}

static inline void tensor_restore(Tensor t, const void *bytes)
{
    size_t codes = tensor_numel(t) * dtype_size(t.format.dtype), at = codes;
    device_put(t.data, bytes, codes);
    if (t.data_t) {
        device_put(t.data_t, (const char *)bytes + at, codes);
        at += codes;
    }
    if (t.scale)
        device_put(t.scale, (const char *)bytes + at,
                   t.format.group ? tensor_bytes(t) - at : sizeof(float));
}

static inline float float_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline double decode_fp8(uint8_t c, DType d)
{
    int mb = d == E4M3 ? 3 : 2, bias = d == E4M3 ? 7 : 15, e = (c & 0x7f) >> mb,
        m = c & ((1 << mb) - 1);
    double x = e ? ldexp(1 + ldexp(m, -mb), e - bias) : ldexp(m, 1 - bias - mb);
    if (d == E4M3 ? (c & 0x7f) == 0x7f : e == 31)
        x = d == E5M2 && m == 0 ? INFINITY : NAN;
    return c & 0x80 ? -x : x;
}

/* Returns the scale of a group that a byte stands for. */
static inline float decode_scale(uint8_t s, DType d)
{
    const double j = s % 8, units = d == E4M3 ? 64 : 32;
    return s == 255 ? NAN : (float)ldexp(1 + j / units, s / 8 - (d == E4M3 ? 18 : 25));
}

/* Returns the values of a snapshot. Not for moments. */
static inline double *decode(Tensor t, const void *snapshot)
{
    const size_t n = tensor_numel(t);
    const char *scales =
        (const char *)snapshot + n * dtype_size(t.format.dtype) * (t.data_t ? 2 : 1);
    double *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        if (t.format.dtype == F32)
            x[i] = ((const float *)snapshot)[i];
        else if (t.format.dtype == BF16)
            x[i] = float_from_bits((uint32_t)((const uint16_t *)snapshot)[i] << 16);
        else {
            float scale;
            if (t.format.group)
                scale = decode_scale(((const uint8_t *)scales)[i / (size_t)t.format.group],
                                     t.format.dtype);
            else
                memcpy(&scale, scales, sizeof scale);
            x[i] = decode_fp8(((const uint8_t *)snapshot)[i], t.format.dtype) * scale;
        }
    return x;
}

static inline double *values(Tensor t)
{
    return t.data ? decode(t, tensor_snapshot(t)) : NULL;
}

/* Stores floats in an F32 or BF16 tensor; BF16 truncates them. */
static inline void put(Tensor t, const float *x)
{
    const size_t n = tensor_numel(t);
    uint16_t *codes = keep(n * sizeof *codes);
    assert_false(format_is_fp8(t.format));
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        codes[i] = (uint16_t)(u >> 16);
    }
    device_put(t.data, t.format.dtype == F32 ? (const void *)x : codes,
               n * dtype_size(t.format.dtype));
}

/* Sets every byte of an F32 or BF16 tensor: 0 gives zeros, 0xff gives NaNs. */
static inline void fill_bytes(Tensor t, int byte)
{
    void *bytes = keep(tensor_bytes(t));
    memset(bytes, byte, tensor_bytes(t));
    device_put(t.data, bytes, tensor_bytes(t));
}

/* Returns element i, uniform in [low, high). The element depends only on (seed, i): the arithmetic
 * is exact, with one rounding at the end. */
static inline float uniform(uint64_t seed, size_t i, float low, float high)
{
    return low + (high - low) * (float)(random_bits(seed, i) >> 40) * 0x1p-24f;
}

static inline void fill(Tensor t, uint64_t seed, float low, float high)
{
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++)
        x[i] = uniform(seed, i, low, high);
    put(t, x);
}

static inline Tensor make_filled(Format f, int rows, int cols, uint64_t seed, float low, float high)
{
    Tensor t = make(f, rows, cols);
    fill(t, seed, low, high);
    return t;
}

static inline int *put_ints(const int *x, size_t n)
{
    int *p = guarded(n * sizeof *p);
    device_put(p, x, n * sizeof *p);
    return p;
}

/* Sorts the tokens for the embedding and copies them to the device. */
static inline TokenAt *put_sorted(const int *tokens, int N, int V)
{
    const size_t bytes = sizeof(TokenAt) * (size_t)N;
    TokenAt *sorted = malloc(bytes), *p = guarded(bytes);
    sort_tokens(sorted, tokens, N, V);
    device_put(p, sorted, bytes);
    free(sorted);
    return p;
}

/* ---- comparison ------------------------------------------------------------------------------ */

static inline void check_same_bytes(const char *name, const void *a, const void *b, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i])
            fail_msg("%s: byte %zu of %zu is %02x, expected %02x", name, i, bytes,
                     ((const unsigned char *)a)[i], ((const unsigned char *)b)[i]);
}

/* |y - ref| <= u |ref| + bound: y is rounded once from a value with an error of `bound`. */
static inline void check_close(const char *name, Tensor t, const double *ref, const double *bound)
{
    const double *y = values(t);
    for (size_t i = 0; i < tensor_numel(t); i++) {
        double limit = unit_roundoff(t.format) * (fabs(ref[i]) + bound[i]) + bound[i] + 0x1p-126;
        if (!(fabs(y[i] - ref[i]) <= limit))
            fail_msg("%s[%zu,%zu]: %.9g, expected %.9g; off by %.3g, at most %.3g is explained",
                     name, i / (size_t)t.cols, i % (size_t)t.cols, y[i], ref[i],
                     fabs(y[i] - ref[i]), limit);
    }
}

static inline void check_twice(const char *what, const Tensor *t, void **first, int n)
{
    for (int i = 0; i < n; i++)
        if (t[i].data)
            check_same_bytes(what, tensor_snapshot(t[i]), first[i], tensor_bytes(t[i]));
}

static inline void snapshot_all(void **bytes, const Tensor *t, int n)
{
    for (int i = 0; i < n; i++)
        bytes[i] = t[i].data ? tensor_snapshot(t[i]) : NULL;
}

static inline void restore_all(const Tensor *t, void **bytes, int n)
{
    for (int i = 0; i < n; i++)
        if (t[i].data)
            tensor_restore(t[i], bytes[i]);
}

/* Runs `call` twice on the same outputs (the tensors after it) and requires the same bits. */
#define TWICE(call, ...) \
    do { \
        const Tensor outputs_[] = { __VA_ARGS__ }; \
        enum { COUNT_ = sizeof outputs_ / sizeof outputs_[0] }; \
        void *before_[COUNT_], *first_[COUNT_]; \
        snapshot_all(before_, outputs_, COUNT_); \
        call; \
        snapshot_all(first_, outputs_, COUNT_); \
        restore_all(outputs_, before_, COUNT_); \
        call; \
        check_twice(#call, outputs_, first_, COUNT_); \
    } while (0)

/* Compares two arrays of values without NaN; 0 equals -0. */
static inline void check_same_values(const char *name, const double *x, const double *expected,
                                     size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(x[i] == expected[i]))
            fail_msg("%s: element %zu of %zu is %.9g, expected %.9g", name, i, n, x[i],
                     expected[i]);
}

/* Checks that `call`, which accumulates in `to`, gives the same result for an `empty` tensor whose
 * memory is full of NaNs as for a tensor of zeros. */
#define EMPTY_IS_ZEROS(to, call) \
    do { \
        const Tensor kept_ = to; \
        if (!kept_.data) \
            break; \
        Tensor empty_ = make(kept_.format, kept_.rows, kept_.cols); \
        const Tensor zeros_ = make(kept_.format, kept_.rows, kept_.cols); \
        fill_bytes(empty_, 0xff); \
        fill_bytes(zeros_, 0); \
        empty_.empty = true; \
        to = empty_; \
        call; \
        to = zeros_; \
        call; \
        to = kept_; \
        check_same_values(#call, values(empty_), values(zeros_), tensor_numel(kept_)); \
    } while (0)

/* ---- errors ---------------------------------------------------------------------------------- */

/* Checks that `call` ends the process with a message that contains `text`. The call runs in a child
 * process, whose stderr is read. NOTE: CUDA does not work in a forked child, so `call` must fail
 * before it uses CUDA, and its tensors must exist before DIES. */
#define DIES(text, call) \
    do { \
        int pipe_[2]; \
        if (getenv("NO_FORK")) \
            break; \
        assert_int_equal(pipe(pipe_), 0); \
        fflush(NULL); \
        pid_t child_ = fork(); \
        if (child_ == 0) { \
            alarm(30); \
            dup2(pipe_[1], STDERR_FILENO); \
            call; \
            _exit(0); \
        } \
        check_death(#call, text, child_, pipe_); \
    } while (0)

static inline void check_death(const char *call, const char *text, pid_t child, int *ends)
{
    char said[8192];
    size_t n = 0;
    ssize_t got;
    int status;
    close(ends[1]);
    while (n < sizeof said - 1 && (got = read(ends[0], said + n, sizeof said - 1 - n)) > 0)
        n += (size_t)got;
    said[n] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 0 || !strstr(said, text))
        fail_msg("%s: expected an error that contains '%s'; status %x, message: %s", call, text,
                 status, said);
}

/* ---- start ----------------------------------------------------------------------------------- */

static inline int start_device(void **state)
{
    (void)state;
    device_init(0);
    return 0;
}
