/* Invalid and damaged safetensors files are not read. Also the bytes of a file that identify it,
 * the search for names, and adapters of all experts in one tensor. test_checkpoint.c reads checkpoints back. */
#include <time.h>

#include "model/checkpoint/base_fingerprint.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/stacked_adapters.h"
#include "tests/stacked_file.h"
#include "tests/test.h"
#include "tests/saved.h"

/* A header followed by `data` bytes. */
static const char *write_raw(const char *header, size_t data)
{
    const char *path = text("%s/raw.safetensors", root);
    FILE *f = fopen(path, "w");
    for (int i = 0; i < 8; i++)
        fputc((int)(strlen(header) >> 8 * i & 255), f);
    fputs(header, f);
    for (size_t i = 0; i < data; i++)
        fputc(0, f);
    assert_int_equal(fclose(f), 0);
    return path;
}

#define ENTRY(name, dtype, shape, from, to) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #from "," #to \
    "]}"

TEST(test_damaged_headers)
{
    const char *good = "{" ENTRY("a", "F32", "2,3", 0, 24) "," ENTRY("b", "I64", "", 24, 32) "}";
    safetensors_close(safetensors_open(write_raw(good, 32)));
    good = "{" ENTRY("a", "F32", "0,3", 0, 0) "," ENTRY("b", "U8", "5", 0, 5) "}";
    safetensors_close(safetensors_open(write_raw(good, 5)));
    const struct {
        const char *header;
        size_t data;
        const char *message;
    } bad[] = {
        { "[1]", 0, "not a JSON object" },
        { "{\"a\":3}", 0, "tensor a" },
        { "{" ENTRY("a", "F32", "2", 0, 8) "," ENTRY("a", "F32", "2", 0, 8) "}", 8,
          "not a JSON object" },
        { "{" ENTRY("a", "F32", "2,3", 0, 23) "}", 23, "tensor a" },
        { "{" ENTRY("a", "F32", "-2,-3", 0, 24) "}", 24, "tensor a" },
        { "{" ENTRY("a", "F32", "9223372036854775807,2", 0, 8) "}", 8, "tensor a" },
        { "{" ENTRY("a", "F32", "2", 8, 0) "}", 8, "tensor a" },
        { "{" ENTRY("a", "F32", "2", 0, 8) "}", 7, "describes 8 bytes of data, the file has 7" },
        { "{" ENTRY("a", "F32", "2", 0, 8) "}", 9, "describes 8 bytes of data, the file has 9" },
        { "{" ENTRY("a", "F32", "2", 4, 12) "}", 12, "starts at byte 4" },
        { "{" ENTRY("a", "F32", "2", 0, 8) "," ENTRY("b", "F32", "2", 4, 12) "}", 12,
          "starts at byte 4" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        DIES(bad[i].message, safetensors_open(write_raw(bad[i].header, bad[i].data)));
    write_raw("{}", 0);
    shell(text("truncate -s 5 %s/raw.safetensors", root));
    DIES("truncated", safetensors_open(text("%s/raw.safetensors", root)));
    shell(text("echo version https://git-lfs.github.com/spec/v1 >%s/raw.safetensors", root));
    DIES("raw.safetensors: this is a Git LFS pointer, not the file itself",
         safetensors_open(text("%s/raw.safetensors", root)));
    DIES("No such file", safetensors_open(text("%s/nothing.safetensors", root)));
}

/* A base that was trained further is detected by three pages of each tensor: at the start, in the
 * middle and at the end. */
TEST(test_sampled_pages)
{
    enum { BYTES = 5 * 4096 };
    static const int changed[] = { 0, BYTES / 2, BYTES - 1, 4096 + 1 };
    const char *header = "{" ENTRY("a", "U8", "20480", 0, 20480) "}", *path = NULL;
    uint64_t fingerprint[5];
    for (int i = 0; i < 5; i++) {
        path = write_raw(header, BYTES);
        if (i > 0)
            shell(text("printf x | dd of=%s conv=notrunc bs=1 seek=%zu status=none", path,
                       8 + strlen(header) + (size_t)changed[i - 1]));
        SafeFile *file = safetensors_open(path);
        fingerprint[i] = base_fingerprint(&(WeightFiles){ &file, 1 });
        safetensors_close(file);
    }
    for (int i = 1; i < 4; i++)
        for (int k = 0; k < i; k++)
            assert_true(fingerprint[i] != fingerprint[k]);
    assert_true(fingerprint[4] == fingerprint[0]); /* bytes between the pages are not read */
}

/* Names of tensors that are prefixes of other names, in random order. */
static const char *name_of(int i)
{
    return text("model.layers.%d.experts%s", i * 7919 % 20011, i % 3 ? ".weight" : "");
}

static SafeFile *write_names(int count)
{
    SafeFile *f = safetensors_new(text("%s/names.safetensors", root));
    for (int i = 0; i < count; i++)
        safetensors_add(f, name_of(i), "U8", 1, (size_t[]){ 1 });
    safetensors_lay_out(f);
    safetensors_create(f);
    safetensors_close(f);
    return safetensors_open(text("%s/names.safetensors", root));
}

/* Finds the same tensors as a search of all names, also if a name occurs twice, and after names
 * have changed. */
TEST(test_names)
{
    enum { COUNT = 100 };
    SafeFile *f = write_names(COUNT);
    strcpy(f->tensor[2].name, f->tensor[71].name);
    strcpy(f->tensor[5].name, "a");
    safetensors_renamed(f);
    for (int i = 0; i < 3 * COUNT; i++) {
        const char *name = i < COUNT ? f->tensor[i].name : name_of(i - COUNT);
        int t = 0;
        while (t < COUNT && strcmp(f->tensor[t].name, name) != 0)
            t++;
        assert_ptr_equal(safetensors_find(f, name), t < COUNT ? &f->tensor[t] : NULL);
    }
    assert_null(safetensors_find(f, ""));
    assert_null(safetensors_find(f, "z"));
    safetensors_close(f);
}

/* Whether each of many tensors belongs to a matrix of codes is known within seconds of processor
 * time. Searches of all names would take minutes. */
TEST(test_many_names)
{
    enum { COUNT = 20000, SECONDS = 20 };
    SafeFile *f = write_names(COUNT);
    const clock_t end = clock() + SECONDS * CLOCKS_PER_SEC;
    for (int t = 0; t < COUNT; t++) {
        assert_null(coded_source_matrix(&f, 1, f->tensor[t].name));
        assert_true(clock() < end);
    }
    safetensors_close(f);
}

/* ---- adapters of all experts as one tensor --------------------------------------------------- */

static float *read_all(const SafeFile *f, const char *name, size_t n)
{
    const SafeTensor *t = safetensors_find(f, name);
    if (!t || t->end - t->begin != n * sizeof(float))
        fail_msg("%s: %s", name, t ? safetensors_shape(t) : "is missing");
    float *x = keep(n * sizeof *x);
    safetensors_read(f, x, t, 0, n * sizeof *x);
    return x;
}

/* The product of an expert's B and A, by PEFT's definition: A is (E, ranks, cols), and B is
 * (rows, ranks, E) [peft/tuners/lora/layer.py, ParamWrapper.get_delta_weight]. */
static float product_of(const float *a, const float *b, size_t ranks, size_t cols, size_t e,
                        size_t row, size_t c)
{
    float sum = 0;
    for (size_t j = 0; j < ranks; j++)
        sum += b[(row * ranks + j) * EXPERTS + e] * a[(e * ranks + j) * cols + c];
    return sum;
}

/* Rows `first` and following of the product are that of the single adapter. */
static void check_single(const SafeFile *f, size_t e, const char *module, const float *a,
                         const float *b, size_t ranks, size_t first, size_t rows, size_t cols)
{
    const float *own_a = read_all(f, text(STACKED "%zu.%s.lora_A.weight", e, module), R * cols),
                *own_b = read_all(f, text(STACKED "%zu.%s.lora_B.weight", e, module), rows * R);
    for (size_t row = 0; row < rows; row++)
        for (size_t c = 0; c < cols; c++) {
            float sum = 0;
            for (size_t j = 0; j < R; j++)
                sum += own_b[row * R + j] * own_a[j * cols + c];
            assert_true(sum == product_of(a, b, ranks, cols, e, first + row, c));
        }
}

TEST(test_stacked_adapters)
{
    for (int fused = 0; fused < 2; fused++) {
        const size_t ranks = R * (fused ? 2 : 1);
        SafeFile *f =
            write_stacked(text("%s/stacked.safetensors", root), ranks, fused ? off_block : NULL);
        const float *a = read_all(f, STACKED "base_layer.lora_A.weight", ranks * EXPERTS * WIDTH),
                    *b = read_all(f, STACKED "base_layer.lora_B.weight",
                                  2 * HIDDEN * ranks * EXPERTS),
                    *down_a = read_all(f, STACKED "lora_A.weight", R * EXPERTS * HIDDEN),
                    *down_b = read_all(f, STACKED "lora_B.weight", WIDTH * R * EXPERTS);
        SafeFile *single = stacked_adapters(f, R, fused);
        assert_true(f->count == 1 && safetensors_find(f, "q_proj.lora_A.weight"));
        assert_int_equal(single->count, EXPERTS * 6);
        for (size_t e = 0; e < EXPERTS; e++) {
            check_single(single, e, "gate_proj", a, b, ranks, 0, HIDDEN, WIDTH);
            check_single(single, e, "up_proj", a, b, ranks, HIDDEN, HIDDEN, WIDTH);
            check_single(single, e, "down_proj", down_a, down_b, R, 0, WIDTH, HIDDEN);
        }
        assert_null(stacked_adapters(f, R, fused));
        safetensors_close(single);
        safetensors_close(f);
        release();
    }
    SafeFile *f = write_stacked(text("%s/stacked.safetensors", root), 2 * R, NULL);
    DIES("base_layer.lora_B.weight connects gate_proj with the ranks of up_proj",
         stacked_adapters(f, R, true));
    DIES("lora_A.weight is 12 x 4 of F32; expected a multiple of 5", stacked_adapters(f, 5, false));
    safetensors_close(f);
}

int main(void)
{
    return run_all_tests(make_root, remove_root);
}
