/* Queues overlap on a GPU but not on a CPU, so a missing wait shows only on a GPU, and rarely. This
 * test finds missing waits on a CPU. Each operation declares the memory that it reads and writes
 * (kernels/runtime/operations.h). Vector clocks [Fidge 1988, Mattern 1989] follow the marks and
 * waits, which the linker wraps, and show whether each access comes after the accesses of other
 * queues. On 1, 2 and 4 ranks. */
#include "tests/test.h"
#include "tests/ranks_case.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "kernels/runtime/trace.h"
#include "kernels/values.h"
#include "model/update/muon_step.h"
#include "tests/sanitized.h"

/* ---- clocks ---------------------------------------------------------------------------------- */

/* CELL: bytes per cell; CELLS: more than a run uses; NEAR: that many neighbors lie together */
enum { CELL = 16, CELLS = 1 << 21, NEAR = 64 };

typedef struct {
    uintptr_t address;
    const char *writer; /* the last operation that wrote the cell */
    /* numbers of the last operations on this cell, in their queues */
    long written, read[NUM_QUEUES];
    Queue queue; /* the queue of the writer */
} Cell;

struct DeviceMark {
    long known[NUM_QUEUES];
};

static Cell *cells;
static Queue queue;
/* [q][p]: the last operation of queue p that is done before the next operation of queue q */
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
    const size_t first = (address / NEAR * 0x9e3779b97f4a7c15u >> 20) * NEAR + address % NEAR;
    for (size_t i = 0; i < CELLS; i += NEAR) {
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
} given; /* the maximum given to quantize_with_amax */

/* The given maximum must belong to the current values. */
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

/* The host has waited for queue q: all later work of any queue comes after it. */
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

/* layers: blocks per stage; 0: 3. small: the model is also narrow. bf16_head: the head is BF16, not
 * as in the recipe. */
typedef struct {
    Case k;
    int layers;
    HostUse on_host;
    bool small, bf16_head;
} Row;

static void micro_batches(Run *r, int count, PassKind pass)
{
    static int tokens[MOST_TOKENS];
    const int n = count * r->model.text.attn.B * r->model.text.T;
    assert_true(n <= MOST_TOKENS);
    for (int i = 0; i < n; i++)
        tokens[i] = test_token(7, (uint64_t)i, r->config.model.vocab_size);
    model_micro_batches(&r->model, &r->store, tokens, tokens, NULL, count,
                        1.0f / (float)r->model.text.N, 0, pass);
}

static int micro_batches_of(const Strategy *s)
{
    return MICRO_BATCHES * pipeline_stages(s);
}

static void configure_row(Run *r, const Row *row, Strategy s, int tokens)
{
    ModelConfig m = architecture(row->k.model);
    if (tensor_ranks(&s) > 1)
        m = without_wide_norms(m);
    if (row->small)
        m.d_model = 32, m.mlp_width = 48;
    m.n_layers = (row->layers ? row->layers : 3) * pipeline_stages(&s);
    m.max_sequence_length = tokens ? tokens : m.max_sequence_length;
    configure(r, &row->k, m, s);
    Config *c = &r->config;
    c->device_train_microbatch_size = 2;
    c->global_train_batch_size *= 2 * micro_batches_of(&s);
    c->optimizer.ns_steps = 1;
    if (row->bf16_head)
        c->recipe.head = (Format){ BF16, 0 };
    if (tensor_ranks(&s) > 1) /* slices of such small matrices have no whole groups */
        c->recipe.moment1 = c->recipe.moment2 = (Format){ F32, 0 };
    c->offload.activations = c->offload.frozen = c->offload.optimizer = c->offload.master =
        row->on_host;
}

/* Trains as train.c does, with an evaluation after each update; the last evaluation comes before
 * its update, when the memory that the update needs is in use. tokens: per sequence; 0: as the
 * architecture has. Returns the bytes of staging memory for Muon's updates. */
static size_t train(const Row *row, Strategy s, int tokens)
{
    Run r;
    configure_row(&r, row, s, tokens);
    memset(cells, 0, CELLS * sizeof *cells);
    alloc_run(&r);
    const size_t staging = r.store.staging_bytes - muon_bytes(&r.store, &r.config);
    store_init(&r.store, &r.config.model, 5);
    for (int step = 1; step <= STEPS && !*problem; step++) {
        fsdp_empty_grads(&r.store);
        micro_batches(&r, micro_batches_of(&s), PASS_COMPLETE);
        take_loss(&r);
        const double norm = optimizer_grad_norm(&r.store);
        if (step == STEPS)
            micro_batches(&r, 1, PASS_FORWARD);
        optimizer_step(&r.store, &r.config, step, 1e-3, fmin(1, 1 / norm));
        if (step < STEPS)
            micro_batches(&r, 1, PASS_FORWARD);
        take_loss(&r);
    }
    close_run(&r);
    if (*problem)
        fail_msg("%s, groups of %d, gathering %d, grad_sum %d: %s", row->k.recipe, s.shard_ranks,
                 s.gathering, s.grad_sum, problem);
    return staging;
}

/* Trains all rows, with groups of 2, 4 ... ranks. least: 1 also trains with groups of one rank. */
static void train_all(const Row *rows, int count, int least,
                      Strategy (*strategy)(int row, int ranks))
{
    for (int i = 0; i < count; i++)
        for (int ranks = least; ranks <= comm_size(); ranks *= 2)
            train(&rows[i], strategy(i, ranks), 0);
}

/* Weights and gradients do not share memory, so in each row some weights stay gathered and others
 * do not. */
TEST(test_every_strategy)
{
    static const Row rows[] = {
        { { "bf16", LLAMA_GQA }, .small = true },
        { { "fp8", OLMO2 }, .small = true },
        { { "coat", LLAMA }, .small = true },
        { { "coat-lean", LLAMA_GQA }, .small = true, .bf16_head = true },
        { { "coat", OLMO3 }, .small = true },
        { { "bf16", QWEN3 }, .small = true },
        { { "fp8", QWEN2 }, .small = true },
        { { "bf16", LLAMA_GQA, .trainable = { "*.mlp.*" } }, .small = true },
        { { "coat", LLAMA, .trainable = { "*.self_attn.*" } }, .small = true, .bf16_head = true },
        { { "fp8", OLMO2, .trainable = { "model.layers.1.*" } }, .small = true },
        { { "bf16", LLAMA_GQA, ALL_MODULES, BASE_NF4 }, .small = true },
        { { "coat-lean", LLAMA, ALL_MODULES, BASE_E4M3 }, .small = true },
    };
    enum { COUNT = sizeof rows / sizeof *rows };
    for (int i = 0; i < COUNT; i++)
        for (int ranks = 1; ranks <= comm_size(); ranks *= 2)
            for (int k = 0; k < 2; k++)
                if (!SANITIZED || (k + i) % 2 == 0)
                    train(&rows[i],
                          (Strategy){ ranks, k ? GATHER_ONCE : GATHER_OFTEN,
                                      (k + i / 2) % 2 ? SUM_ONCE : SUM_OFTEN },
                          0);
}

static Strategy shares_sequences(int i, int ranks)
{
    return (Strategy){ comm_size(), i % 2 ? GATHER_ONCE : GATHER_OFTEN, SUM_OFTEN, ranks };
}

/* Context parallelism over two ranks or all: exchanges around attention. */
TEST(test_in_context)
{
    static const Row rows[] = {
        { { "bf16", LLAMA } },
        { { "coat", OLMO }, .on_host = HOST_ALL },
        { { "coat-lean", LLAMA, ALL_MODULES, BASE_E4M3, .keep = KEEP_BLOCK } },
        { { "fp8", OLMO, .keep = KEEP_ATTENTION } },
    };
    train_all(rows, 4, 2, shares_sequences);
}

/* Tensor parallelism over two ranks or all: collectives around layers, and sums over replicated
 * parameters. If any wait for these collectives is removed from tensor_ranks.c, one of these runs
 * fails: the first for gathered rows or sums, the last for recomputed rows, because its first block
 * has no sum after them. */
TEST(test_in_tensor)
{
    static const Row rows[] = {
        { { "fp8", OLMO2 } },
        { { "coat", OLMO }, .on_host = HOST_ALL },
        { { "coat-lean", LLAMA, ALL_MODULES, .keep = KEEP_INPUTS, .recompute = -2 } },
    };
    for (int i = 0; i < 3 && comm_size() > 1; i++) {
        Strategy s = mesh(1, 1, i % 2 ? comm_size() : 2);
        s.gathering = i % 2 ? GATHER_ONCE : GATHER_OFTEN;
        train(&rows[i], s, 0);
    }
}

static Strategy has_stages(int i, int ranks)
{
    Strategy s = mesh(ranks, 1, 1);
    s.gathering = GATHER_ONCE;
    s.grad_sum = SUM_ONCE;
    s.pipeline_chunks = 1 + i % 2;
    s.pipeline_schedule = i % 2 ? PIPELINE_INTERLEAVED : PIPELINE_1F1B;
    return s;
}

/* Pipeline stages with several micro-batches in flight: messages are copied before they are
 * overwritten, and received before they are read. Meanwhile, activations of other micro-batches are
 * on the host. */
TEST(test_in_stages)
{
    static const Row rows[] = {
        { { "bf16", LLAMA }, .layers = 1 },
        { { "coat", OLMO2 }, .on_host = HOST_ALL },
        { { "coat-lean", LLAMA, ALL_MODULES, BASE_E4M3, .keep = KEEP_BLOCK }, .on_host = HOST_ALL },
        { { "fp8", LLAMA, .keep = KEEP_ATTENTION, .tied = true }, .layers = 2 },
    };
    train_all(rows, 4, 2, has_stages);
}

static Strategy often(int i, int ranks)
{
    (void)i;
    return (Strategy){ ranks, GATHER_OFTEN, SUM_OFTEN };
}

/* Blocks with every kind of saved activations, and more blocks than slots. */
TEST(test_on_host)
{
    static const Row rows[] = {
        { { "bf16", LLAMA_GQA }, 6, HOST_ALL },
        { { "coat", OLMO2, .trainable = { "model.layers.[1-5]*" } }, 6, HOST_ALL },
        { { "coat-lean", LLAMA, .keep = KEEP_BLOCK }, 6, HOST_ALL },
        { { "fp8", QWEN3, .keep = KEEP_INPUTS, .recompute = 2 }, 6, HOST_ALL },
        { { "coat", LLAMA, ALL_MODULES, BASE_E4M3 }, 6, HOST_ALL },
        { { "coat", LLAMA_GQA, ALL_MODULES, BASE_NF4, .keep = KEEP_ATTENTION }, 6, HOST_ALL },
        { { "bf16", OLMO2, ALL_MODULES, BASE_E4M3, .keep = KEEP_BLOCK }, 6, HOST_ALL },
    };
    train_all(rows, 7, 1, often);
}

/* Muon updates one block after the other, or has memory for the matrices of three blocks at
 * once. */
TEST(test_muon)
{
    static const Row rows[] = { { { "f32", LLAMA, .optimizer = "muon" }, 4, .small = true },
                                { { "coat", LLAMA, .optimizer = "muon" }, 4, .small = true } };
    const size_t block = dtype_size(BF16) * (size_t)(32 * (4 * 32 + 3 * 48));
    for (int three = 0; three < 2; three++)
        for (int ranks = 2; ranks <= comm_size(); ranks *= 2)
            assert_int_equal(
                train(&rows[three], often(0, ranks), three ? 128 : 8) > 2 * block + 1024, three);
}

/* Checks this test itself: the computation does not wait for a gather. */
TEST(test_missing_wait)
{
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
    return finish_ranks(run_all_tests(NULL, NULL));
}
