/* Contents of checkpoints: bit-exact round trips, files in the safetensors and Hugging Face
 * formats, type conversions, and models that do not match. Invalid safetensors:
 * test_safetensors.c. */
#include "model/formats/hf.h"
#include "model/shape/architecture.h"
#include "model/checkpoint/safetensors.h"
#include "tests/test.h"
#include "tests/pattern.h"
#include "tests/saved.h"

static const Format f32 = { F32, 0 }, bf16 = { BF16, 0 }, e4m3 = { E4M3, 128 },
                    e5m2 = { E5M2, 128 };

/* ---- round trips ----------------------------------------------------------------------------- */

static void fill_state(Run *r)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Tensor t[] = { r->store.shard[u].slice[TRAINED].stored, r->store.shard[u].state[0],
                             r->store.shard[u].state[1] };
        for (int i = 0; i < 3; i++) {
            size_t n = tensor_numel(t[i]), bytes = n * dtype_size(t[i].format.dtype);
            pattern_put(t[i].data, (uint64_t)(u * 8 + i), 0, bytes);
            if (t[i].scale)
                pattern_put(t[i].scale, (uint64_t)(u * 8 + i + 4), 0, tensor_bytes(t[i]) - bytes);
        }
    }
}

static void check_range(const char *name, const Tensor t, uint64_t seed, size_t first, size_t n)
{
    size_t size = dtype_size(t.format.dtype);
    assert_int_equal(pattern_check((char *)t.data + first * size, seed, first * size, n * size),
                     n * size);
    if (!t.scale)
        return;
    size_t group = (size_t)t.format.group, bytes = format_scale_bytes(t.format, group);
    size_t from = first / group * bytes, to = (first + n + group - 1) / group * bytes;
    if (pattern_check((char *)t.scale + from, seed + 4, from, to - from) != to - from)
        fail_msg("%s: scales differ", name);
}

/* All elements that Hugging Face tensors have are restored. Padding, which these tensors lack, is 0
 * in the weights. */
static void check_state(const Run *r)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Shard *s = &r->store.shard[u];
        const Tensor t[] = { s->slice[TRAINED].stored, s->state[0], s->state[1] };
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        for (int i = 0; i < count * 3; i++)
            check_range(tensor[i / 3].name, t[i % 3], (uint64_t)(u * 8 + i % 3),
                        hf_first(&r->store.shape[u], &tensor[i / 3]),
                        tensor[i / 3].rows * tensor[i / 3].cols);
        size_t size = dtype_size(s->slice[TRAINED].stored.format.dtype), at = 0;
        unsigned char *bytes = keep(s->slice[TRAINED].count * size);
        if (s->slice[TRAINED].count)
            device_get(bytes, s->slice[TRAINED].stored.data, s->slice[TRAINED].count * size);
        for (int i = 0; i <= count; i++) {
            const size_t end =
                i < count ? hf_first(&r->store.shape[u], &tensor[i]) : s->slice[TRAINED].count;
            for (size_t k = at * size; k < end * size; k++)
                assert_int_equal(bytes[k], 0);
            at = i < count ? end + tensor[i].rows * tensor[i].cols : at;
        }
        free(tensor);
    }
}

static void check_round_trip(SmallModel a, Format master, Format m1, Format m2, size_t limit)
{
    Run saved, loaded;
    ModelConfig m = architecture(a);
    open_run(&saved, &m, master, m1, m2);
    open_run(&loaded, &m, master, m1, m2);
    fill_state(&saved);
    /* fill with other values, which loading must overwrite or set to 0 */
    for (int u = 0; u < loaded.store.num_units; u++)
        pattern_put(loaded.store.shard[u].slice[TRAINED].stored.data, 99, 0,
                    tensor_bytes(loaded.store.shard[u].slice[TRAINED].stored));
    saved.file_limit = limit;
    save(&saved, 20);
    assert_int_equal(exists(text("%s/model.safetensors", step_folder(&saved, 20))),
                     limit == CHECKPOINT_FILE_BYTES);
    /* no shard is empty */
    shell(text(
        "cd %s && for f in model*.safetensors; do test $(stat -c %%s $f) -gt 200 || exit 1; done",
        step_folder(&saved, 20)));

    TrainState s = { 0 }, expected = state_of(20);
    assert_true(checkpoint_load(step_folder(&saved, 20), &loaded.config, &loaded.store, &s, true));
    assert_memory_equal(&s, &expected, sizeof s);
    check_state(&loaded);
    close_run(&saved);
    close_run(&loaded);
    release();
}

TEST(test_round_trip)
{
    const Format formats[][3] = {
        { f32, f32, f32 },
        { bf16, bf16, bf16 },
        { f32, e4m3, bf16 },
        { bf16, e4m3, e5m2 },
    };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int i = 0; i < 4; i++)
            check_round_trip(a, formats[i][0], formats[i][1], formats[i][2],
                             i % 2 ? 50000 : 5000000000);
}

/* Without with_optimizer, loading does not change the moments. */
TEST(test_weights_only)
{
    Run r;
    open_small(&r);
    save(&r, 1);
    fill_state(&r);
    TrainState s;
    assert_true(checkpoint_load(step_folder(&r, 1), &r.config, &r.store, &s, false));
    check_range("m", r.store.shard[1].state[0], 8 + 1, 0, r.store.shard[1].slice[TRAINED].count);
    assert_true(pattern_check(r.store.shard[1].slice[TRAINED].stored.data, 8, 0, 1000) < 1000);
    close_run(&r);
    release();
}

/* ---- formats --------------------------------------------------------------------------------- */

/* What the reader does not check: the length of the header, where the data start, and the order of
 * types that keeps tensors aligned. */
TEST(test_file_layout)
{
    Run r;
    ModelConfig m = architecture(LLAMA);
    open_run(&r, &m, bf16, e4m3, f32);
    save(&r, 5);
    const char *name[] = { "model.safetensors", "optimizer-00001.states" };
    for (int i = 0; i < 2; i++) {
        unsigned char head[9];
        SafeFile *f = safetensors_open(text("%s/%s", step_folder(&r, 5), name[i]));
        assert_int_equal(pread(f->fd, head, sizeof head, 0), sizeof head);
        assert_int_equal(head[0] | head[1] << 8 | head[2] << 16, f->data - 8);
        assert_int_equal(f->data % 8, 0);
        assert_int_equal(head[8], '{');
        assert_true(f->count > 0);
        for (int t = 0; t < f->count; t++)
            assert_int_equal(f->tensor[t].begin % safetensors_dtype_size(f->tensor[t].dtype), 0);
        safetensors_close(f);
    }
    close_run(&r);
    release();
}

/* config.json describes the model. */
TEST(test_config_json)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Run r;
        ModelConfig m = architecture(a), found = { .init_fn = m.init_fn,
                                                   .init_std = m.init_std,
                                                   .init_cutoff_factor = m.init_cutoff_factor };
        open_run(&r, &m, bf16, f32, f32);
        save(&r, 1);
        hf_read(&found, step_folder(&r, 1));
        assert_int_equal(found.embedding_size, 128);
        assert_true(found.norm.kind == m.norm.kind && found.norm.eps == m.norm.eps);
        assert_true(found.clip_qkv == m.clip_qkv && found.rope_theta == m.rope_theta);
        assert_true(found.rope_scaling.type == m.rope_scaling.type);
        assert_true(found.rope_scaling.factor == m.rope_scaling.factor);
        assert_true(found.rope_scaling.low_freq_factor == m.rope_scaling.low_freq_factor);
        assert_true(found.rope_scaling.high_freq_factor == m.rope_scaling.high_freq_factor);
        assert_true(found.rope_scaling.original_length == m.rope_scaling.original_length);
        assert_true(found.rope_scaling.beta_fast == m.rope_scaling.beta_fast);
        assert_true(found.rope_scaling.beta_slow == m.rope_scaling.beta_slow);
        assert_true(found.rope_scaling.attention_factor == m.rope_scaling.attention_factor);
        assert_true(found.rope_scaling.full_attn_layers_only ==
                    m.rope_scaling.full_attn_layers_only);
        const int *x = &found.d_model, *y = &m.d_model; /* the sizes are the first members */
        assert_memory_equal(x, y, offsetof(ModelConfig, norm));
        assert_true(found.norm_affine == m.norm_affine && found.norm_after == m.norm_after);
        assert_true(found.qk_norm == m.qk_norm && found.weight_tying == m.weight_tying);
        assert_int_equal(found.sliding_window, m.sliding_window);
        assert_memory_equal(&found.layer_types, &m.layer_types, sizeof m.layer_types);
        close_run(&r);
        release();
    }
    ModelConfig odd = architecture(LLAMA);
    odd.qk_norm = QK_NORM_WIDTH;
    DIES("no Hugging Face architecture", architecture_of(&odd));
}

/* ---- conversions ----------------------------------------------------------------------------- */

static double f16_value(uint16_t code)
{
    int e = code >> 10 & 31, m = code & 1023;
    double x = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return code & 0x8000 ? -x : x;
}

/* n elements of `dtype` whose 16-bit codes count up from `code`, so that even small tensors have
 * many values. Infinities and NaNs are left out. The lower halves of F32 vary, too. */
static void write_values(SafeFile *f, const char *name, const char *dtype, size_t n, uint16_t code)
{
    uint16_t *codes = malloc(4 * n);
    float *wide = malloc(4 * n);
    for (size_t k = 0; k < n; k++) {
        codes[k] = code++;
        if ((codes[k] & 0x7c00) == 0x7c00)
            codes[k] &= 0x83ff;
        wide[k] = float_from_bits((uint32_t)codes[k] << 16 |
                                  (k % 3 == 0 ? 0x8000 : (uint32_t)k * 2654435761u >> 16));
    }
    bool is_f32 = strcmp(dtype, "F32") == 0;
    safetensors_write(f, safetensors_find(f, name), 0, is_f32 ? (void *)wide : codes,
                      n * safetensors_dtype_size(dtype));
    free(codes), free(wide);
}

/* Makes a Hugging Face folder with every tensor of the model in `dtype`. The embedding has `rows`
 * rows. */
static const char *write_folder(const Run *r, const char *dtype, size_t rows)
{
    const char *path = text("%s/hf%d", root, num_folders++);
    mkdir(path, 0777);
    SafeFile *f = safetensors_new(text("%s/model.safetensors", path));
    for (int u = 0; u < r->store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            const HfTensor *t = &tensor[i];
            const size_t matrix[2] = { t->max_rows > t->rows ? rows : t->rows, t->cols };
            safetensors_add(f, t->name, dtype, t->vector ? 1 : 2, t->vector ? &t->cols : matrix);
        }
        free(tensor);
    }
    safetensors_lay_out(f);
    safetensors_create(f);
    for (int i = 0; i < f->count; i++) {
        const SafeTensor *t = &f->tensor[i];
        write_values(f, t->name, dtype, (t->end - t->begin) / safetensors_dtype_size(dtype),
                     (uint16_t)(i * 5000));
    }
    safetensors_close(f);
    return path;
}

/* Returns the BF16 value nearest to x; ties go to even. */
static uint16_t nearest_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1);
    double below = float_from_bits((uint32_t)low << 16),
           above = float_from_bits((uint32_t)high << 16);
    double to_low = fabs(x - below), to_high = fabs(above - x);
    return to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
}

/* Compares the loaded master weights with the file's values, element by element. */
static void check_converted(const char *folder, const char *dtype, Format master, int rows)
{
    Run r;
    ModelConfig m = architecture(LLAMA);
    open_run(&r, &m, master, f32, f32);
    fill_state(&r);
    if (!folder)
        folder = write_folder(&r, dtype, rows);
    assert_false(checkpoint_load(folder, &r.config, &r.store, NULL, true));
    SafeFile *f = safetensors_open(text("%s/model.safetensors", folder));
    for (int u = 0; u < r.store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&r.config.model, &r.store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            const SafeTensor *t = safetensors_find(f, tensor[i].name);
            size_t n = (t->end - t->begin) / safetensors_dtype_size(dtype),
                   size = dtype_size(master.dtype);
            char *raw = malloc(4 * n), *loaded = malloc(4 * n);
            safetensors_read(f, raw, t, 0, t->end - t->begin);
            const char *all = r.store.shard[u].slice[TRAINED].stored.data;
            device_get(loaded, all + hf_first(&r.store.shape[u], &tensor[i]) * size, n * size);
            for (size_t k = 0; k < n; k++) {
                uint16_t code = ((uint16_t *)raw)[k];
                float x = strcmp(dtype, "F32") == 0   ? ((float *)raw)[k]
                          : strcmp(dtype, "F16") == 0 ? (float)f16_value(code)
                                                      : float_from_bits((uint32_t)code << 16);
                if (master.dtype == F32)
                    assert_memory_equal(&((float *)loaded)[k], &x, sizeof x);
                else
                    assert_int_equal(((uint16_t *)loaded)[k], nearest_bf16(x));
            }
            free(raw), free(loaded);
        }
        free(tensor);
    }
    safetensors_close(f);
    close_run(&r);
    release();
}

TEST(test_conversions)
{
    const char *const dtype[] = { "F32", "BF16", "F16" };
    for (int i = 0; i < 3; i++) {
        check_converted(NULL, dtype[i], f32, 90);
        check_converted(NULL, dtype[i], bf16, 90);
        check_converted(NULL, dtype[i], bf16, 128); /* the vocabulary with its padding */
    }
}

/* ---- mismatches ------------------------------------------------------------------------------ */

static void expect_mismatch(const char *folder, const ModelConfig *m, Format moments,
                            const char *message)
{
    Run r;
    open_run(&r, m, f32, moments, moments);
    DIES(message, load(&r, folder));
    close_run(&r);
}

TEST(test_mismatches)
{
    needs_fork();
    Run r;
    open_small(&r);
    save(&r, 1);
    char *folder = strdup(step_folder(&r, 1));
    ModelConfig m = architecture(LLAMA), other = m;
    other.mlp_width = 128;
    expect_mismatch(folder, &other, f32,
                    "model.layers.0.mlp.gate_proj.weight has shape (96, 64), the configured model "
                    "needs (128, 64)");
    other = m;
    other.n_layers = 1;
    expect_mismatch(folder, &other, f32, "model.layers.1.");
    other.n_layers = 3;
    expect_mismatch(folder, &other, f32, "no tensor model.layers.2.");
    other = m;
    other.n_heads = other.n_kv_heads = 8;
    other.head_dim = 8;
    expect_mismatch(folder, &other, f32, "num_attention_heads is 4, but model.n_heads is 8");
    other = m;
    other.weight_tying = true;
    expect_mismatch(folder, &other, f32, "lm_head.weight has no place");
    other = m;
    other.vocab_size = 91;
    expect_mismatch(folder, &other, f32, "embed_tokens.weight has shape (90, 64)");
    char command[1024];
    snprintf(command, sizeof command, "sed -i s/LlamaForCausalLM/GPT2LMHeadModel/ %s/config.json",
             folder);
    assert_int_equal(system(command), 0);
    expect_mismatch(folder, &m, f32, "architecture GPT2LMHeadModel");
    /* an index names files in its own folder */
    static const char *const outside[] = { "../step1/model.safetensors", "/dev/null", "..", "" };
    for (int i = 0; i < 4; i++) {
        snprintf(command, sizeof command,
                 "cd %s && mkdir -p ../index && cp config.json ../index && echo '{\"weight_map\": "
                 "{\"a\": "
                 "\"%s\"}}' >../index/model.safetensors.index.json",
                 folder, outside[i]);
        shell(command);
        expect_mismatch(text("%s/../index", folder), &m, f32,
                        "weight_map.a: expected the name of a file in that folder, found \"");
    }
    expect_mismatch(write_folder(&r, "U8", 90), &m, f32, "stored as U8; expected F32, BF16 or F16");
    shell(text("cd %s/../index && cp %s/model.safetensors a && cp a b && echo '{\"weight_map\": "
               "{\"x\": \"a\", \"y\": \"b\"}}' "
               ">model.safetensors.index.json",
               folder, write_folder(&r, "BF16", 90)));
    expect_mismatch(text("%s/../index", folder), &m, f32,
                    "index/a; expected it in only one file. Save the model again");
    free(folder);
    close_run(&r);
    release();
}

static void expect_warning(const char *folder, const ModelConfig *m, const char *message)
{
    Run r;
    open_run(&r, m, f32, f32, f32);
    DIES(message, (load(&r, folder), _exit(1)));
    close_run(&r);
}

/* Makes a folder of a tied model that also has a head: equal to the embedding, or with another last
 * byte. */
static const char *write_head(const Run *r, bool same)
{
    const char *path = write_folder(r, "BF16", 90);
    shell(text("cd %s && cp %s/config.json . && mv model.safetensors a.safetensors && echo "
               "'{\"weight_map\": {\"a\": "
               "\"a.safetensors\", \"b\": \"b.safetensors\"}}' >model.safetensors.index.json",
               path, step_folder(r, 1)));
    SafeFile *a = safetensors_open(text("%s/a.safetensors", path)),
             *b = safetensors_new(text("%s/b.safetensors", path));
    const SafeTensor *embed = safetensors_find(a, "model.embed_tokens.weight");
    const size_t bytes = embed->end - embed->begin;
    char *values = malloc(bytes);
    safetensors_read(a, values, embed, 0, bytes);
    values[bytes - 1] ^= !same;
    safetensors_add(b, "lm_head.weight", "BF16", 2, embed->shape);
    safetensors_lay_out(b);
    safetensors_create(b);
    safetensors_write(b, &b->tensor[0], 0, values, bytes);
    safetensors_close(a), safetensors_close(b);
    free(values);
    return path;
}

TEST(test_tied_head)
{
    needs_fork();
    const ModelConfig m = architecture(LLAMA_GQA);
    Run r;
    open_run(&r, &m, f32, f32, f32);
    store_init(&r.store, &r.config.model, 3);
    save(&r, 1);
    assert_false(checkpoint_load(write_head(&r, true), &r.config, &r.store, NULL, true));
    expect_mismatch(write_head(&r, false), &m, f32,
                    "lm_head.weight differs from model.embed_tokens.weight");
    close_run(&r);
    release();
}

/* Differences that may be intended are reported. */
TEST(test_changed_on_purpose)
{
    needs_fork();
    Run r;
    ModelConfig m = architecture(OLMO3), other = m;
    open_run(&r, &m, f32, f32, f32);
    store_init(&r.store, &m, 3);
    save(&r, 1);
    char *folder = strdup(step_folder(&r, 1));
    other.sliding_window = 7;
    expect_warning(folder, &other,
                   "sliding_window is 6, but the configuration's model.sliding_window is 7; the "
                   "run uses the configuration");
    other = m;
    other.layer_types = (LayerTypes){ 2, { false, true } };
    expect_warning(folder, &other,
                   "layer 0 has a sliding window, but in the configuration it has none; the run "
                   "uses the configuration");
    other = m;
    other.rope_scaling.attention_factor = 1;
    expect_warning(folder, &other,
                   "its attention_factor is 1.13863, but the configuration's "
                   "model.rope_scaling.attention_factor is 1");
    other = m;
    other.rope_scaling.beta_fast = 16;
    expect_warning(folder, &other,
                   "its beta_fast is 2, but the configuration's model.rope_scaling.beta_fast is "
                   "16; the run uses the configuration");
    other = m;
    other.layer_types.count = 0;
    other.sliding_window = 0;
    other.rope_scaling.type = ROPE_LLAMA3;
    other.rope_scaling.full_attn_layers_only = false;
    expect_warning(folder, &other, "the rope_type is yarn, but llama3 in the configuration");
    other.rope_scaling.type = ROPE_DEFAULT;
    other.max_sequence_length = 99;
    expect_warning(folder, &other,
                   text("max_position_embeddings is %d, but the configuration's "
                        "model.max_sequence_length is 99: sequences are longer",
                        m.max_sequence_length));
    free(folder);
    close_run(&r);
    release();
}

/* F32 moments are converted to BF16, as when the recipe changes. */
TEST(test_moments_are_converted)
{
    Run r, other;
    ModelConfig m = architecture(LLAMA);
    open_small(&r);
    open_run(&other, &m, f32, bf16, bf16);
    const Shard *from = &r.store.shard[1], *to = &other.store.shard[1];
    fill(from->state[0], 1, -1, 1);
    save(&r, 1);
    load(&other, step_folder(&r, 1));
    float *x = keep(4 * from->slice[TRAINED].count);
    uint16_t *y = keep(2 * from->slice[TRAINED].count);
    device_get(x, from->state[0].data, 4 * from->slice[TRAINED].count);
    device_get(y, to->state[0].data, 2 * from->slice[TRAINED].count);
    for (int i = 0; i < m.d_model; i++)
        assert_int_equal(y[i], nearest_bf16(x[i]));
    close_run(&r);
    close_run(&other);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
