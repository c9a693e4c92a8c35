/* Attention: BF16 heads of width 64, 96 and 128 on compute capability 9.0 use attention_sm90.cu;
 * all other cases use attention_mma.cu. */
#include "kernels/cuda/attention.h"

#include <stdlib.h>

static void check_supported(const char *op, Tensor y, Tensor qkv, Attention a)
{
    if (a.D % 2 != 0 || a.D > 256)
        die("%s: heads of width %d; there are kernels for even widths up to 256", op, a.D);
    if (y.format.dtype != qkv.format.dtype || (qkv.format.dtype != F32 && qkv.format.dtype != BF16))
        die("%s: qkv is %s and y is %s; both must be f32 or both bf16", op, format_name(qkv.format),
            format_name(y.format));
}

/* A window that excludes no key counts as no window. The bits are the same. */
static int window_of(Attention a, Documents docs)
{
    return a.window < (docs.count ? docs.longest : a.T) ? a.window : 0;
}

static bool serves_hopper(Tensor qkv, Attention a)
{
    return runs_on_hopper() && qkv.format.dtype == BF16 && (a.D == 64 || a.D == 96 || a.D == 128);
}

static int longer_first(const void *a, const void *b)
{
    const Packed *x = a, *y = b;
    return x->length != y->length ? (x->length < y->length) - (x->length > y->length)
                                  : (x->start > y->start) - (x->start < y->start);
}

Blocks attention_blocks(Attention a, Documents docs, int size)
{
    const int each = (a.T + size - 1) / size;
    if (docs.count == 0)
        return (Blocks){ a.B * each, each > 1 ? a.B * each : 0, NULL };
    Blocks blocks = { 0 };
    Packed *document = xmalloc(sizeof *document * (size_t)docs.count);
    int documents = 0;
    for (int i = 0; i < docs.count; i++) {
        const int length = docs.host_start[i + 1] - docs.host_start[i],
                  count = (length + size - 1) / size;
        if (docs.left_out && docs.left_out[i])
            continue;
        document[documents++] = (Packed){ docs.host_start[i], length, 0 };
        blocks.count += count;
        blocks.split += count > 1 ? count : 0;
    }
    qsort(document, (size_t)documents, sizeof *document, longer_first);
    const size_t bytes = sizeof(Packed) * (size_t)blocks.count;
    Packed *table = xmalloc(bytes), *on_device = device_scratch(bytes, SCRATCH_DOCUMENTS);
    for (int i = 0, block = 0; i < documents; i++) {
        const int end = block + (document[i].length + size - 1) / size;
        for (document[i].first = block; block < end; block++)
            table[block] = document[i];
    }
    backend_device_put(on_device, table, bytes);
    free(table);
    free(document);
    blocks.table = on_device;
    return blocks;
}

void backend_attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    check_attention(OPERATION, y, qkv, a, docs);
    check_supported(OPERATION, y, qkv, a);
    a.window = window_of(a, docs);
    (serves_hopper(qkv, a) ? attention_sm90_forward : attention_mma_forward)(y, lse, qkv, a, docs);
}

void backend_attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                                Attention a, Documents docs)
{
    check_attention(OPERATION, y, qkv, a, docs);
    check_supported(OPERATION, y, qkv, a);
    CHECK_TENSOR(dqkv, qkv.rows, qkv.cols);
    CHECK_TENSOR(dy, y.rows, y.cols);
    CHECK(dqkv.data != qkv.data,
          "attention_backward: dqkv has the memory of qkv, which is still read");
    if (!format_equal(dqkv.format, qkv.format) || !format_equal(dy.format, y.format))
        die("attention_backward: qkv is %s and dqkv %s, y is %s and dy %s; each pair must have one "
            "format",
            format_name(qkv.format), format_name(dqkv.format), format_name(y.format),
            format_name(dy.format));
    a.window = window_of(a, docs);
    (serves_hopper(qkv, a) ? attention_sm90_backward : attention_mma_backward)(dqkv, dy, qkv, y,
                                                                               lse, a, docs);
}
