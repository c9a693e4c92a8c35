/* Tensors of a checkpoint between ranks and files. W ranks write, each its shard of every unit, and
 * any other division reads the same bits, in every format. A shard that several ranks hold is
 * written once. The files do not depend on W. The same holds for whole checkpoints that are saved
 * during training. Run with 1, 2 and 4 ranks. */
#include <jansson.h>

#include "kernels/runtime/comm_mpi.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/layout_ranges.h"
#include "model/checkpoint/layout_finite.h"
#include "tests/test.h"
#include "tests/models.h"
#include "tests/pattern.h"
#include "tests/ranks.h"
#include "tests/saved.h"

enum { LIMIT = 100000 }; /* bytes of a file: units of the small models have 20 to 400 kB */

static const Format f32 = { F32, 0 }, bf16 = { BF16, 0 }, e4m3 = { E4M3, 128, .bf16_scale = true },
                    e5m2 = { E5M2, 128, .bf16_scale = true };

/* Allocates what rank `part` of `parts` has, without values. */
static void open_part(Run *r, SmallModel a, Format master, Format m, Format v, int part, int parts)
{
    const ModelConfig c = architecture(a);
    configure(r, &c, "adamw", master, m, v);
    r->config.save_folder = shared;
    place_part(r, (ShardChoice){ parts, part });
    r->file_limit = LIMIT;
}

/* A run whose moments have scales. */
static void open_coded(Run *r, int part, int parts)
{
    open_part(r, LLAMA_GQA, f32, e4m3, e5m2, part, parts);
}

static uint64_t seed_of(int unit, int kind)
{
    return (uint64_t)(unit * 16 + kind);
}

static void put_pattern(Tensor t, int unit, int kind, size_t first)
{
    size_t size = dtype_size(t.format.dtype), n = tensor_numel(t);
    pattern_put(t.data, seed_of(unit, kind), first * size, n * size);
    if (!t.scale)
        return;
    size_t group = (size_t)t.format.group, bytes = format_scale_bytes(t.format, group);
    pattern_put(t.scale, seed_of(unit, kind + 2), first / group * bytes, n / group * bytes);
}

static void fill_shards(ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++) {
        const Shard *s = &store->shard[u];
        const Tensor t[] = { s->slice[TRAINED].stored, s->state[0], s->state[1] };
        for (int i = 0; i < 3 && s->slice[TRAINED].count; i++)
            put_pattern(t[i], u, i, s->slice[TRAINED].first);
    }
}

static const char *memory_of(const LayoutEntry *p, const Shard *s)
{
    const Tensor t = p->kind == ENTRY_WEIGHT ? s->slice[TRAINED].stored : s->state[p->state];
    return p->kind == ENTRY_SCALE ? t.scale : t.data;
}

/* Numbers of the tensors in fill_shards. Scales have the number of their codes + 2. */
static int number_of(const LayoutEntry *p)
{
    return p->kind == ENTRY_WEIGHT ? 0 : p->state + (p->kind == ENTRY_STATE ? 1 : 3);
}

/* Checks the value of every element of a piece in this rank's shard. Returns the number of
 * elements. */
static size_t check_piece(const LayoutEntry *p, const Shard *s)
{
    const Slice *own = &s->slice[TRAINED];
    size_t first = own->first / p->per, end = (own->first + own->count) / p->per;
    size_t lo = first > p->first ? first : p->first,
           hi = end < p->first + p->count ? end : p->first + p->count;
    if (lo >= hi)
        return 0;
    const char *at = memory_of(p, s) + (lo - first) * p->bytes;
    size_t bytes = (hi - lo) * p->bytes,
           good = pattern_check(at, seed_of(p->unit, number_of(p)), lo * p->bytes, bytes);
    if (good < bytes)
        fail_msg("rank %d of %d: %s: byte %zu of %zu differs", comm_rank(), comm_size(), p->name,
                 good, bytes);
    return hi - lo;
}

/* Files contain whole units up to the limit. A single unit may exceed the limit. All files are
 * needed. */
static void check_sizes(const Layout *l, size_t limit)
{
    assert_true(l->num_files > 1);
    for (int i = 0; i < l->num_files; i++) {
        int first = -1, last = -1;
        for (int k = 0; k < l->num_entries; k++)
            if (l->entry[k].file == i) {
                first = first < 0 ? l->entry[k].unit : first;
                last = l->entry[k].unit;
            }
        assert_true(first >= 0 && (first == last || l->file[i]->bytes <= limit));
        assert_true(i == 0 || l->file[i - 1]->bytes + l->file[i]->bytes > limit);
    }
}

static void write_files(LayoutKind kind, const ParamStore *store)
{
    Layout l = layout_make(shared, kind, store, LIMIT);
    check_sizes(&l, LIMIT);
    if (comm_rank() == 0)
        for (int i = 0; i < l.num_files; i++)
            safetensors_create(l.file[i]);
    comm_barrier();
    Range *own = layout_ranges(store);
    size_t bytes = layout_bytes(&l, own);
    char *snapshot = xmalloc(bytes);
    layout_snapshot(snapshot, &l, own, store);
    const char *problem = layout_write(&l, own, snapshot);
    if (problem)
        fail_msg("%s", problem);
    free(snapshot);
    free(own);
    comm_barrier();
    layout_free(&l);
}

static void read_and_check(const char *where, LayoutKind kind, ParamStore *store)
{
    Layout l = layout_make(where, kind, store, LIMIT);
    SafeFile **file = xcalloc((size_t)l.num_files, sizeof *file);
    for (int i = 0; i < l.num_files; i++)
        file[i] = safetensors_open(l.file[i]->path);
    layout_read(&l, store, file, l.num_files);
    double seen = 0, all = 0;
    for (int i = 0; i < l.num_entries; i++) {
        seen += (double)check_piece(&l.entry[i], &store->shard[l.entry[i].unit]);
        all += (double)l.entry[i].count;
    }
    assert_true(seen > 0 && seen <= all);
    for (int i = 0; i < l.num_files; i++)
        safetensors_close(file[i]);
    free(file);
    layout_free(&l);
    comm_barrier();
}

/* A rank writes as part `part` of `parts`, and reads as another part of another number of parts. */
static void check_division(SmallModel a, Format master, Format m, Format v, int part, int parts,
                           int part2, int parts2)
{
    Run written, read;
    open_part(&written, a, master, m, v, part, parts);
    open_part(&read, a, master, m, v, part2, parts2);
    fill_shards(&written.store);
    for (LayoutKind kind = LAYOUT_MODEL; kind <= LAYOUT_OPTIMIZER; kind++)
        write_files(kind, &written.store);
    for (LayoutKind kind = LAYOUT_MODEL; kind <= LAYOUT_OPTIMIZER; kind++)
        read_and_check(shared, kind, &read.store);
    close_run(&written);
    close_run(&read);
}

TEST(test_sharded)
{
    int W = comm_size(), rank = comm_rank();
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        check_division(a, f32, f32, f32, rank, W, 0, 1);
        check_division(a, bf16, bf16, f32, rank, W, W - 1 - rank, W);
        check_division(a, bf16, e4m3, e5m2, rank, W, rank % 3, 3);
    }
}

/* Every rank has all data: nothing may be left out, or overwritten with other values. */
TEST(test_replicated)
{
    int W = comm_size(), rank = comm_rank();
    check_division(LLAMA, f32, f32, f32, 0, 1, rank, W);
    check_division(OLMO2, bf16, e4m3, e4m3, 0, 1, rank, W);
}

/* Two groups of ranks divide the data in the same way. */
TEST(test_hybrid)
{
    if (comm_size() % 2 != 0)
        return;
    int half = comm_size() / 2;
    check_division(LLAMA_GQA, f32, bf16, bf16, comm_rank() % half, half, 0, 1);
}

/* ---- whole checkpoints ----------------------------------------------------------------------- */

/* Changes a shard while the shard is being written, as training does. */
static void overwrite_shards(ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++) {
        const Shard *s = &store->shard[u];
        const Tensor t[] = { s->slice[TRAINED].stored, s->state[0], s->state[1] };
        for (int i = 0; i < 3 && s->slice[TRAINED].count; i++)
            pattern_put(t[i].data, 999, s->slice[TRAINED].first,
                        tensor_numel(t[i]) * dtype_size(t[i].format.dtype));
    }
}

static void check_checkpoint(long step, int part, int parts)
{
    const char *where = text("%s/step%ld", shared, step);
    Run read;
    json_t *found = json_load_file(text("%s/trainer.json", where), 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(found, "step")), step);
    assert_int_equal(json_integer_value(json_object_get(found, "tokens")), state_of(step).tokens);
    assert_int_equal(json_integer_value(json_object_get(found, "world_size")), comm_size());
    json_decref(found);
    open_coded(&read, part, parts);
    for (LayoutKind kind = LAYOUT_MODEL; kind <= LAYOUT_OPTIMIZER; kind++)
        read_and_check(where, kind, &read.store);
    close_run(&read);
}

/* Each rank has its own shard, or two ranks have the same shard. They save one step during
 * training, and then two more at once. */
static void check_saves(int part, int parts)
{
    int W = comm_size(), rank = comm_rank();
    Run r;
    open_coded(&r, part, parts);
    fill_shards(&r.store);
    assert_false(checkpoint_poll());
    begin(&r, 1);
    overwrite_shards(&r.store);
    while (!checkpoint_poll())
        overwrite_shards(&r.store);
    check_checkpoint(1, W - 1 - rank, W);
    fill_shards(&r.store);
    begin(&r, 2);
    begin(&r, 3);
    overwrite_shards(&r.store);
    check_checkpoint(2, 0, 1);
    checkpoint_finish();
    check_checkpoint(3, rank % 3, 3);
    close_run(&r);
}

TEST(test_saves)
{
    int W = comm_size(), rank = comm_rank();
    check_saves(rank, W);
    if (W % 2 == 0)
        check_saves(rank / 2, W / 2);
}

/* If one rank has a NaN, all ranks report the first tensor with a NaN. */
TEST(test_not_finite)
{
    const int W = comm_size(), rank = comm_rank();
    Run run;
    open_part(&run, LLAMA_GQA, bf16, e4m3, bf16, rank, W);
    ParamStore store = run.store;
    Layout l = layout_make(NULL, LAYOUT_OPTIMIZER, &store, 0);
    fill_shards(&store);
    assert_null(layout_not_finite(&l, &store));
    for (int r = W - 1; r >= 0; r--) {
        const uint16_t minus = 0xbf80;
        const char *expected = NULL;
        /* the tensor of the first block at which the rank's part of v begins */
        for (int i = 0; i < l.num_entries; i++) {
            const LayoutEntry *p = &l.entry[i];
            const size_t first =
                store.shape[1].numel[TRAINED] / PARAM_ALIGN * (size_t)r / (size_t)W * PARAM_ALIGN;
            if (p->unit == 1 && p->kind == ENTRY_STATE && p->state == 1 && first >= p->first &&
                first < p->first + p->count)
                expected = p->name;
        }
        assert_non_null(expected);
        if (rank == r)
            device_put(store.shard[1].state[1].data, &minus, sizeof minus);
        const char *found = layout_not_finite(&l, &store);
        assert_non_null(found);
        assert_string_equal(found, expected);
    }
    layout_free(&l);
    close_run(&run);
}

/* ---- checksums ------------------------------------------------------------------------------- */

/* The files of one kind, with a checksum of each tensor's actual bytes. The manifest must agree. */
static void open_summed(SafeFile **file, const Layout *l, const json_t *sums)
{
    for (int i = 0; i < l->num_files; i++) {
        file[i] = safetensors_open(l->file[i]->path);
        for (int k = 0; k < file[i]->count; k++) {
            SafeTensor *t = &file[i]->tensor[k];
            const size_t bytes = t->end - t->begin;
            char *data = xmalloc(bytes);
            safetensors_read(file[i], data, t, 0, bytes);
            t->has_sum = true;
            t->sum = crc32c(0, data, bytes);
            assert_string_equal(json_string_value(json_object_get(sums, t->name)),
                                text("%08x", t->sum));
            free(data);
        }
    }
}

/* Ranks save in groups of one size and read in groups of another size. All divisions give the same
 * checksums. */
static void check_sums(int shards)
{
    json_t *manifest = json_load_file(text("%s/step9/trainer.json", shared), 0, NULL);
    Run r;
    comm_set_mesh(mesh_of_shards(comm_size(), shards));
    open_coded(&r, comm_group_rank(RANKS_SHARD), shards);
    for (LayoutKind kind = LAYOUT_MODEL; kind <= LAYOUT_OPTIMIZER; kind++) {
        Layout l = layout_make(text("%s/step9", shared), kind, &r.store, LIMIT);
        SafeFile **file = xcalloc((size_t)l.num_files, sizeof *file);
        open_summed(file, &l, json_object_get(manifest, "crc32c"));
        layout_read(&l, &r.store, file, l.num_files); /* dies if the checksums differ */
        for (int i = 0; i < l.num_files; i++)
            safetensors_close(file[i]);
        free(file);
        layout_free(&l);
    }
    json_decref(manifest);
    close_run(&r);
}

TEST(test_sums)
{
    for (int shards = 1; shards <= comm_size(); shards *= 2) {
        Run r;
        comm_set_mesh(mesh_of_shards(comm_size(), shards));
        open_coded(&r, comm_group_rank(RANKS_SHARD), shards);
        fill_shards(&r.store);
        save(&r, 9);
        close_run(&r);
        for (int others = 1; others <= comm_size(); others *= 2)
            check_sums(others);
    }
}

static size_t gathered; /* bytes of MPI's gathers */

int MPI_Allgather(const void *own, int n, MPI_Datatype type, void *all, int each,
                  MPI_Datatype their, MPI_Comm comm)
{
    int ranks, size;
    MPI_Comm_size(comm, &ranks);
    MPI_Type_size(their, &size);
    gathered += (size_t)ranks * (size_t)each * (size_t)size;
    return PMPI_Allgather(own, n, type, all, each, their, comm);
}

/* Each rank announces its ranges with two numbers per rank and region, not per pair of ranks. */
TEST(test_ranges_are_gathered_once)
{
    Run r;
    open_part(&r, LLAMA, f32, f32, f32, comm_rank(), comm_size());
    gathered = 0;
    free(layout_ranges(&r.store));
    assert_in_range(gathered, 0,
                    (size_t)comm_size() * (size_t)r.store.num_units * NUM_REGIONS * 2 *
                        sizeof(double));
    assert_true(comm_size() == 1 || gathered > 0);
    close_run(&r);
}

int main(int argc, char **argv)
{
    comm_start(&argc, &argv);
    device_init(comm_local_rank());
    int failed = run_all_tests(make_shared, remove_shared);
    comm_finish();
    return failed;
}
