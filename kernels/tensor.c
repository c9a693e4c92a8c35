/* Views of tensors, and the bump allocator of their memory. */
#include "kernels/tensor.h"

#include <stdio.h>
#include <string.h>

#include "kernels/runtime/error.h"

size_t dtype_size(DType d)
{
    static const size_t size[] = {
        [F32] = 4, [BF16] = 2, [E4M3] = 1, [E5M2] = 1, [DYNAMIC8] = 1, [UDYNAMIC8] = 1
    };
    return size[d];
}

bool format_equal(Format a, Format b)
{
    return a.dtype == b.dtype && a.group == b.group && a.expand == b.expand &&
           a.bf16_scale == b.bf16_scale;
}

bool format_is_fp8(Format f)
{
    return f.dtype == E4M3 || f.dtype == E5M2;
}

bool format_is_dynamic8(Format f)
{
    return f.dtype == DYNAMIC8 || f.dtype == UDYNAMIC8;
}

bool format_has_scales(Format f)
{
    return f.dtype != F32 && f.dtype != BF16;
}

static const char *const dtype_name[] = {
    [F32] = "f32",   [BF16] = "bf16",         [E4M3] = "e4m3",
    [E5M2] = "e5m2", [DYNAMIC8] = "dynamic8", [UDYNAMIC8] = "udynamic8"
};

const char *format_name(Format f)
{
    static char text[16][24];
    static unsigned next;
    char *s = text[next++ % 16];
    if (f.group)
        snprintf(s, sizeof text[0], "%s/%d%s", dtype_name[f.dtype], f.group, f.expand ? "+" : "");
    else
        snprintf(s, sizeof text[0], "%s", dtype_name[f.dtype]);
    return s;
}

bool format_parse(Format *f, const char *text)
{
    for (DType d = F32; d <= UDYNAMIC8; d++) {
        size_t n = strlen(dtype_name[d]);
        if (strncasecmp(text, dtype_name[d], n) != 0)
            continue;
        Format g = { .dtype = d };
        char plus = '\0', rest;
        if (text[n] != '\0') {
            int found = sscanf(text + n, "/%9d%c%c", &g.group, &plus, &rest);
            if (!format_has_scales(g) || found < 1 || found > 2 || (found == 2 && plus != '+') ||
                g.group < 1)
                continue;
            g.expand = found == 2;
        }
        if (format_is_dynamic8(g) && (g.group != DYNAMIC8_GROUP || g.expand))
            continue;
        *f = g;
        return true;
    }
    return false;
}

size_t format_scale_bytes(Format f, size_t n)
{
    const size_t each = f.expand || format_is_dynamic8(f) ? 4 : f.bf16_scale ? 2 : 1;
    return f.group ? n / (size_t)f.group * each : 0;
}

bool format_has_byte_scales(Format f)
{
    return format_is_fp8(f) && f.group && !f.expand && !f.bf16_scale;
}

Format format_of_moment(Format f)
{
    f.bf16_scale = format_is_fp8(f) && !f.expand;
    return f;
}

bool tensor_exists(Tensor t)
{
    return t.data || t.data_t;
}

size_t tensor_numel(Tensor t)
{
    return (size_t)t.rows * t.cols;
}

static size_t scale_bytes(Format f, int rows, int cols)
{
    if (!format_has_scales(f))
        return 0;
    return f.group ? format_scale_bytes(f, (size_t)rows * cols) : 16;
}

size_t tensor_bytes(Tensor t)
{
    size_t codes = tensor_numel(t) * dtype_size(t.format.dtype);
    return codes + (t.data_t ? codes : 0) + scale_bytes(t.format, t.rows, t.cols);
}

void *arena_alloc(Arena *a, size_t bytes)
{
    size_t at = (a->used + 255) & ~(size_t)255;
    a->used = at + bytes;
    return a->memory ? a->memory + at : (void *)(at + 256); /* if the arena only measures: an
                                                             * address that is not NULL and never
                                                             * read */
}

Tensor tensor_alloc(Arena *a, Format f, int rows, int cols)
{
    CHECK(!f.group || cols % f.group == 0, "%d columns in groups of %d", cols, f.group);
    Tensor t = { .format = f, .rows = rows, .cols = cols };
    t.data = arena_alloc(a, (size_t)rows * cols * dtype_size(f.dtype));
    if (format_has_scales(f))
        t.scale = arena_alloc(a, scale_bytes(f, rows, cols));
    return t;
}

Tensor tensor_at(void *data, Format f, int rows, int cols)
{
    CHECK(!format_has_scales(f), "a view of plain memory has no scales");
    return (Tensor){ .data = data, .format = f, .rows = rows, .cols = cols };
}

Tensor tensor_flat(Tensor t, size_t n)
{
    enum { COLS = 256 };
    const size_t cols = n > 0 && n % COLS == 0 ? COLS : n, rows = n > 0 ? n / cols : 1;
    CHECK(rows <= INT32_MAX && cols <= INT32_MAX, "%zu elements in rows of %zu", n, cols);
    t.rows = (int)rows;
    t.cols = (int)cols;
    return t;
}

Tensor tensor_rows(Tensor t, int first, int rows)
{
    CHECK(first >= 0 && rows >= 0 && first + rows <= t.rows, "rows %d..%d of %d", first,
          first + rows, t.rows);
    if (!t.data)
        return t;
    t.data = (char *)t.data + (size_t)first * t.cols * dtype_size(t.format.dtype);
    if (t.format.group)
        t.scale = (char *)t.scale + format_scale_bytes(t.format, (size_t)first * t.cols);
    t.data_t = NULL;
    t.rows = rows;
    return t;
}

Tensor tensor_item(Tensor t, int item, int items)
{
    t.rows /= items;
    const size_t first = (size_t)item * tensor_numel(t);
    t.data = t.data ? (char *)t.data + first * dtype_size(t.format.dtype) : NULL;
    t.data_t = t.data_t ? (char *)t.data_t + first : NULL;
    t.scale = t.scale ? (float *)t.scale + SCALE_FLOATS * item : NULL;
    return t;
}
