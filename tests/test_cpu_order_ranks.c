/* Queues overlap on a GPU and never on a CPU, so a missing wait shows on a GPU only, and there seldom. Here it shows: the linker
 * puts each operation behind a wrapper that says what memory the operation reads and writes, and vector clocks [Fidge 1988,
 * Mattern 1989] tell whether marks and waits order it behind what other queues did there. On 1, 2 and 4 ranks. */
#include <math.h>

#include "tests/kit.h"

#include "kernels/error.h"
#include "kernels/fp8.h"
#include "kernels/values.h"
#include "model/run/memory.h"
#include "model/update.h"
#include "tests/models.h"
#include "tests/ranks.h"

/* ---- clocks --------------------------------------------------------------------------------------------------- */

enum { CELL = 16, CELLS = 1 << 21 };    /* bytes that are watched together; as many of them as a run uses, and more */

typedef struct {
    uintptr_t address;
    const char *writer;                 /* the operation that wrote last */
    long written, read[NUM_QUEUES];     /* the last operations there: their numbers in their queues */
    Queue queue;                        /* the writer's */
} Cell;

struct DeviceMark { long known[NUM_QUEUES]; };

static Cell *cells;
static Queue queue;
static long known[NUM_QUEUES][NUM_QUEUES];      /* [q][p]: the last operation of p that is done before what q gets next */
static const char *operation;
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
    static const char *const names[] = { "compute", "gather", "reduce" };
    if (!*problem)
        snprintf(problem, sizeof problem, "%s on queue %s touches memory that %s on queue %s %s, and no wait is between (%p)",
                 operation, names[queue], other, names[theirs], verb, (void *)(c->address * CELL));
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
            *c = (Cell){ .address = a, .writer = operation, .written = before[queue], .queue = queue };
        else
            c->read[queue] = before[queue];
    }
}

static void touch_tensor(Tensor t, bool writes)
{
    const size_t n = tensor_numel(t);
    const size_t scales = !t.scale ? 0 : t.format.group ? format_scale_bytes(t.format, n)
                                                        : sizeof(float);
    touch(t.data, n * dtype_size(t.format.dtype), writes);
    touch(t.data_t, n, writes);
    touch(t.scale, scales, writes);
}

/* Written with the scale that it has, unless it is cut into groups. */
static void touch_codes(Tensor t)
{
    const bool given = format_is_fp8(t.format) && !t.format.group;
    if (given) {
        touch(t.scale, sizeof(float), false);
        t.scale = NULL;
    }
    touch_tensor(t, true);
}

static void touch_groups(Nf4 x, int cols)
{
    size_t count = 0;
    for (int i = 0; i < x.num_parts; i++)
        count += nf4_groups((size_t)x.rows[i], (size_t)cols);
    touch(x.plain ? (const void *)x.plain : x.group, count * nf4_group_bytes(x.plain != NULL), false);
}

/* A maximum that is handed on must be that of what is there now. */
static void check_maximum(Tensor x, const float *amax)
{
    float value, max = 0;
    for (size_t i = 0; amax && i < tensor_numel(x); i++) {
        tensor_load(&value, x, i, 1);
        max = fmaxf(max, fabsf(value));
    }
    if (amax && *amax != max && !*problem)
        snprintf(problem, sizeof problem, "%s is given the maximum %g of numbers up to %g", operation, *amax, max);
}

static void learn(Queue q, const long *more)
{
    for (Queue p = 0; p < NUM_QUEUES; p++)
        known[q][p] = more[p] > known[q][p] ? more[p] : known[q][p];
}

/* The host waited for queue q; what it queues from now on, anywhere, comes after. */
static void host_waited(Queue q)
{
    for (Queue p = 0; p < NUM_QUEUES; p++)
        learn(p, known[q]);
}

/* ---- what operations touch -------------------------------------------------------------------------------------- */

#define R(t) touch_tensor(t, false)
#define W(t) touch_tensor(t, true)
#define OP(name, parameters, arguments, ...)      \
    extern __typeof__(name) __real_##name, __wrap_##name;   \
    void __wrap_##name parameters                 \
    {                                             \
        begin(#name);                             \
        __VA_ARGS__;                              \
        __real_##name arguments;                  \
    }

OP(quantize,             (Tensor y, Tensor x), (y, x), R(x), W(y))
OP(quantize_with_amax,   (Tensor y, Tensor x, const float *a), (y, x, a), R(x), touch(a, sizeof *a, false), W(y),
   check_maximum(x, a))
OP(quantize_scale,       (Tensor y, Tensor x), (y, x), R(x), touch(y.scale, sizeof(float), true))
OP(quantize_scale_from,  (Tensor y, const float *a), (y, a), touch(a, sizeof *a, false), touch(y.scale, sizeof(float), true))
OP(quantize_codes,       (Tensor y, Tensor x), (y, x), R(x), touch_codes(y))
OP(expand_operand,       (Tensor y, Tensor x), (y, x), touch(x.data, tensor_numel(x), false),
   touch(x.data_t, tensor_numel(x), true), W(y))
OP(init_normal,          (Tensor w, float s, float c, uint64_t seed, uint64_t f), (w, s, c, seed, f), W(w))
OP(init_constant,        (Tensor w, float x), (w, x), W(w))
OP(embedding_forward,    (Tensor y, const TokenAt *t, Tensor w), (y, t, w), R(w), W(y))
OP(embedding_backward,   (Tensor dw, const TokenAt *t, Tensor dy), (dw, t, dy), R(dy), W(dw))
OP(norm_forward,         (Tensor y, Tensor x, float *s, Tensor r0, Tensor w, Tensor r, Norm n), (y, x, s, r0, w, r, n),
   R(r0), R(w), R(r), W(x), W(y))
OP(norm_forward_exact,   (Tensor y, Tensor x, float *s, Tensor r0, Tensor w, Tensor r, Norm n), (y, x, s, r0, w, r, n),
   R(r0), R(w), R(r), W(x), W(y))
OP(norm_again,           (Tensor y, Tensor x, const float *s, Tensor w), (y, x, s, w), R(x), R(w), W(y))
OP(norm_backward,        (Tensor dx, float *m, Tensor dw, Tensor dy, Tensor x, const float *s, Tensor w, Norm n, bool add),
   (dx, m, dw, dy, x, s, w, n, add), R(dy), R(x), R(w), W(dw), W(dx), touch(m, sizeof *m, true))
OP(matmul,               (Tensor y, Tensor x, Tensor w, Tensor add), (y, x, w, add), R(x), R(w), R(add), W(y))
OP(matmul_dx,            (Tensor dx, Tensor dy, Tensor w, bool add), (dx, dy, w, add), R(dy), R(w), W(dx))
OP(matmul_dw,            (Tensor dw, Tensor dy, Tensor x), (dw, dy, x), R(dy), R(x), W(dw))
OP(lora_narrow,          (Tensor l, Tensor x, LowRank m, float scale), (l, x, m, scale), R(x), R(m.w), W(l))
OP(lora_widen,           (Tensor y, Tensor l, LowRank m, Tensor add), (y, l, m, add), R(l), R(m.w), R(add), W(y))
OP(lora_dw,              (LowRank dm, Tensor l, Tensor x), (dm, l, x), R(l), R(x), W(dm.w))
OP(rope_forward,         (Tensor y, Tensor g, float *s, Tensor x, LowProduct p, Tensor q, Tensor k, Attention a),
   (y, g, s, x, p, q, k, a), R(x), R(p.low), R(p.m.w), R(q), R(k), W(g), W(y))
OP(rope_forward_exact,   (Tensor y, Tensor g, float *s, Tensor x, LowProduct p, Tensor q, Tensor k, Attention a),
   (y, g, s, x, p, q, k, a), R(x), R(p.low), R(p.m.w), R(q), R(k), W(g), W(y))
OP(rope_backward,        (Tensor dx, Tensor dq, Tensor dk, Tensor dy, Tensor x, const float *s, Tensor q, Tensor k, Attention a),
   (dx, dq, dk, dy, x, s, q, k, a), R(dy), R(x), R(q), R(k), W(dq), W(dk), W(dx))
OP(attention_forward,    (Tensor y, float *l, Tensor x, Attention a, Documents d), (y, l, x, a, d), R(x), W(y))
OP(attention_backward,   (Tensor dx, Tensor dy, Tensor x, Tensor y, const float *l, Attention a, Documents d),
   (dx, dy, x, y, l, a, d), R(dy), R(x), R(y), W(dx))
OP(swiglu_forward,       (Tensor y, Tensor g, Tensor x, LowProduct p), (y, g, x, p), R(x), R(p.low), R(p.m.w), W(g), W(y))
OP(swiglu_forward_exact, (Tensor y, Tensor g, Tensor x, LowProduct p), (y, g, x, p), R(x), R(p.low), R(p.m.w), W(g), W(y))
OP(matmul_swiglu,        (Tensor y, Tensor g, Tensor wide, Tensor x, Tensor w), (y, g, wide, x, w), R(x), R(w), W(wide), W(g), W(y))
OP(swiglu_backward,      (Tensor dg, Tensor y, Tensor dy, LowProduct p, Tensor g), (dg, y, dy, p, g),
   R(dy), R(p.low), R(p.m.w), R(g), W(y), W(dg))
OP(matmul_dx_swiglu,     (Tensor dg, Tensor y, Tensor h, Tensor dy, Tensor w, Tensor g), (dg, y, h, dy, w, g),
   R(dy), R(w), R(g), W(h), W(y), W(dg))
OP(cross_entropy,        (Tensor x, float *l, float *z, const int *t, int v, float s, float w, bool b), (x, l, z, t, v, s, w, b),
   W(x))
OP(cross_entropy_codes,  (Tensor g, float a, Tensor x, float *l, float *z, const int *t, int v, float s, float w),
   (g, a, x, l, z, t, v, s, w), R(x), W(g))
OP(nf4_dequantize,       (Tensor y, Nf4 x), (y, x), touch_groups(x, y.cols), touch_codes(y))
OP(sum_squares,          (float *out, Tensor x), (out, x), R(x), touch(out, sizeof *out, true))
OP(find_not_finite,      (int *found, Tensor x, bool n), (found, x, n), R(x), touch(found, sizeof *found, true))
OP(adamw,                (Tensor w, Tensor m, Tensor v, Tensor g, AdamW a, uint64_t f), (w, m, v, g, a, f), R(g), W(m), W(v), W(w))
OP(comm_all_reduce,      (Tensor x, Ranks g), (x, g), W(x))
OP(comm_all_reduce_max,  (Tensor x, Ranks g), (x, g), W(x))
OP(comm_reduce_scatter,  (Tensor part, Tensor whole), (part, whole), R(whole), W(part))
OP(comm_all_gather,      (void *whole, const void *part, size_t n), (whole, part, n),
   touch(part, n, false), touch(whole, n * (size_t)comm_group_size(RANKS_SHARD), true))
OP(device_put,           (void *to, const void *from, size_t n), (to, from, n), touch(to, n, true))
OP(device_get,           (void *to, const void *from, size_t n), (to, from, n), touch(from, n, false), host_waited(queue))
OP(device_copy,          (void *to, const void *from, size_t n), (to, from, n), touch(from, n, false), touch(to, n, true))
OP(device_zero,          (void *p, size_t n), (p, n), touch(p, n, true))
OP(device_sync,          (void), (), for (Queue q = 0; q < NUM_QUEUES; q++) host_waited(q))
OP(device_queue,         (Queue q), (q), queue = q)

DeviceMark *__wrap_device_mark(DeviceMark *m);
DeviceMark *__wrap_device_mark(DeviceMark *m)
{
    m = m ? m : malloc(sizeof *m);
    assert_non_null(m);
    memcpy(m->known, known[queue], sizeof m->known);
    return m;
}

void __wrap_device_wait(DeviceMark *m);
void __wrap_device_wait(DeviceMark *m)
{
    if (m)
        learn(queue, m->known);
}

/* ---- training under watch --------------------------------------------------------------------------------------- */

enum { MICRO_BATCHES = 2, STEPS = 3 };

static void micro_batch(Model *m, Fsdp *f, Pass pass)
{
    int tokens[4096], targets[4096];
    assert_true(m->N <= 4096);
    for (int n = 0; n < m->N; n++)
        tokens[n] = targets[n] = test_token(7, (uint64_t)n, m->config->vocab_size);
    model_step(m, f, tokens, targets, NULL, 1.0f / (float)m->N, 0, pass);
}

/* As train.c goes, with an evaluation in between. */
static void train(const char *recipe, ModelConfig m, char *trainable, bool bf16_head, Strategy strategy)
{
    Config c;
    Model model = { 0 };
    Fsdp fsdp = { 0 };
    model_config(&c, &m, recipe, 2);
    if (bf16_head)
        c.recipe.head = (Format){ BF16, 0 };
    c.strategy = strategy;
    c.trainable = &trainable;
    c.num_trainable = trainable != NULL;
    comm_device_finish();
    comm_set_mesh(mesh_of_shards(comm_size(), strategy.shard_ranks));
    comm_init();
    memset(cells, 0, CELLS * sizeof *cells);
    memory_plan(&model, &fsdp, &c);
    model_place(&model, &fsdp, &c);
    fsdp_init(&fsdp, &m, 5);
    for (int step = 1; step <= STEPS && !*problem; step++) {
        fsdp_empty_grads(&fsdp);
        for (int i = 0; i < MICRO_BATCHES; i++)
            micro_batch(&model, &fsdp, i == MICRO_BATCHES - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
        model_losses(&model);
        const double norm = optimizer_grad_norm(&fsdp);
        optimizer_step(&fsdp, &c, step, step, 1e-3, fmin(1, 1 / norm));
        micro_batch(&model, &fsdp, PASS_FORWARD);
        model_losses(&model);
    }
    model_free(&model, &fsdp);
    if (*problem)
        fail_msg("%s, groups of %d, gathering %d, grad_sum %d: %s", recipe, strategy.shard_ranks, strategy.gathering,
                 strategy.grad_sum, problem);
}

static void test_every_strategy(void **state)
{
    (void)state;
    static const struct { const char *recipe; SmallModel a; char *trainable; bool bf16_head, adapters; BaseFormat base; } runs[] = {
        { "bf16", LLAMA_GQA }, { "fp8", OLMO2 }, { "coat", LLAMA }, { "coat-lean", LLAMA_GQA, NULL, true }, { "coat", OLMO3 },
        { "bf16", QWEN3 },
        { "bf16", LLAMA_GQA, "*.mlp.*" }, { "coat", LLAMA, "*.self_attn.*", true }, { "fp8", OLMO2, "model.layers.1.*" },
        { "bf16", LLAMA_GQA, .adapters = true, .base = BASE_NF4 }, { "coat-lean", LLAMA, .adapters = true, .base = BASE_E4M3 },
    };
    for (int r = 0; r < (int)(sizeof runs / sizeof *runs); r++) {
        ModelConfig m = architecture(runs[r].a);
        m.n_layers = 3;
        if (runs[r].adapters)
            m = with_adapters(m, 4, ALL_MODULES, runs[r].base);
        for (int ranks = 1; ranks <= comm_size(); ranks *= 2)
            for (int keep = 0; keep < 2; keep++)        /* the memory of weights is none of gradients' */
                train(runs[r].recipe, m, runs[r].trainable, runs[r].bf16_head,
                      (Strategy){ ranks, keep ? GATHER_ONCE : GATHER_OFTEN, (keep + r) % 2 ? SUM_ONCE : SUM_OFTEN });
    }
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
    assert_non_null(strstr(problem, "device_copy on queue compute touches memory that device_zero on queue gather wrote"));
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
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_missing_wait), cmocka_unit_test(test_every_strategy) };
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
