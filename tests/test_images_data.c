/* data/images: which row of which image the tokens of a file show, in sequences with and without
 * packing, and errors for bad files. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/images.h"
#include "data/loader.h"
#include "kernels/runtime/error.h"
#include "tests/test.h"
#include "tests/shards.h"

enum { T = 8, VOCAB = 100, TOKEN = 99, EOS = 0, ROWS = 3, COLS = 8, IMAGES = 5, LENGTH = 3 * T };
static const uint64_t ID = 0x0123456789abcdef;

static char folder[64];

/* Returns a path in the folder, valid until the 32nd call after this one. */
static char *in(const char *name)
{
    static char path[32][128];
    static int next;
    char *place = path[next++ % 32];
    snprintf(place, sizeof path[0], "%s/%s", folder, name);
    return place;
}

/* Returns value c of row r of image i, which is exact in BF16. */
static float value(int i, int r, int c)
{
    return (float)(i * ROWS + r) + (float)c / 16;
}

static const char *tower = "\"00000000000000ab\"", *settings = "{}"; /* of features.json */

static void write_features(const char *dtype, int rows, int cols)
{
    const char *const names[] = { "f0", "f1" };
    const int count[] = { 2, IMAGES - 2 };
    for (int f = 0, image = 0; f < 2; f++) {
        unsigned char bytes[IMAGES * ROWS * COLS * 4];
        size_t n = 0;
        for (int i = 0; i < count[f]; i++, image++)
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < COLS; c++) {
                    const float x = value(image, r, c);
                    if (*dtype == 'b')
                        memcpy(bytes + n, (const char *)&x + 2, 2), n += 2;
                    else
                        memcpy(bytes + n, &x, 4), n += 4;
                }
        write_file(in(names[f]), bytes, n);
    }
    char *text =
        xasprintf("{\"id\": \"%016llx\", \"rows\": %d, \"cols\": %d, \"dtype\": \"%s\", "
                  "\"files\": [[\"f0\", 2], [\"f1\", %d]], \"tower_sample\": %s, \"settings\": %s}",
                  (unsigned long long)ID, rows, cols, dtype, IMAGES - 2, tower, settings);
    write_file(in("features.json"), text, strlen(text));
    free(text);
}

static void write_index(const char *name, uint64_t id, const uint32_t *image, size_t count)
{
    unsigned char bytes[256];
    memcpy(bytes, &id, sizeof id);
    memcpy(bytes + sizeof id, image, count * sizeof *image);
    write_file(in(name), bytes, sizeof id + count * sizeof *image);
}

/* Three images in three documents of 10, 8 and 6 tokens. They start at 2, at 7 (cut at 8), and at
 * 19. */
static const int at[3] = { 2, 7, 19 };
static const uint32_t shown[3] = { 4, 0, 2 };
static uint16_t tokens[LENGTH];

static void write_tokens(const char *name)
{
    for (int i = 0; i < LENGTH; i++)
        tokens[i] = (uint16_t)(i == 9 || i == 17 || i == 23 ? EOS : 10 + i);
    for (int k = 0; k < 3; k++)
        for (int r = 0; r < ROWS; r++)
            tokens[at[k] + r] = TOKEN;
    /* the second image fills the end of the first document; eos follows */
    tokens[9] = TOKEN;
    tokens[10] = EOS;
    write_file(in(name), tokens, sizeof tokens);
}

static DataSpec spec_of(char **paths, char **indexes)
{
    return (DataSpec){ .paths = paths,
                       .num_paths = 1,
                       .image_paths = indexes,
                       .num_image_paths = indexes != NULL,
                       .image_features = folder,
                       .image_rows = ROWS,
                       .image_cols = COLS,
                       .image_token_id = TOKEN,
                       .itemsize = 2,
                       .sequence_length = T,
                       .vocab_size = VOCAB,
                       .eos_token_id = EOS,
                       .pad_token_id = -1,
                       .reopened = true };
}

/* Returns the value that token `offset` of the file shows in column c; -1: the token shows no
 * image. */
static float expected(int offset, int c)
{
    for (int k = 0; k < 3; k++)
        if (offset >= at[k] && offset < at[k] + ROWS)
            return value((int)shown[k], offset - at[k], c);
    return -1;
}

static float stored(const void *row, int c, bool f32)
{
    float x = 0;
    memcpy((char *)&x + (f32 ? 0 : 2), (const char *)row + c * (f32 ? 4 : 2), f32 ? 4 : 2);
    return x;
}

static void check_token(const Batch *b, int n, int offset)
{
    for (int c = 0; c < COLS; c++) {
        if (expected(offset, c) < 0)
            assert_null(b->images[n]);
        else
            assert_true(b->images[n] &&
                        stored(b->images[n], c, b->images_f32) == expected(offset, c));
    }
}

/* The sequences of a file follow each other. An image is cut between the first and the second
 * sequence. */
TEST(test_cut)
{
    for (int f32 = 0; f32 < 2; f32++) {
        char *paths[] = { in("a.npy") }, *indexes[] = { in("a.index") };
        write_features(f32 ? "f32" : "bf16", ROWS, COLS);
        write_tokens("a.npy");
        write_index("a.index", ID, shown, 3);
        const DataSpec spec = spec_of(paths, indexes);
        Loader *l = loader_open(&spec, 3, 0, 1);
        Batch b;
        assert_true(loader_next(l, &b));
        assert_int_equal(b.sequences, 3);
        assert_int_equal(b.images_f32, f32);
        long labels = 0;
        for (int n = 0; n < LENGTH; n++) {
            check_token(&b, n, n);
            const int target = n % T == T - 1 || tokens[n + 1] == TOKEN ? -1 : tokens[n + 1];
            assert_int_equal(b.targets[n], target);
            labels += target >= 0;
        }
        assert_int_equal(b.labels, labels);
        loader_close(l);
    }
}

/* A file of two blocks, in which images are counted separately: images in both blocks, and one
 * across the border. */
TEST(test_long_file)
{
    enum { LONG = 2 * 4096, COUNT = 4 };
    static const int start[COUNT] = { 5, 1000, 4095, 4099 };
    static const uint32_t images[COUNT] = { 1, 3, 0, 4 };
    static uint16_t ids[LONG];
    char *paths[] = { in("long.npy") }, *indexes[] = { in("long.index") };
    for (int i = 0; i < LONG; i++)
        ids[i] = 10;
    for (int k = 0; k < COUNT * ROWS; k++)
        ids[start[k / ROWS] + k % ROWS] = TOKEN;
    write_features("f32", ROWS, COLS);
    write_file(paths[0], ids, sizeof ids);
    write_index("long.index", ID, images, COUNT);
    const DataSpec spec = spec_of(paths, indexes);
    Loader *l = loader_open(&spec, LONG / T, 0, 1);
    Batch b;
    int seen = 0;
    assert_true(loader_next(l, &b));
    for (int n = 0; n < LONG; n++)
        if (b.images[n]) {
            const int k = seen / ROWS, row = seen % ROWS;
            assert_int_equal(n, start[k] + row);
            assert_true(stored(b.images[n], 0, true) == value((int)images[k], row, 0));
            seen++;
        }
    assert_int_equal(seen, COUNT * ROWS);
    loader_close(l);
}

/* Whole documents: the first, of 11 tokens, is truncated or split. The start of a piece does not
 * matter. */
TEST(test_packed)
{
    write_features("bf16", ROWS, COLS);
    for (int split = 0; split < 2; split++) {
        char *paths[] = { in("a.npy") }, *indexes[] = { in("a.index") };
        DataSpec spec = spec_of(paths, indexes);
        spec.best_fit = true;
        spec.split = split;
        Loader *l = loader_open(&spec, 4, 0, 1);
        Batch b;
        int seen = 0;
        assert_true(loader_next(l, &b));
        for (int n = 0; n < b.sequences * T; n++) {
            int offset = 0;
            if (b.tokens[n] != TOKEN) {
                assert_null(b.images[n]);
                continue;
            }
            while (offset < LENGTH && expected(offset, 0) != stored(b.images[n], 0, false))
                offset++;
            assert_true(offset < LENGTH);
            check_token(&b, n, offset);
            assert_true(n % T == 0 || b.begins[n] || b.tokens[n - 1] == tokens[offset - 1]);
            seen++;
        }
        /* split: the border repeats an image token; truncated: the first document keeps 4 of its 6
         * image tokens, and the third image has 3 */
        assert_int_equal(seen, split ? 9 + 1 : 7);
        loader_close(l);
    }
}

/* Every rank has the same rows for the same sequences. */
TEST(test_ranks)
{
    char *paths[] = { in("a.npy") }, *indexes[] = { in("a.index") };
    const DataSpec spec = spec_of(paths, indexes);
    for (int rank = 0; rank < 3; rank++) {
        Loader *l = loader_open(&spec, 3, rank, 3);
        Batch b;
        assert_true(loader_next(l, &b));
        for (int t = 0; t < T; t++)
            check_token(&b, t, rank * T + t);
        loader_close(l);
    }
}

/* ---- mixtures -------------------------------------------------------------------------------- */

enum { G = 4, STEPS = 5 };

/* The same images have other numbers; and a source has only text. */
static int sources(MixtureSource mix[3])
{
    static char *paths[3], *indexes[2];
    static const uint32_t other[3] = { 1, 3, 0 };
    uint16_t text[LENGTH];
    for (int i = 0; i < LENGTH; i++)
        text[i] = (uint16_t)(i % T == T - 1 ? EOS : 40 + i);
    write_features("bf16", ROWS, COLS);
    write_tokens("a.npy");
    write_file(in("text.npy"), text, sizeof text);
    write_index("a.index", ID, shown, 3);
    write_index("b.index", ID, other, 3);
    static const char *const files[3] = { "a.npy", "text.npy", "a.npy" }, *const names[3] = {
        "a", "text", "b"
    };
    for (int s = 0; s < 3; s++) {
        paths[s] = in(files[s]);
        mix[s] = (MixtureSource){ .name = (char *)names[s],
                                  .paths = &paths[s],
                                  .num_paths = 1,
                                  .ratio = s + 1,
                                  .max_repetition = 9 };
    }
    for (int s = 0; s < 3; s += 2) {
        indexes[s / 2] = in(s ? "b.index" : "a.index");
        mix[s].image_paths = &indexes[s / 2];
        mix[s].num_image_paths = 1;
        mix[s].image_features = folder;
    }
    return 3;
}

/* A sequence: its source and number, and the first value of each token's features, -1 without an
 * image. */
typedef struct {
    int source, index;
    float first[T];
} Seen;

/* Collects the steps from `from` on, as one of W ranks sees them; returns the position after
 * them. */
static LoaderState see(Seen *seen, const DataSpec *spec, int steps, int rank, int W,
                       LoaderState from)
{
    Loader *l = loader_open(spec, G, rank, W);
    Batch b;
    loader_seek(l, from);
    for (int k = 0; k < steps; k++) {
        assert_true(loader_next(l, &b));
        for (int i = 0; i < b.sequences; i++) {
            Seen *s = &seen[k * G + i * W + rank];
            *s = (Seen){ b.source[i], (int)b.index[i], { 0 } };
            for (int t = 0; t < T; t++)
                s->first[t] =
                    b.images[i * T + t] ? stored(b.images[i * T + t], 0, b.images_f32) : -1;
        }
    }
    const LoaderState end = loader_state(l);
    loader_close(l);
    return end;
}

/* Each source shows its own images. Steps depend neither on the number of ranks nor on the step of
 * a resume. */
TEST(test_mixture)
{
    MixtureSource mix[3];
    DataSpec spec = spec_of(NULL, NULL);
    spec.num_paths = 0;
    spec.image_features = NULL;
    spec.num_mix = sources(mix);
    spec.mix = mix;
    spec.shuffle = spec.drop_last = true;
    static Seen one[STEPS * G], more[STEPS * G];
    const LoaderState end = see(one, &spec, STEPS, 0, 1, (LoaderState){ 0 });
    static const uint32_t other[3] = { 1, 3, 0 };
    int images[3] = { 0 };
    for (int i = 0; i < STEPS * G; i++)
        for (int t = 0; t < T; t++) {
            const Seen *s = &one[i];
            const float first = expected(s->index * T + t, 0);
            int k = 0;
            while (k < 2 && s->index * T + t >= at[k] + ROWS)
                k++;
            const float own = first < 0 || s->source == 1 ? -1
                              : s->source == 0            ? first
                                               : value((int)other[k], s->index * T + t - at[k], 0);
            assert_true(s->first[t] == own);
            images[s->source] += own >= 0;
        }
    assert_true(images[0] > 0 && images[1] == 0 && images[2] > 0);
    for (int W = 2; W <= 4; W *= 2) {
        for (int rank = 0; rank < W; rank++) {
            const LoaderState middle = see(more, &spec, 2, rank, W, (LoaderState){ 0 });
            const LoaderState last = see(more + 2 * G, &spec, STEPS - 2, rank, W, middle);
            assert_memory_equal(&last, &end, sizeof last);
        }
        assert_memory_equal(more, one, sizeof one);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

typedef struct {
    const DataSpec *spec;
    Loader *loader;
} Opening;

static void open_it(void *what)
{
    Opening *o = what;
    o->loader = loader_open(o->spec, 3, 0, 1);
}

/* Opening the data or reading the first step must fail with a message that contains this text. */
static void fails(const DataSpec *spec, const char *text)
{
    Opening o = { spec, NULL };
    char *problem = error_catch(open_it, &o);
    const char *found = problem ? problem : loader_problem(o.loader);
    if (!found || !strstr(found, text))
        fail_msg("expected an error with '%s', found: %s", text, found ? found : "none");
    free(problem);
    if (o.loader)
        loader_close(o.loader);
}

TEST(test_errors)
{
    char *paths[] = { in("a.npy"), in("a.npy") }, *indexes[] = { in("b.index") };
    DataSpec spec = spec_of(paths, indexes);
    const uint32_t beyond[] = { 4, 5, 2 };
    write_features("bf16", ROWS, COLS);
    write_index("b.index", ID, shown, 2);
    fails(&spec, "has 2 images of 3 tokens each, 6 tokens in all, but");
    write_index("b.index", ID, beyond, 3);
    fails(&spec, "entry 1 (counted from 0) is image 5, but");
    write_index("b.index", ID + 1, shown, 3);
    fails(&spec, "was made for features with the id 0123456789abcdf0, but");
    write_file(in("b.index"), tokens, 11);
    fails(&spec, "has 11 bytes; expected 8 bytes, and 4 bytes for each image");
    write_index("b.index", ID, shown, 3);
    spec.num_paths = 2;
    fails(&spec, "data.image_paths names 1 files, data.paths 2");
    spec.num_paths = 1;
    spec.num_image_paths = 0;
    fails(&spec, "token 2 (counted from 0) is 99 (model.image_token_id), which stands for a "
                 "row of an image, but the file has no index");
    spec.num_image_paths = 1;
    write_features("bf16", ROWS, COLS + 8);
    fails(&spec,
          "a row has 16 values, but the model's projector reads 8 (model.image_feature_size)");
    write_features("bf16", ROWS + 1, COLS);
    fails(&spec, "an image has 4 rows, but the model has 3 tokens for each (model.image_tokens)");
    write_features("f16", ROWS, COLS);
    fails(&spec, "\"dtype\" is f16; expected bf16 or f32");
    write_features("bf16", ROWS, COLS);
    write_file(in("f1"), tokens, 20);
    fails(&spec,
          "has 20 bytes; 3 images of 3 rows of 8 values of 2 bytes need 144 bytes: truncated?");
    write_features("bf16", ROWS, COLS);
    uint16_t nan[IMAGES * ROWS * COLS] = { 0 };
    nan[2 * ROWS * COLS + COLS + 3] = 0x7fc0; /* image 4, row 1 */
    write_file(in("f1"), nan, sizeof nan / IMAGES * (IMAGES - 2));
    fails(&spec, "row 1 of image 4 has a value that is not finite");
}

/* Features of another tower of the same width, of the same tower, and of an unknown tower. */
TEST(test_tower)
{
    char *paths[] = { in("a.npy") }, *indexes[] = { in("a.index") };
    DataSpec spec = spec_of(paths, indexes);
    write_tokens("a.npy");
    write_index("a.index", ID, shown, 3);
    write_features("bf16", ROWS, COLS);
    spec.image_model = "runs/LLaVA";
    for (uint64_t own = 0xab; own <= 0xac; own++) {
        spec.image_tower = own;
        if (own == 0xab)
            loader_close(loader_open(&spec, 3, 0, 1));
        else
            fails(&spec, "features.json: the features were made with a vision tower whose "
                         "weights (00000000000000ab) differ from the tower of "
                         "runs/LLaVA (00000000000000ac). Make the features again: "
                         "scripts/make_image_features.py");
    }
    tower = "null";
    write_features("bf16", ROWS, COLS);
    loader_close(loader_open(&spec, 3, 0, 1));
    tower = "\"00000000000000ab\"";
    write_features("bf16", ROWS, COLS);
}

#define CLIP "\"vision_config\": {\"hidden_act\": \"gelu\"}"

/* Features whose settings differ from those of the model's folder: a key of each file, a missing
 * key, an additional key, numbers, and other ways to write a value. */
TEST(test_settings)
{
    char *paths[] = { in("a.npy") }, *indexes[] = { in("a.index") };
    char *files[] = { in("config.json"), in("preprocessor_config.json"),
                      in("processor_config.json") };
    const struct {
        const char *config, *processor, *nested, *wrong;
    } cases[] = {
        /* without a tower, any features are accepted */
        { "{" CLIP "}", "{\"size\": 336, \"image_mean\": [0, 1]}", NULL, NULL },
        { "{" CLIP ", \"vision_feature_layer\": -2}",
          "{\"size\": {\"edge\": 336}, \"image_mean\": [0.0, 1.0]}", NULL, NULL },
        { "{" CLIP ", \"vision_feature_layer\": null}", NULL, NULL, NULL },
        { "{\"vision_feature_layer\": -1}", NULL, NULL, NULL },
        { "{" CLIP ", \"vision_feature_layer\": -1}", NULL, NULL,
          "vision_feature_layer (config.json) is -1, but the features were made with -2" },
        { "{\"vision_config\": {}}", NULL, NULL,
          "hidden_act (vision_config of config.json) is not given, but the features were made with "
          "\"" },
        { "{" CLIP "}", "{\"size\": 224}", NULL,
          "size (preprocessor_config.json) is 224, but the features were made with {\"edge\"" },
        { "{" CLIP "}", "{\"size\": {\"edge\": 337}}", NULL, "is {\"edge\": 337}, but" },
        { "{" CLIP "}", "{}", NULL, "size (preprocessor_config.json) is not given" },
        { "{" CLIP "}", "{\"size\": 336, \"image_mean\": [0, 0.5]}", NULL,
          "image_mean (preprocessor_config.json) is [0, 0.5]" },
        { "{" CLIP "}", "{\"size\": 336, \"do_pad\": true}", NULL,
          "do_pad (preprocessor_config.json) is true, but the features were" },
        { "{" CLIP "}", "{}", "{\"image_processor\": {\"size\": 336}}", NULL },
        { "{" CLIP "}", "{\"size\": 336}", "{\"image_processor\": {\"size\": 224}}",
          "size (preprocessor_config.json) is 224" },
        { "{" CLIP "}", "{\"size\": 336}", "{\"image_processor\": null}", NULL },
    };
    DataSpec spec = spec_of(paths, indexes);
    write_tokens("a.npy");
    write_index("a.index", ID, shown, 3);
    settings = "{\"config\": {\"vision_feature_layer\": [-2, -2]}, "
               "\"vision_config\": {\"hidden_act\": [\"gelu\", \"quick_gelu\"]}, "
               "\"image_processor\": {\"size\": [{\"edge\": 336}, {\"edge\": 224}], "
               "\"image_mean\": [[0.0, 1.0], [0.0, 1.0]], "
               "\"do_pad\": [null, null]}, \"program\": {\"image_processor\": [\"pil\", null]}}";
    write_features("bf16", ROWS, COLS);
    spec.image_model = folder;
    spec.image_tower = 0xab;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *const texts[] = { cases[i].config, cases[i].processor, cases[i].nested };
        for (int k = 0; k < 3; k++) {
            remove(files[k]);
            if (texts[k])
                write_file(files[k], texts[k], strlen(texts[k]));
        }
        if (cases[i].wrong)
            fails(&spec, cases[i].wrong);
        else
            loader_close(loader_open(&spec, 3, 0, 1));
    }
    settings = "{}";
    write_features("bf16", ROWS, COLS);
}

/* Errors in a mixture name the source. */
TEST(test_mixture_errors)
{
    MixtureSource mix[3];
    DataSpec spec = spec_of(NULL, NULL);
    spec.num_paths = 0;
    spec.num_mix = sources(mix);
    spec.mix = mix;
    spec.shuffle = true;
    write_index("b.index", ID, shown, 2);
    fails(&spec, "data.mix: source 'b': ");
    fails(&spec, "has 2 images of 3 tokens each, 6 tokens in all, but");
    sources(mix);
    char *two[] = { in("a.index"), in("b.index") };
    mix[2].image_paths = two;
    mix[2].num_image_paths = 2;
    fails(&spec, "data.mix: source 'b': image_paths names 2 files, its paths 1");
    sources(mix);
    char *command = xasprintf("mkdir %s/wide", folder);
    assert_int_equal(system(command), 0);
    free(command);
    char *wide = in("wide"), *narrow = xstrdup(folder);
    strcpy(folder, wide);
    write_features("f32", ROWS, COLS);
    strcpy(folder, narrow);
    free(narrow);
    mix[2].image_features = wide;
    fails(&spec, "are F32, but the features of data.mix: source 'a', in");
    mix[2].num_image_paths = 0;
    fails(&spec, "data.mix: source 'b': ");
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/test_images_XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char *command = xasprintf("rm -r %s", folder);
    const int status = system(command);
    free(command);
    return status;
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
