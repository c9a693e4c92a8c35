/* data/packing and the packing loader: every label once per epoch, whole documents, resume, valid
 * and invalid metadata, label masks without a label. test_packed_model.c tests the model with
 * packed documents. */
#include "tests/test.h"
#include "tests/kit.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/loader.h"
#include "data/packing.h"
#include "data/shuffle.h"
#include "kernels/random.h"
#include "kernels/runtime/error.h"
#include "tests/shards.h"

enum { T = 16, FILES = 3, TOKENS = 700, VOCAB = 1 << 20, MOST = FILES * TOKENS, ROWS = 320 };

static char folder[64], *paths[FILES], *masks[FILES];

/* Returns the length of document i of file f: random(f, i), 1 to 39 tokens. The last document has
 * the remaining tokens. */
static int document_length(int f, int i)
{
    return 1 + (int)(random_bits(70 + (uint64_t)f, (uint64_t)i) % 39);
}

static bool is_label(int token)
{
    return random_bits(5, (uint64_t)token) % 3 != 0;
}

static char *name_of(const char *format, int f)
{
    char *name = xasprintf(format, f);
    char *path = xasprintf("%s/%s", folder, name);
    free(name);
    return path;
}

static void write_rows(const char *path, const char *rows)
{
    gzFile file = gzopen(path, "wb");
    assert_non_null(file);
    assert_true(gzputs(file, rows) >= 0);
    assert_int_equal(gzclose(file), Z_OK);
}

/* Token i of all files is i + 1, so a target identifies its label. The rows have unused columns. */
static int make_files(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/test_packing_XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    for (int f = 0; f < FILES; f++) {
        uint32_t ids[TOKENS];
        uint8_t mask[TOKENS];
        char *rows = NULL, *metadata = name_of("%d.csv.gz", f);
        size_t size;
        FILE *text = open_memstream(&rows, &size);
        for (int i = 0; i < TOKENS; i++) {
            ids[i] = (uint32_t)(f * TOKENS + i + 1);
            mask[i] = is_label((int)ids[i]);
        }
        for (int i = 0, start = 0; start < TOKENS; i++) {
            const int length = document_length(f, i),
                      end = start + length < TOKENS ? start + length : TOKENS;
            fprintf(text, i % 2 ? "%d,%d\n" : "%d,%d,a \"name\",source.jsonl.gz,%d\r\n", start, end,
                    i);
            start = end;
        }
        fclose(text);
        paths[f] = name_of("%d.npy", f);
        masks[f] = name_of("%d.mask", f);
        write_file(paths[f], ids, sizeof ids);
        write_file(masks[f], mask, sizeof mask);
        write_rows(metadata, rows);
        free(metadata);
        free(rows);
    }
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    char command[128];
    for (int f = 0; f < FILES; f++) {
        free(paths[f]);
        free(masks[f]);
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static DataSpec packed_spec(bool split)
{
    return (DataSpec){ .paths = paths,
                       .num_paths = FILES,
                       .label_mask_paths = masks,
                       .num_label_mask_paths = FILES,
                       .itemsize = 4,
                       .sequence_length = T,
                       .vocab_size = VOCAB,
                       .eos_token_id = -1,
                       .pad_token_id = 0,
                       .shuffle = true,
                       .seed = 6198,
                       .best_fit = true,
                       .split = split,
                       .metadata = true,
                       .reopened = true };
}

/* ---- best fit -------------------------------------------------------------------------------- */

/* The definition: for every item in turn, searches all bins. Returns the number of bins; room[]:
 * the free space of each bin. */
static int best_fit_by_definition(int *room, const uint32_t *sorted, int n, int capacity)
{
    int bins = 0;
    for (int i = 0; i < n; i++) {
        int best = -1;
        for (int b = 0; b < bins; b++)
            if (room[b] >= (int)sorted[i] && (best < 0 || room[b] < room[best]))
                best = b;
        if (best < 0)
            room[best = bins++] = capacity;
        room[best] -= (int)sorted[i];
    }
    return bins;
}

static int falling(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x > y ? -1 : x < y;
}

static int rising(const void *a, const void *b)
{
    return falling(b, a);
}

/* Bins are filled as by the definition, for capacities around powers of two and items of all
 * sizes. */
TEST(test_best_fit)
{
    enum { N = 300 };
    static const int capacities[] = { 1, 2, 3, 15, 16, 17, 100, 4096 };
    for (size_t c = 0; c < sizeof capacities / sizeof capacities[0]; c++)
        for (int trial = 0; trial < 20; trial++) {
            const int capacity = capacities[c], n = trial * 15 + (trial > 0),
                      most = trial % 3 ? capacity : (capacity + 2) / 3;
            uint32_t length[N], sorted[N];
            int bin[N], room[N], expected[N];
            for (int i = 0; i < n; i++)
                sorted[i] = length[i] =
                    1 + (uint32_t)(random_bits(c * 100 + (uint64_t)trial, (uint64_t)i) %
                                   (uint64_t)most);
            qsort(sorted, (size_t)n, sizeof *sorted, falling);
            const int bins = best_fit_decreasing(bin, length, n, capacity);
            assert_int_equal(bins, best_fit_by_definition(expected, sorted, n, capacity));
            for (int b = 0; b < bins; b++)
                room[b] = capacity;
            for (int i = 0; i < n; i++) {
                assert_in_range(bin[i], 0, bins - 1);
                room[bin[i]] -= (int)length[i];
            }
            qsort(room, (size_t)bins, sizeof *room, rising);
            qsort(expected, (size_t)bins, sizeof *expected, rising);
            assert_memory_equal(room, expected, (size_t)bins * sizeof *room);
        }
}

/* Items are random parts of sequences, so the number of sequences suffices as bins. Best fit
 * decreasing needs at most 11/9 of this number, plus 4 (D. S. Johnson and others, SIAM J. Comput.
 * 3, 1974). */
TEST(test_best_fit_bound)
{
    enum { FULL = 2000, CAPACITY = 4096 };
    static uint32_t length[FULL * 8];
    static int bin[FULL * 8];
    int n = 0;
    for (uint64_t s = 0; s < FULL; s++)
        for (int left = CAPACITY, part = 0; left > 0; part++) {
            const int cut =
                part == 7 ? left : 1 + (int)(random_bits(s, (uint64_t)part) % (uint64_t)left);
            length[n++] = (uint32_t)cut;
            left -= cut;
        }
    assert_in_range(best_fit_decreasing(bin, length, n, CAPACITY), FULL, FULL * 11 / 9 + 4);
}

/* ---- epochs ---------------------------------------------------------------------------------- */

/* How often each token of all files must be a target in an epoch: once or never. */
static long expected_labels(int *expected, bool split)
{
    long labels = 0;
    memset(expected, 0, MOST * sizeof *expected);
    for (int f = 0; f < FILES; f++)
        for (int i = 0, start = 0; start < TOKENS; i++) {
            const int length = document_length(f, i),
                      end = start + length < TOKENS ? start + length : TOKENS;
            for (int t = start + 1; t < end && (split || t < start + T); t++)
                labels += expected[f * TOKENS + t] = is_label(f * TOKENS + t + 1);
            start = end;
        }
    return labels;
}

/* Checks a row: a target is the next token of the same document, the tokens of a document are
 * consecutive, and padding counts as a document. */
static void check_row(const int *tokens, const int *targets, const uint8_t *begins)
{
    assert_int_equal(begins[0], 1);
    for (int t = 0; t < T; t++) {
        const bool goes_on = t + 1 < T && !begins[t + 1];
        if (goes_on)
            assert_int_equal(tokens[t + 1], tokens[t] ? tokens[t] + 1 : 0);
        assert_int_equal(targets[t],
                         goes_on && tokens[t] && is_label(tokens[t] + 1) ? tokens[t] + 1 : -1);
    }
}

/* Reads two epochs in steps of G on W ranks, starting from a state. Collects all rows in order from
 * the ranks. Returns the number of steps. */
typedef struct {
    int tokens[ROWS * T], targets[ROWS * T];
    uint8_t begins[ROWS * T];
    long labels;
} Rows;

static int read_rows(Rows *rows, const DataSpec *spec, int G, int W, LoaderState from)
{
    int steps = 0;
    memset(rows, 0, sizeof *rows);
    for (int rank = 0; rank < W; rank++) {
        Loader *l = loader_open(spec, G, rank, W);
        Batch b;
        loader_seek(l, from);
        for (steps = 0; loader_state(l).epoch < 1 || loader_steps(l, loader_state(l).instance) > 0;
             steps++) {
            assert_true(loader_next(l, &b));
            assert_int_equal(b.sequences, G / W);
            for (int i = 0; i < b.sequences; i++) {
                const size_t to = (size_t)(steps * G + i * W + rank) * T;
                assert_in_range(to, 0, (ROWS - 1) * T);
                memcpy(rows->tokens + to, b.tokens + i * T, T * sizeof *b.tokens);
                memcpy(rows->targets + to, b.targets + i * T, T * sizeof *b.targets);
                memcpy(rows->begins + to, b.begins + i * T, T);
                check_row(b.tokens + i * T, b.targets + i * T, b.begins + i * T);
            }
            rows->labels += b.labels;
        }
        assert_int_equal(steps,
                         loader_steps(l, from.instance) + (from.epoch ? 0 : loader_steps(l, 0)));
        loader_close(l);
    }
    return steps;
}

static void check_epochs(bool split)
{
    static Rows one, more;
    static int expected[MOST], seen[MOST];
    const DataSpec spec = packed_spec(split);
    enum { G = 8 };
    const long labels = expected_labels(expected, split);
    const int steps = read_rows(&one, &spec, G, 1, (LoaderState){ 0, 0 });
    assert_int_equal(steps % 2, 0);
    assert_int_equal(one.labels, 2 * labels);
    for (int epoch = 0; epoch < 2; epoch++) {
        memset(seen, 0, sizeof seen);
        for (int n = epoch * steps / 2 * G * T; n < (epoch + 1) * steps / 2 * G * T; n++)
            if (one.targets[n] >= 0)
                seen[one.targets[n] - 1]++;
        assert_memory_equal(seen, expected, sizeof seen);
    }
    assert_memory_not_equal(one.tokens, one.tokens + steps / 2 * G * T, G * T * sizeof *one.tokens);
    for (int W = 2; W <= 4; W *= 2) {
        assert_int_equal(read_rows(&more, &spec, G, W, (LoaderState){ 0, 0 }), steps);
        check_same_bytes("on several ranks", &more, &one, sizeof one);
    }
}

TEST(test_every_label_once)
{
    check_epochs(false);
    check_epochs(true);
}

/* Resumes at every step of two epochs, on another number of ranks. */
TEST(test_resume)
{
    static Rows whole, part;
    enum { G = 8 };
    const DataSpec spec = packed_spec(true);
    const int steps = read_rows(&whole, &spec, G, 1, (LoaderState){ 0, 0 });
    Loader *l = loader_open(&spec, G, 0, 1);
    Batch b;
    for (int k = 0; k < steps; k++) {
        assert_int_equal(read_rows(&part, &spec, G, k % 2 ? 4 : 2, loader_state(l)), steps - k);
        check_same_bytes("tokens", part.tokens, whole.tokens + k * G * T,
                         (size_t)((steps - k) * G * T) * sizeof *part.tokens);
        check_same_bytes("targets", part.targets, whole.targets + k * G * T,
                         (size_t)((steps - k) * G * T) * sizeof *part.targets);
        assert_true(loader_next(l, &b));
    }
    loader_close(l);
}

/* A validation set is read once; the last step is short. */
TEST(test_unshuffled)
{
    static int expected[MOST];
    DataSpec spec = packed_spec(false);
    spec.shuffle = false;
    Loader *l = loader_open(&spec, 8, 0, 1);
    Batch b;
    long labels = 0;
    uint64_t sequences = 0;
    while (loader_next(l, &b)) {
        labels += b.labels;
        sequences += (uint64_t)b.sequences;
    }
    assert_int_equal(labels, expected_labels(expected, false));
    assert_int_equal(sequences, loader_instances(l));
    const PackedData p = loader_packed(l);
    assert_int_equal(p.labels, labels);
    assert_int_equal(p.pieces, p.documents);
    assert_true((double)p.tokens / (double)(sequences * T) > 0.95);
    loader_close(l);
}

static int windows, scans;

static void count_beats(const char *doing)
{
    windows += doing && strncmp(doing, "packing documents of ", 21) == 0;
    scans += doing && strncmp(doing, "looking for documents in ", 25) == 0;
}

/* More documents than a window holds: each occurs once. Sequences are full except for the last one
 * of a window; the number of a window is the seed of its order. A real corpus would take
 * minutes. */
TEST(test_windows)
{
    windows = scans = 0;
    /* SEQUENCES: sequences of a window */
    enum { DOCUMENTS = 150000, EACH = 4, SEQUENCES = (1 << 16) / EACH };
    char *all[] = { name_of("many%d.npy", 0) };
    uint16_t *ids = xcalloc(DOCUMENTS * EACH, sizeof *ids);
    for (int i = 0; i < DOCUMENTS * EACH; i++)
        ids[i] = i % EACH == EACH - 1 ? 9 : (uint16_t)(10 + i / EACH % 50000);
    write_file(all[0], ids, DOCUMENTS * EACH * sizeof *ids);
    DataSpec spec = { .paths = all,
                      .num_paths = 1,
                      .itemsize = 2,
                      .sequence_length = 4 * EACH + 3,
                      .vocab_size = 1 << 16,
                      .eos_token_id = 9,
                      .pad_token_id = -1,
                      .best_fit = true,
                      .reopened = true,
                      .beat = count_beats };
    Loader *l = loader_open(&spec, 1000, 0, 1);
    assert_true(windows == 3 && scans == 1);
    Batch b;
    int *seen = xcalloc(50000, sizeof *seen);
    static uint32_t order[SEQUENCES];
    for (int done = 0; loader_next(l, &b); done += b.sequences) {
        for (int n = 0; n < b.sequences * spec.sequence_length; n++)
            if (b.begins[n] && b.tokens[n] != 9)
                seen[b.tokens[n] - 10]++;
        for (int i = 0, k; i < b.sequences && (k = done + i) < 2 * SEQUENCES; i++) {
            if (k % SEQUENCES == 0)
                numpy_shuffle(order, SEQUENCES, (uint64_t)(k / SEQUENCES), NULL, NULL);
            /* all have one length */
            const int first = 4 * (k / SEQUENCES * SEQUENCES + (int)order[k % SEQUENCES]);
            assert_int_equal(b.tokens[i * spec.sequence_length], 10 + first % 50000);
        }
    }
    for (int i = 0; i < 50000; i++)
        assert_int_equal(seen[i], DOCUMENTS / 50000);
    assert_in_range(loader_instances(l), DOCUMENTS / 4, DOCUMENTS / 4 + 3);
    loader_close(l);
    free(ids);
    free(seen);
    free(all[0]);
}

/* ---- boundaries ------------------------------------------------------------------------------ */

/* A document ends as its metadata say, even with an eos inside. Metadata of documents that end with
 * an eos give the same result as eos. */
TEST(test_eos_and_metadata)
{
    enum { EOS = 7, N = 24 };
    static const uint16_t ids[N] = { 1, 2, EOS, 3, EOS, 4, 5, 6, 8, EOS, EOS, 1,
                                     2, 3, EOS, 4, 5,   6, 8, 9, 1, 2,   3,   4 };
    char *file[] = { name_of("eos%d.npy", 0) }, *rows = name_of("eos%d.csv.gz", 0);
    write_file(file[0], ids, sizeof ids);
    DataSpec spec = { .paths = file,
                      .num_paths = 1,
                      .itemsize = 2,
                      .sequence_length = 12,
                      .vocab_size = 10,
                      .eos_token_id = EOS,
                      .pad_token_id = -1,
                      .reopened = true };
    for (int best_fit = 0; best_fit < 2; best_fit++) {
        spec.best_fit = best_fit;
        uint64_t fingerprint[3];
        Batch b[3];
        Loader *l[3];
        static const char *const texts[] = { NULL, "0,3\n3,5\n5,10\n10,11\n11,15\n15,24\n",
                                             "0,5\n5,10\n11,24\n" };
        for (int i = 0; i < 3; i++) {
            spec.metadata = i > 0;
            if (i > 0)
                write_rows(rows, texts[i]);
            l[i] = loader_open(&spec, 2, 0, 1);
            fingerprint[i] = loader_fingerprint(l[i]);
            assert_true(loader_next(l[i], &b[i]));
        }
        check_same_bytes("begins", b[1].begins, b[0].begins, N);
        check_same_bytes("tokens", b[1].tokens, b[0].tokens, N * sizeof *b[0].tokens);
        check_same_bytes("targets", b[1].targets, b[0].targets, N * sizeof *b[0].targets);
        assert_true(fingerprint[2] != fingerprint[1]);
        if (!best_fit) {
            static const uint8_t expected[N] = { 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1 };
            check_same_bytes("begins", b[2].begins, expected, N);
            assert_int_equal(b[2].targets[9], EOS); /* as in OLMo: also across documents */
        }
        for (int i = 0; i < 3; i++)
            loader_close(l[i]);
    }
    free(file[0]);
    free(rows);
}

static void open_data(const DataSpec *spec)
{
    loader_close(loader_open(spec, 1, 0, 1));
}

TEST(test_wrong_metadata)
{
    static const struct {
        const char *rows, *place, *found;
    } cases[] = {
        { "start,end\n0,3\n", "wrong0.csv.gz:1: found 'start,end'", "expected START,END" },
        { "0,3\n3;6\n", "wrong0.csv.gz:2: found '3;6'", "Make both files again together" },
        { "0,3\n3,6x\n", ":2: found '3,6x'", "expected START,END" },
        { "0,3\n-1,6\n", ":2: found '-1,6'", "expected START,END" },
        { "0,3\n\n", ":2: found ''", "expected START,END" },
        { "0,3\n3,99999999999999999999\n", ":2: found '3,99999999999999999999'",
          "expected START,END" },
        { "0,3\n2,6\n", ":2: found a document of tokens 2 to 6, expected a document within 3 to 24",
          "after the previous row" },
        { "0,3\n5,4\n", ":2: found a document of tokens 5 to 4", "--data.document_boundaries=eos" },
        { "0,3\n3,25\n",
          ":2: found a document of tokens 3 to 25, expected a document within 3 to 24",
          "wrong0.npy" },
        { "", "wrong0.npy name no document", "--data.document_boundaries=eos" },
    };
    char *file[] = { name_of("wrong%d.npy", 0) }, *rows = name_of("wrong%d.csv.gz", 0);
    const uint16_t ids[24] = { 0 };
    write_file(file[0], ids, sizeof ids);
    DataSpec spec = { .paths = file,
                      .num_paths = 1,
                      .itemsize = 2,
                      .sequence_length = 12,
                      .vocab_size = 10,
                      .eos_token_id = -1,
                      .pad_token_id = -1,
                      .best_fit = true,
                      .metadata = true };
    DIES("wrong0.csv.gz for ", open_data(&spec)); /* the file does not exist yet */
    DIES("--data.document_boundaries=eos", open_data(&spec));
    spec.key = "evaluator 'v'";
    DIES("evaluator 'v': document_boundaries metadata needs ", open_data(&spec));
    DIES(": document_boundaries: eos in that data section", open_data(&spec));
    spec.key = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_rows(rows, cases[i].rows);
        DIES(cases[i].place, open_data(&spec));
        DIES(cases[i].found, open_data(&spec));
    }
    gzFile file_of_rows = gzopen(rows, "wb"); /* a NUL must not hide a row */
    assert_int_equal(gzwrite(file_of_rows, "0,3\0\n3,6\n", 9), 9);
    assert_int_equal(gzclose(file_of_rows), Z_OK);
    DIES(":1: found '0,3?'", open_data(&spec));
    spec.split = true;
    write_rows(rows, "0,21\n"); /* two pieces that overlap by a token */
    DIES("3 of 24 tokens are in no document", (open_data(&spec), _exit(1)));
    spec.split = false;
    char text[20000] = "";
    for (int i = 0; i < 24; i += 2)
        sprintf(text + strlen(text), "%d,%d,%0600d\n", i, i + 2,
                (int)(random_bits(1, (uint64_t)i) % 1000000));
    write_rows(rows, text); /* many columns are valid */
    open_data(&spec);
    assert_int_equal(truncate(rows, 60), 0);
    DIES("wrong0.csv.gz: cannot read after token", open_data(&spec));
    unlink(rows);
    assert_int_equal(mkdir(rows, 0777), 0);
    errno = EIO; /* from an earlier call */
    DIES("it is not a regular file", open_data(&spec));
    free(file[0]);
    free(rows);
}

/* ---- label masks ----------------------------------------------------------------------------- */

/* As with a wrong chat template. */
TEST(test_masks_without_labels)
{
    static const uint8_t zeros[TOKENS], first[TOKENS] = { 1 };
    char *none[FILES];
    for (int f = 0; f < FILES; f++) {
        none[f] = name_of("zero%d.mask", f);
        write_file(none[f], zeros, sizeof zeros);
    }
    DataSpec spec = packed_spec(true);
    spec.label_mask_paths = none;
    for (int best_fit = 0; best_fit < 2; best_fit++) {
        spec.best_fit = best_fit;
        DIES("zero0.mask (and 2 others): all bytes are 0", open_data(&spec));
        DIES("leave label_mask_paths out to train on every token", open_data(&spec));
    }
    /* the first token of a document is never a target */
    write_file(none[1], first, sizeof first);
    DIES("no token of the", open_data(&spec));
    char *one[FILES] = { none[0], none[1], masks[2] };
    spec.label_mask_paths = one;
    open_data(&spec);
    for (int f = 0; f < FILES; f++)
        free(none[f]);
}

int main(void)
{
    return run_all_tests(make_files, remove_files);
}
