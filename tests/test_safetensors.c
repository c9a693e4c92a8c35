/* Invalid and damaged safetensors files are not read. Also the bytes of a file that identify it,
 * and the search for names. test_checkpoint.c reads checkpoints back. */
#include <time.h>

#include "model/checkpoint/base_fingerprint.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/safetensors.h"
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

int main(void)
{
    return run_all_tests(make_root, remove_root);
}
