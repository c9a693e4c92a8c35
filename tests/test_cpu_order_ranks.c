/* Queues overlap on a GPU but not on a CPU, so a missing wait has effects only on a GPU, and
 * rarely. This test finds it: each operation declares the memory it reads and writes
 * (kernels/runtime/operations.h), and vector clocks [Fidge 1988, Mattern 1989] show whether marks
 * and waits, which the linker wraps, order it after accesses of other queues. On 1, 2 and 4
 * ranks. */
#include <math.h>

#include "tests/kit.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "kernels/runtime/trace.h"
#include "kernels/values.h"
#include "model/update/muon.h"
#include "model/predict/memory.h"
#include "model/update/update.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/sanitized.h"

/* ---- clocks ---------------------------------------------------------------------------------- */

enum { CELL = 16, CELLS = 1 << 21 }; /* bytes per cell; more cells than a run uses */

typedef struct {
    uintptr_t address;
    const char *writer;             /* the last operation that wrote */
    long written, read[NUM_QUEUES]; /* numbers of the last operations there in their queues */
    Queue queue;                    /* the writer's */
} Cell;

struct DeviceMark {
    long known[NUM_QUEUES];
};

static Cell *cells;
static Queue queue;
/* [q][p]: the last operation of p that is done before the next one of q */
static long known[NUM_QUEUES][NUM_QUEUES];
static const char *operation = "";
static char problem[512];

static void begin(const char *name)
{
    operation = name;
    known[queue][queue]++;
}

static Cell *find(uintptr_t address)
{
    const size_t first = address * 0x9e3779b97f4a7c15u >> 20;
    for (size_t i = 0; i < CELLS; i++) {
        Cell *c = &cells[(first + i) % CELLS];
        if (c->address == address || !c->address) {
            c->address = address;
            return c;
        }
    }
    die("more than %d cells of memory are watched: raise CELLS", CELLS);
}

static void report(const Cell *c, const char *other, Queue theirs, const char *verb)
{
    if (!*problem)
        snprintf(
            problem, sizeof problem,
            "%s on queue %s touches memory that %s on queue %s %s, and no wait is between (%p)",
            operation, trace_queue_name(queue), other, trace_queue_name(theirs), verb,
            (void *)(c->address * CELL));
}

static void touch(const void *p, size_t bytes, bool writes)
{
    const uintptr_t first = (uintptr_t)p / CELL, last = ((uintptr_t)p + bytes + CELL - 1) / CELL;
    const long *before = known[queue];
    for (uintptr_t a = first; p && bytes && a < last; a++) {
        Cell *c = find(a);
        if (c->writer && c->written > before[c->queue])
            report(c, c->writer, c->queue, "wrote");
        for (Queue q = 0; writes && q < NUM_QUEUES; q++)
            if (c->read[q] > before[q] && q != queue)
                report(c, "an operation", q, "read");
        if (writes)
            *c = (Cell){
                .address = a, .writer = operation, .written = before[queue], .queue = queue
            };
        else
            c->read[queue] = before[queue];
    }
}

static struct {
    Tensor x;
    const float *amax;
} given; /* to quantize_with_amax */

/* A given maximum must be that of the current values. */
static void check_maximum(void)
{
    const float *amax = given.amax;
    float value, max = 0;
    for (size_t i = 0; amax && i < tensor_numel(given.x); i++) {
        tensor_load(&value, given.x, i, 1);
        max = fmaxf(max, fabsf(value));
    }
    if (amax && *amax != max && !*problem)
        snprintf(problem, sizeof problem,
                 "quantize_with_amax is given the maximum %g of numbers up to %g", *amax, max);
}

static void learn(Queue q, const long *more)
{
    for (Queue p = 0; p < NUM_QUEUES; p++)
        known[q][p] = more[p] > known[q][p] ? more[p] : known[q][p];
}

/* The host waited for queue q: all later work of any queue comes after. */
static void host_waited(Queue q)
{
    for (Queue p = 0; p < NUM_QUEUES; p++)
        learn(p, known[q]);
}

/* ---- operations, marks and waits ------------------------------------------------------------- */

static bool watch_operation(void *watcher, const Operation *o)
{
    (void)watcher;
    begin(o->name);
    if (strcmp(o->name, "quantize_with_amax") == 0)
        check_maximum();
    for (int i = 0; i < o->count; i++) {
        const Access a = o->access[i];
        if (a.how & READS)
            touch(a.at, a.bytes, false);
        if (a.how & (WRITES | SPOILS))
            touch(a.at, a.bytes, true);
    }
    return true;
}

static void watch_end(void *watcher, const Operation *o)
{
    (void)watcher;
    if (strcmp(o->name, "device_get") == 0)
        host_waited(queue);
}

static const Watch watch = { watch_operation, watch_end, NULL };

#define WRAP(result, name, parameters) \
    extern __typeof__(name) __real_##name, __wrap_##name; \
    result __wrap_##name parameters

WRAP(void, quantize_with_amax, (Tensor y, Tensor x, const float *amax))
{
    given.x = x;
    given.amax = amax;
    __real_quantize_with_amax(y, x, amax);
}

WRAP(void, device_sync, (void))
{
    for (Queue q = 0; q < NUM_QUEUES; q++)
        host_waited(q);
}

WRAP(void, device_queue, (Queue q))
{
    queue = q;
    __real_device_queue(q);
}

WRAP(DeviceMark *, device_mark, (DeviceMark * m))
{
    m = m ? m : malloc(sizeof *m);
    assert_non_null(m);
    memcpy(m->known, known[queue], sizeof m->known);
    return m;
}

WRAP(void, device_wait, (DeviceMark * m))
{
    if (m)
        learn(queue, m->known);
}

/* ---- training under watch -------------------------------------------------------------------- */

enum { MICRO_BATCHES = 2, STEPS = 3 };

static void micro_batches(Model *m, ParamStore *store, int count, PassKind pass)
{
    int tokens[4096], targets[4096];
    assert_true(count * m->attn.B * m->T <= 4096);
    for (int n = 0; n < count * m->attn.B * m->T; n++)
        tokens[n] = targets[n] = test_token(7, (uint64_t)n, m->config->vocab_size);
    model_micro_batches(m, store, tokens, targets, NULL, count, 1.0f / (float)m->N, 0, pass);
}

/* Override the recipe's; -1: no. optimizer: NULL: adamw. */
static struct {
    int keep, recompute;
    char *optimizer;
    size_t staging;
} own = { .keep = -1 };

/* As train.c, with an evaluation after each update, or in front of the last: what an update needs
 * is not free then. */
static void train(const char *recipe, ModelConfig m, char *trainable, bool bf16_head,
                  Strategy strategy, HostUse on_host)
{
    Config c;
    Model model = { 0 };
    ParamStore store = { 0 };
    const int count =
        pipeline_stages(&strategy) > 1 ? 2 * pipeline_stages(&strategy) : MICRO_BATCHES;
    model_config(&c, &m, recipe, 2);
    if (bf16_head)
        c.recipe.head = (Format){ BF16, 0 };
    if (own.optimizer)
        c.optimizer.name = own.optimizer, c.optimizer.ns_steps = 1;
    c.strategy = strategy;
    c.global_train_batch_size =
        2 * count * comm_size() /
        (pipeline_stages(&strategy) * context_ranks(&strategy) * tensor_ranks(&strategy));
    /* parts of such small matrices have no whole groups */
    if (tensor_ranks(&strategy) > 1)
        c.recipe.moment1 = c.recipe.moment2 = (Format){ F32, 0 };
    if (own.keep >= 0) {
        c.recipe.keep = (Keep)own.keep;
        c.recipe.recompute = own.recompute;
    }
    c.trainable = &trainable;
    c.num_trainable = trainable != NULL;
    c.host.activations = c.host.frozen = c.host.moments = c.host.master = on_host;
    comm_device_finish();
    comm_set_mesh(mesh_of_tensor(comm_size(), pipeline_stages(&strategy), strategy.shard_ranks,
                                 context_ranks(&strategy), tensor_ranks(&strategy)));
    comm_init();
    memset(cells, 0, CELLS * sizeof *cells);
    memory_plan(&model, &store, &c);
    model_alloc(&model, &store, &c);
    own.staging = store.staging_bytes - muon_bytes(&store, &c);
    store_init(&store, &m, 5);
    for (int step = 1; step <= STEPS && !*problem; step++) {
        fsdp_empty_grads(&store);
        micro_batches(&model, &store, count, PASS_COMPLETE);
        take_losses(&model);
        const double norm = optimizer_grad_norm(&store);
        if (step == STEPS)
            micro_batches(&model, &store, 1, PASS_FORWARD);
        optimizer_step(&store, &c, step, 1e-3, fmin(1, 1 / norm));
        if (step < STEPS)
            micro_batches(&model, &store, 1, PASS_FORWARD);
        take_losses(&model);
    }
    model_free(&model, &store);
    if (*problem)
        fail_msg("%s, groups of %d, gathering %d, grad_sum %d: %s", recipe, strategy.shard_ranks,
                 strategy.gathering, strategy.grad_sum, problem);
}

static void test_every_strategy(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        SmallModel a;
        char *trainable;
        bool bf16_head, adapters;
        BaseFormat base;
    } runs[] = {
        { "bf16", LLAMA_GQA },
        { "fp8", OLMO2 },
        { "coat", LLAMA },
        { "coat-lean", LLAMA_GQA, NULL, true },
        { "coat", OLMO3 },
        { "bf16", QWEN3 },
        { "fp8", QWEN2 },
        { "bf16", LLAMA_GQA, "*.mlp.*" },
        { "coat", LLAMA, "*.self_attn.*", true },
        { "fp8", OLMO2, "model.layers.1.*" },
        { "bf16", LLAMA_GQA, .adapters = true, .base = BASE_NF4 },
        { "coat-lean", LLAMA, .adapters = true, .base = BASE_E4M3 },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs); r++) {
        ModelConfig m = architecture(runs[r].a);
        m.d_model = 32;
        m.mlp_width = 48;
        m.n_layers = 3;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, runs[r].base);
        /* weights and gradients do not share memory */
        for (int ranks = 1; ranks <= comm_size(); ranks *= 2)
            for (int stays = 0; stays < 2; stays++) {
                if (SANITIZED && (stays + r) % 2)
                    continue;
                train(runs[r].recipe, m, runs[r].trainable, runs[r].bf16_head,
                      (Strategy){ ranks, stays ? GATHER_ONCE : GATHER_OFTEN,
                                  (stays + r / 2) % 2 ? SUM_ONCE : SUM_OFTEN },
                      HOST_NEVER);
            }
    }
}

/* Ranks that share sequences, two or all: exchanges around attention. */
static void test_in_context(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        SmallModel a;
        Keep keep;
        bool adapters;
        HostUse on_host;
    } runs[] = {
        { "bf16", LLAMA, KEEP_ALL, false, HOST_NEVER },
        { "coat", OLMO, KEEP_INPUTS, false, HOST_ALL },
        { "coat-lean", LLAMA, KEEP_BLOCK, true, HOST_NEVER },
        { "fp8", OLMO, KEEP_ATTENTION, false, HOST_NEVER },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs); r++) {
        ModelConfig m = architecture(runs[r].a);
        m.n_layers = 3;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, BASE_E4M3);
        own.keep = (int)runs[r].keep;
        for (int ranks = 2; ranks <= comm_size(); ranks *= 2)
            train(runs[r].recipe, m, NULL, false,
                  (Strategy){ comm_size(), r % 2 ? GATHER_ONCE : GATHER_OFTEN, SUM_OFTEN, ranks },
                  runs[r].on_host);
    }
    own.keep = -1;
}

/* Ranks that compute layers together, two or all: exchanges around layers, and sums of what they
 * have copies of. Without one of the waits for exchanges (tensor_ranks.c) one of these runs fails:
 * for gathered rows or sums the first, for rows made again the last, whose first block has no sum
 * after them. */
static void test_in_tensor(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        SmallModel a;
        Keep keep;
        int recompute;
        bool adapters;
        HostUse on_host;
    } runs[] = {
        { "fp8", OLMO2, KEEP_ALL, 0, false, HOST_NEVER },
        { "coat", OLMO, KEEP_INPUTS, 0, false, HOST_ALL },
        { "coat-lean", LLAMA, KEEP_INPUTS, -2, true, HOST_NEVER },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs) && comm_size() > 1; r++) {
        const int ranks = r % 2 ? comm_size() : 2;
        ModelConfig m = without_wide_norms(architecture(runs[r].a));
        m.n_layers = 3;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, BASE_AS_FROZEN);
        own.keep = (int)runs[r].keep;
        own.recompute = runs[r].recompute;
        train(runs[r].recipe, m, NULL, false,
              (Strategy){ comm_size() / ranks, r % 2 ? GATHER_ONCE : GATHER_OFTEN, SUM_OFTEN,
                          .tensor_ranks = ranks },
              runs[r].on_host);
    }
    own.keep = -1;
    own.recompute = 0;
}

/* Stages with several micro-batches in flight: messages are copied before they are overwritten, and
 * received before they are read; activations of other micro-batches are on the host meanwhile. */
static void test_in_stages(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        SmallModel a;
        Keep keep;
        bool adapters;
        HostUse on_host;
    } runs[] = {
        { "bf16", LLAMA, KEEP_ALL, false, HOST_NEVER },
        { "coat", OLMO2, KEEP_INPUTS, false, HOST_ALL },
        { "coat-lean", LLAMA, KEEP_BLOCK, true, HOST_ALL },
        { "fp8", LLAMA, KEEP_ATTENTION, false, HOST_NEVER },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs); r++) {
        ModelConfig m = architecture(runs[r].a);
        m.weight_tying |= r == 3;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, BASE_E4M3);
        own.keep = (int)runs[r].keep;
        for (int stages = 2; stages <= comm_size(); stages *= 2) {
            m.n_layers = (runs[r].on_host == HOST_ALL ? 3 : 1 + r % 2) * stages;
            train(runs[r].recipe, m, NULL, false,
                  (Strategy){ comm_size() / stages, GATHER_ONCE, SUM_ONCE,
                              .pipeline_stages = stages, .pipeline_chunks = 1 + r % 2,
                              .pipeline_schedule = r % 2 ? PIPELINE_INTERLEAVED : PIPELINE_1F1B },
                  runs[r].on_host);
        }
    }
    own.keep = -1;
}

/* Blocks with all ways to keep activations, more than slots. */
static void test_on_host(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        SmallModel a;
        Keep keep;
        int recompute;
        bool adapters;
        BaseFormat base;
    } runs[] = {
        { "bf16", LLAMA_GQA, KEEP_ALL },
        { "coat", OLMO2, KEEP_INPUTS },
        { "coat-lean", LLAMA, KEEP_BLOCK },
        { "fp8", QWEN3, KEEP_INPUTS, 2 },
        { "coat", LLAMA, KEEP_INPUTS, .adapters = true, .base = BASE_E4M3 },
        { "coat", LLAMA_GQA, KEEP_ATTENTION, .adapters = true, .base = BASE_NF4 },
        { "bf16", OLMO2, KEEP_BLOCK, .adapters = true, .base = BASE_E4M3 },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs); r++) {
        ModelConfig m = architecture(runs[r].a);
        m.n_layers = 6;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, runs[r].base);
        own.keep = (int)runs[r].keep;
        own.recompute = runs[r].recompute;
        for (int ranks = 1; ranks <= comm_size(); ranks *= 2)
            train(runs[r].recipe, m, r == 1 ? "model.layers.[1-5]*" : NULL, false,
                  (Strategy){ ranks, GATHER_OFTEN, SUM_OFTEN }, HOST_ALL);
    }
    own.keep = -1;
}

/* Muon's updates of one block after the other, and with memory for those of three at once. */
static void test_muon(void **state)
{
    (void)state;
    own.optimizer = "muon";
    for (int ahead = 0; ahead < 2; ahead++) {
        ModelConfig m = architecture(LLAMA);
        m.d_model = 32;
        m.mlp_width = 48;
        m.n_layers = 4;
        m.max_sequence_length = ahead ? 128 : 8;
        const size_t block =
            dtype_size(BF16) * (size_t)m.d_model * (size_t)(4 * m.d_model + 3 * m.mlp_width);
        for (int ranks = 2; ranks <= comm_size(); ranks *= 2) {
            train(ahead ? "coat" : "f32", m, NULL, false,
                  (Strategy){ ranks, GATHER_OFTEN, SUM_OFTEN }, HOST_NEVER);
            assert_int_equal(own.staging > 2 * block + 1024, ahead);
        }
    }
    own.optimizer = NULL;
}

/* The watch itself: a gather that the computation does not wait for. */
static void test_missing_wait(void **state)
{
    (void)state;
    char *memory = device_alloc(64);
    device_queue(QUEUE_GATHER);
    device_zero(memory, 64);
    DeviceMark *done = device_mark(NULL);
    device_queue(QUEUE_COMPUTE);
    device_copy(memory + 32, memory, 16);
    assert_non_null(strstr(
        problem,
        "device_copy on queue compute touches memory that device_zero on queue gather wrote"));
    *problem = '\0';
    device_wait(done);
    device_zero(memory, 64);
    assert_string_equal(problem, "");
    device_unmark(done);
    device_free(memory);
}

int main(int argc, char **argv)
{
    cells = calloc(CELLS, sizeof *cells);
    start_ranks(&argc, &argv);
    add_after_architecture();
    operations_watch(&watch);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_wait), cmocka_unit_test(test_every_strategy),
        cmocka_unit_test(test_in_context),   cmocka_unit_test(test_in_tensor),
        cmocka_unit_test(test_in_stages),    cmocka_unit_test(test_on_host),
        cmocka_unit_test(test_muon)
    };
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
