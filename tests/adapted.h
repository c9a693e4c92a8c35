/* Shared by tests of adapter folders: runs with adapters on a base that another run has saved,
 * without activations. */
#pragma once
#include "model/checkpoint/convert.h"
#include "model/checkpoint/safetensors.h"
#include "model/formats/adapter.h"
#include "tests/saved.h"

enum { RANK = 3, LAST_STEP = 7 };

static const bool all_modules[NUM_LORA_MODULES] = { true, true, true, true, true, true, true };

/* Saves a model with random weights in F32; returns its folder. */
static inline const char *save_model(const ModelConfig *m)
{
    Run r;
    const Format f32 = { F32, 0 };
    open_run(&r, m, f32, f32, f32);
    store_init(&r.store, &r.config.model, 3);
    save(&r, 1);
    const char *folder = lasting(step_folder(&r, 1));
    close_run(&r);
    return folder;
}

static inline const char *save_base(SmallModel a)
{
    const ModelConfig m = architecture(a);
    return save_model(&m);
}

/* Each tensor of an expert's adapter has a multiple of 256 elements. */
static inline int adapter_rank(SmallModel a)
{
    return a < OLMOE ? RANK : 16;
}

/* Opens a run with adapters of scale 2 on the model in the folder `base`. plain: NF4 without double
 * quantization. */
static inline void open_adapted_to(Run *r, SmallModel a, const char *base, const bool *target,
                                   BaseFormat stored, bool plain, const char *recipe)
{
    ModelConfig m = architecture(a);
    *r = (Run){ 0 };
    model_config(&r->config, &m, recipe, 1);
    Lora *l = &r->config.model.lora;
    *l = (Lora){ .rank = adapter_rank(a),
                 .alpha = 2 * adapter_rank(a),
                 .base = stored,
                 .plain_nf4 = plain,
                 .base_path = (char *)base };
    memcpy(l->target, target, sizeof l->target);
    place(r);
}

static inline void open_adapted(Run *r, SmallModel a, const char *base, const bool *target,
                                BaseFormat stored, const char *recipe)
{
    open_adapted_to(r, a, base, target, stored, false, recipe);
}

/* ---- tensors by PEFT's names and shapes, independent of the code under test ------------------ */

static const struct {
    const char *name;
    const char *group;
} module_rows[NUM_LORA_MODULES] = {
    { "q_proj", "self_attn" }, { "k_proj", "self_attn" }, { "v_proj", "self_attn" },
    { "o_proj", "self_attn" }, { "gate_proj", "mlp" },    { "up_proj", "mlp" },
    { "down_proj", "mlp" },
};

/* A matrix of a block: module i, or, from LORA_GATE on, a module of expert (i - LORA_GATE) / 3. */
typedef struct {
    int module, out, in;
    const char *path; /* without ".weight"; valid until release() */
} Adapted;

static inline int num_matrices(const ModelConfig *m, int layer)
{
    const int experts = layer_experts(m, layer);
    return LORA_GATE + (NUM_LORA_MODULES - LORA_GATE) * (experts > 0 ? experts : 1);
}

static inline Adapted matrix_of(const ModelConfig *m, int layer, int i)
{
    const int C = m->d_model, q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim,
              F = layer_mlp_width(m, layer);
    const int shape[NUM_LORA_MODULES][2] = { { q, C }, { kv, C }, { kv, C }, { C, q },
                                             { F, C }, { F, C },  { C, F } };
    const int modules = NUM_LORA_MODULES - LORA_GATE,
              module = i < LORA_GATE ? i : LORA_GATE + (i - LORA_GATE) % modules;
    const char *expert = i >= LORA_GATE && layer_experts(m, layer) > 0
                             ? lasting(text("experts.%d.", (i - LORA_GATE) / modules))
                             : "";
    return (Adapted){ module, shape[module][0], shape[module][1],
                      lasting(text("model.layers.%d.%s.%s%s", layer, module_rows[module].group,
                                   expert, module_rows[module].name)) };
}

static inline const char *tensor_of(const char *path, char matrix)
{
    return text("base_model.model.%s.lora_%c.weight", path, matrix);
}

/* of a model without experts */
static inline const char *adapter_name(int layer, int module, char matrix)
{
    return text("base_model.model.model.layers.%d.%s.%s.lora_%c.weight", layer,
                module_rows[module].group, module_rows[module].name, matrix);
}

/* Returns the values of a tensor of a file, converted to F32, valid until release(). */
static inline float *values_in(const char *path, const char *name, size_t n)
{
    SafeFile *f = safetensors_open(path);
    const SafeTensor *t = safetensors_find(f, name);
    if (!t)
        fail_msg("%s has no %s", path, name);
    assert_int_equal(t->end - t->begin, n * safetensors_dtype_size(t->dtype));
    void *raw = keep(t->end - t->begin);
    float *x = keep(n * sizeof *x);
    safetensors_read(f, raw, t, 0, t->end - t->begin);
    convert_decode(x, t->dtype, raw, n);
    safetensors_close(f);
    return x;
}

/* Rewrites an adapter_model.safetensors in `dtype`, with names that end with `ending` instead of
 * ".weight". */
static inline void rewrite(const char *path, const char *dtype, const char *ending)
{
    path = lasting(path);
    SafeFile *from = safetensors_open(path), *to = safetensors_new(text("%s.new", path));
    char **name = keep((size_t)from->count * sizeof *name);
    for (int i = 0; i < from->count; i++) {
        const int length = (int)(strlen(from->tensor[i].name) - strlen(".weight"));
        name[i] = lasting(text("%.*s%s", length, from->tensor[i].name, ending));
        safetensors_add(to, name[i], dtype, 2, from->tensor[i].shape);
    }
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i], *u = safetensors_find(to, name[i]);
        const size_t n = t->shape[0] * t->shape[1];
        float *x = values_in(path, t->name, n);
        convert_encode(x, dtype, x, n);
        assert_true(safetensors_write(to, u, 0, x, n * safetensors_dtype_size(dtype)));
    }
    safetensors_close(from);
    safetensors_close(to);
    shell(text("mv %s.new %s", path, path));
}

/* ---- folders made from others ---------------------------------------------------------------- */

/* Makes a folder with the base's tensors in `dtype`, except for one tensor in F32: so the tensors
 * that form one matrix differ in type. */
static inline const char *convert_base(const char *base, const char *dtype)
{
    const char *folder = lasting(text("%s/base-%s-%d", root, dtype, num_folders++));
    shell(text("mkdir %s && cp %s/config.json %s", folder, base, folder));
    SafeFile *from = safetensors_open(text("%s/model.safetensors", base));
    SafeFile *to = safetensors_new(text("%s/model.safetensors", folder));
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        safetensors_add(to, t->name, strstr(t->name, "layers.1.self_attn.k_proj") ? "F32" : dtype,
                        t->dims, t->shape);
    }
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < to->count; i++) {
        const SafeTensor *t = &to->tensor[i];
        const size_t n = t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
        float *x = values_in(from->path, t->name, n);
        convert_encode(x, t->dtype, x, n);
        assert_true(safetensors_write(to, t, 0, x, t->end - t->begin));
    }
    safetensors_close(from);
    safetensors_close(to);
    return folder;
}

/* Changes one byte of a tensor in its file. */
static inline void damage(const char *path, const char *tensor)
{
    SafeFile *f = safetensors_open(path);
    const SafeTensor *t = safetensors_find(f, tensor);
    assert_non_null(t);
    shell(text("printf '\\001' | dd of=%s bs=1 seek=%zu conv=notrunc 2>/dev/null", path,
               f->data + t->begin));
    safetensors_close(f);
}
