/* Loads optimizer states in other formats than those they were saved in. The result must equal
 * decoding and encoding by kernels/values.h over whole units, whatever part of them a rank has.
 * Weights that are stored as codes and scales must equal the folder's export to F32. Run with 1, 2
 * and 4 ranks. */
#include "kernels/values.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/stored_states.h"
#include "tests/test.h"
#include "tests/exported.h"
#include "tests/ranks.h"
#include "tests/saved.h"

/* The formats of m and v in the blocks. adamw8bit has F32 in other units, except in earlier
 * checkpoints (earlier8bit). */
typedef struct {
    const char *optimizer;
    Format m, v;
} Kept;

static void no_step(Tensor w, const Tensor *state, Tensor grad, const StepParams *p, uint64_t first)
{
    (void)w, (void)state, (void)grad, (void)p, (void)first;
}

static const Optimizer earlier = { "earlier8bit",
                                   2,
                                   { { "exp_avg", "m", OWN_FORMAT, { DYNAMIC8, 256 } },
                                     { "exp_avg_sq", "v", OWN_FORMAT, { UDYNAMIC8, 256 } } },
                                   .step = no_step };

static const Kept ways[] = {
    { "adamw", { F32, 0 }, { F32, 0 } },
    { "adamw", { E4M3, 128, .bf16_scale = true }, { BF16, 0 } },
    { "adamw", { E4M3, 128, true }, { E4M3, 128, true } },
    { "adamw", { E5M2, 64, .bf16_scale = true }, { E4M3, 32, true } },
    { "adamw8bit", { DYNAMIC8, 256 }, { UDYNAMIC8, 256 } },
    { "earlier8bit", { DYNAMIC8, 256 }, { UDYNAMIC8, 256 } },
};
enum { KINDS = sizeof ways / sizeof ways[0] };

/* Trains only two vectors of 64 elements. Their number of scales allows groups of 64, 128 and 256
 * elements. */
static char *norms[] = { "model.layers.*_layernorm.weight" };
static bool only_norms;

/* Opens this rank's shards, in groups of `shards` ranks. */
static void open_shards(Run *r, const ModelConfig *m, const Kept *k, int shards)
{
    comm_set_mesh(mesh_of_shards(comm_size(), shards));
    configure(r, m, k->optimizer, (Format){ F32, 0 }, k->m, k->v);
    r->config.save_folder = shared;
    r->config.trainable = norms;
    r->config.num_trainable = only_norms;
    place_part(r, (ShardChoice){ shards, comm_group_rank(RANKS_SHARD) });
    store_init(&r->store, m, 3);
}

/* Returns a tensor in host memory with the n values x, stored in format f. */
static Tensor stored(Format f, const float *x, size_t n)
{
    Tensor t = { .format = f,
                 .rows = 1,
                 .cols = (int)n,
                 .data = xcalloc(n, dtype_size(f.dtype)),
                 .scale = xcalloc(1, format_scale_bytes(f, n) + 1) };
    tensor_store(t, 0, x, n);
    return t;
}

static void free_stored(Tensor t)
{
    free(t.data);
    free(t.scale);
}

/* Returns a value for each element of the unit's tensors, over several decades. Values of v are not
 * negative; padding is 0. */
static float *values_of(const ParamStore *store, int unit, int state)
{
    Layout l = layout_make(NULL, LAYOUT_OPTIMIZER, store, 0);
    float *x = xcalloc(store->shape[unit].numel[TRAINED], sizeof *x);
    for (int i = 0; i < l.num_entries; i++)
        for (size_t e = 0;
             l.entry[i].kind == ENTRY_STATE && l.entry[i].unit == unit && e < l.entry[i].count;
             e++) {
            const size_t at = l.entry[i].first + e;
            const float u = test_uniform((uint64_t)(2 * unit + state), at);
            x[at] = (state ? u * u : u) * (float)pow(10, 2 * test_uniform(99, at));
        }
    layout_free(&l);
    return x;
}

static void fill_shards(const Run *s)
{
    for (int u = 0; u < s->store.num_units; u++)
        for (int i = 0; i < 2; i++) {
            const Shard *shard = &s->store.shard[u];
            const Slice own = shard->slice[TRAINED];
            const Tensor dst = shard->state[i];
            if (own.count == 0) /* a rank may have no part of a small unit */
                continue;
            float *x = values_of(&s->store, u, i);
            Tensor t = stored(dst.format, x + own.first, own.count);
            device_put(dst.data, t.data, own.count * dtype_size(dst.format.dtype));
            if (dst.scale)
                device_put(dst.scale, t.scale, format_scale_bytes(dst.format, own.count));
            free_stored(t);
            free(x);
        }
}

static Format format_in(const Kept *k, const Run *s, int unit, int state)
{
    const bool f32 = strcmp(k->optimizer, "adamw8bit") == 0 && !s->store.shape[unit].kind->is_layer;
    return f32 ? (Format){ F32, 0 } : state == 0 ? k->m : k->v;
}

/* The shard has the values of the whole unit after storing it as `from` and, if the formats differ,
 * in the shard's format. */
static void check_shard(const Run *s, int unit, int i, Format from)
{
    const Shard *shard = &s->store.shard[unit];
    const Slice own = shard->slice[TRAINED];
    const Format to = shard->state[i].format;
    const size_t n = s->store.shape[unit].numel[TRAINED];
    float *x = values_of(&s->store, unit, i), *y = xcalloc(own.count + 1, sizeof *y);
    Tensor there = stored(from, x, n);
    tensor_load(x, there, 0, n);
    Tensor whole = format_equal(from, to) ? stored((Format){ F32, 0 }, x, n) : stored(to, x, n),
           here = stored(to, y, own.count);
    device_get(here.data, shard->state[i].data, own.count * dtype_size(to.dtype));
    if (shard->state[i].scale)
        device_get(here.scale, shard->state[i].scale, format_scale_bytes(to, own.count));
    tensor_load(x, whole, 0, n);
    tensor_load(y, here, 0, own.count);
    for (size_t e = 0; e < own.count; e++)
        if (y[e] != x[own.first + e])
            fail_msg("%s -> %s: element %zu of unit %d, state %d: %a; expected %a",
                     format_name(from), format_name(to), own.first + e, unit, i, (double)y[e],
                     (double)x[own.first + e]);
    free_stored(there);
    free_stored(whole);
    free_stored(here);
    free(x);
    free(y);
}

static void save_states(const ModelConfig *m, const Kept *k)
{
    Run s;
    open_shards(&s, m, k, comm_size());
    fill_shards(&s);
    save(&s, 1);
    close_run(&s);
}

static void check_load(const ModelConfig *m, const Kept *from, const Kept *to, int shards)
{
    Run s;
    TrainState state = { 0 };
    open_shards(&s, m, to, shards);
    assert_true(checkpoint_load(text("%s/step1", shared), &s.config, &s.store, &state, true));
    assert_int_equal(s.store.counts.updates, SAVED_UPDATES);
    for (int u = 0; u < s.store.num_units; u++) {
        for (int i = 0; i < 2; i++) {
            assert_true(format_equal(s.store.shard[u].state[i].format, format_in(to, &s, u, i)));
            check_shard(&s, u, i, format_in(from, &s, u, i));
        }
    }
    close_run(&s);
}

TEST(test_all_pairs)
{
    const ModelConfig m = architecture(LLAMA_GQA);
    for (int from = 0; from < KINDS; from++) {
        save_states(&m, &ways[from]);
        for (int to = 0; to < KINDS; to++)
            check_load(&m, &ways[from], &ways[to], to % 2 ? 1 : comm_size());
    }
}

/* Even if the number of scales fits several formats, an unchanged run does not convert. */
TEST(test_few_groups)
{
    const ModelConfig m = architecture(LLAMA_GQA);
    only_norms = true;
    for (int i = 0; i < KINDS; i++) {
        Run s;
        save_states(&m, &ways[i]);
        open_shards(&s, &m, &ways[i], comm_size());
        SafeFile *file = safetensors_open(text("%s/step1/optimizer-00001.states", shared));
        StoredStates stored = stored_states(&s.store, &file, 1);
        assert_false(stored.converts);
        stored_states_free(&stored);
        safetensors_close(file);
        close_run(&s);
    }
}

/* Rank 0 exports the checkpoint `from` as `dtype`. All ranks get the path of the folder. */
static const char *export_one(const char *from, const char *dtype)
{
    const char *to = text("%s-%s", from, dtype);
    if (comm_rank() == 0)
        export_folder(from, NULL, to, dtype, CHECKPOINT_FILE_BYTES);
    comm_barrier();
    return to;
}

TEST(test_codes)
{
    static const char *const dtypes[] = { "fp8", "int8", "int4", "nf4" };
    ModelConfig m = architecture(LLAMA_GQA);
    m.d_model = 128, m.head_dim = 32, m.mlp_width = 128;
    only_norms = false;
    save_states(&m, &ways[0]);
    for (int i = 0; i < 4; i++) {
        const char *coded = export_one(text("%s/step1", shared), dtypes[i]),
                   *plain = export_one(coded, "f32");
        Run a, b;
        open_shards(&a, &m, &ways[0], comm_size());
        open_shards(&b, &m, &ways[0], comm_size());
        checkpoint_load(coded, &a.config, &a.store, NULL, false);
        checkpoint_load(plain, &b.config, &b.store, NULL, false);
        for (int u = 0; u < a.store.num_units; u++) {
            const Tensor one = a.store.shard[u].slice[TRAINED].stored,
                         other = b.store.shard[u].slice[TRAINED].stored;
            const size_t bytes =
                a.store.shard[u].slice[TRAINED].count * dtype_size(one.format.dtype);
            char *x = keep(bytes), *y = keep(bytes);
            device_get(x, one.data, bytes);
            device_get(y, other.data, bytes);
            check_same_bytes(dtypes[i], x, y, bytes);
        }
        close_run(&a);
        close_run(&b);
        release();
    }
}

int main(int argc, char **argv)
{
    comm_start(&argc, &argv);
    device_init(comm_local_rank());
    optimizer_add(&earlier);
    int failed = run_all_tests(make_shared, remove_shared);
    comm_finish();
    return failed;
}
