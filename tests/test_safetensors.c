/* Invalid or damaged safetensors are not read; and which bytes of a file identify it.
 * test_checkpoint.c reads checkpoints back. */
#include "model/checkpoint/base_fingerprint.h"
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
        { "[1]", 0, "no JSON object" },
        { "{\"a\":3}", 0, "tensor a" },
        { "{" ENTRY("a", "F32", "2", 0, 8) "," ENTRY("a", "F32", "2", 0, 8) "}", 8,
          "no JSON object" },
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

int main(void)
{
    return run_all_tests(make_root, remove_root);
}
