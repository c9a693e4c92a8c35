#include "model/checkpoint/coded_source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dynamic8.h"
#include "kernels/fp8.h"
#include "kernels/nf4_map.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/nf4_source.h"

/* GPTQ: codes 0 to 15, minus 8; 8 is stored as 7 */
enum { BLOCK = 128, PER_WORD = 8, ZEROS = 0x77777777 };

typedef struct Kind Kind;

/* A matrix; the names of its tensors are STEM<suffix>. */
typedef struct {
    const Kind *kind;
    SafeFile *const *file;
    int count;
    const char *stem;
    size_t rows, cols;
} Matrix;

/* A kind of quantized matrix. A matrix is of this kind if it has the tensors `codes`, of type
 * `dtype` (NULL: any), and `scale`. The tensors `others` are optional. */
struct Kind {
    const char *codes, *dtype, *scale, *others[5];
    void (*read)(float *to, const Matrix *m, size_t first, size_t n);
};

static void read_bytes(float *to, const Matrix *m, size_t first, size_t n);
static void read_packed(float *to, const Matrix *m, size_t first, size_t n);
static void read_gptq(float *to, const Matrix *m, size_t first, size_t n);
static void read_nf4(float *to, const Matrix *m, size_t first, size_t n);

#define NF4_NEXT \
    { ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map" }

// clang-format off
static const Kind kinds[] = {
    { ".weight",        "F8_E4M3", ".weight_scale",     { ".input_scale" },          read_bytes },
    { ".weight",        "F8_E4M3", ".weight_scale_inv", { ".input_scale" },          read_bytes },
    { ".weight",        "I8",      ".weight_scale",     { ".input_scale" },          read_bytes },
    { ".weight",        "I8",      ".SCB",              { ".weight_format" },        read_bytes },
    { ".weight_packed", "I32",     ".weight_scale",     { ".weight_shape" },         read_packed },
    { ".qweight",       "I32",     ".scales",           { ".qzeros", ".g_idx" },     read_gptq },
    { ".weight",        NULL,      ".weight.quant_state.bitsandbytes__nf4", NF4_NEXT, read_nf4 },
    { ".weight",        NULL,      ".weight.quant_state.bitsandbytes__fp4", NF4_NEXT, read_nf4 },
};
// clang-format on
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

/* ---- which tensors there are ----------------------------------------------------------------- */

/* The result of a search; tensor NULL: no file has the tensor. */
static Found find(const Matrix *m, const char *suffix)
{
    char *name = xasprintf("%s%s", m->stem, suffix);
    const Found f = safetensors_find_in(m->file, m->count, name);
    free(name);
    return f;
}

static bool is_of(const Matrix *m, const Kind *k)
{
    const SafeTensor *codes = find(m, k->codes).tensor;
    return codes && (!k->dtype || strcmp(codes->dtype, k->dtype) == 0) && find(m, k->scale).tensor;
}

/* The first kind that fits the matrix; NULL: none fits. */
static const Kind *kind_of(const Matrix *m)
{
    for (int i = 0; i < NUM_KINDS; i++)
        if (is_of(m, &kinds[i]))
            return &kinds[i];
    return NULL;
}

/* Returns `name` without `suffix`, malloc'ed; NULL: `name` does not end with `suffix`. */
static char *stem_of(const char *name, const char *suffix)
{
    return suffix && text_ends_with(name, suffix)
               ? xasprintf("%.*s", (int)(strlen(name) - strlen(suffix)), name)
               : NULL;
}

const SafeFile *coded_source_find(SafeFile *const *file, int count, const char *name)
{
    char *stem = stem_of(name, ".weight");
    Matrix m = { .file = file, .count = count, .stem = stem };
    m.kind = stem ? kind_of(&m) : NULL;
    const SafeFile *found = m.kind ? find(&m, m.kind->codes).file : NULL;
    free(stem);
    return found;
}

enum { OTHERS = sizeof kinds[0].others / sizeof kinds[0].others[0] };

/* Returns the suffix of the codes (k = -2), of the scale (k = -1) or of another tensor (k = 0 ..
 * OTHERS - 1; may be NULL). */
static const char *suffix_of(const Kind *kind, int k)
{
    return k == -2 ? kind->codes : k == -1 ? kind->scale : kind->others[k];
}

char *coded_source_matrix(SafeFile *const *file, int count, const char *name)
{
    for (int i = 0; i < NUM_KINDS; i++)
        for (int k = -2; k < OTHERS; k++) {
            char *stem = stem_of(name, suffix_of(&kinds[i], k));
            const Matrix m = { .file = file, .count = count, .stem = stem };
            const bool found = stem && is_of(&m, &kinds[i]) && kind_of(&m) == &kinds[i];
            char *matrix = found ? xasprintf("%s.weight", stem) : NULL;
            free(stem);
            if (matrix)
                return matrix;
        }
    return NULL;
}

/* ---- tensors of a known shape ---------------------------------------------------------------- */

static _Noreturn void die_of_shape(Found f, const Matrix *m, const char *expected)
{
    die("%s: tensor %s is %s; expected %s for a matrix of %zu x %zu, which the configured model "
        "needs",
        f.file->path, f.tensor->name, safetensors_shape(f.tensor), expected, m->rows, m->cols);
}

static Found need(const Matrix *m, const char *suffix)
{
    const Found f = find(m, suffix);
    if (!f.tensor)
        die("%s%s: there is no tensor %s%s, which %s.weight needs; copy all files of the folder "
            "again",
            m->file[0]->path, m->count > 1 ? " and the files next to it" : "", m->stem, suffix,
            m->stem);
    return f;
}

static bool is_matrix(const SafeTensor *t, size_t rows, size_t cols)
{
    return t->dims == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

/* Finds the tensor STEM<suffix>. Dies unless it is rows x cols of type dtype. */
static Found need_matrix(const Matrix *m, const char *suffix, const char *dtype, size_t rows,
                         size_t cols)
{
    const Found f = need(m, suffix);
    char expected[96];
    snprintf(expected, sizeof expected, "%zu x %zu of %s", rows, cols, dtype);
    if (!is_matrix(f.tensor, rows, cols) || strcmp(f.tensor->dtype, dtype) != 0)
        die_of_shape(f, m, expected);
    return f;
}

static size_t numel_of(const SafeTensor *t)
{
    return (t->end - t->begin) / safetensors_dtype_size(t->dtype);
}

/* Reads elements first .. first + n - 1 of a tensor in F32, BF16 or F16; the result is
 * malloc'ed. */
static float *read_floats(Found f, const Matrix *m, size_t first, size_t n)
{
    if (!convert_knows(f.tensor->dtype))
        die_of_shape(f, m, "F32, BF16 or F16");
    const size_t size = safetensors_dtype_size(f.tensor->dtype);
    float *values = xmalloc(n * sizeof *values);
    void *raw = xmalloc(n * size);
    safetensors_read(f.file, raw, f.tensor, first * size, n * size);
    convert_decode(values, f.tensor->dtype, raw, n);
    free(raw);
    return values;
}

/* ---- a byte per weight ----------------------------------------------------------------------- */

/* The scale of element (row, col) is scale[row / high * across + col / wide]. */
typedef struct {
    float *scale;
    size_t high, wide, across;
} Scales;

static bool is_llm(const Matrix *m)
{
    return strcmp(m->kind->scale, ".SCB") == 0;
}

static Scales read_scales(const Matrix *m)
{
    const Found f = need(m, m->kind->scale);
    const SafeTensor *t = f.tensor;
    const size_t across = (m->cols + BLOCK - 1) / BLOCK, down = (m->rows + BLOCK - 1) / BLOCK,
                 n = numel_of(t);
    const bool by_row = t->dims == 1 && n == m->rows;
    Scales s = { .high = 1, .wide = m->cols, .across = 1 };
    if (t->dims <= 2 && n == 1 && !is_llm(m))
        s.high = m->rows;
    else if (is_matrix(t, down, across) && !is_llm(m))
        s = (Scales){ NULL, BLOCK, BLOCK, across };
    else if (!by_row && (is_llm(m) || !is_matrix(t, m->rows, 1)))
        die_of_shape(f, m,
                     is_llm(m) ? "one scale for each row"
                               : "one scale, one for each row or one for each 128 x 128 elements");
    s.scale = read_floats(f, m, 0, n);
    return s;
}

/* The number of consecutive elements, from element i on and at most n, that are in the same row and
 * have the same scale. */
static size_t run_of(const Matrix *m, size_t i, size_t wide, size_t n)
{
    const size_t col = i % m->cols, end = (col / wide + 1) * wide,
                 run = (end < m->cols ? end : m->cols) - col;
    return run < n ? run : n;
}

/* NOTE: LLM.int8() multiplies by the row's largest magnitude, SCB, then by the F32 nearest to 1/127
 * [bitsandbytes 0.50]. */
static void read_bytes(float *to, const Matrix *m, size_t first, size_t n)
{
    const Found codes = need_matrix(m, ".weight", m->kind->dtype, m->rows, m->cols);
    const bool integer = strcmp(m->kind->dtype, "I8") == 0;
    const float factor = is_llm(m) ? 1.0f / 127 : 1;
    const Scales s = read_scales(m);
    uint8_t *raw = xmalloc(n);
    float value[256];
    for (int i = 0; i < 256; i++)
        value[i] = integer ? (float)(int8_t)i : fp8_decode((uint8_t)i, E4M3);
    safetensors_read(codes.file, raw, codes.tensor, first, n);
    for (size_t i = 0, run; i < n; i += run) {
        const size_t row = (first + i) / m->cols, col = (first + i) % m->cols;
        const float scale = s.scale[row / s.high * s.across + col / s.wide];
        run = run_of(m, first + i, s.wide, n - i);
        for (size_t k = i; k < i + run; k++)
            to[k] = value[raw[k]] * scale * factor;
    }
    free(raw);
    free(s.scale);
}

/* Checks the tensor with the matrix's shape: other programs read the shape from it. */
static void check_shape(const Matrix *m)
{
    const Found f = need(m, ".weight_shape");
    int64_t shape[2];
    if (strcmp(f.tensor->dtype, "I64") != 0 || f.tensor->end - f.tensor->begin != sizeof shape)
        die_of_shape(f, m, "two I64");
    safetensors_read(f.file, shape, f.tensor, 0, sizeof shape);
    if (shape[0] != (int64_t)m->rows || shape[1] != (int64_t)m->cols)
        die("%s: tensor %s says %lld x %lld; the configured model needs %zu x %zu", f.file->path,
            f.tensor->name, (long long)shape[0], (long long)shape[1], m->rows, m->cols);
}

/* Code i of packed codes. A word contains `per` codes. Codes are stored as unsigned numbers:
 * for example 0 to 15 for -8 to 7. */
static int code_in(const uint32_t *word, size_t i, size_t per)
{
    const size_t bits = 32 / per;
    return (int)(*word >> bits * (i % per) & ((1u << bits) - 1)) - (1 << (bits - 1));
}

/* Number of codes in a word. */
static size_t packed_per_word(const Matrix *m)
{
    const SafeTensor *t = find(m, ".weight_packed").tensor;
    return t->dims == 2 && t->shape[1] * 4 == m->cols ? 4 : PER_WORD;
}

/* Rows of codes have no gaps between them: a row is a whole number of groups and of words. */
static void read_packed(float *to, const Matrix *m, size_t first, size_t n)
{
    const size_t per = packed_per_word(m);
    const Found codes = need_matrix(m, ".weight_packed", "I32", m->rows, m->cols / per),
                scales = need(m, ".weight_scale");
    const size_t groups = scales.tensor->dims == 2 ? scales.tensor->shape[1] : 0;
    if (groups == 0 || m->cols % groups != 0 || m->cols % per != 0 ||
        scales.tensor->shape[0] != m->rows)
        die_of_shape(scales, m, "a number of scales per row that divides the row");
    check_shape(m);
    const size_t group = m->cols / groups, word = first / per,
                 words = (first + n - 1) / per + 1 - word;
    float *scale =
        read_floats(scales, m, first / group, (first + n - 1) / group + 1 - first / group);
    uint32_t *packed = xmalloc(words * sizeof *packed);
    safetensors_read(codes.file, packed, codes.tensor, word * sizeof *packed,
                     words * sizeof *packed);
    for (size_t i = first, run; i < first + n; i += run) {
        run = run_of(m, i, group, first + n - i);
        for (size_t k = i; k < i + run; k++)
            to[k - first] =
                (float)code_in(&packed[k / per - word], k, per) * scale[i / group - first / group];
    }
    free(packed);
    free(scale);
}

/* Reads the group of each input from .g_idx; malloc'ed. */
static uint32_t *read_groups(const Matrix *m, size_t groups)
{
    const Found f = need(m, ".g_idx");
    if (f.tensor->dims != 1 || f.tensor->shape[0] != m->cols || strcmp(f.tensor->dtype, "I32") != 0)
        die_of_shape(f, m, "one I32 for each input");
    uint32_t *group = xmalloc(m->cols * sizeof *group);
    safetensors_read(f.file, group, f.tensor, 0, m->cols * sizeof *group);
    for (size_t i = 0; i < m->cols; i++)
        if (group[i] >= groups)
            die("%s: tensor %s: input %zu is in group %u; expected a group below %zu. Copy the "
                "folder again",
                f.file->path, f.tensor->name, i, group[i], groups);
    return group;
}

static void check_zeros(const Matrix *m, size_t groups)
{
    const Found f = need_matrix(m, ".qzeros", "I32", groups, m->rows / PER_WORD);
    const size_t n = numel_of(f.tensor);
    uint32_t *zeros = xmalloc(n * sizeof *zeros);
    safetensors_read(f.file, zeros, f.tensor, 0, n * sizeof *zeros);
    for (size_t i = 0; i < n; i++)
        if (zeros[i] != ZEROS)
            die("%s: tensor %s has the word %08x; expected %08x: only symmetric "
                "GPTQ codes (version 1 of GPTQ's format) are supported; load the folder of the "
                "unquantized model",
                f.file->path, f.tensor->name, zeros[i], (unsigned)ZEROS);
    free(zeros);
}

/* A word holds the codes of eight inputs of one output. From each row of words, reads only the
 * words of the requested outputs, from first / cols on. */
static void read_gptq(float *to, const Matrix *m, size_t first, size_t n)
{
    const Found codes = need_matrix(m, ".qweight", "I32", m->cols / PER_WORD, m->rows),
                scales = need(m, ".scales");
    const size_t groups = scales.tensor->dims == 2 ? scales.tensor->shape[0] : 0;
    if (groups == 0 || m->cols % PER_WORD != 0 || m->rows % PER_WORD != 0 ||
        scales.tensor->shape[1] != m->rows)
        die_of_shape(scales, m, "groups x outputs, and inputs and outputs in multiples of 8");
    const size_t row = first / m->cols, rows = (first + n - 1) / m->cols + 1 - row,
                 bytes = rows * sizeof(uint32_t);
    check_zeros(m, groups);
    uint32_t *group = read_groups(m, groups), *packed = xmalloc(m->cols / PER_WORD * bytes);
    float *scale = read_floats(scales, m, 0, groups * m->rows);
    for (size_t r = 0; r < m->cols / PER_WORD; r++)
        safetensors_read(codes.file, packed + r * rows, codes.tensor,
                         (r * m->rows + row) * sizeof *packed, bytes);
    for (size_t i = first; i < first + n; i++) {
        const size_t o = i / m->cols, c = i % m->cols;
        to[i - first] = (float)code_in(&packed[c / PER_WORD * rows + o - row], c, PER_WORD) *
                        scale[group[c] * m->rows + o];
    }
    free(group);
    free(packed);
    free(scale);
}

/* The largest magnitude in a block of 64 weights [kernels/nf4_map.h]. */
static float nested_absmax(const Nf4Group *g, size_t block)
{
    const float rest = g->nested * dynamic8_map(DYNAMIC8)[g->absmax[block]];
    return rest + g->offset;
}

static void read_nf4(float *to, const Matrix *m, size_t first, size_t n)
{
    const size_t group = first / NF4_GROUP, groups = (first + n - 1) / NF4_GROUP + 1 - group;
    const bool plain = !find(m, ".weight.nested_absmax").tensor;
    const float *map = nf4_map();
    Nf4Group *g = plain ? NULL : xmalloc(groups * sizeof *g);
    Nf4PlainGroup *p = plain ? xmalloc(groups * sizeof *p) : NULL;
    char *name = xasprintf("%s.weight", m->stem);
    if (plain)
        nf4_source_read_plain(p, m->file, m->count, name, m->rows, m->cols, group, groups);
    else
        nf4_source_read(g, m->file, m->count, name, m->rows, m->cols, group, groups);
    for (size_t i = first; i < first + n; i++) {
        const size_t at = i / NF4_GROUP - group, k = i % NF4_GROUP, block = k / NF4_BLOCK;
        const uint8_t *codes = plain ? p[at].codes : g[at].codes;
        const float absmax = plain ? p[at].absmax[block] : nested_absmax(&g[at], block);
        to[i - first] = map[codes[k / 2] >> (k % 2 ? 0 : 4) & 15] * absmax;
    }
    free(name);
    free(g);
    free(p);
}

/* ---- for checks ------------------------------------------------------------------------------ */

bool coded_source_shape(CodedShape *to, SafeFile *const *file, int count, const char *name)
{
    char *stem = stem_of(name, ".weight");
    Matrix m = { .file = file, .count = count, .stem = stem };
    m.kind = stem ? kind_of(&m) : NULL;
    const Found codes = m.kind ? find(&m, m.kind->codes) : (Found){ 0 };
    bool says = codes.tensor && codes.tensor->dims == 2 && m.kind->read != read_nf4 && !is_llm(&m);
    if (says) {
        const size_t *shape = codes.tensor->shape;
        *to = (CodedShape){ .scale = find(&m, m.kind->scale), .rows = shape[0], .cols = shape[1] };
    }
    if (says && m.kind->read == read_gptq)
        *to = (CodedShape){ to->scale, find(&m, ".g_idx"), to->cols, to->rows * PER_WORD, 4, true };
    if (says && m.kind->read == read_packed) {
        const Found said = find(&m, ".weight_shape");
        int64_t shape[2] = { 0 };
        if (said.tensor && said.tensor->end - said.tensor->begin == sizeof shape)
            safetensors_read(said.file, shape, said.tensor, 0, sizeof shape);
        to->bits = shape[1] > 0 ? to->cols * 32 / (size_t)shape[1] : 0;
        to->cols = (size_t)shape[1];
        says = shape[1] > 0;
    }
    free(stem);
    return says && to->rows > 0 && to->cols > 0;
}

/* ---- tensors that belong to no matrix -------------------------------------------------------- */

/* Adds the name of the tensor STEM<suffix> to the text. */
static void add_name(char **text, const char *stem, const char *suffix)
{
    char *name = xasprintf("%s%s", stem, suffix);
    if (!strstr(*text, name))
        *text = xasprintf("%s%s%s", *text, **text ? " or " : "", name);
    free(name);
}

void coded_source_refuse_single(SafeFile *const *file, int count, Found single)
{
    const SafeTensor *t = single.tensor;
    char *missing = xstrdup("");
    for (int i = 0; i < NUM_KINDS; i++)
        for (int k = -2; k < OTHERS; k++) {
            const char *dtype = kinds[i].dtype ? kinds[i].dtype : "U8";
            char *stem = stem_of(t->name, suffix_of(&kinds[i], k));
            const Matrix m = { .file = file, .count = count, .stem = stem };
            if (stem && k != -2 && !find(&m, kinds[i].codes).tensor)
                add_name(&missing, stem, kinds[i].codes);
            else if (stem && !find(&m, kinds[i].scale).tensor &&
                     (k != -2 || strcmp(t->dtype, dtype) == 0))
                add_name(&missing, stem, kinds[i].scale);
            free(stem);
        }
    if (*missing)
        die("%s: tensor %s of %s needs %s, which is %s: copy all files of the folder again",
            single.file->path, t->name, t->dtype, missing,
            count > 1 ? "neither there nor in the files next to it" : "not in that file");
    free(missing);
}

void coded_source_read(float *to, SafeFile *const *file, int count, const char *name, size_t rows,
                       size_t cols, size_t first, size_t n)
{
    char *stem = stem_of(name, ".weight");
    Matrix m = { .file = file, .count = count, .stem = stem, .rows = rows, .cols = cols };
    m.kind = stem ? kind_of(&m) : NULL;
    CHECK(m.kind && n > 0 && first + n <= rows * cols, "%zu elements of %s from %zu on", n, name,
          first);
    m.kind->read(to, &m, first, n);
    free(stem);
}
