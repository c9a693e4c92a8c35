/* Exports as codes and scales: compares each tensor of each format with the format's definition,
 * element by element. */
#include "kernels/nf4_map.h"
#include "tests/test.h"
#include "tests/coded.h"

/* ---- expected contents of a folder ----------------------------------------------------------- */

typedef struct {
    const char *suffix, *dtype, *shape[2];
} Expected;

typedef struct {
    const char *name;
    ExportType dtype;
    int layout, block, group;
    const char *config; /* quantization_config, with ' in place of " */
    Expected tensor[7]; /* the tensors of a matrix (O, I) */
    void (*check)(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                  int group);
} Case;

#define COMPRESSED(format, weights, acts) \
    "{'quant_method':'compressed-tensors','format':'" format \
    "','quantization_status':'compressed','ignore':['lm_head']," \
    "'config_groups':{'group_0':{'targets':['Linear'],'weights':" weights \
    ",'input_activations':" acts "}}}"
#define WEIGHTS(bits, type, more) \
    "{'num_bits':" bits ",'type':'" type "','symmetric':true,'dynamic':false,'strategy':" more "}"
#define ACTS(type, more) \
    "{'num_bits':8,'type':'" type "','symmetric':true,'dynamic':true,'strategy':" more "}"

static float quotient(float a, float b)
{
    return a / b;
}

static float largest(const float *w, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(w[i]) > most ? fabsf(w[i]) : most;
    return most;
}

/* Returns the nearest finite code of E4M3; ties go to even. */
static void check_e4m3(uint8_t code, float x)
{
    double best = INFINITY;
    unsigned expected = 0;
    for (unsigned c = 0; c < 256; c++) {
        const double distance = fabs(value_of(c, 4, 3) - (double)x);
        if ((c & 0x7f) == 0x7f || distance > best || (distance == best && c % 2 != 0))
            continue;
        best = distance;
        expected = c;
    }
    assert_true(code == expected || (value_of(code, 4, 3) == 0 && value_of(expected, 4, 3) == 0));
}

static void check_scale(float found, float amax, double codes, bool rounded)
{
    const float s = quotient(amax, (float)codes);
    const double expected = amax == 0 ? 0x1p-7 : rounded ? nearest((double)s, 7, -126) : (double)s;
    assert_true((double)found == expected);
}

static void check_fp8_rows(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                           int group)
{
    const uint8_t *codes = bytes_in(f, text("%s.weight", layer), "F8_E4M3");
    const uint16_t *scale = bytes_in(f, text("%s.weight_scale", layer), "BF16");
    (void)group;
    for (size_t o = 0; o < O; o++) {
        const float s = bf16_value(scale[o]);
        check_scale(s, largest(w + o * I, I), 448, true);
        for (size_t i = 0; i < I; i++)
            check_e4m3(codes[o * I + i], quotient(w[o * I + i], s));
    }
}

static void check_blocks(const uint8_t *codes, const float *w, size_t O, size_t I,
                         const void *scale, bool rounded)
{
    for (size_t block = 0; block < O / 128 * (I / 128); block++) {
        const float s =
            rounded ? bf16_value(((const uint16_t *)scale)[block]) : ((const float *)scale)[block];
        const size_t first = block / (I / 128) * 128 * I + block % (I / 128) * 128;
        float amax = 0;
        for (size_t row = 0; row < 128; row++)
            amax = fmaxf(amax, largest(w + first + row * I, 128));
        check_scale(s, amax, 448, rounded);
        for (size_t i = 0; i < 128 * 128; i++)
            check_e4m3(codes[first + i / 128 * I + i % 128],
                       quotient(w[first + i / 128 * I + i % 128], s));
    }
}

static void check_fp8_blocks(const SafeFile *f, const char *layer, const float *w, size_t O,
                             size_t I, int group)
{
    (void)group;
    check_blocks(bytes_in(f, text("%s.weight", layer), "F8_E4M3"), w, O, I,
                 bytes_in(f, text("%s.weight_scale", layer), "BF16"), true);
}

static void check_fp8_inverse(const SafeFile *f, const char *layer, const float *w, size_t O,
                              size_t I, int group)
{
    (void)group;
    check_blocks(bytes_in(f, text("%s.weight", layer), "F8_E4M3"), w, O, I,
                 bytes_in(f, text("%s.weight_scale_inv", layer), "F32"), false);
}

static void check_int8(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                       int group)
{
    const int8_t *codes = bytes_in(f, text("%s.weight", layer), "I8");
    const uint16_t *scale = bytes_in(f, text("%s.weight_scale", layer), "BF16");
    (void)group;
    for (size_t o = 0; o < O; o++) {
        const float s = bf16_value(scale[o]);
        check_scale(s, largest(w + o * I, I), 127.5, true);
        for (size_t i = 0; i < I; i++)
            assert_true((double)codes[o * I + i] ==
                        fmax(-128, fmin(127, nearbyint((double)quotient(w[o * I + i], s)))));
    }
}

/* w is first rounded to F16, then multiplied by 127 / the row's largest value. */
static void check_llm(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                      int group)
{
    const int8_t *codes = bytes_in(f, text("%s.weight", layer), "I8");
    const float *most = bytes_in(f, text("%s.SCB", layer), "F32");
    (void)group;
    assert_int_equal(*(const uint8_t *)bytes_in(f, text("%s.weight_format", layer), "U8"), 0);
    for (size_t o = 0; o < O; o++) {
        const float factor = most[o] > 0 ? quotient(127, most[o]) : 0;
        assert_true((double)most[o] == nearest((double)largest(w + o * I, I), 10, -14));
        for (size_t i = 0; i < I; i++) {
            const float half = (float)nearest((double)w[o * I + i], 10, -14),
                        product = half * factor;
            assert_true((double)codes[o * I + i] == nearbyint((double)product));
        }
    }
}

/* Returns the error that the choice of the scale minimizes [Frantar et al. 2022; its code,
 * --mse]. */
static double error_of(const float *w, size_t n, float s)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        const double code = fmax(-8, fmin(7, nearbyint((double)w[i] / (double)s)));
        sum += pow(fabs((double)w[i] - code * (double)s), 2.4);
    }
    return sum;
}

/* NOTE: the program compares errors that are exact to 3e-5, so the error of the chosen scale may be
 * up to 1e-4 above the smallest error. */
static void check_grid(const float *w, size_t n, float found)
{
    double least = INFINITY;
    bool is_one = false;
    const float amax = largest(w, n);
    for (int step = 0; step < 80 && amax > 0; step++) {
        const float s =
            (float)nearest((double)quotient(amax * (1 - 0.01f * (float)step), 7.5f), 7, -126);
        is_one |= s == found;
        least = fmin(least, error_of(w, n, s));
    }
    assert_true(amax == 0 ? found == 0x1p-7f
                          : is_one && error_of(w, n, found) <= least * (1 + 1e-4));
}

static void check_int4(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                       int group)
{
    const uint32_t *packed = bytes_in(f, text("%s.weight_packed", layer), "I32");
    const uint16_t *scale = bytes_in(f, text("%s.weight_scale", layer), "BF16");
    const int64_t *shape = bytes_in(f, text("%s.weight_shape", layer), "I64");
    const size_t n = (size_t)(group == NOT_GIVEN ? 128 : group);
    assert_true(shape[0] == (int64_t)O && shape[1] == (int64_t)I);
    for (size_t g = 0; g < O * I / n; g++) {
        const float s = bf16_value(scale[g]);
        check_grid(w + g * n, n, s);
        for (size_t i = g * n; i < (g + 1) * n; i++)
            assert_true((double)(packed[i / 8] >> 4 * (i % 8) & 15) - 8 ==
                        fmax(-8, fmin(7, nearbyint((double)quotient(w[i], s)))));
    }
}

/* As for the base of adapters: the device encodes the same groups from the same values. */
static void check_nf4(const SafeFile *f, const char *layer, const float *w, size_t O, size_t I,
                      int group)
{
    const size_t groups = nf4_groups(O, I);
    Nf4Group *device = guarded(groups * sizeof *device), *g = keep(groups * sizeof *g);
    float *offset = guarded(sizeof *offset);
    const Tensor t = make_f32((int)O, (int)I);
    (void)group;
    device_put(t.data, w, O * I * sizeof *w);
    nf4_offset(offset, t);
    nf4_quantize(device, t, offset, 0, groups);
    device_get(g, device, groups * sizeof *g);
    const uint8_t *codes = bytes_in(f, text("%s.weight", layer), "U8");
    const uint8_t *absmax = bytes_in(f, text("%s.weight.absmax", layer), "U8");
    const float *nested = bytes_in(f, text("%s.weight.nested_absmax", layer), "F32");
    for (size_t i = 0; i < groups; i++) {
        const size_t left = O * I - i * NF4_GROUP, n = left < NF4_GROUP ? left : NF4_GROUP;
        assert_memory_equal(codes + i * NF4_GROUP / 2, g[i].codes, n / 2);
        assert_memory_equal(absmax + i * NF4_GROUP / NF4_BLOCK, g[i].absmax, n / NF4_BLOCK);
        assert_true(nested[i] == g[i].nested);
    }
    const void *json = bytes_in(f, text("%s.weight.quant_state.bitsandbytes__nf4", layer), "U8");
    json_t *state = json_loadb(json, 256, 0, NULL);
    json_t *expected =
        json_pack("{s:s, s:i, s:s, s:[I,I], s:i, s:s, s:f}", "quant_type", "nf4", "blocksize", 64,
                  "dtype", "bfloat16", "shape", (json_int_t)O, (json_int_t)I, "nested_blocksize",
                  256, "nested_dtype", "float32", "nested_offset", (double)g[0].offset);
    assert_true(json_equal(state, expected));
    json_decref(state);
    json_decref(expected);
}

#define CHANNEL(type) \
    COMPRESSED(type "-quantized", WEIGHTS("8", type, "'channel'"), ACTS(type, "'token'"))
#define W4A16(group) \
    COMPRESSED("pack-quantized", WEIGHTS("4", "int", "'group','group_size':" group), "null")

static const Case cases[] = {
    { "rows",
      EXPORT_FP8,
      NOT_GIVEN,
      NOT_GIVEN,
      NOT_GIVEN,
      CHANNEL("float"),
      { { ".weight", "F8_E4M3", { "O", "I" } }, { ".weight_scale", "BF16", { "O", "1" } } },
      check_fp8_rows },
    { "blocks",
      EXPORT_FP8,
      AS_COMPRESSED_TENSORS,
      128,
      NOT_GIVEN,
      COMPRESSED("float-quantized", WEIGHTS("8", "float", "'block','block_structure':[128,128]"),
                 ACTS("float", "'group','group_size':128")),
      { { ".weight", "F8_E4M3", { "O", "I" } }, { ".weight_scale", "BF16", { "O/128", "I/128" } } },
      check_fp8_blocks },
    { "deepseek",
      EXPORT_FP8,
      AS_FP8,
      NOT_GIVEN,
      NOT_GIVEN,
      "{'quant_method':'fp8','fmt':'e4m3','activation_scheme':'dynamic','weight_block_size':[128,"
      "128],"
      "'modules_to_not_convert':['lm_head']}",
      { { ".weight", "F8_E4M3", { "O", "I" } },
        { ".weight_scale_inv", "F32", { "O/128", "I/128" } } },
      check_fp8_inverse },
    { "int8",
      EXPORT_INT8,
      NOT_GIVEN,
      NOT_GIVEN,
      NOT_GIVEN,
      CHANNEL("int"),
      { { ".weight", "I8", { "O", "I" } }, { ".weight_scale", "BF16", { "O", "1" } } },
      check_int8 },
    { "llm",
      EXPORT_INT8,
      AS_BITSANDBYTES,
      NOT_GIVEN,
      NOT_GIVEN,
      "{'quant_method':'bitsandbytes','load_in_8bit':true,'llm_int8_threshold':6.0}",
      { { ".weight", "I8", { "O", "I" } },
        { ".SCB", "F32", { "O" } },
        { ".weight_format", "U8", { NULL } } },
      check_llm },
    { "int4",
      EXPORT_INT4,
      NOT_GIVEN,
      NOT_GIVEN,
      NOT_GIVEN,
      W4A16("128"),
      { { ".weight_packed", "I32", { "O", "I/8" } },
        { ".weight_scale", "BF16", { "O", "I/128" } },
        { ".weight_shape", "I64", { "2" } } },
      check_int4 },
    { "int4-32",
      EXPORT_INT4,
      NOT_GIVEN,
      NOT_GIVEN,
      32,
      W4A16("32"),
      { { ".weight_packed", "I32", { "O", "I/8" } },
        { ".weight_scale", "BF16", { "O", "I/32" } },
        { ".weight_shape", "I64", { "2" } } },
      check_int4 },
    { "nf4",
      EXPORT_NF4,
      NOT_GIVEN,
      NOT_GIVEN,
      NOT_GIVEN,
      "{'quant_method':'bitsandbytes','load_in_4bit':true,'bnb_4bit_quant_type':'nf4','bnb_4bit_"
      "use_double_quant':true,"
      "'bnb_4bit_compute_dtype':'bfloat16','bnb_4bit_quant_storage':'uint8'}",
      { { ".weight", "U8", { "X/2", "1" } },
        { ".weight.absmax", "U8", { "X/64" } },
        { ".weight.nested_absmax", "F32", { "X/16384" } },
        { ".weight.nested_quant_map", "F32", { "256" } },
        { ".weight.quant_map", "F32", { "16" } },
        { ".weight.quant_state.bitsandbytes__nf4", "U8", { "256" } } },
      check_nf4 },
};
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

/* ---- folders --------------------------------------------------------------------------------- */

/* A size such as "I/8" is a dimension, rounded up; X is O I. */
static size_t dimension(const char *says, size_t O, size_t I)
{
    const size_t whole = *says == 'O'   ? O
                         : *says == 'I' ? I
                         : *says == 'X' ? O * I
                                        : (size_t)atoi(says);
    const size_t by = strchr(says, '/') ? (size_t)atoi(strchr(says, '/') + 1) : 1;
    return (whole + by - 1) / by;
}

static void check_tensor(const SafeFile *f, const char *layer, const Expected *e, size_t O,
                         size_t I)
{
    const SafeTensor *t = safetensors_find(f, text("%s%s", layer, e->suffix));
    int dims = 0;
    if (!t || strcmp(t->dtype, e->dtype) != 0)
        fail_msg("%s%s is missing, or not %s", layer, e->suffix, e->dtype);
    for (; dims < 2 && e->shape[dims]; dims++)
        assert_int_equal(t->shape[dims], dimension(e->shape[dims], O, I));
    assert_int_equal(t->dims, dims);
}

/* Returns the value rounded to BF16. */
static void check_plain(const SafeFile *f, const SafeTensor *from, const float *w)
{
    const uint16_t *codes = bytes_in(f, from->name, "BF16");
    for (size_t i = 0; i < (from->end - from->begin) / sizeof *w; i++)
        assert_true((double)bf16_value(codes[i]) == nearest((double)w[i], 7, -126));
}

/* Adds the routers to the list of modules without codes. bitsandbytes has no list without them. */
static void add_routers(json_t *settings, int layers)
{
    json_t *list = json_object_get(settings, "ignore");
    list = list ? list : json_object_get(settings, "modules_to_not_convert");
    if (!list) {
        list = json_pack("[s]", "lm_head");
        json_object_set_new(settings, "llm_int8_skip_modules", list);
    }
    for (int i = 0; i < layers; i++)
        json_array_append_new(list, json_string(text("model.layers.%d.mlp.gate", i)));
}

static void check_config(const char *source, const char *target, const char *quantization)
{
    char *expected = lasting(quantization);
    for (char *c = expected; *c; c++)
        *c = *c == '\'' ? '"' : *c;
    json_t *from = json_load_file(text("%s/config.json", source), 0, NULL);
    json_t *to = json_load_file(text("%s/config.json", target), 0, NULL);
    json_object_set_new(from, "torch_dtype", json_string("bfloat16"));
    json_t *settings = json_loads(expected, 0, NULL);
    if (json_object_get(from, "num_experts"))
        add_routers(settings, (int)json_integer_value(json_object_get(from, "num_hidden_layers")));
    json_object_set_new(from, "quantization_config", settings);
    assert_true(json_equal(from, to));
    json_decref(from);
    json_decref(to);
}

static ExportOptions options_of(const Case *c, const char *source, const char *target)
{
    ExportOptions o = export_options_of(source, NULL, target, "bf16");
    o.dtype = c->dtype, o.layout = c->layout, o.block = c->block, o.group = c->group;
    return o;
}

static void check_folder(const Case *c, const char *source)
{
    const char *target = lasting(text("%s/%s-%d", root, c->name, num_folders++));
    const ExportOptions o = options_of(c, source, target);
    int tensors = 0;
    export_to(&o, CHECKPOINT_FILE_BYTES);
    check_config(source, target, c->config);
    SafeFile *from = open_folder(source), *to = open_folder(target);
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        const float *w = bytes_in(from, t->name, "F32");
        const char *layer =
            lasting(text("%.*s", (int)(strlen(t->name) - strlen(".weight")), t->name));
        if (!strstr(t->name, "_proj.")) {
            check_plain(to, t, w);
            tensors++;
            continue;
        }
        for (const Expected *e = c->tensor; e->suffix; e++, tensors++)
            check_tensor(to, layer, e, t->shape[0], t->shape[1]);
        c->check(to, layer, w, t->shape[0], t->shape[1], c->group);
    }
    assert_int_equal(to->count, tensors);
    safetensors_close(from);
    safetensors_close(to);
}

/* LLAMA_GQA is tied, so no head is written. OLMOE has routers: one format of each kind of config. */
TEST(test_formats)
{
    static const SmallModel models[] = { LLAMA, LLAMA_GQA, OLMO2, OLMOE };
    for (int a = 0; a < 4; a++)
        for (int i = 0; i < NUM_CASES; i++) {
            if (a == 0 || (a == 3 ? i % 5 > 1 : i % 3 == a))
                check_folder(&cases[i], save_wide(models[a]));
            release();
        }
}

/* Codes and scales of other programs are written like the codes of the export itself. */
TEST(test_given_codes)
{
    const char *source = save_wide(LLAMA), *one = lasting(text("%s/one", root)),
               *other = lasting(text("%s/other", root));
    const Case *c = &cases[5];
    const ExportOptions o = options_of(c, source, one), again = options_of(c, source, other);
    export_to(&o, CHECKPOINT_FILE_BYTES);
    SafeFile *f = open_folder(one);
    Export x = export_open(&again);
    export_begin(&x, CHECKPOINT_FILE_BYTES);
    for (int i = 0; i < f->count; i++) {
        const SafeTensor *t = &f->tensor[i];
        const char *packed = strstr(t->name, ".weight_packed");
        if (!packed)
            continue;
        const char *layer = lasting(text("%.*s", (int)(packed - t->name), t->name));
        const uint32_t *word = bytes_in(f, t->name, "I32");
        const uint16_t *scale = bytes_in(f, text("%s.weight_scale", layer), "BF16");
        const size_t n = t->shape[0] * t->shape[1] * 8;
        int8_t *codes = keep(n);
        float *scales = keep(n / 128 * sizeof *scales);
        for (size_t k = 0; k < n; k++)
            codes[k] = (int8_t)((int)(word[k / 8] >> 4 * (k % 8) & 15) - 8);
        for (size_t k = 0; k < n / 128; k++)
            scales[k] = bf16_value(scale[k]);
        export_write_int4(&x, text("%s.weight", layer), codes, scales);
    }
    export_complete(&x);
    shell(text("cmp %s/model.safetensors %s/model.safetensors", one, other));
    safetensors_close(f);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
