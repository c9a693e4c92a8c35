/* Tensors in NF4 as saved by bitsandbytes [bitsandbytes 0.49, QuantState.as_dict]. */
#include "model/checkpoint/nf4_source.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dynamic8.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

#define FROM_16_BIT "load the model's 16-bit folder with --lora.base=nf4"

_Static_assert(offsetof(Nf4Group, codes) == 0 && offsetof(Nf4PlainGroup, codes) == 0,
               "codes come first in both");

enum { BLOCKS = NF4_GROUP / NF4_BLOCK, MAX_STATE = 65536 };

/* Finds the tensor NAME<suffix>; tensor NULL: no file has this tensor. */
static Found find(SafeFile *const *file, int count, const char *name, const char *suffix)
{
    char *full = xasprintf("%s%s", name, suffix);
    const Found f = safetensors_find_in(file, count, full);
    free(full);
    return f;
}

/* Dies if the tensor is missing, or does not have `bytes` bytes of this type. dtype NULL: any
 * type. */
static Found need(SafeFile *const *file, int count, const char *name, const char *suffix,
                  const char *dtype, size_t bytes)
{
    const Found f = find(file, count, name, suffix);
    if (!f.tensor)
        die("%s%s: there is no tensor %s%s, which %s needs; copy all files of the folder again",
            file[0]->path, count > 1 ? " and the files next to it" : "", name, suffix, name);
    if ((dtype && strcmp(f.tensor->dtype, dtype) != 0) || f.tensor->end - f.tensor->begin != bytes)
        die("%s: tensor %s is %zu bytes of %s; expected %zu of %s: the configuration must describe "
            "the model in that folder",
            f.file->path, f.tensor->name, f.tensor->end - f.tensor->begin, f.tensor->dtype, bytes,
            dtype ? dtype : "any type");
    return f;
}

static void check_map(SafeFile *const *file, int count, const char *name, const char *suffix,
                      const float *map, int n)
{
    float found[256];
    const size_t bytes = (size_t)n * sizeof *found;
    const Found f = need(file, count, name, suffix, "F32", bytes);
    safetensors_read(f.file, found, f.tensor, 0, bytes);
    for (int i = 0; i < n; i++)
        if (found[i] != map[i])
            die("%s: tensor %s: value %d is %.9g; expected %.9g, as bitsandbytes writes on a GPU "
                "(on a CPU the lowest value is "
                "-1): quantize the model on a GPU, or " FROM_16_BIT,
                f.file->path, f.tensor->name, i, found[i], map[i]);
}

static bool is_integer(const json_t *value, long long expected)
{
    return json_is_integer(value) && json_integer_value(value) == expected;
}

/* Dies unless the state describes a supported format. Returns the offset of scales with double
 * quantization. */
static float check_state(const json_t *state, const char *where, size_t rows, size_t cols,
                         bool nested)
{
    const json_t *type = json_object_get(state, "quant_type"),
                 *shape = json_object_get(state, "shape");
    const json_t *offset = json_object_get(state, "nested_offset");
    if (!json_is_string(type) || strcmp(json_string_value(type), "nf4") != 0)
        die("%s: quant_type is %s; expected nf4: " FROM_16_BIT, where,
            json_is_string(type) ? json_string_value(type) : "no text");
    if (!is_integer(json_object_get(state, "blocksize"), NF4_BLOCK))
        die("%s: blocksize is %lld; expected %d: " FROM_16_BIT, where,
            (long long)json_integer_value(json_object_get(state, "blocksize")), (int)NF4_BLOCK);
    if (json_is_number(offset) != nested)
        die("%s: there is %s nested_offset, so the scales were %squantized; config.json must say "
            "so: \"quantization_config\": "
            "{\"load_in_4bit\": true, \"bnb_4bit_use_double_quant\": %s}",
            where, nested ? "no" : "a", nested ? "not " : "", nested ? "false" : "true");
    if (nested && !is_integer(json_object_get(state, "nested_blocksize"), BLOCKS))
        die("%s: nested_blocksize is %lld; expected %d: " FROM_16_BIT, where,
            (long long)json_integer_value(json_object_get(state, "nested_blocksize")), (int)BLOCKS);
    if (json_array_size(shape) != 2 || !is_integer(json_array_get(shape, 0), (long long)rows) ||
        !is_integer(json_array_get(shape, 1), (long long)cols))
        die("%s: the shape is not (%zu, %zu), which the configured model needs; the configuration "
            "must describe the model in that "
            "folder",
            where, rows, cols);
    return (float)json_number_value(offset);
}

/* Finds the quantization state of NAME, of nf4 or fp4; tensor NULL: there is none. */
static Found find_state(SafeFile *const *file, int count, const char *name)
{
    const Found f = find(file, count, name, ".quant_state.bitsandbytes__nf4");
    return f.tensor ? f : find(file, count, name, ".quant_state.bitsandbytes__fp4");
}

static float read_state(SafeFile *const *file, int count, const char *name, size_t rows,
                        size_t cols, bool nested)
{
    const Found f = find_state(file, count, name);
    CHECK(f.tensor, "%s is not stored in 4 bits", name);
    const size_t bytes = f.tensor->end - f.tensor->begin;
    char text[MAX_STATE], *where = xasprintf("%s: tensor %s", f.file->path, f.tensor->name);
    json_error_t error;
    if (bytes > sizeof text)
        die("%s is %zu bytes of JSON; expected at most %zu", where, bytes, sizeof text);
    safetensors_read(f.file, text, f.tensor, 0, bytes);
    json_t *state = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!state)
        die("%s: not JSON: %s", where, error.text);
    const float offset = check_state(state, where, rows, cols, nested);
    json_decref(state);
    free(where);
    return offset;
}

bool nf4_source_has(SafeFile *const *file, int count, const char *name)
{
    return find_state(file, count, name).tensor != NULL;
}

/* A field of a group's struct: its offset and size in bytes. */
typedef struct {
    size_t at, size;
} Field;

/* Reads a field of each group from f, where the values of this field are contiguous; the last may
 * be short. stride: bytes of a group's struct. */
static void read_field(void *to, size_t stride, Field field, Found f, size_t first, size_t groups)
{
    const size_t chunk = safetensors_chunk / field.size + 1;
    char *buffer = xmalloc(chunk * field.size);
    for (size_t i = 0; i < groups; i += chunk) {
        const size_t n = groups - i < chunk ? groups - i : chunk, at = (first + i) * field.size;
        const size_t left = f.tensor->end - f.tensor->begin - at;
        memset(buffer, 0, n * field.size);
        safetensors_read(f.file, buffer, f.tensor, at,
                         left < n * field.size ? left : n * field.size);
        for (size_t k = 0; k < n; k++)
            memcpy((char *)to + (i + k) * stride + field.at, buffer + k * field.size, field.size);
    }
    free(buffer);
}

/* Does what tensors with and without double quantization have in common: checks state and map, and
 * reads the codes. Returns the offset. */
static float read_codes(void *to, bool nested, SafeFile *const *file, int count, const char *name,
                        size_t rows, size_t cols, size_t first, size_t groups)
{
    const size_t all = nf4_groups(rows, cols), stride = nf4_group_bytes(!nested);
    CHECK(first <= all && groups <= all - first, "%s: %zu groups from %zu on, of %zu", name, groups,
          first, all);
    const float offset = read_state(file, count, name, rows, cols, nested);
    check_map(file, count, name, ".quant_map", nf4_map(), 16);
    memset(to, 0, groups * stride);
    /* the tensor may have any type: bnb_4bit_quant_storage */
    const Found codes = need(file, count, name, "", NULL, (rows * cols + 1) / 2);
    read_field(to, stride, (Field){ offsetof(Nf4Group, codes), NF4_GROUP / 2 }, codes, first,
               groups);
    return offset;
}

void nf4_source_read(Nf4Group *to, SafeFile *const *file, int count, const char *name, size_t rows,
                     size_t cols, size_t first, size_t groups)
{
    const float offset = read_codes(to, true, file, count, name, rows, cols, first, groups);
    check_map(file, count, name, ".nested_quant_map", dynamic8_map(DYNAMIC8), 256);
    const Found absmax =
        need(file, count, name, ".absmax", "U8", (rows * cols + NF4_BLOCK - 1) / NF4_BLOCK);
    const Found nested =
        need(file, count, name, ".nested_absmax", "F32", nf4_groups(rows, cols) * sizeof(float));
    read_field(to, sizeof *to, (Field){ offsetof(Nf4Group, absmax), sizeof to->absmax }, absmax,
               first, groups);
    read_field(to, sizeof *to, (Field){ offsetof(Nf4Group, nested), sizeof to->nested }, nested,
               first, groups);
    for (size_t i = 0; i < groups; i++) {
        to[i].offset = offset;
        if (!isfinite(offset) || !isfinite(to[i].nested) || to[i].nested < 0)
            die("%s: the scales of %s are not numbers: offset %g, scale %zu is %g; copy the folder "
                "again",
                nested.file->path, name, offset, first + i, to[i].nested);
    }
}

void nf4_source_read_plain(Nf4PlainGroup *to, SafeFile *const *file, int count, const char *name,
                           size_t rows, size_t cols, size_t first, size_t groups)
{
    read_codes(to, false, file, count, name, rows, cols, first, groups);
    const size_t blocks = (rows * cols + NF4_BLOCK - 1) / NF4_BLOCK;
    const Found absmax = need(file, count, name, ".absmax", "F32", blocks * sizeof(float));
    read_field(to, sizeof *to, (Field){ offsetof(Nf4PlainGroup, absmax), sizeof to->absmax },
               absmax, first, groups);
    for (size_t i = 0; i < groups * BLOCKS; i++) {
        const float x = to[i / BLOCKS].absmax[i % BLOCKS];
        if (!isfinite(x) || x < 0)
            die("%s: tensor %s: scale %zu is %g; expected a finite number >= 0; copy the folder "
                "again",
                absmax.file->path, absmax.tensor->name, first * BLOCKS + i, (double)x);
    }
}
