/* The list of operations is complete: each row of kernels/operation_list.h names all memory that
 * the operation reads and writes.
 *
 * While an operation of a training step runs, the model's device memory is NaN, except for the
 * memory that the operation's row names as read. A change of memory that the row does not name as
 * written is detected and undone. So an access that is missing in a row is an error or changes the
 * results, which are compared with those of a normal step. Then each access of each row is hidden
 * in turn; the test must detect this. */
#include "tests/test.h"
#include "tests/kit.h"

#include <math.h>

#include "kernels/gptq_layer.h"
#include "kernels/wire.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "model/decode.h"
#include "model/update/update.h"
#include "tests/images.h"

#define OP(name, ...) #name,
static const char *const names[] = {
#include "kernels/operation_list.h"
};
#undef OP
enum { NUM_OPERATIONS = sizeof names / sizeof *names, MAX_ACCESSES = 32 };

static struct {
    char *memory; /* watched memory, and its size in units of 8 bytes */
    size_t words;
    /* 0xff in each byte that the current operation reads, writes or spoils */
    uint64_t *reads, *writes, *spoils;
    /* the memory before the operation, as given to the operation, and after it */
    uint64_t *before, *left, *now;
    int operation, access; /* the hidden access; -1: none */
    char problem[160];
    bool is_seen[NUM_OPERATIONS];
    unsigned used[NUM_OPERATIONS][MAX_ACCESSES]; /* how each access is used, over all calls */
} eye = { .operation = -1 };

static int number_of(const char *name)
{
    for (int i = 0; i < NUM_OPERATIONS; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    fail_msg("%s is not in the list", name);
    return -1;
}

/* Whether a hidden access has no effect: nothing is read or kept, or another access names the same
 * memory as read. */
static bool is_immaterial(const Operation *o, int access)
{
    const Access *a = &o->access[access];
    bool is_read = a->how == SPOILS;
    for (int i = 0; i < o->count; i++)
        is_read |=
            i != access && a->how & WRITES && o->access[i].at == a->at && o->access[i].how & READS;
    return is_read;
}

/* Marks the accesses of the operation, without the hidden one. */
static void note(const Operation *o, int number)
{
    const size_t bytes = 8 * eye.words;
    memset(eye.reads, 0, bytes), memset(eye.writes, 0, bytes), memset(eye.spoils, 0, bytes);
    for (int i = 0; i < o->count; i++) {
        const Access *a = &o->access[i];
        if (a->at < eye.memory || a->at + a->bytes > eye.memory + bytes)
            continue;
        if (!is_immaterial(o, i))
            eye.used[number][i] |= a->how;
        if (number == eye.operation && i == eye.access)
            continue;
        uint64_t *const as[] = { eye.reads, eye.writes, eye.spoils };
        for (int how = 0; how < 3; how++)
            if (a->how >> how & 1)
                memset((char *)as[how] + (a->at - eye.memory), 0xff, a->bytes);
    }
}

static bool blind(void *watcher, const Operation *o)
{
    (void)watcher;
    const int number = number_of(o->name);
    eye.is_seen[number] = true;
    note(o, number);
    device_get(eye.before, eye.memory, 8 * eye.words);
    for (size_t i = 0; i < eye.words; i++)
        eye.left[i] = eye.before[i] | ~eye.reads[i];
    device_put(eye.memory, eye.left, 8 * eye.words);
    return true;
}

static void restore(void *watcher, const Operation *o)
{
    (void)watcher;
    device_get(eye.now, eye.memory, 8 * eye.words);
    for (size_t i = 0; i < eye.words; i++) {
        if ((eye.now[i] ^ eye.left[i]) & ~(eye.writes[i] | eye.spoils[i]) && !*eye.problem)
            snprintf(eye.problem, sizeof eye.problem,
                     "%s writes in bytes %zu to %zu of the model's memory, which its row does not "
                     "name",
                     o->name, 8 * i, 8 * i + 7);
        eye.now[i] =
            (eye.now[i] & eye.writes[i]) | ((eye.before[i] | eye.spoils[i]) & ~eye.writes[i]);
    }
    device_put(eye.memory, eye.now, 8 * eye.words);
}

/* Watches the model's memory; device_alloc allocates multiples of 256 bytes. */
static void open_eye(void *memory, size_t bytes)
{
    uint64_t **const own[] = { &eye.reads,  &eye.writes, &eye.spoils,
                               &eye.before, &eye.left,   &eye.now };
    eye.memory = memory;
    eye.words = (bytes + 7) / 8;
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        *own[i] = xmalloc(8 * eye.words);
    *eye.problem = '\0';
    static const Watch watch = { blind, restore, NULL };
    operations_watch(&watch);
}

static void close_eye(void)
{
    operations_watch(NULL);
    free(eye.reads), free(eye.writes), free(eye.spoils), free(eye.before), free(eye.left),
        free(eye.now);
}

/* ---- a run ----------------------------------------------------------------------------------- */

static void add(uint64_t *hash, const void *p, size_t bytes)
{
    unsigned char *host = xmalloc(bytes + 1);
    if (p)
        device_get(host, p, bytes);
    for (size_t i = 0; p && i < bytes; i++)
        *hash = (*hash ^ host[i]) * 0x100000001b3u; /* FNV-1a */
    free(host);
}

static void add_host(uint64_t *hash, const void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        *hash = (*hash ^ ((const unsigned char *)p)[i]) * 0x100000001b3u;
}

static void add_tensor(uint64_t *hash, Tensor t)
{
    add(hash, t.data, tensor_numel(t) * dtype_size(t.format.dtype));
    add(hash, t.scale, t.format.group ? format_scale_bytes(t.format, tensor_numel(t)) : 0);
}

static void train(Model *m, ParamStore *store, const Config *c, uint64_t *hash)
{
    int tokens[256], targets[256];
    TestImages images = { 0 };
    uint8_t begins[256] = { [5] = 1, [11] = 1 };
    assert_true(m->text.N <= 256);
    store_zero_states(store);
    fsdp_empty_grads(store);
    for (PassKind pass = PASS_FORWARD; pass <= PASS_COMPLETE; pass++) {
        for (int n = 0; n < m->text.N; n++)
            tokens[n] = test_token((uint64_t)pass, (uint64_t)n, c->model.vocab_size);
        memcpy(targets, tokens, sizeof targets);
        if (c->model.image.feature_size > 0)
            place_images(&images, tokens, targets, m->text.attn.B, m->text.T, 2);
        model_use_images(m, image_rows(&images));
        model_micro_batch(m, store, tokens, targets, m->text.documents ? begins : NULL,
                          1.0f / (float)m->text.N, 1e-3f, pass);
        const Losses l = take_losses(m);
        add_host(hash, &l, sizeof l);
    }
    const double norm = optimizer_grad_norm(store);
    add_host(hash, &norm, sizeof norm);
    for (int step = 1; step <= 2; step++) /* in the first step, moments are 0 with any scales */
        optimizer_step(store, c, step, 1e-2, fmin(1, 1 / norm));
    for (int u = 0; u < store->num_units; u++) {
        add_tensor(hash, store->shard[u].slice[TRAINED].stored);
        add_tensor(hash, store->shard[u].grad);
        for (int i = 0; i < store->optimizer->num_states; i++)
            add_tensor(hash, store->shard[u].state[i]);
    }
}

static void generate(Model *m, ParamStore *store, const Config *c, uint64_t *hash)
{
    float logits[128];
    int tokens[8];
    for (int i = 0; i < 8; i++)
        tokens[i] = test_token(1, (uint64_t)i, c->model.vocab_size);
    decode_begin(m);
    decode_append(m, store, tokens, 7);
    decode_append(m, store, tokens + 7, 1);
    decode_logits(m, store, logits);
    add_host(hash, logits, sizeof *logits * (size_t)c->model.vocab_size);
}

/* Returns a hash of all results. watched: whether the test watches the memory. */
static uint64_t run(const Config *c, bool watched)
{
    Model m;
    ParamStore store;
    uint64_t hash = 0;
    model_create(&m, &store, c);
    if (watched)
        open_eye(m.memory, m.bytes.total);
    store_init(&store, &c->model, 3);
    test_fill_adapters(&store, 9);
    (c->generate ? generate : train)(&m, &store, c, &hash);
    if (watched)
        close_eye();
    model_free(&m, &store);
    return hash;
}

static void configure(Config *c, const ModelConfig *m, const char *recipe, Keep kept,
                      ScalesPer scales)
{
    model_config(c, m, recipe, 1);
    c->recipe.keep = kept;
    c->recipe.scales = scales;
    c->recipe.down_scales = scales == PER_STEP ? DOWN_CHANNEL : DOWN_TENSOR;
}

static ModelConfig small(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.n_layers = 1;
    m.layer_types.count = 0;
    m.d_model = 32;
    m.head_dim = m.head_dim % 16 ? 32 : m.head_dim; /* FP8 GEMMs need multiples of 16 */
    m.n_heads = 2;
    m.n_kv_heads = a % 2 ? 1 : 2;
    m.mlp_width = 48;
    m.embedding_size = 96;
    m.max_sequence_length = 16;
    return m;
}

static void check(const Config *c)
{
    const uint64_t expected = run(c, false), found = run(c, true);
    if (*eye.problem)
        fail_msg("%s, keep %d: %s", c->recipe.name, c->recipe.keep, eye.problem);
    if (found != expected)
        fail_msg("%s, keep %d: results change when operations see nothing but what their rows name",
                 c->recipe.name, c->recipe.keep);
}

TEST(test_training)
{
    static const char *const recipes[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 5; r++) {
            const ModelConfig m = small(a);
            Config c;
            configure(&c, &m, recipes[r], (Keep)((a + r) % 3), a % 2 ? PER_STEP : PER_MICROBATCH);
            /* the adapters of every recipe, so that x is not the stream */
            c.recipe.forward = a / 2 % 2 && a != OLMOE ? FROM_SAVED : c.recipe.forward;
            c.data.generate_doc_lengths = a == LLAMA || a == MISTRAL;
            c.optimizer.name = r == 2 && a % 2 ? "adamw8bit" : r == 3 && a % 2 ? "muon" : "adamw";
            check(&c);
        }
}

TEST(test_adapters)
{
    static const char *const recipes[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (int r = 0; r < 4; r++)
        for (BaseFormat base = BASE_AS_FROZEN; base <= BASE_NF4; base++) {
            const ModelConfig m =
                with_adapters(small(r % 2 ? LLAMA_GQA : OLMO2), 4, ALL_MODULES, base);
            Config c;
            configure(&c, &m, recipes[r], (Keep)((r + base) % 3), PER_MICROBATCH);
            c.model.lora.plain_nf4 = base == BASE_NF4 && r % 2;
            check(&c);
        }
}

TEST(test_adapters_of_experts)
{
    static const char *const recipes[] = { "bf16", "coat", "coat-lean" };
    for (int r = 0; r < 3; r++) {
        ModelConfig m = with_adapters(small(QWEN3_MOE), 16, ALL_MODULES, (BaseFormat)r);
        Config c;
        m.experts.dense.count = 0; /* the only block has experts */
        configure(&c, &m, recipes[r], (Keep)r, PER_MICROBATCH);
        check(&c);
    }
}

TEST(test_images)
{
    static const char *const recipes[] = { "f32", "bf16", "coat" };
    for (int r = 0; r < 3; r++) {
        const ModelConfig m =
            with_images(small(LLAMA), r == 1 ? PROJECTOR_LINEAR : PROJECTOR_MLP, r != 1);
        Config c;
        configure(&c, &m, recipes[r], KEEP_ALL, PER_MICROBATCH);
        check(&c);
    }
}

TEST(test_generating)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = small(a);
        Config c;
        configure(&c, &m, a % 2 ? "f32" : "bf16", KEEP_ALL, PER_MICROBATCH);
        c.generate = "prompts";
        check(&c);
    }
}

/* A layer's Hessian, factor and codes, in two ranges. */
static uint64_t call_gptq(bool watched)
{
    enum { ROWS = 8, COLS = 16, PIECE = 8 };
    const Format f32 = { F32, 0 };
    uint64_t hash = 0;
    char *memory = device_alloc(16 << 10);
    Arena a = { .memory = memory };
    const Tensor w = tensor_alloc(&a, f32, ROWS, COLS), x = tensor_alloc(&a, f32, 4 * COLS, COLS);
    const Tensor h = tensor_alloc(&a, f32, COLS, COLS), m = tensor_alloc(&a, f32, COLS, COLS);
    const Tensor c = tensor_alloc(&a, f32, COLS, COLS), e = tensor_alloc(&a, f32, ROWS, COLS);
    const Tensor sums = tensor_alloc(&a, f32, ROWS, PIECE),
                 values = tensor_alloc(&a, (Format){ BF16, 0 }, ROWS, COLS);
    Tensor scale = tensor_alloc(&a, f32, ROWS, COLS / PIECE);
    float *diagonal = arena_alloc(&a, COLS * sizeof *diagonal);
    int *order = arena_alloc(&a, COLS * sizeof *order), *failed = arena_alloc(&a, sizeof *failed),
        columns[COLS];
    int8_t *q = arena_alloc(&a, ROWS * COLS);
    CHECK(a.used <= 16 << 10, "%zu bytes", a.used);
    for (int i = 0; i < COLS; i++)
        columns[i] = (i * 5 + 3) % COLS;
    device_put(order, columns, sizeof columns);
    init_normal(w, 1, 3, 7, 0), init_normal(x, 1, 3, 8, 0), init_constant(scale, 0.25f);
    matmul_dw(h, x, x);
    if (watched)
        open_eye(memory, a.used);
    gptq_diagonal(diagonal, h);
    gptq_damp(m, h, order, 1);
    for (int first = COLS - PIECE; first >= 0; first -= PIECE) {
        gptq_factor(tensor_rows(c, first, PIECE), failed, tensor_rows(m, first, PIECE), first);
        matmul_dw(m, tensor_rows(c, first, PIECE), tensor_rows(c, first, PIECE));
    }
    for (int first = 0; first < COLS; first += PIECE) {
        matmul(sums, e, tensor_rows(c, first, PIECE), NONE);
        gptq_columns(q, values, e, (GptqWeights){ w, scale.data, PIECE, order }, sums,
                     tensor_rows(c, first, PIECE), first, PIECE);
    }
    if (watched)
        close_eye();
    add_tensor(&hash, c), add_tensor(&hash, values), add_tensor(&hash, e);
    add(&hash, diagonal, COLS * sizeof *diagonal), add(&hash, failed, sizeof *failed),
        add(&hash, q, ROWS * COLS);
    device_free(memory);
    return hash;
}

/* The operations of soft labels, of a model whose own columns are the labels. */
static uint64_t call_soft_labels(bool watched)
{
    enum { ROWS = 6, COLS = 48, K = 5 };
    const Format f32 = { F32, 0 }, e5m2 = { E5M2, 0 };
    const Distillation d = { false, 2, 1, 0.5f };
    uint64_t hash = 0;
    int targets[ROWS];
    char *memory = device_alloc(8 << 10);
    Arena a = { .memory = memory };
    const Tensor logits = tensor_alloc(&a, f32, ROWS, COLS),
                 codes = tensor_alloc(&a, e5m2, 16, COLS), losses = tensor_alloc(&a, f32, 3, ROWS),
                 logps = tensor_alloc(&a, f32, ROWS, K), drawn = tensor_alloc(&a, f32, ROWS, K),
                 tail = tensor_alloc(&a, f32, 1, ROWS);
    int *target = arena_alloc(&a, ROWS * sizeof *target),
        *column = arena_alloc(&a, ROWS * K * sizeof *column);
    float *loss = losses.data;
    CHECK(a.used <= 8 << 10, "%zu bytes", a.used);
    for (int i = 0; i < ROWS; i++)
        targets[i] = i == 2 ? -1 : 7 * i;
    device_put(target, targets, sizeof targets);
    init_normal(logits, 1, 3, 7, 0), init_constant(logps, 0.125f), init_constant(tail, 0.375f);
    if (watched)
        open_eye(memory, a.used);
    row_entropy(loss + 2 * ROWS, logits, target, COLS, 2);
    draw_columns(column, drawn.data, logits, target, COLS, 2, K, 1);
    top_columns(column, drawn.data, logits, target, COLS, 2, K);
    const SoftLabels labels = { K, column, logps.data, tail.data };
    distill(codes, 4, logits, loss, loss + ROWS, target, labels, d, COLS, 1);
    distill(logits, 0, logits, loss, loss + ROWS, target, labels, d, COLS, 1);
    if (watched)
        close_eye();
    add_tensor(&hash, logits), add_tensor(&hash, codes), add_tensor(&hash, losses);
    add_tensor(&hash, drawn), add(&hash, column, ROWS * K * sizeof *column);
    device_free(memory);
    return hash;
}

/* Operations that no training step calls, but that back ends and saving call. */
static uint64_t call_others(bool watched)
{
    enum { ROWS = 16, COLS = 32 };
    const Format f32 = { F32, 0 }, e4m3 = { E4M3, 0 };
    Arena arena = { 0 };
    uint64_t hash = 0;
    tensor_alloc(&arena, f32, 4 * ROWS, COLS), tensor_alloc(&arena, e4m3, ROWS, COLS),
        arena_alloc(&arena, 512), arena_alloc(&arena, 4 << 10);
    char *memory = device_alloc(arena.used);
    Arena placed = { .memory = memory };
    const Tensor x = tensor_alloc(&placed, f32, ROWS, COLS);
    const Tensor mean = tensor_alloc(&placed, f32, ROWS, COLS);
    const Tensor exchanged = tensor_alloc(&placed, f32, 2 * ROWS, 12),
                 joined = tensor_alloc(&placed, f32, ROWS, 24);
    Tensor y = tensor_alloc(&placed, e4m3, ROWS, COLS);
    y.scale_amax = arena_alloc(&placed, sizeof *y.scale_amax);
    const bool kept = true;
    y.scale_reused = &kept;
    int *found = arena_alloc(&placed, sizeof *found);
    const Tensor grads = tensor_flat(x, WIRE_VALUES),
                 sum = tensor_alloc(&placed, f32, 1, WIRE_VALUES),
                 message = wire_message(arena_alloc(&placed, WIRE_VALUES * 2), 1, WIRE_FP8_LM);
    const WireScale scale = { arena_alloc(&placed, sizeof(float)), 0.01f,
                              arena_alloc(&placed, sizeof(uint64_t)) };
    const float range = 0.25f; /* half of the needed range, which E4M3's headroom covers */
    init_normal(x, 1, 1, 7, 0);
    device_put(y.scale_amax, &range, sizeof range);
    device_put((void *)scale.scale, &range, sizeof range);
    device_zero(scale.cut, sizeof *scale.cut);
    if (watched)
        open_eye(memory, arena.used);
    quantize_in_range(y, x);
    find_not_finite(found, x, false);
    average_weights(mean, x, 1);
    average_weights(mean, x, 0.5f);
    accumulate(mean, x);
    const Attention heads = { .H = 1, .K = 1, .D = 4 };
    heads_split(exchanged, tensor_at(x.data, f32, ROWS, 24), heads);
    heads_join(joined, exchanged, heads);
    wire_encode(message, grads, WIRE_FP8_LM, scale);
    wire_sum(sum, grads, message, 2, 1, WIRE_FP8_LM);
    if (watched)
        close_eye();
    add_tensor(&hash, y), add_tensor(&hash, mean);
    add_tensor(&hash, exchanged), add_tensor(&hash, joined);
    add(&hash, y.scale_amax, sizeof *y.scale_amax);
    add_tensor(&hash, message), add_tensor(&hash, sum);
    add(&hash, found, sizeof *found), add(&hash, scale.cut, sizeof *scale.cut);
    device_free(memory);
    return hash;
}

/* On one rank, collectives do nothing; test_cpu_order_ranks tests their rows. */
TEST(test_all_seen)
{
    assert_true(call_others(true) == call_others(false));
    assert_true(call_gptq(true) == call_gptq(false));
    assert_true(call_soft_labels(true) == call_soft_labels(false));
    assert_string_equal(eye.problem, "");
    for (int i = 0; i < NUM_OPERATIONS; i++)
        if (!eye.is_seen[i] && strncmp(names[i], "comm_", 5) != 0)
            fail_msg("%s is in no run of this test", names[i]);
}

/* ---- rows that are wrong --------------------------------------------------------------------- */

static void check_hidden(const Config *c)
{
    const uint64_t expected = run(c, false);
    memset(eye.used, 0, sizeof eye.used);
    run(c, true);
    unsigned used[NUM_OPERATIONS][MAX_ACCESSES];
    memcpy(used, eye.used, sizeof used);
    for (eye.operation = 0; eye.operation < NUM_OPERATIONS; eye.operation++)
        for (eye.access = 0; eye.access < MAX_ACCESSES; eye.access++) {
            if (!used[eye.operation][eye.access] ||
                (strstr(names[eye.operation], "embedding_") && eye.access == 0))
                continue; /* the operation itself detects invalid token numbers */
            const uint64_t found = run(c, true);
            if (!*eye.problem && found == expected)
                fail_msg("%s, %s: it is not noticed that access %d is missing", c->recipe.name,
                         names[eye.operation], eye.access);
        }
    eye.operation = -1;
}

TEST(test_hidden)
{
    const ModelConfig m = small(OLMO2), n = small(LLAMA_GQA);
    Config c;
    configure(&c, &n, "coat", KEEP_INPUTS, PER_MICROBATCH);
    check_hidden(&c);
    configure(&c, &m, "bf16", KEEP_ALL, PER_MICROBATCH);
    check_hidden(&c);
    const ModelConfig seeing = with_images(small(LLAMA), PROJECTOR_MLP, true);
    configure(&c, &seeing, "bf16", KEEP_ALL, PER_MICROBATCH);
    check_hidden(&c);
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
