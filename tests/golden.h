/* Golden values of kernel outputs: the CPU build of a test records them, the CUDA build compares.
 *
 * The folder is $GOLDEN_DIR, else build/golden. Both builds make their inputs from the same integer
 * hash, so results that do not depend on the order of a sum must agree bit for bit (bound == NULL).
 * Other results are rounded once in each build and differ by at most 2 u |y| + 2 bound: u is the
 * format's unit roundoff, and `bound` is the largest error of a result before it is rounded. */
#pragma once
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/kit.h"

/* Names of results must be unique: a second one would overwrite the first. */
static inline void golden_new_name(const char *name)
{
    static char names[2048][96];
    static int count;
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            fail_msg("two golden results are called %s", name);
    assert_true(count < 2048 && strlen(name) < sizeof names[0]);
    strcpy(names[count++], name);
}

static inline void golden_path(char *path, size_t size, const char *name)
{
    const char *folder = getenv("GOLDEN_DIR");
    if (!folder) {
        folder = "build/golden";
        mkdir("build", 0777);
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        fail_msg("cannot create %s: %s", folder, strerror(errno));
    size_t at = (size_t)snprintf(path, size, "%s/", folder);
    snprintf(path + at, size - at, "%s", name);
    for (char *p = path + at; *p; p++)
        if (*p == '/' || *p == ' ')
            *p = '-';
}

typedef struct {
    int32_t rows, cols, dtype, group;
    uint64_t bytes;
} GoldenHeader;

static inline void golden_record(const char *path, GoldenHeader header, const void *bytes)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(&header, sizeof header, 1, f) != 1 ||
        fwrite(bytes, 1, header.bytes, f) != header.bytes || fclose(f) != 0)
        fail_msg("cannot write %s: %s", path, strerror(errno));
}

static inline void *golden_read(const char *path, GoldenHeader header)
{
    GoldenHeader found;
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("cannot read %s: %s; run the tests of the CPU build first", path, strerror(errno));
    void *bytes = keep(header.bytes);
    bool whole = fread(&found, sizeof found, 1, f) == 1 &&
                 memcmp(&found, &header, sizeof header) == 0 &&
                 fread(bytes, 1, header.bytes, f) == header.bytes;
    fclose(f);
    if (!whole)
        fail_msg(
            "%s was recorded by another version of this test; run the tests of the CPU build again",
            path);
    return bytes;
}

/* bound: numel absolute errors. NULL: every byte of codes, scales and transposed codes must
 * agree. */
static inline void golden_check(const char *name, Tensor t, const double *bound)
{
    char path[512];
    golden_new_name(name);
    golden_path(path, sizeof path, name);
    GoldenHeader header = { t.rows, t.cols, (int32_t)t.format.dtype, t.format.group,
                            tensor_bytes(t) };
    void *bytes = tensor_snapshot(t);
    if (on_cpu()) {
        golden_record(path, header, bytes);
        return;
    }
    void *expected = golden_read(path, header);
    if (!bound) {
        check_same_bytes(name, bytes, expected, header.bytes);
        return;
    }
    double *y = decode(t, bytes), *ref = decode(t, expected);
    for (size_t i = 0; i < tensor_numel(t); i++) {
        double limit = 2 * unit_roundoff(t.format) * fabs(ref[i]) + 2 * bound[i] + 0x1p-126;
        if (!(fabs(y[i] - ref[i]) <= limit))
            fail_msg("%s[%zu,%zu]: %.9g, on the CPU %.9g; they differ by %.3g, at most %.3g is "
                     "explained",
                     name, i / (size_t)t.cols, i % (size_t)t.cols, y[i], ref[i],
                     fabs(y[i] - ref[i]), limit);
    }
}
