/* Reading folders of codes and scales: every code with scales of every type and shape, ranges of
 * matrices, refusals. Runs and exports from such folders have the decoded values. */
#include "model/checkpoint/coded_check.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/convert.h"
#include "tests/test.h"
#include "tests/coded.h"

/* The matrix N.weight, whose last blocks of 128 x 128 have 96 columns. In each row, and in each
 * column of 256, the codes take all values. */
enum { O = 256, I = 352 };

/* ---- files ----------------------------------------------------------------------------------- */

typedef struct {
    const char *name, *dtype;
    int dims;
    size_t shape[2];
    const void *bytes;
} Given;

/* Writes the tensors of a list that ends with a tensor without a name. */
static SafeFile *write_file(const Given *tensor)
{
    char *path = lasting(text("%s/%d.safetensors", root, num_folders++));
    SafeFile *f = safetensors_new(path);
    for (const Given *t = tensor; t->name; t++)
        safetensors_add(f, t->name, t->dtype, t->dims, t->shape);
    safetensors_lay_out(f);
    safetensors_create(f);
    for (const Given *t = tensor; t->name; t++) {
        const SafeTensor *to = safetensors_find(f, t->name);
        assert_true(safetensors_write(f, to, 0, t->bytes, to->end - to->begin));
    }
    safetensors_close(f);
    return safetensors_open(path);
}

/* Compares the matrix with value(row, col), as a whole and in ranges with any start and end. */
static void check_values(SafeFile *f, double (*value)(size_t row, size_t col))
{
    static const size_t parts[] = { 1, 7, 100, 4095, 50000 };
    float *whole = keep(O * I * sizeof *whole), *part = keep(50000 * sizeof *part);
    char *matrix = coded_source_matrix(&f, 1, f->tensor[0].name);
    assert_string_equal(matrix, "N.weight");
    assert_ptr_equal(coded_source_find(&f, 1, "N.weight"), f);
    free(matrix);
    coded_source_read(whole, &f, 1, "N.weight", O, I, 0, O * I);
    for (size_t i = 0; i < O * I; i++)
        if ((double)whole[i] != value(i / I, i % I))
            fail_msg("element %zu, %zu: %.9g, expected %.9g", i / I, i % I, whole[i],
                     value(i / I, i % I));
    for (size_t k = 0, at = 3; k < 5; at += parts[k++]) {
        coded_source_read(part, &f, 1, "N.weight", O, I, at, parts[k]);
        assert_memory_equal(part, whole + at, parts[k] * sizeof *part);
    }
    safetensors_close(f);
}

/* ---- a byte per weight ----------------------------------------------------------------------- */

/* All codes of E4M3, with 0 in place of the two NaNs. */
static uint8_t byte_at(size_t row, size_t col)
{
    const unsigned code = (unsigned)(row + col) % 256;
    return (code & 0x7f) == 0x7f ? 0 : (uint8_t)code;
}

/* Some values that all three types can represent. */
static double scale_at(size_t i)
{
    return ldexp(1 + (double)(i % 7) / 8, (int)(i % 5) - 9);
}

static const void *scales_in(const char *dtype, size_t n)
{
    float *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)scale_at(i);
    convert_encode(x, dtype, x, n);
    return x;
}

static const void *bytes_given(void)
{
    uint8_t *bytes = keep(O * I);
    for (size_t i = 0; i < O * I; i++)
        bytes[i] = byte_at(i / I, i % I);
    return bytes;
}

static double fp8(size_t row, size_t col)
{
    return value_of(byte_at(row, col), 4, 3);
}
static double integer(size_t row, size_t col)
{
    return (int8_t)byte_at(row, col);
}
static double fp8_one(size_t row, size_t col)
{
    return fp8(row, col) * scale_at(0);
}
static double fp8_rows(size_t row, size_t col)
{
    return fp8(row, col) * scale_at(row);
}
static double fp8_blocks(size_t row, size_t col)
{
    return fp8(row, col) * scale_at(row / 128 * 3 + col / 128);
}
static double integer_rows(size_t row, size_t col)
{
    return integer(row, col) * scale_at(row);
}

/* Two products in F32, as in [bitsandbytes 0.50, int8_vectorwise_dequant]. */
static double llm(size_t row, size_t col)
{
    const float product = (float)integer(row, col) * (float)scale_at(row),
                factor = 0.007874015718698502f;
    return (double)(product * factor);
}

TEST(test_bytes)
{
    static const char *const dtypes[] = { "F32", "BF16", "F16" };
    static const struct {
        int dims;
        size_t shape[2];
        double (*value)(size_t row, size_t col);
    } shapes[] = {
        { 0, { 0 }, fp8_one },  { 1, { 1 }, fp8_one },     { 2, { 1, 1 }, fp8_one },
        { 1, { O }, fp8_rows }, { 2, { O, 1 }, fp8_rows }, { 2, { 2, 3 }, fp8_blocks },
    };
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < 6; i++) {
            const Given codes = { "N.weight", "F8_E4M3", 2, { O, I }, bytes_given() };
            const Given scale = { "N.weight_scale",
                                  dtypes[d],
                                  shapes[i].dims,
                                  { shapes[i].shape[0], shapes[i].shape[1] },
                                  scales_in(dtypes[d], O) };
            Given inverse = scale;
            inverse.name = "N.weight_scale_inv";
            check_values(write_file((const Given[]){ codes, scale, { 0 } }), shapes[i].value);
            check_values(write_file((const Given[]){ codes, inverse, { 0 } }), shapes[i].value);
            release();
        }
    const Given codes = { "N.weight", "I8", 2, { O, I }, bytes_given() };
    check_values(
        write_file((const Given[]){
            codes, { "N.weight_scale", "BF16", 2, { O, 1 }, scales_in("BF16", O) }, { 0 } }),
        integer_rows);
    check_values(write_file((const Given[]){ codes,
                                             { "N.SCB", "F32", 1, { O }, scales_in("F32", O) },
                                             { "N.weight_format", "U8", 0, { 0 }, "" },
                                             { 0 } }),
                 llm);
    release();
}

/* ---- packed bits ----------------------------------------------------------------------------- */

static int code_at(size_t row, size_t col)
{
    return (int)((3 * row + col) % 16) - 8;
}

static double packed_32(size_t row, size_t col)
{
    return code_at(row, col) * scale_at(row * 11 + col / 32);
}
static double packed_row(size_t row, size_t col)
{
    return code_at(row, col) * scale_at(row);
}

static const void *words_by_row(void)
{
    uint32_t *word = keep(O * I / 2);
    for (size_t i = 0; i < O * I; i++)
        word[i / 8] |= (uint32_t)(code_at(i / I, i % I) + 8) << 4 * (i % 8);
    return word;
}

/* A word has four bytes, the first in the lowest bits: code + 128. */
static const void *words_of_bytes(void)
{
    uint32_t *word = keep(O * I);
    for (size_t i = 0; i < O * I; i++)
        word[i / 4] |= (uint32_t)(integer(i / I, i % I) + 128) << 8 * (i % 4);
    return word;
}

static const int64_t shape_of_it[] = { O, I };

TEST(test_packed)
{
    const Given codes = { "N.weight_packed", "I32", 2, { O, I / 8 }, words_by_row() };
    const Given shape = { "N.weight_shape", "I64", 1, { 2 }, shape_of_it };
    check_values(write_file((const Given[]){
                     codes,
                     shape,
                     { "N.weight_scale", "BF16", 2, { O, 11 }, scales_in("BF16", O * 11) },
                     { 0 } }),
                 packed_32);
    check_values(
        write_file((const Given[]){
            codes, shape, { "N.weight_scale", "F16", 2, { O, 1 }, scales_in("F16", O) }, { 0 } }),
        packed_row);
    check_values(
        write_file((const Given[]){ { "N.weight_packed", "I32", 2, { O, I / 4 }, words_of_bytes() },
                                    shape,
                                    { "N.weight_scale", "BF16", 2, { O, 1 }, scales_in("BF16", O) },
                                    { 0 } }),
        integer_rows);
    release();
}

/* Groups of 128 inputs, in order or interleaved. */
static double gptq(size_t row, size_t col)
{
    return code_at(row, col) * scale_at(col / 128 * O + row);
}
static double gptq_dealt(size_t row, size_t col)
{
    return code_at(row, col) * scale_at(col * 129 % I / 128 * O + row);
}

/* Makes the tensors of GPTQ; zeros: the value of each word of qzeros. */
static void give_gptq(Given to[5], bool dealt, uint32_t zeros)
{
    uint32_t *word = keep(O * I / 2), *zero = keep(3 * O / 2), *group = keep(I * sizeof *group);
    for (size_t i = 0; i < O * I; i++)
        word[i % I / 8 * O + i / I] |= (uint32_t)(code_at(i / I, i % I) + 8) << 4 * (i % I % 8);
    for (size_t i = 0; i < 3 * O / 8; i++)
        zero[i] = zeros;
    for (uint32_t i = 0; i < I; i++)
        group[i] = (dealt ? i * 129 % I : i) / 128;
    const Given tensor[] = { { "N.qweight", "I32", 2, { I / 8, O }, word },
                             { "N.qzeros", "I32", 2, { 3, O / 8 }, zero },
                             { "N.scales", "F16", 2, { 3, O }, scales_in("F16", 3 * O) },
                             { "N.g_idx", "I32", 1, { I }, group },
                             { 0 } };
    memcpy(to, tensor, sizeof tensor);
}

TEST(test_gptq)
{
    for (int dealt = 0; dealt < 2; dealt++) {
        Given tensor[5];
        give_gptq(tensor, dealt, 0x77777777);
        check_values(write_file(tensor), dealt ? gptq_dealt : gptq);
        release();
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void read_all(const Given *tensor)
{
    SafeFile *f = write_file(tensor);
    float *values = keep(O * I * sizeof *values);
    coded_source_read(values, &f, 1, "N.weight", O, I, 0, O * I);
}

TEST(test_refusals)
{
    needs_fork();
    static const int64_t other[] = { O, I + 1 };
    const Given codes = { "N.weight", "F8_E4M3", 2, { O, I }, bytes_given() };
    const Given bytes = { "N.weight", "I8", 2, { O, I }, bytes_given() };
    const Given packed = { "N.weight_packed", "I32", 2, { O, I / 8 }, words_by_row() };
    const Given shape = { "N.weight_shape", "I64", 1, { 2 }, shape_of_it };
    const void *scales = scales_in("F32", O * 12);
    const struct {
        Given tensor[4];
        const char *message;
    } wrong[] = {
        { { codes, { "N.weight_scale", "F32", 2, { O, 3 }, scales } },
          "tensor N.weight_scale is 256 x 3 of F32; expected one scale, one "
          "for each row or one for each 128 x 128 elements for a matrix of 256 x 352" },
        /* blocks of 64 */
        { { codes, { "N.weight_scale", "F32", 2, { 4, 6 }, scales } },
          "expected one scale, one for each row" },
        { { codes, { "N.weight_scale", "F64", 1, { 1 }, scales } }, "expected F32, BF16 or F16" },
        { { { "N.weight", "F8_E4M3", 2, { I, O }, bytes_given() },
            { "N.weight_scale", "F32", 1, { 1 }, scales } },
          "tensor N.weight is 352 x 256 of F8_E4M3; expected 256 x 352 of F8_E4M3" },
        { { bytes, { "N.SCB", "F32", 1, { 1 }, scales } }, "expected one scale for each row" },
        { { packed, { "N.weight_scale", "F32", 2, { O, 11 }, scales } },
          "there is no tensor N.weight_shape, which N.weight" },
        { { packed, { "N.weight_scale", "F32", 2, { O, 12 }, scales }, shape },
          "expected a number of scales per row that divides the row" },
        { { packed,
            { "N.weight_scale", "F32", 2, { O, 11 }, scales },
            { "N.weight_shape", "I64", 1, { 2 }, other } },
          "tensor N.weight_shape says 256 x 353; the configured model needs 256 x 352" },
        { { { "N.weight_packed", "I32", 2, { O, I / 2 }, keep(2 * O * I) },
            { "N.weight_scale", "F32", 2, { O, 11 }, scales },
            shape },
          "tensor N.weight_packed is 256 x 176 of I32; expected 256 x 44 of I32" }, /* 16 bits */
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        DIES(wrong[i].message, read_all(wrong[i].tensor));
    Given tensor[5];
    give_gptq(tensor, false, 0x88888888);
    DIES("tensor N.qzeros has the word 88888888; expected 77777777: only symmetric GPTQ codes "
         "(version 1",
         read_all(tensor));
    give_gptq(tensor, false, 0x77777777);
    ((uint32_t *)tensor[3].bytes)[5] = 3;
    DIES("tensor N.g_idx: input 5 is in group 3; expected a group below 3. Copy the folder again",
         read_all(tensor));
    tensor[3].name = NULL;
    DIES("there is no tensor N.g_idx", read_all(tensor));
    release();
}

/* Each coding with the scales of each layout: the expected message, or NULL if they fit. */
TEST(test_codings)
{
    needs_fork();
    const void *scales = scales_in("F32", O * 11), *zeros = keep(O * I);
    const Given bytes = { "N.weight", "F8_E4M3", 2, { O, I }, zeros };
    const Given packed = { "N.weight_packed", "I32", 2, { O, I / 8 }, zeros };
    const Given words = { "N.weight_packed", "I32", 2, { O, I / 4 }, zeros };
    const Given shape = { "N.weight_shape", "I64", 1, { 2 }, shape_of_it };
    const Coding tensor = { 8, 0, 0, true, true }, channel = { 8, 1, 0, true, true },
                 block = { 0, 128, 128, true, true };
    const Coding silent = { 4 }, by_32 = { 4, 1, 32, true, true },
                 by_256 = { 4, 1, 256, true, true };
    const Coding rows = { 4, 1, 0, true, true };
    const struct {
        Given tensor[4];
        Coding said[2];
        const char *message;
    } cases[] = {
        { { bytes, { "N.weight_scale", "F32", 1, { 1 }, scales } }, { tensor }, NULL },
        { { bytes, { "N.weight_scale", "F32", 0, { 0 }, scales } }, { tensor }, NULL },
        { { bytes, { "N.weight_scale", "F32", 1, { 1 }, scales } },
          { channel },
          "tensor N.weight_scale is 1 of F32, for N.weight of 256 x 352. By the "
          "quantization_config of its folder this matrix has 8 "
          "bits and a scale for each 1 x 352 weights. Correct" },
        { { bytes, { "N.weight_scale", "F32", 0, { 0 }, scales } },
          { block },
          "one value of F32, for N.weight of 256 x 352. By" },
        { { bytes, { "N.weight_scale", "F32", 2, { O, 1 }, scales } }, { channel }, NULL },
        { { bytes, { "N.weight_scale", "F32", 1, { O }, scales } }, { channel }, NULL },
        { { bytes, { "N.weight_scale", "F32", 2, { O, 1 }, scales } },
          { block },
          "has a scale for each 128 x 128 weights" },
        { { bytes, { "N.weight_scale_inv", "F32", 2, { 2, 3 }, scales } }, { block }, NULL },
        { { bytes, { "N.weight_scale_inv", "F32", 2, { 2, 3 }, scales } },
          { tensor },
          "a scale for each 256 x 352 weights" },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 11 }, scales } }, { by_32 }, NULL },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 11 }, scales } }, { silent }, NULL },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 11 }, scales } },
          { by_256, by_32 },
          NULL },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 11 }, scales } },
          { by_256, channel },
          "N.weight_scale is 256 x 11 of F32, for N.weight of 256 x 352 in 4 bits. By the "
          "quantization_config of its folder this matrix "
          "has 4 bits and a scale for each 1 x 256 weights, or 8 bits and a scale for each 1 x 352 "
          "weights, and the size of a group must divide" },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 11 }, scales } },
          { rows },
          "each 1 x 352 weights, and" },
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 1 }, scales } }, { rows }, NULL },
        /* 352 = 256 + 96: as many scales as halves would have */
        { { packed, shape, { "N.weight_scale", "F32", 2, { O, 2 }, scales } },
          { by_256 },
          "each 1 x 256 weights, and the size of a group must" },
        { { words, shape, { "N.weight_scale", "F32", 2, { O, 1 }, scales } }, { channel }, NULL },
        { { words, shape, { "N.weight_scale", "F32", 2, { O, 1 }, scales } },
          { rows },
          "in 8 bits. By the" },
        { { words, shape, { "N.weight_scale", "F32", 2, { O, 1 }, scales } },
          { silent },
          "this matrix has 4 bits, and" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Given given[5] = { { 0 } };
        memcpy(given, cases[i].tensor, sizeof cases[i].tensor);
        SafeFile *f = write_file(given);
        const int count = cases[i].said[1].bits ? 2 : 1;
        if (cases[i].message)
            DIES(cases[i].message, coded_check(&f, 1, "N.weight", cases[i].said, count));
        else
            coded_check(&f, 1, "N.weight", cases[i].said, count);
        coded_check(&f, 1, "N.weight", cases[i].said, 0);
        safetensors_close(f);
    }
    release();
}

TEST(test_gptq_codings)
{
    needs_fork();
    for (int dealt = 0; dealt < 2; dealt++)
        for (int ordered = 0; ordered < 2; ordered++) {
            Given tensor[5];
            give_gptq(tensor, dealt, 0x77777777);
            SafeFile *f = write_file(tensor);
            const Coding said = { 4, 1, 128, true, ordered }, other = { 4, 1, 96, true, ordered };
            if (dealt && ordered)
                DIES("N.g_idx: input 1 is in group 1; expected 0, as desc_act is false and "
                     "group_size is 128",
                     coded_check(&f, 1, "N.weight", &said, 1));
            else
                coded_check(&f, 1, "N.weight", &said, 1);
            DIES("tensor N.scales is 3 x 256 of F16, for N.weight of 256 x 352 in 4 bits. By the "
                 "quantization_config of its folder "
                 "this matrix has 4 bits and a scale for each 1 x 96 weights. Correct",
                 coded_check(&f, 1, "N.weight", &other, 1));
            safetensors_close(f);
        }
    Given tensor[5];
    give_gptq(tensor, true, 0x77777777);
    ((uint32_t *)tensor[3].bytes)[5] = 0;
    SafeFile *f = write_file(tensor);
    DIES("N.g_idx: group 0 has 129 inputs; expected 128, as group_size is 128",
         coded_check(&f, 1, "N.weight", &(Coding){ 4, 1, 128, true, false }, 1));
    safetensors_close(f);
    release();
}

/* Tensors next to a matrix without codes, or tensors that the coding does not have, are not
 * used. */
TEST(test_strangers)
{
    const Given plain = { "N.weight", "BF16", 2, { 2, 2 }, "1234567" },
                codes = { "N.weight", "I8", 2, { 2, 2 }, "123" };
    const Given scale = { "N.weight_scale", "BF16", 2, { 2, 1 }, "123" },
                zero = { "N.weight_zero_point", "I8", 2, { 2, 1 }, "1" };
    SafeFile *f = write_file((const Given[]){ plain, scale, { 0 } });
    assert_null(coded_source_find(&f, 1, "N.weight"));
    assert_null(coded_source_matrix(&f, 1, "N.weight_scale"));
    safetensors_close(f);
    f = write_file((const Given[]){ codes, scale, zero, { 0 } });
    assert_non_null(coded_source_find(&f, 1, "N.weight"));
    assert_null(coded_source_find(&f, 1, "M.weight"));
    assert_null(coded_source_matrix(&f, 1, "N.weight_zero_point"));
    safetensors_close(f);
    release();
}

/* ---- folders --------------------------------------------------------------------------------- */

static const struct {
    const char *dtype;
    int layout;
} kinds[] = {
    { "fp8", NOT_GIVEN },        { "fp8", AS_FP8 },     { "int8", NOT_GIVEN },
    { "int8", AS_BITSANDBYTES }, { "int4", NOT_GIVEN }, { "nf4", NOT_GIVEN },
};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

/* A run starts with the values of the folder's export to F32, rounded if the run stores weights in
 * BF16. If a run with F32 weights is saved and exported again, the export equals the first one. */
static void check_run(const char *folder, const char *plain, DType master)
{
    Run one, other;
    const ModelConfig m = wide(QWEN3);
    const Format f32 = { F32, 0 };
    open_run(&one, &m, (Format){ master, 0 }, f32, f32);
    open_run(&other, &m, (Format){ master, 0 }, f32, f32);
    load(&one, folder);
    load(&other, plain);
    for (int u = 0; u < one.store.num_units; u++) {
        const size_t bytes = tensor_bytes(one.store.shard[u].slice[TRAINED].stored);
        char *a = keep(bytes), *b = keep(bytes);
        device_get(a, one.store.shard[u].slice[TRAINED].stored.data, bytes);
        device_get(b, other.store.shard[u].slice[TRAINED].stored.data, bytes);
        assert_memory_equal(a, b, bytes);
    }
    save(&one, 1);
    const char *again = lasting(text("%s/again%d", root, num_folders++));
    export_folder(step_folder(&one, 1), NULL, again, "F32", CHECKPOINT_FILE_BYTES);
    if (master == F32)
        shell(text("cmp %s/model.safetensors %s/model.safetensors", plain, again));
    close_run(&one);
    close_run(&other);
}

TEST(test_folders)
{
    for (int i = 0; i < NUM_KINDS; i++) {
        const char *source = save_wide(QWEN3), *folder = lasting(text("%s/folder%d", root, i));
        const char *plain = lasting(text("%s/plain%d", root, i));
        ExportOptions o = export_options_of(source, NULL, folder, kinds[i].dtype);
        o.layout = kinds[i].layout;
        export_to(&o, 50000); /* in several files */
        export_folder(folder, NULL, plain, "F32", CHECKPOINT_FILE_BYTES);
        json_t *config = json_load_file(text("%s/config.json", plain), 0, NULL);
        assert_non_null(config);
        assert_null(json_object_get(config, "quantization_config"));
        json_decref(config);
        check_run(folder, plain, F32);
        check_run(folder, plain, BF16);
        release();
    }
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
