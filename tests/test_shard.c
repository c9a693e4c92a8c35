/* data/loader: file formats, patterns, and every message about unusable data. Each failing call
 * runs in a child process, which must exit with a status that is not 0 and a message that names the
 * file and the remedy. */
#include "data/loader.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { VOCAB = 50304, EOS = 50279 };

/* Files are made in a new folder for each test, which is the current folder, and removed with
 * it. */
static char folder[64], repository[4096];

static int enter_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/test_shard_XXXXXX");
    return getcwd(repository, sizeof repository) && mkdtemp(folder) && chdir(folder) == 0 ? 0 : -1;
}

static int leave_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return chdir(repository) == 0 && system(command) == 0 ? 0 : -1;
}

static void write_bytes(const char *path, const void *head, size_t head_bytes, const void *data,
                        size_t bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(head, 1, head_bytes, file), head_bytes);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* Writes n tokens first, first + 1, ... after a header, which may be empty. */
static void write_tokens(const char *path, const void *head, size_t head_bytes, int itemsize, int n,
                         int first)
{
    uint16_t *narrow = calloc(n, sizeof *narrow);
    uint32_t *wide = calloc(n, sizeof *wide);
    for (int i = 0; i < n; i++)
        narrow[i] = wide[i] = first + i;
    write_bytes(path, head, head_bytes, itemsize == 2 ? (void *)narrow : (void *)wide,
                (size_t)n * itemsize);
    free(narrow);
    free(wide);
}

static void write_bin(const char *path, int magic, int version, int n_said, int itemsize, int n,
                      int first)
{
    int32_t header[256] = { magic, version, n_said };
    write_tokens(path, header, sizeof header, itemsize, n, first);
}

static DataSpec file_spec(char **paths, int num_paths)
{
    return (DataSpec){
        .paths = paths,
        .num_paths = num_paths,
        .itemsize = 2,
        .sequence_length = 8,
        .vocab_size = VOCAB,
        .eos_token_id = -1,
        .pad_token_id = -1,
    };
}

/* Opens the data and reads all of them once. */
static void read_all(const DataSpec *spec)
{
    Loader *l = loader_open(spec, 1, 0, 1);
    Batch b;
    while (loader_next(l, &b))
        continue;
    loader_close(l);
}

/* Runs read(spec) in a child process; said: its stderr; returns its exit status. */
static int run_child(char *said, size_t size, void (*read)(const DataSpec *), const DataSpec *spec)
{
    int ends[2], status;
    fflush(NULL);
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        read(spec);
        _exit(0);
    }
    close(ends[1]);
    FILE *messages = fdopen(ends[0], "r");
    said[fread(said, 1, size - 1, messages)] = '\0';
    fclose(messages);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void assert_says(const char *said, const char *words)
{
    if (!strstr(said, words))
        fail_msg("'%s' is missing in: %s", words, said);
}

/* Reading spec ends with an error that contains these texts, usually a place and a remedy. */
static void assert_refused(const DataSpec *spec, const char *place, const char *remedy)
{
    char said[8192];
    assert_int_not_equal(run_child(said, sizeof said, read_all, spec), 0);
    assert_true(strncmp(said, "error: ", 7) == 0);
    assert_says(said, place);
    assert_says(said, remedy);
}

static void assert_path_refused(const char *path, const char *place, const char *remedy)
{
    char *paths[] = { (char *)path };
    DataSpec spec = file_spec(paths, 1);
    assert_refused(&spec, place, remedy);
}

/* Returns the first token of every sequence of 8, in the order of files. */
static int first_tokens(int *first, int most, const DataSpec *spec)
{
    Loader *l = loader_open(spec, 1, 0, 1);
    Batch b;
    int n = 0;
    while (loader_next(l, &b) && n < most)
        first[n++] = b.tokens[0];
    loader_close(l);
    return n;
}

/* ---- formats --------------------------------------------------------------------------------- */

TEST(test_formats_in_one_run)
{
    char *paths[] = { "a.npy", "b.bin", "c.bin", "d.bin" };
    /* uint32 without header, as set by memmap_dtype */
    write_tokens("a.npy", "", 0, 4, 17, 100);
    write_bin("b.bin", 20240520, 1, 16, 2, 16, 200); /* uint16, as in its header */
    write_bin("c.bin", 20240801, 7, 9, 4, 9, 300);
    write_tokens("d.bin", "", 0, 4, 8, 400); /* the name does not matter */
    DataSpec spec = file_spec(paths, 4);
    spec.itemsize = 4;
    const int expected[] = { 100, 108, 200, 208, 300, 400 };
    int first[8];
    assert_int_equal(first_tokens(first, 8, &spec), 6);
    assert_memory_equal(first, expected, sizeof expected);
    Loader *l = loader_open(&spec, 1, 0, 1);
    assert_int_equal(loader_tokens(l), 17 + 16 + 9 + 8);
    loader_close(l);
}

TEST(test_patterns)
{
    char *paths[] = { "z.npy", "part-[0-9]*.npy", "lite[1].npy" };
    write_tokens("part-2.npy", "", 0, 2, 8, 20);
    /* byte order, not number order, as OLMo sorts */
    write_tokens("part-10.npy", "", 0, 2, 8, 10);
    write_tokens("part-1.npy", "", 0, 2, 8, 1);
    write_tokens("part-x.npy", "", 0, 2, 8, 5000);
    write_tokens("lite[1].npy", "", 0, 2, 8, 30); /* a file with exactly this name */
    write_tokens("z.npy", "", 0, 2, 8, 40);
    DataSpec spec = file_spec(paths, 3);
    const int expected[] = { 40, 1, 10, 20, 30 };
    int first[8];
    assert_int_equal(first_tokens(first, 8, &spec), 5);
    assert_memory_equal(first, expected, sizeof expected);
}

/* 2^32 + 21 tokens, nearly all in a hole of the file: byte and token offsets exceed 32 bits. */
TEST(test_huge_file)
{
    char *paths[] = { "huge.npy" };
    const uint16_t last[8] = { 11, 12, 13, 14, 15, 16, 17, 18 };
    const uint64_t instances = 536870914;
    FILE *file = fopen("huge.npy", "wb");
    assert_int_equal(fseeko(file, (off_t)((instances - 1) * 8 * 2), SEEK_SET), 0);
    assert_int_equal(fwrite(last, 2, 8, file), 8);
    fclose(file);
    assert_int_equal(truncate("huge.npy", (off_t)((instances * 8 + 5) * 2)), 0);

    DataSpec spec = file_spec(paths, 1);
    Loader *l = loader_open(&spec, 2, 0, 1);
    Batch b;
    assert_int_equal(loader_instances(l), instances);
    loader_seek(l, (LoaderState){ 0, instances - 2 });
    assert_true(loader_next(l, &b));
    assert_int_equal(b.index[1], instances - 1);
    assert_int_equal(b.tokens[0], 0);
    assert_int_equal(b.tokens[8], 11);
    assert_int_equal(b.tokens[15], 18);
    assert_false(loader_next(l, &b));
    loader_close(l);

    spec.sequence_length = 1;
    assert_int_equal(truncate("huge.npy", (off_t)((1ull << 32) * 2 + 2)), 0);
    assert_refused(&spec, "4294967297 sequences", "fewer files");
}

TEST(test_sample)
{
    char train[4200], val[4200], said[8192];
    snprintf(train, sizeof train, "%s/data/sample-train.npy", repository);
    snprintf(val, sizeof val, "%s/data/sample-val.npy", repository);
    char *paths[] = { train, val };
    DataSpec spec = file_spec(paths, 2);
    spec.eos_token_id = EOS;
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    assert_string_equal(said, "");
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(test_paths_that_lead_nowhere)
{
    assert_path_refused("nowhere.npy", "nowhere.npy: No such file", "Check the path");
    assert_path_refused("no/where-*.npy", "'no/where-*.npy'", "Check the folder");
    mkdir("folder", 0777);
    assert_path_refused("folder", "folder is a folder", "'folder/*.npy'");
    assert_path_refused("/dev/zero", "/dev/zero is not a regular file", "file of tokens");
    write_bytes("empty.npy", "", 0, "", 0);
    assert_path_refused("empty.npy", "empty.npy is empty", "Make it again");
    DataSpec spec = file_spec(NULL, 0);
    assert_refused(&spec, "data.paths is empty", "name at least one file");
}

TEST(test_foreign_files)
{
    write_tokens("part-0.npy", "", 0, 2, 8, 0);
    write_tokens("part-0.csv.gz", "", 0, 2, 8, 0);
    assert_path_refused("part-0*", "part-0.csv.gz is not a token file", "part-*.npy");
    write_tokens("text.jsonl", "", 0, 2, 8, 0);
    assert_path_refused("text.jsonl", "text.jsonl is not a token file", "scripts/make_shards.py");
    write_tokens("numpy.npy", "\x93NUMPY\1\0", 8, 2, 60, 0);
    assert_path_refused("numpy.npy", "numpy.npy has a numpy header", "tofile");
    write_tokens("llmq.bin", "BIN.TOK\n", 8, 2, 60, 0);
    assert_path_refused("llmq.bin", "llmq.bin is a token file of llmq", "make_shards.py");
}

TEST(test_broken_bin_files)
{
    write_bin("short.bin", 20240520, 1, 100, 2, 99, 0);
    assert_path_refused("short.bin",
                        "short.bin says 100 tokens of 2 bytes, so it should have 1224 "
                        "bytes, but it has 1222",
                        "Download or make it again");
    write_bin("long.bin", 20240801, 7, 100, 4, 101, 0);
    assert_path_refused("long.bin", "1424 bytes, but it has 1428", "Download or make it again");
    write_bin("none.bin", 20240520, 1, 0, 2, 0, 0);
    assert_path_refused("none.bin", "none.bin says 0 tokens", "make it again");
    write_bin("old.bin", 20240520, 2, 100, 2, 100, 0);
    assert_path_refused("old.bin", "version 2 where 1 is expected", "dev/data");
}

TEST(test_wrong_dtype)
{
    char *paths[] = { "wide.npy" };
    write_tokens("odd.npy", "x", 1, 2, 100, 0);
    assert_path_refused("odd.npy", "odd.npy has 201 bytes, which is not a multiple of 2",
                        "data.memmap_dtype");
    write_tokens("wide.npy", "", 0, 4, 500, 40000);
    assert_path_refused("wide.npy", "wide.npy looks like 4-byte tokens", "memmap_dtype to uint32");
    write_tokens("wide.npy", "", 0, 4, 500, 100000);
    assert_path_refused("wide.npy", "wide.npy looks like 4-byte tokens", "memmap_dtype to uint32");
    write_tokens("wide.npy", "", 0, 2, 500, 100);
    DataSpec spec = file_spec(paths, 1);
    spec.itemsize = 4;
    assert_refused(&spec, "wide.npy: token 0 (counted from 0) is 6619236", "be uint16");
    write_tokens("wide.npy", "", 0, 2, 501, 100);
    assert_refused(&spec, "1002 bytes, which is not a multiple of 4", "(now uint32)");
}

/* Errors at the start of a file are found before reading. Later errors are found when their
 * sequence is due, which `read_some` does not reach. */
static void read_some(const DataSpec *spec)
{
    Loader *l = loader_open(spec, 1, 0, 1);
    Batch b;
    for (int k = 0; k < 1500 / 8; k++)
        loader_next(l, &b);
    loader_close(l);
}

TEST(test_ids_beyond_the_vocabulary)
{
    char *paths[] = { "good.npy", "bad.npy" }, said[8192];
    write_tokens("good.npy", "", 0, 2, 16, 0);
    write_tokens("bad.npy", "", 0, 2, 1600, VOCAB - 1500);
    DataSpec spec = file_spec(paths, 2);
    assert_refused(
        &spec, "bad.npy: token 1500 (counted from 0) is 50304, but the vocabulary has 50304 ids",
        "model.vocab_size");
    assert_int_equal(run_child(said, sizeof said, read_some, &spec), 0);
    spec.vocab_size = VOCAB - 1000;
    assert_int_not_equal(run_child(said, sizeof said, read_some, &spec), 0);
    assert_says(said, "bad.npy: token 500 (counted from 0) is 49304");
    write_tokens("bad.npy", "", 0, 4, 16, -8);
    spec.paths = paths + 1;
    spec.num_paths = 1;
    spec.itemsize = 4;
    assert_refused(&spec, "bad.npy: token 0 (counted from 0) is 4294967288", "tokenize again");
}

/* Masks among token files, as a single pattern for a folder matches them. One mask begins with a
 * long prompt. The tokens 0 and 1 are not masks. */
TEST(test_mask_as_tokens)
{
    enum { BYTES = 40000 };
    char *bytes = calloc(BYTES, 1), *paths[] = { "tokens.npy" };
    memset(bytes + BYTES - 5, 1, 5);
    write_bytes("part-0.npy", "", 0, bytes, BYTES);
    assert_path_refused("part-*.npy", "part-0.npy looks like a label mask", "narrower pattern");
    for (int i = 0; i < BYTES; i += 2)
        bytes[i] = i % 3 == 0, bytes[i + 1] = 0;
    write_bytes("tokens.npy", "", 0, bytes, BYTES);
    DataSpec spec = file_spec(paths, 1);
    char said[8192];
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    memset(bytes, 1, BYTES);
    bytes[BYTES - 1] = 2;
    write_bytes("tokens.npy", "", 0, bytes, BYTES);
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    free(bytes);
}

TEST(test_label_mask_errors)
{
    char *paths[] = { "a.npy", "b.npy" }, *masks[] = { "a.mask", "b.mask" };
    write_tokens("a.npy", "", 0, 2, 100, 0);
    write_tokens("b.npy", "", 0, 2, 100, 0);
    write_tokens("a.mask", "", 0, 2, 50, 0);
    write_tokens("b.mask", "", 0, 2, 49, 0);
    DataSpec spec = file_spec(paths, 2);
    spec.label_mask_paths = masks;
    spec.num_label_mask_paths = 1;
    assert_refused(&spec, "data.label_mask_paths names 1 files, data.paths 2", "needs its mask");
    spec.num_label_mask_paths = 2;
    assert_refused(&spec, "b.mask has 98 bytes, but b.npy has 100 tokens", "one byte");
    unlink("b.mask");
    assert_refused(&spec, "data.label_mask_paths: cannot open b.mask", "Check the path");
    char bytes[100] = { 0 };
    memset(bytes + 60, '1', 40);
    write_bytes("b.mask", "", 0, bytes, 100);
    memset(bytes, 1, 100);
    write_bytes("a.mask", "", 0, bytes, 100);
    assert_refused(&spec, "b.mask: byte 60 is 49; expected 0 or 1", "Make the mask again");
}

static void open_for_16(const DataSpec *spec)
{
    loader_close(loader_open(spec, 16, 0, 1));
}

static void seek_behind_the_end(const DataSpec *spec)
{
    Loader *l = loader_open(spec, 1, 0, 1);
    loader_seek(l, (LoaderState){ 3, 16 });
}

TEST(test_too_few_data)
{
    char *paths[] = { "a.npy", "b.npy" }, said[8192];
    write_tokens("a.npy", "", 0, 2, 15 * 8 + 7, 0);
    write_tokens("b.npy", "", 0, 2, 7, 0);
    DataSpec spec = file_spec(paths, 2);
    spec.drop_last = true;
    assert_int_not_equal(run_child(said, sizeof said, open_for_16, &spec), 0);
    assert_says(
        said, "134 tokens in 2 files make 15 sequences of 8 tokens, fewer than the 16 of one step");
    assert_says(said, "global_train_batch_size");
    assert_int_not_equal(run_child(said, sizeof said, seek_behind_the_end, &spec), 0);
    assert_says(said, "sequence 16 of epoch 3: data.paths has only 15 sequences of 8 tokens");
    spec.drop_last = false;
    assert_int_equal(run_child(said, sizeof said, open_for_16, &spec), 0);
    assert_says(said, "warning: data.paths: 1 of 2 files have less than one sequence");
    assert_path_refused("b.npy", "7 tokens in 1 file make 0 sequences",
                        "lower model.max_sequence_length");
}

/* The documents in Dolma's files end with 50279, whatever a configuration says. */
TEST(test_eos_warning)
{
    char *paths[] = { "dolma.npy" }, said[8192];
    uint16_t ids[1000];
    for (int i = 0; i < 1000; i++)
        ids[i] = i % 20 == 19 ? EOS : i + 1;
    ids[500] = 0;
    write_bytes("dolma.npy", "", 0, ids, sizeof ids);
    DataSpec spec = file_spec(paths, 1);
    spec.eos_token_id = EOS;
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    assert_string_equal(said, "");
    spec.eos_token_id = 0;
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    assert_says(
        said,
        "warning: model.eos_token_id is 0, which occurs 1 times in 1000 sampled tokens, while "
        "50279 occurs 50 times");
    assert_says(said, "set model.eos_token_id to 50279");
    write_tokens("dolma.npy", "", 0, 2, 1000, 1);
    assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
    assert_says(said,
                "warning: model.eos_token_id is 0, which does not occur in 1000 sampled tokens");
}

/* Truncates the file after its first sequence. */
static void read_while_cut(const DataSpec *spec)
{
    Loader *l = loader_open(spec, 1, 0, 1);
    Batch b;
    loader_next(l, &b);
    assert_int_equal(truncate(spec->paths[0], 4096), 0);
    while (loader_next(l, &b))
        continue;
    loader_close(l);
}

TEST(test_cut_while_read)
{
    enum { BYTES = 1 << 20 };
    char said[8192], *paths[] = { "cut.npy" };
    void *zeros = calloc(BYTES, 1);
    write_bytes(paths[0], "", 0, zeros, BYTES);
    free(zeros);
    DataSpec spec = file_spec(paths, 1);
    assert_int_equal(run_child(said, sizeof said, read_while_cut, &spec), 1);
    assert_says(said, "error: data.paths: cut.npy can no longer be read at byte ");
    assert_says(said, "--try_load_latest_save");
}

/* Tokens 8 to 15 are in no document: without packing they are trained on, with packing they are
 * not. */
TEST(test_gaps_in_metadata)
{
    static const char whole[] = "0,8\n8,24\n", gap[] = "0,8\n16,24\n";
    char said[8192], *paths[] = { "a.npy" };
    DataSpec spec = file_spec(paths, 1);
    spec.metadata = true;
    write_tokens("a.npy", "", 0, 2, 24, 1);
    for (int best_fit = 0; best_fit < 2; best_fit++) {
        spec.best_fit = best_fit;
        write_bytes("a.csv.gz", "", 0, whole, sizeof whole - 1);
        assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
        assert_null(strstr(said, "in no document"));
        write_bytes("a.csv.gz", "", 0, gap, sizeof gap - 1);
        assert_int_equal(run_child(said, sizeof said, read_all, &spec), 0);
        assert_says(
            said,
            "warning: data.paths: according to the metadata, 8 of 24 tokens are in no document");
        assert_says(said, best_fit ? "does not train on these tokens"
                                   : "data.packing concat trains on these tokens");
    }
}

int main(void)
{
    for (size_t i = 0; i < num_tests; i++) {
        all_tests[i].setup_func = enter_folder;
        all_tests[i].teardown_func = leave_folder;
    }
    return run_all_tests(NULL, NULL);
}
