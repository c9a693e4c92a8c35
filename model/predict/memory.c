/* Plans the memory of a run. */
#include "model/predict/memory.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/host_memory.h"
#include "model/plan_model.h"
#include "model/store/param_store.h"
#include "model/store/param_store_sizes.h"
#include "model/model.h"
#include "model/store/offload.h"
#include "kernels/runtime/agree.h"
#include "model/shape/units.h"

double memory_of_device(const Config *c)
{
    const double given = c->device_memory * (1 << 30);
    return given > 0 && (c->dry_run || given < (double)device_memory_total())
               ? given
               : (double)device_memory_total();
}

static int ranks_of(const Config *c)
{
    return c->dry_run ? c->ranks : comm_size();
}

Mesh memory_mesh(const Config *c)
{
    const Strategy *s = &c->strategy;
    Mesh m = mesh_of_tensor(ranks_of(c), pipeline_stages(s), s->shard_ranks, context_ranks(s),
                            tensor_ranks(s));
    if (s->wire != WIRE_NONE)
        mesh_cut_at_hosts(&m, s->ranks_per_host);
    return m;
}

/* CUDA's context and code, workspace of cuBLASLt, scratch of our kernels; with several ranks also
 * NCCL's buffers. Measured on H200s, models of 1B to 30B parameters in sequences of 2048 tokens:
 * 0.77 to 1.65 GiB in 13 runs on one GPU, 2.06 to 2.89 GiB in 16 on two and four; with two tensor
 * ranks, which have more communicators, 3.0 to 3.1 in 4 runs with 4096 and 8192 tokens. The
 * function returns the maximum of each case, rounded up. */
double memory_allowance(const Config *c)
{
    if (c->device_memory == 0 && strcmp(device_build(), "cpu") == 0)
        return 0;
    return (tensor_ranks(&c->strategy) > 1 ? 3.2 : ranks_of(c) > 1 ? 2.9 : 1.7) * (1 << 30);
}

/* Device memory that the plan leaves free for libraries: they took less in all measured runs. */
static double spare(const Config *c)
{
    return (tensor_ranks(&c->strategy) > 1 ? 3.3 : 3.0) * (1 << 30);
}

/* How many bytes the plan may take if ranks keep unsharded gradients and gathered weights: the
 * device's memory without a reserve, and without the memory that other programs use now. If no more
 * than the reserve is in use, it counts as this program's own. */
static double most_with_weights(const Config *c)
{
    const double used = c->dry_run || c->device_memory > 0 ? 0 : (double)device_memory_used();
    return memory_of_device(c) - spare(c) - (used > spare(c) ? used : 0);
}

/* The plan, and the choices made up to now. */
typedef struct {
    Model *m;
    ParamStore *store;
    const Config *c;
    ShardChoice p;
} Search;

static double bytes_of(const Search *s)
{
    model_replan(s->m, s->store, s->c, s->p);
    return (double)model_planned_bytes(s->m, s->store);
}

/* Whether gradients are summed once per step. With one micro-batch per step, this has no advantage.
 * NOTE: the choice changes the bits of gradients, so it must not depend on other programs on the
 * device. */
static bool sums_once(const Search *s)
{
    const Config *c = s->c;
    const long at_once =
        (long)c->device_train_microbatch_size * data_ranks(&c->strategy, ranks_of(c));
    const bool gains = s->p.shards * s->p.tensor_ranks > 1 && c->global_train_batch_size > at_once;
    return agree_least(gains && bytes_of(s) <= memory_of_device(c) - spare(c));
}

/* Sets *choice, a field of s->p, to the largest number from `least` to `largest` with which the
 * plan takes at most `bytes`, and returns it. Memory must grow with the number. If no number fits,
 * *choice is `least`. */
static int largest_that_fits(Search *s, int *choice, int least, int largest, double bytes)
{
    while (least < largest) {
        *choice = (least + largest + 1) / 2;
        if (bytes_of(s) <= bytes)
            least = *choice;
        else
            largest = *choice - 1;
    }
    *choice = least;
    return least;
}

/* The minimum over ranks. With stages, which have different units, the minimum over the ranks of
 * one stage: these ranks gather together, and their tensors have the same offsets in memory. */
static int least_of_ranks(const ShardChoice *p, int own)
{
    return (int)(p->pipe.stages > 1 ? agree_least_of_stage(own) : agree_least(own));
}

static int most_resident(Search s)
{
    return least_of_ranks(
        &s.p, largest_that_fits(&s, &s.p.resident, 0, s.store->num_units, most_with_weights(s.c)));
}

/* How many bytes the plan may take if the rest can be on the host. Without device_memory, the CPU
 * back end moves nothing, because its device memory is host memory. */
static double most_planned(const Config *c)
{
    if (c->device_memory == 0 && strcmp(device_build(), "cpu") == 0)
        return INFINITY;
    const double used = c->dry_run || c->device_memory > 0 ? 0 : (double)device_memory_used(),
                 libraries = memory_allowance(c);
    return memory_of_device(c) - (used > libraries ? used : libraries);
}

/* Returns as many slots for saved activations as fit, but at least offload_least_slots; 0: all
 * blocks have their own memory. NOTE: a slot is as large as the largest block. So slots may take
 * more memory than blocks of different sizes. */
static int most_slots(Search s)
{
    const double most = most_planned(s.c), all = bytes_of(&s);
    const int saves = s.m->offload.saves, least = offload_least_slots(s.m);
    if (s.c->offload.activations == HOST_NEVER || s.m->text.forward_only)
        return 0;
    if (s.c->offload.activations == HOST_ALL)
        return saves > least ? least : 0;
    if (all > most && saves > least)
        largest_that_fits(&s, &s.p.slots, least, saves - 1, most);
    const int slots = least_of_ranks(&s.p, s.p.slots > 0 && bytes_of(&s) < all ? s.p.slots : saves);
    return slots < saves ? slots : 0;
}

static HostUse use_of(const Config *c, Hosted h)
{
    return h == HOST_FROZEN    ? c->offload.frozen
           : h == HOST_MOMENTS ? c->offload.optimizer
                               : c->offload.master;
}

/* Returns the fewest units with `h` on the host for which everything fits; all units if nothing
 * fits. NOTE: the first unit may cost more memory than it saves, because copies from the host need
 * a buffer on the device. */
static int fewest_on_host(Search s, Hosted h)
{
    const double most = most_planned(s.c);
    const int units = s.store->num_units;
    int first = 0, last = bytes_of(&s) <= most ? 0 : units;
    while (first < last) {
        s.p.on_host[h] = (first + last) / 2;
        if (bytes_of(&s) <= most)
            last = s.p.on_host[h];
        else
            first = s.p.on_host[h] + 1;
    }
    return units - (int)agree_least(units - first);
}

static Pipeline pipeline_of(const Config *c, int stage)
{
    const Strategy *s = &c->strategy;
    const int stages = pipeline_stages(s),
              sequences = c->global_train_batch_size / data_ranks(s, ranks_of(c));
    const int micro_batches = sequences / c->device_train_microbatch_size;
    if (stages == 1)
        return (Pipeline){ 0 };
    return (Pipeline){ stages, stage, s->pipeline_chunks > 1 ? s->pipeline_chunks : 1,
                       s->pipeline_schedule, micro_batches > 0 ? micro_batches : 1 };
}

/* Makes the choices that depend on memory; all ranks agree on them. Choices that change results
 * come first, then offload, which changes none. */
static void plan_with(Model *m, ParamStore *store, const Config *c, int stage, int tile)
{
    const Strategy *strategy = &c->strategy;
    Search s = { m,
                 store,
                 c,
                 { comm_group_size(RANKS_SHARD), comm_group_rank(RANKS_SHARD),
                   strategy->grad_sum != SUM_OFTEN,
                   strategy->gathering == GATHER_ONCE ? unit_count(&c->model) : 0, .tile = tile,
                   .tensor_ranks = tensor_ranks(strategy),
                   .replicas = memory_mesh(c).size[MESH_REPLICA], .pipe = pipeline_of(c, stage) } };
    ShardChoice *p = &s.p;
    if (c->dry_run) { /* for ranks that may not exist: all have the same memory */
        p->shards = strategy->shard_ranks;
        p->rank = 0;
        /* what an operation writes depends on the mesh */
        const Mesh mesh = memory_mesh(c);
        comm_pretend(&mesh, stage * (c->ranks / pipeline_stages(strategy)));
    }
    p->tensor_rank = comm_group_rank(RANKS_TENSOR);
    model_plan(m, store, c, *p);
    if (c->dry_run)
        comm_pretend(NULL, 0);
    if (strategy->grad_sum == SUM_ONCE_IF_FITS)
        p->sum_once = sums_once(&s);
    for (Hosted h = 0; h < NUM_HOSTED; h++)
        p->on_host[h] = use_of(c, h) == HOST_ALL ? store->num_units : 0;
    p->slots = most_slots(s);
    for (Hosted h = 0; h < NUM_HOSTED; h++)
        if (use_of(c, h) == HOST_AUTO)
            p->on_host[h] = fewest_on_host(s, h);
    if (strategy->gathering == GATHER_ONCE_IF_FITS)
        p->resident = most_resident(s);
    model_replan(m, store, c, *p);
}

/* Tiles that the user did not ask for come last, because they change FP8 results. */
void memory_plan_stage(Model *m, ParamStore *store, const Config *c, int stage)
{
    enum { TILE = 16384 }; /* GEMMs with this number of rows are as fast as larger ones */
    plan_with(m, store, c, stage, c->tiled_mlp_tokens);
    if (c->tiled_mlp_tokens > 0 || !recipe_recomputes(&c->recipe) || m->text.rows <= TILE ||
        m->text.tensor_ranks > 1)
        return;
    if (agree_least((double)model_planned_bytes(m, store) <= most_planned(c)))
        return;
    model_free(m, store);
    plan_with(m, store, c, stage, TILE);
}

void memory_plan(Model *m, ParamStore *store, const Config *c)
{
    memory_plan_stage(m, store, c, comm_group_rank(RANKS_PIPELINE));
}

static double gib(double bytes)
{
    return bytes / (1 << 30);
}

enum { COLUMNS = 80 };

/* Prints items with commas between them, wrapped at the width of a terminal. */
typedef struct {
    int column;
    bool some;
} Items;

static void __attribute__((format(printf, 2, 3))) add_item(Items *l, const char *format, ...)
{
    char text[80];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof text, format, args),
              column = l->column + n + (l->some ? 3 : 2);
    va_end(args);
    const bool wraps = column > COLUMNS;
    printf("%s%s%s", l->some ? "," : "", wraps ? "\n  " : " ", text);
    *l = (Items){ wraps ? n + 2 : column - 1, true };
}

/* Adds a choice to the list, with the time at which it takes effect, such as "for each pass". */
static void add_gathering(Items *l, const Model *m, const ParamStore *store, const char *what)
{
    const char *once = m->text.forward_only ? "once" : "once per step";
    if (store->resident > 0 && store->resident < store->num_units)
        add_item(l, "%s %s in %d of %d units (else for each pass)", what, once, store->resident,
                 store->num_units);
    else
        add_item(l, "%s %s", what, store->resident == 0 ? "for each pass" : once);
}

/* Prints the sharding. On one rank no weights are gathered, and blocks that compute in the stored
 * format have no copies either. With HYBRID_SHARD the number of hosts decides the groups. */
static void print_sharding(const Model *m, const ParamStore *store, const Config *c)
{
    const int ranks = ranks_of(c), sharing = context_ranks(&c->strategy),
              shards = store->shards * store->tensor_ranks;
    const int groups = ranks / pipeline_stages(&c->strategy) / shards;
    bool copies = false;
    for (int u = 0; u < store->num_units; u++)
        copies |= store->shape[u].kind->is_layer && store->plan[u].weights != NULL;
    if (ranks == 1 && !copies)
        return;
    Items l = { printf(ranks > 1 ? "sharding:" : "weights:"), false };
    if (ranks > 1)
        add_item(&l, "%d group%s of %d rank%s%s", groups, groups > 1 ? "s" : "", shards,
                 shards > 1 ? "s" : "", store->pipe.stages > 1 ? " in each stage" : "");
    if (sharing > 1)
        add_item(&l, "%d ranks share each sequence", sharing);
    if (store->tensor_ranks > 1)
        add_item(&l, "%d ranks compute each layer together", store->tensor_ranks);
    if (shards > 1 || copies)
        add_gathering(&l, m, store, shards > 1 ? "weights gathered" : "operands made");
    if (shards > 1 && !m->text.forward_only)
        add_item(&l, "gradients summed %s",
                 store->sum_once ? "once per step" : "with every micro-batch");
    putchar('\n');
}

static double memory_of_host(const Model *m, const ParamStore *store)
{
    return (double)offload_host_bytes(m) + (double)store_host_bytes(store, NUM_HOSTED);
}

static void print_host(const Model *m, const ParamStore *store)
{
    static const char *const names[NUM_HOSTED] = { "frozen weights", "moments", "master weights" };
    if (memory_of_host(m, store) == 0)
        return;
    Items l = { printf("on the host, GiB:"), false };
    if (offload_host_bytes(m) > 0)
        add_item(&l, "activations of %d of %d blocks%s %.3f", m->offload.leaving, m->offload.saves,
                 m->num_sets > 1 ? " x micro-batches" : "", gib((double)offload_host_bytes(m)));
    for (Hosted h = 0; h < NUM_HOSTED; h++) {
        int units = 0;
        for (int u = 0; u < store->num_units; u++)
            units += store_on_host(store, u, h);
        if (units > 0)
            add_item(&l, "%s of %d of %d units %.3f", names[h], units, store->num_units,
                     gib((double)store_host_bytes(store, h)));
    }
    add_item(&l, "total %.3f\n", gib(memory_of_host(m, store)));
}

/* Host memory of a checkpoint while it is written: master weights, moments, and frozen weights
 * unless only adapters are saved. */
static size_t memory_of_snapshot(const ParamStore *store, const Config *c)
{
    size_t bytes = store_state_bytes(store);
    for (int u = 0; u < store->num_units; u++) {
        const Slice *s = store->shard[u].slice;
        bytes += tensor_bytes(s[TRAINED].stored) +
                 (c->model.lora.rank > 0 ? 0 : tensor_bytes(s[FROZEN].stored));
    }
    return bytes;
}

static void print_optimizer(const Optimizer *o, const Recipe *r)
{
    printf("optimizer %s:", o->name);
    for (int i = 0; i < o->num_states; i++) {
        const Format f = optimizer_format(o, i, r, true), other = optimizer_format(o, i, r, false);
        printf("%s %s in %s", i ? "," : "", o->state[i].label, format_name(f));
        if (!format_equal(f, other))
            printf(" (outside the blocks %s)", format_name(other));
    }
    puts(o->num_states ? "" : " no states");
}

/* Numbers of parameters, and bytes of this rank's device memory. */
typedef struct {
    size_t trained, untrained, master, frozen, moments;
    double active; /* number of parameters that compute a token */
} Sizes;

static Sizes sizes_of(const ParamStore *store)
{
    size_t n[NUM_REGIONS] = { 0 };
    Sizes z = { .moments = store_state_bytes(store) - store_host_bytes(store, HOST_MOMENTS) };
    for (int u = 0; u < store->num_units; u++) {
        const Slice *s = store->shard[u].slice;
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            n[p->region] += param_numel(p) * (size_t)p->tensor_ranks;
            z.active += param_active(&store->shape[u], p) * p->tensor_ranks;
        }
        z.master += tensor_bytes(s[TRAINED].stored);
        z.frozen += tensor_bytes(s[FROZEN].stored) + s[QUANTIZED].count;
    }
    z.master -= store_host_bytes(store, HOST_MASTER);
    z.frozen -= store_host_bytes(store, HOST_FROZEN);
    z.trained = n[TRAINED];
    z.untrained = n[FROZEN] + n[QUANTIZED];
    return z;
}

static void print_model(const Model *m, const Sizes *z)
{
    printf("model: %.4g M parameters", (double)(z->trained + z->untrained) / 1e6);
    if (z->untrained > 0 && !m->text.forward_only)
        printf(", of which %.4g M are trained", (double)z->trained / 1e6);
    if (m->text.config->experts.count > 0)
        printf(", %.4g M are active for a token", z->active / 1e6);
    printf(", %d blocks of width %d\n", m->text.L, m->text.config->d_model);
}

/* Prints the plan of a run. */
static void print_plan(const Model *m, const ParamStore *store, const Config *c, const Sizes *z)
{
    const PlanBytes *b = &m->bytes;
    Items l = { printf("memory: %.2f of %.1f GiB planned on each rank:",
                       gib((double)model_planned_bytes(m, store)), gib(memory_of_device(c))),
                false };
    const struct {
        const char *name;
        double bytes;
    } item[] = {
        { "weights", (double)z->master + (double)z->frozen + (double)store_weight_bytes(store) },
        { "gradients", (double)store_grad_bytes(store) },
        { "moments", (double)z->moments },
        { "activations", (double)b->blocks },
        { "keys and values", (double)b->cache },
        { "work", (double)b->work + (double)b->head },
    };
    for (size_t i = 0; i < sizeof item / sizeof item[0]; i++)
        if (item[i].bytes > 0)
            add_item(&l, "%s %.2f", item[i].name, gib(item[i].bytes));
    putchar('\n');
}

/* Prints the plan of a dry run: also every format, and the parts of the weights. */
static void print_details(const Model *m, const ParamStore *store, const Config *c, const Sizes *z)
{
    const PlanBytes *b = &m->bytes;
    const double weights = gib((double)store_weight_bytes(store));
    printf("micro-batch %d x %d tokens\n", m->text.attn.B, m->text.T);
    recipe_print(&m->text.recipe);
    if (!m->text.forward_only)
        print_optimizer(store->optimizer, &m->text.recipe);
    Items l = { store->pipe.stages > 1
                    ? printf("memory plan of a rank of stage %d, GiB:", store->pipe.stage)
                    : printf("memory plan of a rank, GiB:"),
                false };
    if (m->text.forward_only) {
        add_item(&l, "weights %.3f", gib((double)z->frozen));
        add_item(&l, "gathered or converted weights %.3f", weights);
        add_item(&l, "activations of one block %.3f", gib((double)b->work));
        add_item(&l, "head %.3f", gib((double)b->head));
        if (b->cache > 0)
            add_item(&l, "keys and values of %d tokens %.3f", m->text.P, gib((double)b->cache));
    } else {
        add_item(&l, "master %.3f", gib((double)z->master));
        if (z->untrained > 0)
            add_item(&l, "frozen %.3f", gib((double)z->frozen));
        add_item(&l, "weights %.3f", weights);
        add_item(&l, "gradients %.3f", gib((double)store_grad_bytes(store)));
        add_item(&l, "moments %.3f", gib((double)z->moments));
        add_item(&l, "activations %.3f (%.1f kB per token and block)", gib((double)b->blocks),
                 (double)b->blocks / m->offload.slots / 1e3 / m->text.N);
        add_item(&l, "work %.3f", gib((double)b->work));
        add_item(&l, "head and loss %.3f", gib((double)b->head));
    }
    printf("; total %.3f of %.1f\n", gib((double)model_planned_bytes(m, store)),
           gib(memory_of_device(c)));
    if (!m->text.forward_only)
        printf("while a checkpoint is written, up to %.3f GiB more host memory\n",
               gib((double)memory_of_snapshot(store, c)));
}

void memory_print(const Model *m, const ParamStore *store, const Config *c)
{
    if (comm_rank() != 0)
        return;
    const Sizes z = sizes_of(store);
    print_model(m, &z);
    (c->dry_run ? print_details : print_plan)(m, store, c, &z);
    print_sharding(m, store, c);
    print_host(m, store);
    if (recipe_recomputes(&m->text.recipe) && m->text.tile < m->text.rows)
        printf("MLP in tiles of %d tokens, in the blocks whose MLP backward recomputes\n",
               m->text.tile);
}

/* All ranks must see the same free host memory: after one rank allocates, another would see less.
 * So ranks of stages without host memory must call this, too. */
void memory_check_host(const Model *m, const ParamStore *store, const Config *c)
{
    const double moved = memory_of_host(m, store),
                 snapshot = c->save_folder && !m->text.forward_only
                                ? (double)memory_of_snapshot(store, c)
                                : 0;
    const double left =
        agree_any(moved > 0) ? agree_least(host_memory_left("") / comm_local_size()) : INFINITY;
    if (moved > 0 && moved + snapshot > left)
        die("host memory: the plan needs %.2f GiB and writing a checkpoint %.2f GiB. That is %.2f "
            "GiB more than the %.2f GiB which each of the %d ranks here may use of this host or "
            "its container (cgroup memory.max). To use less: offload.*=never, a smaller "
            "device_train_microbatch_size, activations.keep=block or more ranks; see --dry_run",
            gib(moved), gib(snapshot), gib(moved + snapshot - left), gib(left), comm_local_size());
}
