/* Bases in the format of lora.base: read from folders of every type, tensor by tensor, with the
 * result of whole matrices; read from bitsandbytes' folders; read in ranges by tensor ranks; and
 * never saved. */
#include "kernels/dynamic8.h"
#include "kernels/nf4_map.h"
#include "model/store/quantized_weights.h"
#include "tests/test.h"
#include "tests/adapted.h"
#include "tests/exported.h"

/* ---- a base in another format ---------------------------------------------------------------- */

/* Returns all values of a matrix in F32, by the names of its tensors in a block. */
static Tensor whole_matrix(const char *base, const Param *p, int unit)
{
    static const struct {
        const char *param, *part[3];
    } rows[] = {
        { "qkv", { "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj" } },
        { "out", { "self_attn.o_proj" } },
        { "gate_up", { "mlp.gate_proj", "mlp.up_proj" } },
        { "down", { "mlp.down_proj" } },
    };
    const Tensor w = make_f32(p->rows, p->cols);
    size_t at = 0;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3 && strcmp(rows[i].param, p->name) == 0 && rows[i].part[k]; k++) {
            SafeFile *f = safetensors_open(text("%s/model.safetensors", base));
            const char *name =
                lasting(text("model.layers.%d.%s.weight", unit - 1, rows[i].part[k]));
            const size_t n = safetensors_find(f, name)->shape[0] * (size_t)p->cols;
            device_put((float *)w.data + at, values_in(f->path, name, n), n * sizeof(float));
            at += n;
            safetensors_close(f);
        }
    assert_int_equal(at, tensor_numel(w));
    return w;
}

/* The base equals the result of quantizing whole matrices. */
static void check_stored(const Run *r, const char *base)
{
    Run other;
    open_adapted_to(&other, QWEN3, base, all_modules, r->config.model.lora.base,
                    r->config.model.lora.plain_nf4, "bf16");
    for (int u = 1; u <= r->config.model.n_layers; u++) {
        const Shard *s = &r->store.shard[u], *t = &other.store.shard[u];
        const size_t bytes = s->slice[QUANTIZED].count;
        for (int i = 0; i < r->store.shape[u].num_params; i++) {
            const Param *p = &r->store.shape[u].param[i];
            assert_true((p->region == QUANTIZED) == p->is_operand);
            if (p->region == QUANTIZED)
                quantized_store(&other.store, u, p, whole_matrix(base, p, u));
        }
        char *found = keep(bytes), *expected = keep(bytes);
        device_get(found, s->slice[QUANTIZED].stored.data, bytes);
        device_get(expected, t->slice[QUANTIZED].stored.data, bytes);
        check_same_bytes("base", found, expected, bytes);
        assert_true(bytes >= (size_t)64 * 96 * 3 / 2);
    }
    close_run(&other);
}

TEST(test_stored_base)
{
    static const char *const dtypes[] = { "F32", "BF16", "F16" };
    const char *base = save_base(QWEN3);
    for (BaseFormat stored = BASE_E4M3; stored <= BASE_NF4; stored++)
        for (int i = 0; i < 3; i++) {
            const char *folder = convert_base(base, dtypes[i]);
            Run r, again;
            open_adapted(&r, QWEN3, folder, all_modules, stored, "bf16");
            load(&r, folder);
            check_stored(&r, folder);
            save(&r, LAST_STEP);
            open_adapted(&again, QWEN3, folder, all_modules, stored, "bf16");
            load(&again, step_folder(&r, LAST_STEP));
            check_stored(&again, folder);
            close_run(&r);
            close_run(&again);
        }
    release();
}

/* For E5M2 operands, E4M3 codes are rounded again to two mantissa bits: an error of a sixteenth or
 * of half the smallest code, and then of an eighth. Backward reads the same values as forward. */
TEST(test_other_operand)
{
    const char *base = save_base(LLAMA);
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_E4M3, "fp8");
    device_free(r.memory);
    r.config.recipe.operand.dtype = E5M2;
    place(&r);
    load(&r, base);
    for (int i = 0; i < r.store.shape[1].num_params; i++) {
        const Param *p = &r.store.shape[1].param[i];
        if (p->region != QUANTIZED)
            continue;
        const double *x = values(whole_matrix(base, p, 1));
        Tensor t = r.store.unit[1].tensor[p->id], transpose = t;
        transpose.data = t.data_t;
        transpose.rows = t.cols, transpose.cols = t.rows;
        t.data_t = transpose.data_t = NULL;
        fsdp_gather(&r.store, 1, FOR_FORWARD);
        fsdp_acquire(&r.store, 1);
        const double *w = values(t);
        fsdp_gather(&r.store, 1, FOR_BACKWARD);
        fsdp_acquire(&r.store, 1);
        const double *wt = values(transpose);
        double most = 0;
        for (int n = 0; n < t.rows * t.cols; n++)
            most = fmax(most, fabs(x[n]));
        for (int n = 0; n < t.rows * t.cols; n++) {
            const double once = fmax(fabs(x[n]) / 16, 0x1p-10 * most / 448),
                         bound = once + (fabs(x[n]) + once) / 8;
            const double back = wt[n % t.cols * t.rows + n / t.cols];
            if (!(fabs(w[n] - x[n]) <= bound && w[n] == back))
                fail_msg("%s[%d]: %g, transposed %g, in the file %g", p->name, n, w[n], back, x[n]);
        }
    }
    close_run(&r);
    release();
}

/* ---- a base that bitsandbytes saved ---------------------------------------------------------- */

static void add_bytes(SafeFile *f, const char *name, const char *suffix, const char *dtype,
                      size_t n)
{
    const size_t shape[] = { n, 1 };
    safetensors_add(f, text("%s%s", name, suffix), dtype, *suffix ? 1 : 2, shape);
}

static void put_bytes(SafeFile *f, const char *name, const char *suffix, const void *bytes)
{
    const SafeTensor *t = safetensors_find(f, text("%s%s", name, suffix));
    assert_true(safetensors_write(f, t, 0, bytes, t->end - t->begin));
}

static bool is_quantized(const char *name)
{
    return strstr(name, "_proj.weight") != NULL;
}

static char *state_of_tensor(const SafeTensor *t, float offset)
{
    return lasting(text(
        "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float32\", \"shape\": [%zu, "
        "%zu], "
        "\"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": %-20.9g}",
        t->shape[0], t->shape[1], (double)offset));
}

static char *plain_state(const SafeTensor *t)
{
    return lasting(text("{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float32\", "
                        "\"shape\": [%zu, %zu]}",
                        t->shape[0], t->shape[1]));
}

/* The same without double quantization. */
static void put_plain(SafeFile *to, const SafeTensor *t, const float *x, size_t n)
{
    const size_t groups = nf4_groups(n, 1);
    Nf4PlainGroup *on_device = guarded(groups * sizeof *on_device), *g = keep(groups * sizeof *g);
    Tensor w = make_f32((int)t->shape[0], (int)t->shape[1]);
    uint8_t *codes = keep(groups * sizeof g->codes);
    float *absmax = keep(groups * sizeof g->absmax);
    put(w, x);
    nf4_quantize_plain(on_device, w, 0, groups);
    device_get(g, on_device, groups * sizeof *g);
    for (size_t i = 0; i < groups; i++) {
        memcpy(codes + i * sizeof g->codes, g[i].codes, sizeof g->codes);
        memcpy(absmax + i * NF4_GROUP / NF4_BLOCK, g[i].absmax, sizeof g->absmax);
    }
    put_bytes(to, t->name, "", codes);
    put_bytes(to, t->name, ".absmax", absmax);
    put_bytes(to, t->name, ".quant_map", nf4_map());
    put_bytes(to, t->name, ".quant_state.bitsandbytes__nf4", plain_state(t));
}

/* All tensors stored with the codes of a tensor of n elements. */
static void put_quantized(SafeFile *to, const SafeTensor *t, const float *x, size_t n)
{
    const size_t groups = nf4_groups(n, 1);
    Nf4Group *on_device = guarded(groups * sizeof *on_device), *g = keep(groups * sizeof *g);
    float *offset = guarded(sizeof *offset), mean, *nested = keep(groups * sizeof *nested);
    Tensor w = make_f32((int)t->shape[0], (int)t->shape[1]);
    uint8_t *codes = keep(groups * sizeof g->codes), *absmax = keep(groups * sizeof g->absmax);
    put(w, x);
    nf4_offset(offset, w);
    nf4_quantize(on_device, w, offset, 0, groups);
    device_get(g, on_device, groups * sizeof *g);
    device_get(&mean, offset, sizeof mean);
    for (size_t i = 0; i < groups; i++) {
        memcpy(codes + i * sizeof g->codes, g[i].codes, sizeof g->codes);
        memcpy(absmax + i * sizeof g->absmax, g[i].absmax, sizeof g->absmax);
        nested[i] = g[i].nested;
    }
    put_bytes(to, t->name, "", codes);
    put_bytes(to, t->name, ".absmax", absmax);
    put_bytes(to, t->name, ".nested_absmax", nested);
    put_bytes(to, t->name, ".quant_map", nf4_map());
    put_bytes(to, t->name, ".nested_quant_map", dynamic8_map(DYNAMIC8));
    put_bytes(to, t->name, ".quant_state.bitsandbytes__nf4", state_of_tensor(t, mean));
}

/* plain: without double quantization. */
static const char *quantize_base(const char *base, bool plain)
{
    const char *folder =
        lasting(text("%s/%s%d", root, plain ? "plain" : "quantized", num_folders++));
    shell(text("mkdir %s && cp %s/config.json %s", folder, base, folder));
    SafeFile *from = safetensors_open(text("%s/model.safetensors", base));
    SafeFile *to = safetensors_new(text("%s/model.safetensors", folder));
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        const size_t n = t->shape[0] * t->shape[1];
        if (!is_quantized(t->name)) {
            safetensors_add(to, t->name, "F32", t->dims, t->shape);
            continue;
        }
        add_bytes(to, t->name, "", "U8", n / 2);
        add_bytes(to, t->name, ".absmax", plain ? "F32" : "U8", n / NF4_BLOCK);
        add_bytes(to, t->name, ".quant_map", "F32", 16);
        add_bytes(to, t->name, ".quant_state.bitsandbytes__nf4", "U8",
                  strlen(plain ? plain_state(t) : state_of_tensor(t, 0)));
        if (plain)
            continue;
        add_bytes(to, t->name, ".nested_absmax", "F32", nf4_groups(n, 1));
        add_bytes(to, t->name, ".nested_quant_map", "F32", 256);
    }
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        const size_t n = t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
        const float *x = values_in(from->path, t->name, n);
        if (is_quantized(t->name))
            (plain ? put_plain : put_quantized)(to, t, x, n);
        else
            put_bytes(to, t->name, "", x);
    }
    safetensors_close(from);
    safetensors_close(to);
    return folder;
}

/* In the same format, the base equals the 16-bit folder, quantized when it is loaded. In another
 * format, it is quantized from the decoded values. */
TEST(test_quantized_base)
{
    const char *base = save_base(QWEN3), *folder = quantize_base(base, false);
    Run r;
    for (int plain = 0; plain < 2; plain++) {
        const char *from = plain ? quantize_base(base, true) : folder;
        open_adapted_to(&r, QWEN3, from, all_modules, BASE_NF4, plain, "bf16");
        load(&r, from);
        check_stored(&r, base);
        close_run(&r);
        open_adapted_to(&r, QWEN3, from, all_modules, BASE_NF4, !plain, "bf16");
        if (on_cpu())
            DIES("config.json must say so: \"quantization_config\": {\"load_in_4bit\": true, "
                 "\"bnb_4bit_use_double_quant\": ",
                 load(&r, from));
        close_run(&r);
        const char *values = lasting(text("%s/values%d", root, plain));
        export_folder(from, NULL, values, "F32", CHECKPOINT_FILE_BYTES);
        open_adapted(&r, QWEN3, from, all_modules, BASE_E4M3, "bf16");
        load(&r, from);
        check_stored(&r, values);
        close_run(&r);
    }
    release();
}

/* ---- parts of tensor ranks ------------------------------------------------------------------- */

enum { TENSOR_RANKS = 2 };

/* place: position among these ranks; -1: a single rank that has everything. plain: NF4 without
 * double quantization. */
static void open_part(Run *r, const ModelConfig *m, const char *folder, BaseFormat stored,
                      bool plain, int place)
{
    *r = (Run){ 0 };
    model_config(&r->config, m, stored == BASE_AS_FROZEN ? "bf16" : "fp8", 1);
    Lora *l = &r->config.model.lora;
    *l = (Lora){
        .rank = RANK, .alpha = RANK, .base = stored, .plain_nf4 = plain, .base_path = (char *)folder
    };
    memcpy(l->target, all_modules, sizeof l->target);
    place_choice(r, place < 0
                        ? (ShardChoice){ 1 }
                        : (ShardChoice){ 1, .tensor_ranks = TENSOR_RANKS, .tensor_rank = place });
    load(r, folder);
}

/* Every operand of this rank has the numbers and the scale of the same elements of the whole
 * matrix. */
static void check_part(Run *whole, Run *part)
{
    for (int u = 1; u <= whole->config.model.n_layers; u++) {
        fsdp_gather(&whole->store, u, FOR_FORWARD);
        fsdp_gather(&part->store, u, FOR_FORWARD);
        fsdp_acquire(&whole->store, u);
        fsdp_acquire(&part->store, u);
        for (int i = 0; i < part->store.shape[u].num_params; i++) {
            const Param *p = &part->store.shape[u].param[i];
            Tensor w = part->store.unit[u].tensor[p->id], all = whole->store.unit[u].tensor[p->id];
            if (!p->is_operand)
                continue;
            w.data_t = all.data_t = NULL;
            const double *found = values(w), *expected = values(all);
            assert_int_equal(tensor_numel(all), TENSOR_RANKS * tensor_numel(w));
            for (size_t k = 0, at; k < tensor_numel(w); k++) {
                param_run(p, k, &at);
                if (found[k] != expected[at])
                    fail_msg("unit %d, place %d, %s[%zu]: %.9g, in the whole %.9g", u,
                             p->tensor_rank, p->name, k, found[k], expected[at]);
            }
        }
    }
}

/* The matrices of tensor ranks are slices of the matrices of one rank, in every format, from
 * folders of values and of codes. A group of double quantization is on both ranks; q, k and v have
 * no whole groups. */
TEST(test_tensor_parts)
{
    ModelConfig m = architecture(LLAMA_GQA);
    m.head_dim = 32;
    m.mlp_width = 512;
    Run r, part;
    /* without the checksums of all ranks */
    const char *base = save_model(&m), *floats = convert_base(base, "F32");
    const char *quantized = quantize_base(base, false), *plain = quantize_base(base, true);
    const struct {
        const char *folder;
        BaseFormat stored;
        bool plain;
    } list[] = {
        { floats, BASE_E4M3 },     { floats, BASE_NF4 },          { quantized, BASE_NF4 },
        { plain, BASE_NF4, true }, { quantized, BASE_AS_FROZEN }, { plain, BASE_E4M3 },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        open_part(&r, &m, list[i].folder, list[i].stored, list[i].plain, -1);
        for (int place = 0; place < TENSOR_RANKS; place++) {
            open_part(&part, &m, list[i].folder, list[i].stored, list[i].plain, place);
            check_part(&r, &part);
            close_run(&part);
        }
        close_run(&r);
    }
    release();
}

/* ---- damage ---------------------------------------------------------------------------------- */

/* A base in E4M3 or NF4 is checked when it is loaded, because its values are lost afterwards. */
TEST(test_refused_base)
{
    static const float nan[] = { NAN };
    needs_fork();
    const char *base = save_base(QWEN3), *broken = convert_base(base, "F32"),
               *name = "model.layers.1.self_attn.v_proj.weight";
    Run r;
    open_adapted(&r, QWEN3, base, all_modules, BASE_E4M3, "bf16");
    SafeFile *f = safetensors_open(text("%s/model.safetensors", broken));
    FILE *file = fopen(f->path, "r+");
    assert_int_equal(fseek(file, (long)(f->data + safetensors_find(f, name)->begin + 8), SEEK_SET),
                     0);
    fwrite(nan, sizeof nan, 1, file);
    fclose(file);
    DIES(text("%s: tensor %s holds a value that is not finite", f->path, name), load(&r, broken));
    safetensors_close(f);
    damage(text("%s/model.safetensors", base), name);
    DIES(text("tensor %s has the checksum", name), load(&r, base));
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
