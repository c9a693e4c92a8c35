/* Items of a parameter with a count are initialized, rounded, updated, saved, loaded and exported
 * like separate parameters, whichever ranks store them. On 1, 2 and 4 ranks. test_units.c tests
 * their names. */
#include "tests/test.h"
#include "tests/expert_unit.h"
#include "tests/exported.h"
#include "tests/ranks.h"
#include "tests/saved.h"

#include "kernels/kernels.h"
#include "model/store/fsdp.h"
#include "model/store/param_store_sizes.h"
#include "model/update/muon_step.h"
#include "model/update/update.h"

enum { SEED = 5 };

/* ALONE_: a copy on each rank. SHARDED: over all ranks. CUT: two tensor ranks cut each layer. */
typedef enum { ALONE_, SHARDED, CUT } Place;

static void plan_items(Run *r, const ModelConfig *m, const char *recipe, Place place)
{
    const int cut = place == CUT ? 2 : 1, shards = place == ALONE_ ? 1 : comm_size() / cut;
    divide((Strategy){ .shard_ranks = shards, .tensor_ranks = cut });
    *r = (Run){ 0 };
    model_config(&r->config, m, recipe, 1);
    r->config.save_folder = shared;
}

static ShardChoice choice(void)
{
    return (ShardChoice){ .shards = comm_group_size(RANKS_SHARD),
                          .rank = comm_group_rank(RANKS_SHARD),
                          .tensor_ranks = comm_group_size(RANKS_TENSOR),
                          .tensor_rank = comm_group_rank(RANKS_TENSOR) };
}

static void open_items(Run *r, const ModelConfig *m, const char *recipe, Place place)
{
    plan_items(r, m, recipe, place);
    place_part(r, choice());
    store_init(&r->store, &r->config.model, SEED);
}

/* ---- operands -------------------------------------------------------------------------------- */

/* Returns the values of an item from the shards of all ranks. */
static float *master_of(const Run *r, const Param *p)
{
    const Shard *s = &r->store.shard[LAYER];
    size_t first, n = shard_part(s, p, &first);
    double *x = keep(param_numel(p) * sizeof *x);
    float *y = keep(param_numel(p) * sizeof *y);
    if (n)
        memcpy(x + first, values(shard_weights(s, p, first, n)), n * sizeof *x);
    comm_sum_over(x, (int)param_numel(p), RANKS_SHARD);
    for (size_t i = 0; i < param_numel(p); i++)
        y[i] = (float)x[i];
    return y;
}

/* An operand in host memory. */
typedef struct {
    char *codes, *transposed;
    float scale;
} Operand;

static void fetch(Operand *o, Tensor t, bool transposed)
{
    char **to = transposed ? &o->transposed : &o->codes;
    *to = keep(tensor_numel(t));
    device_get(*to, transposed ? t.data_t : t.data, tensor_numel(t));
    device_get(&o->scale, t.scale, sizeof o->scale);
}

/* Returns the item, rounded alone, in other memory: in its stored format or, for a base, from its
 * initial weights. */
static Operand rounded_alone(const Run *r, const Param *p, Format f)
{
    const bool base = p->region == QUANTIZED;
    Operand o;
    Tensor t = make(f, p->rows, p->cols),
           x = make(base ? (Format){ BF16, 0, false } : r->store.recipe.master, 1,
                    (int)param_numel(p));
    t.data_t = guarded(param_numel(p));
    if (base)
        init_normal(x, p->init_std, 0, SEED, r->store.shape[LAYER].first + p->number);
    else
        put(x, master_of(r, p));
    x.rows = p->rows, x.cols = p->cols;
    quantize(t, x);
    fetch(&o, t, false);
    fetch(&o, t, true);
    return o;
}

/* Copies the operands of a pass. A layer has all items as one tensor. */
static void take_operands(Operand to[ITEMS], Run *r, bool transposed)
{
    fsdp_gather(&r->store, LAYER, transposed ? FOR_BACKWARD : FOR_FORWARD);
    const Tensor all = fsdp_acquire(&r->store, LAYER)->gate_up;
    for (int i = 0; i < ITEMS; i++) {
        const Param *p = &r->store.shape[LAYER].param[i];
        const size_t first = (size_t)i * param_numel(p);
        Tensor t = { .format = all.format,
                     .rows = p->rows,
                     .cols = p->cols,
                     .data = (char *)all.data + first,
                     .data_t = (char *)all.data_t + first,
                     .scale = (float *)all.scale + SCALE_FLOATS * i };
        assert_int_equal(all.rows, ITEMS * p->rows);
        fetch(&to[i], t, transposed);
    }
    fsdp_release(&r->store, LAYER);
}

static void check_operands(const char *what, const Operand *found, const Operand *expected,
                           size_t n)
{
    check_same_bytes(what, found->codes, expected->codes, n);
    check_same_bytes(what, found->transposed, expected->transposed, n);
    assert_true(found->scale == expected->scale);
}

/* Blocks have separate scales, next to the scales of the expert layer. */
static void check_quantized_scales(const ParamStore *store, bool are_there)
{
    int count = 0;
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            if (p->region == QUANTIZED)
                assert_ptr_equal(quantized_scale(store, p),
                                 (float *)store->quantized_scales.data + SCALE_FLOATS * count++);
        }
    assert_int_equal(count, are_there ? ITEMS + 2 * NUM_LINEARS : 0);
}

/* Runs on one rank, whose values are known, and on all ranks. Scales differ because the largest of
 * random weights differ. */
TEST(test_operands)
{
    static const BaseFormat bases[] = { BASE_AS_FROZEN, BASE_E4M3, BASE_NF4 };
    for (int b = 0; b < 3; b++) {
        const ModelConfig m = expert_model(bases[b]);
        Operand expected[ITEMS], found[ITEMS];
        for (Place place = ALONE_; place <= SHARDED; place++) {
            Run r;
            open_items(&r, &m, "coat", place);
            check_quantized_scales(&r.store, bases[b] != BASE_AS_FROZEN);
            take_operands(found, &r, false);
            take_operands(found, &r, true);
            for (int i = 0; i < ITEMS; i++) {
                const Param *p = &r.store.shape[LAYER].param[i];
                if (place == ALONE_)
                    expected[i] = bases[b] == BASE_NF4
                                      ? found[i]
                                      : rounded_alone(&r, p, r.store.recipe.operand);
                check_operands(text("base %d, place %d, item %d", b, place, i), &found[i],
                               &expected[i], param_numel(p));
                for (int k = 0; k < i; k++)
                    assert_true(found[k].scale != found[i].scale);
            }
            close_run(&r);
        }
        release();
    }
}

/* ---- training -------------------------------------------------------------------------------- */

/* Runs a micro-batch with given gradients of all units: rank 0 has the gradients, the other ranks
 * add 0. The gradients are multiples of 1/32, so that sums of two are exact in BF16. */
static void add_gradients(ParamStore *store, int number, bool last)
{
    for (int u = store->num_units - 1; u >= 0; u--) {
        UnitTensors *dw = fsdp_grads(store, u);
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            const Tensor t = param_tensor(dw, p);
            const int rows = p->has_padding ? store->shape[u].config->vocab_size : p->rows;
            double *old = t.empty ? NULL : values(t);
            float *x = keep(param_numel(p) * sizeof *x);
            for (size_t k = 0; k < (size_t)rows * (size_t)p->cols && comm_rank() == 0; k++)
                x[k] = roundf(32 * test_uniform((uint64_t)number,
                                                store->shape[u].first + p->number + k)) /
                       32;
            for (size_t k = 0; old && k < param_numel(p); k++)
                x[k] = (float)(x[k] + old[k]);
            put(t, x);
        }
        fsdp_reduce(store, u, last);
    }
}

static void step_with_gradients(Run *r, int step)
{
    ParamStore *store = &r->store;
    fsdp_empty_grads(store);
    add_gradients(store, 2 * step, false);
    add_gradients(store, 2 * step + 1, true);
    fsdp_wait_grads(store);
    optimizer_step(store, &r->config, step, 1e-2, 1);
    store_updated(store);
}

/* How weights and states are stored, and updated. */
static const struct {
    const char *recipe, *optimizer;
    bool on_host;
} ways[] = {
    { "f32", "adamw" },
    { "coat", "adamw", true },
    { "bf16", "adamw8bit" },
    { "bf16", "muon" },
};

static void open_way(Run *r, const ModelConfig *m, int way, Place place)
{
    plan_items(r, m, ways[way].recipe, place);
    r->config.optimizer.name = (char *)ways[way].optimizer;
    ShardChoice c = choice();
    for (int h = 0; h < NUM_HOSTED && ways[way].on_host; h++)
        c.on_host[h] = unit_count(m);
    place_part(r, c);
    ParamStore *store = &r->store;
    const size_t part = store->update_bucket_bytes = store_update_bucket_bytes(store),
                 muon = muon_bytes(store, &r->config);
    store->staging_bytes = UPDATE_BUFFERS * part > muon ? UPDATE_BUFFERS * part : muon;
    store->staging = guarded(store->staging_bytes);
    assert_true(store_on_host(store, LAYER, HOST_MASTER) == ways[way].on_host);
    store_init(store, &r->config.model, SEED);
}

/* Two steps have the same bits on all ranks as on one rank, with every optimizer, and with weights
 * on the host. */
TEST(test_steps)
{
    const ModelConfig m = expert_model(BASE_AS_FROZEN);
    for (size_t way = 0; way < sizeof ways / sizeof ways[0]; way++) {
        float *expected[ITEMS];
        for (Place place = ALONE_; place <= SHARDED; place++) {
            Run r;
            open_way(&r, &m, (int)way, place);
            for (int step = 1; step <= 2; step++)
                step_with_gradients(&r, step);
            for (int i = 0; i < ITEMS; i++) {
                const Param *p = &r.store.shape[LAYER].param[i];
                float *x = master_of(&r, p);
                if (place == SHARDED)
                    check_same_bytes(
                        text("%s, %s, item %d", ways[way].recipe, ways[way].optimizer, i), x,
                        expected[i], param_numel(p) * sizeof *x);
                else
                    expected[i] = x;
            }
            close_run(&r);
        }
        release();
    }
}

/* ---- files ----------------------------------------------------------------------------------- */

static void check_file(const Run *r, const char *folder)
{
    const int F = r->config.model.mlp_width, C = r->config.model.d_model;
    for (int i = 0; i < ITEMS; i++) {
        const float *x = master_of(r, &r->store.shape[LAYER].param[i]);
        if (comm_rank() != 0)
            continue;
        SafeFile *f = safetensors_open(text("%s/model.safetensors", folder));
        for (int k = 0; k < 2; k++) {
            const size_t n = (size_t)F * (size_t)C;
            const SafeTensor *t = safetensors_find(
                f, text("model.layers.0.experts.%d.%s.weight", i, k ? "up_proj" : "gate_proj"));
            float *y = keep(n * sizeof *y);
            assert_true(t && t->dims == 2 && t->shape[0] == (size_t)F && t->shape[1] == (size_t)C);
            safetensors_read(f, y, t, 0, n * sizeof *y);
            check_same_bytes(t->name, y, x + (size_t)k * n, n * sizeof *y);
        }
        safetensors_close(f);
    }
}

enum { STORED = 4 };

/* Copies of what this rank stores of a unit; the rank may store nothing. */
typedef struct {
    char *bytes[STORED];
    size_t size[STORED];
} Stored;

static Stored *stored_bytes(const ParamStore *store)
{
    Stored *to = keep((size_t)store->num_units * sizeof *to);
    for (int u = 0; u < store->num_units; u++) {
        const Shard *s = &store->shard[u];
        const Tensor t[STORED] = { s->slice[TRAINED].stored, s->state[0], s->state[1],
                                   s->slice[QUANTIZED].stored };
        for (int i = 0; i < STORED; i++) {
            to[u].size[i] = i < 3 ? tensor_bytes(t[i]) : s->slice[QUANTIZED].count;
            to[u].bytes[i] = keep(to[u].size[i]);
            if (to[u].size[i] > 0)
                device_get(to[u].bytes[i], t[i].data, to[u].size[i]);
        }
    }
    return to;
}

static void check_same_stored(const ParamStore *store, const Stored *expected)
{
    const Stored *found = stored_bytes(store);
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < STORED; i++) {
            assert_int_equal(found[u].size[i], expected[u].size[i]);
            check_same_bytes(text("unit %d, tensor %d", u, i), found[u].bytes[i],
                             expected[u].bytes[i], expected[u].size[i]);
        }
}

/* NOTE: on a GPU, only one store at a time can have gathered weights (comm_alloc), so each store is
 * closed before the next is opened. */
TEST(test_saved)
{
    const ModelConfig m = expert_model(BASE_AS_FROZEN);
    const char *folder = lasting(text("%s/step1", shared));
    Run r;
    open_items(&r, &m, "f32", SHARDED);
    step_with_gradients(&r, 1);
    save(&r, 1);
    check_file(&r, folder);
    const Stored *saved = stored_bytes(&r.store);
    float *x[ITEMS];
    for (int i = 0; i < ITEMS; i++)
        x[i] = master_of(&r, &r.store.shape[LAYER].param[i]);
    close_run(&r);
    open_items(&r, &m, "f32", SHARDED);
    load(&r, folder);
    check_same_stored(&r.store, saved);
    close_run(&r);
    open_items(&r, &m, "f32", ALONE_);
    load(&r, folder);
    for (int i = 0; i < ITEMS; i++) {
        const Param *p = &r.store.shape[LAYER].param[i];
        check_same_bytes("an item on one rank", master_of(&r, p), x[i],
                         param_numel(p) * sizeof(float));
    }
    close_run(&r);
    release();
}

/* Two tensor ranks compute each layer, and each has rows of gate and of up of every item. */
TEST(test_cut)
{
    const ModelConfig m = expert_model(BASE_AS_FROZEN);
    const char *folder = lasting(text("%s/step5", shared));
    Run r;
    if (comm_size() == 1)
        return;
    open_items(&r, &m, "f32", CUT);
    assert_int_equal(r.store.shape[LAYER].param[ITEMS - 1].rows, m.mlp_width);
    save(&r, 5);
    const Stored *saved = stored_bytes(&r.store);
    close_run(&r);
    open_items(&r, &m, "f32", CUT);
    store_init(&r.store, &m, SEED + 1);
    load(&r, folder);
    check_same_stored(&r.store, saved);
    close_run(&r);
    open_items(&r, &m, "f32", ALONE_);
    check_file(&r, folder);
    close_run(&r);
    release();
}

/* With the trainer's scales, one scale for gate and up of each item. Reading the codes gives the
 * numbers of their export. */
TEST(test_exported)
{
    const ModelConfig m = expert_model(BASE_AS_FROZEN);
    const char *folder = lasting(text("%s/step3", shared)),
               *coded = lasting(text("%s-fp8", folder)), *plain = lasting(text("%s-f32", folder));
    Run r;
    open_items(&r, &m, "coat", SHARDED);
    save(&r, 3);
    close_run(&r);
    if (comm_rank() == 0) {
        ExportOptions o = export_options_of(folder, NULL, coded, "fp8");
        o.scales = SCALES_TRAINED;
        export_to(&o, CHECKPOINT_FILE_BYTES);
        export_folder(coded, NULL, plain, "f32", CHECKPOINT_FILE_BYTES);
        SafeFile *f = safetensors_open(text("%s/model.safetensors", coded));
        float scale[ITEMS][2];
        for (int i = 0; i < ITEMS; i++) {
            for (int k = 0; k < 2; k++) {
                const SafeTensor *t =
                    safetensors_find(f, text("model.layers.0.experts.%d.%s.weight_scale", i,
                                             k ? "up_proj" : "gate_proj"));
                assert_true(t && t->end - t->begin == sizeof(float));
                safetensors_read(f, &scale[i][k], t, 0, sizeof(float));
            }
            assert_true(scale[i][0] == scale[i][1]);
            for (int k = 0; k < i; k++)
                assert_true(scale[i][0] != scale[k][0]);
        }
        safetensors_close(f);
    }
    comm_barrier();
    open_items(&r, &m, "f32", SHARDED);
    checkpoint_load(coded, &r.config, &r.store, NULL, false);
    const Stored *from_codes = stored_bytes(&r.store);
    close_run(&r);
    open_items(&r, &m, "f32", SHARDED);
    checkpoint_load(plain, &r.config, &r.store, NULL, false);
    check_same_stored(&r.store, from_codes);
    close_run(&r);
    release();
}

/* Adapters of items, on the checkpoint of test_saved. */
TEST(test_adapters)
{
    const char *base = lasting(text("%s/step1", shared));
    ModelConfig m = expert_model(BASE_E4M3);
    m.lora.base_path = (char *)base;
    Run r;
    open_items(&r, &m, "bf16", SHARDED);
    checkpoint_load(base, &r.config, &r.store, NULL, false);
    test_fill_adapters(&r.store, 3);
    save(&r, 7);
    const Stored *saved = stored_bytes(&r.store);
    close_run(&r);
    open_items(&r, &m, "bf16", SHARDED);
    load(&r, text("%s/step7", shared));
    check_same_stored(&r.store, saved);
    close_run(&r);
    release();
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    architecture_add(&with_experts);
    unit_kind_add(&expert_layer, 1);
    return finish_ranks(run_all_tests(make_shared, remove_shared));
}
