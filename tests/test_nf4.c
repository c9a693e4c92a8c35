/* Compares NF4 with bitsandbytes (tests/golden/nf4, scripts/golden_nf4.py), bit for bit. Also all
 * shapes and formats, with the same bits on both back ends. */
#include "kernels/nf4_map.h"
#include "kernels/dynamic8.h"
#include "model/checkpoint/nf4_source.h"
#include "tests/test.h"
#include "tests/fp8.h"
#include "tests/golden.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E = { E4M3, 0 };
static const char name[] = "model.layers.0.mlp.up_proj.weight";

/* Groups in device memory, one per row of a tensor. */
static Tensor make_groups(size_t count)
{
    return make_f32((int)count, sizeof(Nf4Group) / sizeof(float));
}

static float get_float(const float *x)
{
    float y;
    device_get(&y, x, sizeof y);
    return y;
}

static SafeFile *open_golden(const char *file)
{
    char path[128];
    snprintf(path, sizeof path, "tests/golden/nf4/%s.safetensors", file);
    return safetensors_open(path);
}

/* Returns X.part; *t: its description. */
static void *read_golden(const SafeFile *f, const char *x, const char *part, const SafeTensor **t)
{
    char full[160];
    const SafeTensor *found;
    snprintf(full, sizeof full, "%s%s", x, part);
    found = safetensors_find(f, full);
    assert_non_null(found);
    void *data = keep(found->end - found->begin);
    safetensors_read(f, data, found, 0, found->end - found->begin);
    if (t)
        *t = found;
    return data;
}

/* ---- bitsandbytes ---------------------------------------------------------------------------- */

/* Makes groups from bitsandbytes' tensors. */
static Nf4Group *expected_groups(const SafeFile *f, const char *x, size_t numel, float offset)
{
    const SafeTensor *t[3];
    const char *parts[3] = { strcmp(x, name) == 0 ? "" : ".codes", ".absmax",
                             strcmp(x, name) == 0 ? ".nested_absmax" : ".nested" };
    const uint8_t *codes = read_golden(f, x, parts[0], &t[0]),
                  *absmax = read_golden(f, x, parts[1], &t[1]);
    const float *nested = read_golden(f, x, parts[2], &t[2]);
    const size_t groups = nf4_groups(1, numel);
    Nf4Group *g = keep(groups * sizeof *g);
    assert_int_equal(t[0]->end - t[0]->begin, numel / 2);
    assert_int_equal(t[1]->shape[0], (numel + NF4_BLOCK - 1) / NF4_BLOCK);
    assert_int_equal(t[2]->shape[0], groups);
    for (size_t i = 0; i < numel / 2; i++)
        g[2 * i / NF4_GROUP].codes[i % sizeof g->codes] = codes[i];
    for (size_t i = 0; i < t[1]->shape[0]; i++)
        g[i / 256].absmax[i % 256] = absmax[i];
    for (size_t i = 0; i < groups; i++)
        g[i].nested = nested[i], g[i].offset = offset;
    return g;
}

static void check_values(const char *what, Nf4 x, int cols, const void *expected, Format format)
{
    Tensor y = make(format, x.rows[0], cols);
    TWICE(nf4_dequantize(y, x), y);
    check_same_bytes(what, tensor_snapshot(y), expected, tensor_bytes(y));
}

/* w must be quantized to `expected`. All groups have the same offset. */
static Nf4 check_groups(const char *what, Tensor w, const Nf4Group *expected)
{
    const size_t groups = nf4_groups((size_t)w.rows, (size_t)w.cols);
    Tensor to = make_groups(groups), offset = make_f32(1, 1);
    TWICE(nf4_offset(offset.data, w), offset);
    TWICE(nf4_quantize(to.data, w, offset.data, 0, groups), to);
    check_same_bytes(what, tensor_snapshot(offset), &expected->offset, sizeof(float));
    check_same_bytes(what, tensor_snapshot(to), expected, groups * sizeof *expected);
    return (Nf4){ .group = to.data, .num_tensors = 1, .rows = { w.rows } };
}

TEST(test_bitsandbytes)
{
    static const char *const tensors[] = { "hard", "zeros", "one",   "short",
                                           "few",  "tiny",  "small", "large" };
    SafeFile *f = open_golden("codes");
    check_same_bytes("map", nf4_map(), read_golden(f, "map", "", NULL), 16 * sizeof(float));
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        const SafeTensor *t;
        const float *x = read_golden(f, tensors[i], "", &t),
                    *offset = read_golden(f, tensors[i], ".offset", NULL);
        Tensor w = make_f32((int)t->shape[0], (int)t->shape[1]);
        put(w, x);
        const Nf4 nf4 =
            check_groups(tensors[i], w, expected_groups(f, tensors[i], tensor_numel(w), *offset));
        check_values(tensors[i], nf4, w.cols, read_golden(f, tensors[i], ".f32", NULL), F);
        check_values(tensors[i], nf4, w.cols, read_golden(f, tensors[i], ".bf16", NULL), H);
        release();
    }
    safetensors_close(f);
}

/* A BF16 tensor of two groups, and the same numbers in F32. */
TEST(test_saved)
{
    const SafeTensor *t;
    SafeFile *f = open_golden("saved");
    const uint16_t *source = read_golden(f, "source", "", &t);
    const int rows = (int)t->shape[0], cols = (int)t->shape[1];
    Tensor w = make(H, rows, cols), wide = make_f32(rows, cols);
    Nf4Group read[2], second;
    assert_true(nf4_source_has(&f, 1, name));
    assert_false(nf4_source_has(&f, 1, "source"));
    nf4_source_read(read, &f, 1, name, (size_t)rows, (size_t)cols, 0, 2);
    nf4_source_read(&second, &f, 1, name, (size_t)rows, (size_t)cols, 1, 1);
    check_same_bytes("second group", &second, &read[1], sizeof second);
    check_same_bytes("groups", read, expected_groups(f, name, tensor_numel(w), read->offset),
                     sizeof read);
    device_put(w.data, source, tensor_bytes(w));
    quantize(wide, w);
    check_values("bf16", check_groups("bf16", w, read), cols, read_golden(f, "bf16", "", NULL), H);
    check_groups("f32", wide, read);
    safetensors_close(f);
    release();
}

/* The same tensor without double quantization. The value of an element is quant_map[code] absmax,
 * rounded to F32, then to BF16. */
TEST(test_plain)
{
    enum { ROWS = 48, COLS = 344, GROUPS = 2 };
    SafeFile *f = open_golden("plain"), *from = open_golden("saved");
    const uint8_t *codes = read_golden(f, name, "", NULL);
    const float *absmax = read_golden(f, name, ".absmax", NULL);
    Nf4PlainGroup read[GROUPS], second;
    Tensor w = make(H, ROWS, COLS), to = make_f32(GROUPS, sizeof *read / sizeof(float));
    Tensor y = make_f32(ROWS, COLS), amax = make_f32(1, 1);
    float *expected = keep(tensor_bytes(y)), top = 0;
    for (int i = 0; i < ROWS * COLS; i++) {
        expected[i] = nf4_map()[codes[i / 2] >> (i % 2 ? 0 : 4) & 15] * absmax[i / NF4_BLOCK];
        top = fmaxf(top, absmax[i / NF4_BLOCK]);
    }
    assert_true(nf4_source_has(&f, 1, name));
    nf4_source_read_plain(read, &f, 1, name, ROWS, COLS, 0, GROUPS);
    nf4_source_read_plain(&second, &f, 1, name, ROWS, COLS, 1, 1);
    check_same_bytes("second group", &second, &read[1], sizeof second);
    device_put(to.data, read, sizeof read);
    const Nf4 x = { .plain = to.data, .num_tensors = 1, .rows = { ROWS } };
    check_values("f32", x, COLS, expected, F);
    check_values("bf16", x, COLS, read_golden(f, "bf16", "", NULL), H);
    device_zero(amax.data, sizeof(float));
    nf4_amax(amax.data, x, COLS, 0, GROUPS);
    assert_true(get_float(amax.data) == top);

    device_put(w.data, read_golden(from, "source", "", NULL), tensor_bytes(w));
    TWICE(nf4_quantize_plain(to.data, w, 0, GROUPS), to);
    check_same_bytes("quantized", tensor_snapshot(to), read, sizeof read);
    safetensors_close(from);
    safetensors_close(f);
    release();
}

/* ---- all shapes ------------------------------------------------------------------------------ */

/* Returns a view of the matrix from its group `first` on. */
static Nf4 from_group(Nf4 x, size_t first)
{
    x.group = x.plain ? NULL : x.group + first;
    x.plain = x.plain ? x.plain + first : NULL;
    return x;
}

/* Makes ranges of these rows from random tensors. */
static Nf4 make_plain(int num_tensors, const int *rows, int cols, uint64_t seed)
{
    Nf4 x = { .num_tensors = num_tensors };
    size_t groups = 0;
    for (int i = 0; i < num_tensors; i++)
        groups += nf4_groups((size_t)rows[i], (size_t)cols);
    Nf4PlainGroup *to = make_f32((int)groups, sizeof *to / sizeof(float)).data;
    x.plain = to;
    for (int i = 0; i < num_tensors; i++) {
        const Tensor w = make_filled(i % 2 ? H : F, rows[i], cols, seed + (uint64_t)i, -0.7f, 0.9f);
        const size_t n = nf4_groups((size_t)rows[i], (size_t)cols);
        x.rows[i] = rows[i];
        nf4_quantize_plain(to, w, 0, n / 2);
        nf4_quantize_plain(to + n / 2, w, n / 2, n - n / 2);
        to += n;
    }
    return x;
}

/* The same with double quantization. */
static Nf4 make_matrix(int num_parts, const int *rows, int cols, uint64_t seed)
{
    Nf4 x = { .num_tensors = num_parts };
    size_t groups = 0;
    for (int i = 0; i < num_parts; i++)
        groups += nf4_groups((size_t)rows[i], (size_t)cols);
    Tensor all = make_groups(groups);
    Nf4Group *to = all.data;
    x.group = to;
    for (int i = 0; i < num_parts; i++) {
        Tensor w = make_filled(i % 2 ? H : F, rows[i], cols, seed + (uint64_t)i, -0.7f, 0.9f),
               offset = make_f32(1, 1);
        const size_t n = nf4_groups((size_t)rows[i], (size_t)cols);
        x.rows[i] = rows[i];
        nf4_offset(offset.data, w);
        nf4_quantize(to, w, offset.data, 0, n / 2);
        nf4_quantize(to + n / 2, w, offset.data, n / 2, n - n / 2);
        to += n;
    }
    return x;
}

/* Codes and transposed codes are those of the F32 values; the ranges are placed one below the
 * other. */
static void check_operand_of(const char *what, Nf4 x, Tensor f32)
{
    Tensor expected = make(E, f32.rows, f32.cols), y = make(E, f32.rows, f32.cols);
    expected.data_t = guarded(tensor_numel(y));
    y.data_t = guarded(tensor_numel(y));
    quantize(expected, f32);
    device_copy(y.scale, expected.scale, sizeof(float));
    TWICE(nf4_dequantize(y, x), y);
    check_same_bytes(what, tensor_snapshot(y), tensor_snapshot(expected), tensor_bytes(y));

    Tensor rows = make(E, y.rows, y.cols), columns = make(E, y.cols, y.rows), only = y;
    rows.scale = columns.scale = y.scale;
    TWICE(nf4_dequantize(rows, x), rows);
    check_same_bytes("rows", tensor_snapshot(rows), tensor_snapshot(y), tensor_numel(y));
    only.data = NULL, only.data_t = columns.data;
    TWICE(nf4_dequantize(only, x), columns);
    check_transposed("both", y);
    check_same_bytes("columns", tensor_snapshot(columns),
                     (uint8_t *)tensor_snapshot(y) + tensor_numel(y), tensor_numel(y));
}

static void check_parts(Nf4 x, Tensor f32)
{
    int first = 0;
    size_t group = 0;
    for (int i = 0; i < x.num_tensors; i++) {
        Nf4 part = from_group(x, group);
        part.num_tensors = 1;
        part.rows[0] = x.rows[i];
        Tensor y = make_f32(x.rows[i], f32.cols);
        nf4_dequantize(y, part);
        check_same_bytes("part", tensor_snapshot(y),
                         (float *)tensor_snapshot(f32) + first * f32.cols, tensor_bytes(y));
        first += x.rows[i];
        group += nf4_groups((size_t)x.rows[i], (size_t)f32.cols);
    }
}

/* All groups at once give the same as one group at a time. */
static void check_amax(Nf4 x, Tensor f32)
{
    Tensor amax = make_f32(1, 2);
    float top = 0, start[2] = { 0, 0x1p-20f };
    const float *v = tensor_snapshot(f32);
    size_t groups = 0;
    for (size_t i = 0; i < tensor_numel(f32); i++)
        top = fmaxf(top, fabsf(v[i]));
    for (int i = 0; i < x.num_tensors; i++)
        groups += nf4_groups((size_t)x.rows[i], (size_t)f32.cols);
    put(amax, start);
    nf4_amax(amax.data, x, f32.cols, 0, groups);
    for (size_t i = 0; i < groups; i++) {
        nf4_amax((float *)amax.data + 1, from_group(x, i), f32.cols, i, 1);
    }
    assert_true(get_float(amax.data) == top && get_float((float *)amax.data + 1) == top);
    start[0] = 2;
    put(amax, start);
    nf4_amax(amax.data, x, f32.cols, 0, groups);
    assert_true(get_float(amax.data) == 2);
}

TEST(test_shapes)
{
    static const struct {
        int num_parts, rows[3], cols;
    } shapes[] = {
        { 1, { 16 }, 64 },        { 3, { 352, 16, 32 }, 48 },
        { 2, { 176, 176 }, 112 }, { 3, { 64, 128, 64 }, 256 },
        { 2, { 24, 40 }, 16 },    { 3, { 3, 1, 4 }, 20 },
        { 1, { 1 }, 1 },          { 2, { 8, 9 }, 40 },
    };
    for (size_t n = 0; n < 2 * sizeof shapes / sizeof shapes[0]; n++) {
        const size_t i = n / 2;
        char what[64];
        int rows = 0;
        for (int k = 0; k < shapes[i].num_parts; k++)
            rows += shapes[i].rows[k];
        const Nf4 x = (n % 2 ? make_plain : make_matrix)(shapes[i].num_parts, shapes[i].rows,
                                                         shapes[i].cols, 10 * i);
        Tensor wide = make_f32(rows, shapes[i].cols), half = make(H, rows, shapes[i].cols),
               rounded = make(H, rows, shapes[i].cols);
        TWICE(nf4_dequantize(wide, x), wide);
        TWICE(nf4_dequantize(half, x), half);
        quantize(rounded, wide);
        check_same_bytes("bf16", tensor_snapshot(half), tensor_snapshot(rounded),
                         tensor_bytes(half));
        check_parts(x, wide);
        check_amax(x, wide);
        snprintf(what, sizeof what, n % 2 ? "nf4-plain-%dx%d" : "nf4-%dx%d", rows, shapes[i].cols);
        golden_check(what, wide, NULL);
        check_operand_of(what, x, wide);
        release();
    }
}

/* Each tensor's mean is over 700 blocks and a short one; no order of F32 additions gives the
 * correct sum. */
TEST(test_offset)
{
    enum { N = 700 * NF4_BLOCK + 10 };
    for (int half = 0; half < 2; half++) {
        Tensor w = make(half ? H : F, 1, N), offset = make_f32(1, 1);
        float *x = keep(N * sizeof *x);
        double sum = 0;
        for (size_t i = 0; i < N; i++)
            x[i] = ldexpf(uniform(77, i, -1, 1), (int)(random_bits(78, i / NF4_BLOCK) % 40) - 20);
        put(w, x);
        const double *v = values(w);
        for (size_t i = 0; i < N; i += NF4_BLOCK) {
            double top = 0;
            for (size_t k = i; k < i + NF4_BLOCK && k < N; k++)
                top = fmax(top, fabs(v[k]));
            sum += top;
        }
        TWICE(nf4_offset(offset.data, w), offset);
        assert_true(fabs(get_float(offset.data) - sum / 701) <= U24 * sum / 701 * (1 + 1e-9));
        golden_check(half ? "nf4-offset-bf16" : "nf4-offset-f32", offset, NULL);
        release();
    }
}

/* ---- folders that are refused ---------------------------------------------------------------- */

/* Copies a file with a tensor of bitsandbytes, in which one part is replaced; data NULL: the part
 * is removed. */
static SafeFile *open_changed(const char *file, const char *part, const void *data, size_t bytes)
{
    static const char *const parts[] = { "",
                                         ".absmax",
                                         ".quant_map",
                                         ".nested_absmax",
                                         ".nested_quant_map",
                                         ".quant_state.bitsandbytes__nf4" };
    char path[] = "/tmp/coat-nf4-XXXXXX", full[160];
    SafeFile *f = open_golden(file), *out;
    close(mkstemp(path));
    out = safetensors_new(path);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < 6; i++) {
            const SafeTensor *t;
            const bool is_changed = strcmp(parts[i], part) == 0;
            snprintf(full, sizeof full, "%s%s", name, parts[i]);
            if (!safetensors_find(f, full))
                continue;
            const void *own = read_golden(f, name, parts[i], &t);
            const size_t size = is_changed ? bytes : t->end - t->begin,
                         width = safetensors_dtype_size(t->dtype);
            if (is_changed && !data)
                continue;
            if (pass == 0)
                safetensors_add(out, full, t->dtype, 1, (size_t[]){ size / width });
            else
                assert_true(safetensors_write(out, safetensors_find(out, full), 0,
                                              is_changed ? data : own, size));
        }
        if (pass == 0) {
            safetensors_lay_out(out);
            safetensors_create(out);
        }
    }
    safetensors_close(out);
    safetensors_close(f);
    f = safetensors_open(path);
    remove(path);
    return f;
}

static void check_refused(const char *said, const char *part, const void *data, size_t bytes)
{
    static Nf4Group g[2];
    SafeFile *f = open_changed("saved", part, data, bytes);
    DIES(said, nf4_source_read(g, &f, 1, name, 48, 344, 0, 2));
    safetensors_close(f);
    release();
}

TEST(test_refused_plain)
{
    static Nf4PlainGroup g[2];
    static const char nested[] = "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [48, "
                                 "344], \"nested_offset\": 0.5}";
    float absmax[258] = { 1, -1 };
    const struct {
        const char *said, *part;
        const void *data;
        size_t bytes;
    } list[] = {
        { "scale 1 is -1; expected a finite number", ".absmax", absmax, sizeof absmax },
        { "is 1028 bytes of F32; expected 1032 of F32", ".absmax", absmax,
          sizeof absmax - sizeof *absmax },
        { "there is a nested_offset, so the scales were quantized",
          ".quant_state.bitsandbytes__nf4", nested, sizeof nested - 1 },
        { "there is no tensor model.layers.0.mlp.up_proj.weight.absmax", ".absmax", NULL, 0 },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        SafeFile *f = open_changed("plain", list[i].part, list[i].data, list[i].bytes);
        DIES(list[i].said, nf4_source_read_plain(g, &f, 1, name, 48, 344, 0, 2));
        safetensors_close(f);
        release();
    }
}

static void check_state(const char *said, const char *text)
{
    check_refused(said, ".quant_state.bitsandbytes__nf4", text, strlen(text));
}

TEST(test_refused)
{
    static Nf4Group g[2];
    SafeFile *f = open_golden("saved");
    float map[256];
    const float scale[2] = { 1, NAN };
    DIES("the shape is not (344, 48)", nf4_source_read(g, &f, 1, name, 344, 48, 0, 2));
    safetensors_close(f);
    memcpy(map, dynamic8_map(DYNAMIC8), sizeof map);
    map[0] = -1;
    check_refused("value 0 is -1; expected -0.992968", ".nested_quant_map", map, sizeof map);
    map[0] = 0;
    check_refused("value 0 is 0; expected -1,", ".quant_map", map, 16 * sizeof(float));
    check_refused("is 60 bytes of F32; expected 64 of F32", ".quant_map", map, 60);
    check_refused("there is no tensor model.layers.0.mlp.up_proj.weight.nested_absmax",
                  ".nested_absmax", NULL, 0);
    check_refused("scale 1 is nan", ".nested_absmax", scale, sizeof scale);
    check_refused("is 8 bytes of U8; expected 8256 of any type", "", map, 8);
    check_state("not JSON", "{");
    check_state("quant_type is fp4; expected nf4", "{\"quant_type\": \"fp4\"}");
    check_state("blocksize is 128; expected 64", "{\"quant_type\": \"nf4\", \"blocksize\": 128}");
    check_state(
        "there is no nested_offset, so the scales were not quantized; config.json must say so",
        "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [48, 344]}");
    check_state("nested_blocksize is 512; expected 256",
                "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"nested_blocksize\": 512, "
                "\"nested_offset\": 0.5, \"shape\": [48, 344]}");
}

int main(void)
{
    safetensors_chunk = 64; /* a group at a time */
    return run_all_tests(start_device, NULL);
}
