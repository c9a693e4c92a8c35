/* Buffers that share memory: a step gives the same bits as with separate memory for each buffer. A
 * buffer whose planned lifetime is too short may be overwritten by overlaid buffers, so several
 * placements are tried. */
#include <math.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "model/decode.h"
#include "model/lifetimes.h"
#include "model/plan_model.h"
#include "tests/models.h"
#include "tests/sanitized.h"

enum { B = 2, TOKENS = 64 };

/* ---- operations ------------------------------------------------------------------------------ */

static char problem[128];

/* On the CPU, an operation reads all inputs before it writes; on a GPU it does not. So an output
 * may overlap another operand only if both are the same bytes (in place). */
static bool check_overlaps(void *watcher, const Operation *o)
{
    (void)watcher;
    const Access *a = o->access;
    for (int i = 0; i < o->count; i++)
        for (int j = 0; j < o->count; j++)
            if (a[i].how & (WRITES | SPOILS) && (a[i].at != a[j].at || a[i].bytes != a[j].bytes) &&
                a[i].at < a[j].at + a[j].bytes && a[j].at < a[i].at + a[i].bytes && !*problem)
                snprintf(problem, sizeof problem,
                         "%s: what it writes (%d) overlaps another of its tensors (%d)", o->name, i,
                         j);
    return true;
}

static bool is_written(const Operation *o, const Access *a)
{
    for (int i = 0; i < o->count; i++)
        if (o->access[i].how & WRITES && o->access[i].at == a->at)
            return true;
    return false;
}

/* NaN in any format. */
static void fill_with_nan(void *p, size_t bytes)
{
    void *nan = xmalloc(bytes);
    memset(nan, 0xff, bytes);
    device_put(p, nan, bytes);
    free(nan);
}

/* Fills memory that may have any contents after the operation with NaN, because another back end
 * may use this memory. */
static void spoil(void *watcher, const Operation *o)
{
    (void)watcher;
    for (int i = 0; i < o->count; i++)
        if (o->access[i].how == SPOILS && !is_written(o, &o->access[i]))
            fill_with_nan((void *)(uintptr_t)o->access[i].at, o->access[i].bytes);
}

static const Watch operations = { .begin = check_overlaps, .end = spoil };

/* ---- placements ------------------------------------------------------------------------------ */

/* seen: a hash of the blocks' buffers, from an observer. */
typedef struct {
    float loss[PASS_COMPLETE + 1], logits[2][128];
    uint64_t seen;
    size_t bytes;
    char *grads;
} Result;

/* Places the buffers in random order, each at the lowest free offset. */
static size_t lay_out(OverlaidBuffer *s, uint64_t seed)
{
    bool done[NUM_BUFFERS] = { false };
    size_t end = 0;
    for (int n = 0; n < NUM_BUFFERS; n++) {
        int b = test_token(seed, (uint64_t)n, NUM_BUFFERS);
        while (done[b])
            b = (b + 1) % NUM_BUFFERS;
        s[b].at = 0;
        for (int o = 0; o < NUM_BUFFERS; o++)
            if (done[o] && buffers_have(&s[b].meets, (Buffer)o) && s[o].at < s[b].at + s[b].bytes &&
                s[b].at < s[o].at + s[o].bytes) {
                s[b].at = s[o].at + s[o].bytes;
                o = -1;
            }
        done[b] = true;
        end = s[b].at + s[b].bytes > end ? s[b].at + s[b].bytes : end;
    }
    return end;
}

enum { APART, AS_PLANNED, AT_RANDOM };

static void create(Model *m, ParamStore *store, const Config *c, int placement)
{
    static uint64_t seed;
    if (placement == APART)
        model_create_apart(m, store, c);
    else if (placement == AS_PLANNED)
        model_create(m, store, c);
    else {
        model_plan(m, store, c, (ShardChoice){ 1, 0, true, .tile = c->tiled_mlp_tokens });
        model_alloc_shared(m, store, c, lay_out(m->shared, seed++));
    }
}

static void see(uint64_t *hash, const void *p, size_t bytes)
{
    unsigned char *host = xmalloc(bytes + 1);
    device_get(host, p, bytes);
    for (size_t i = 0; i < bytes; i++)
        *hash = (*hash ^ host[i]) * 0x100000001b3u; /* FNV-1a */
    free(host);
}

static const Model *observed;

/* Sees all buffers that forward writes in a block, because run/telemetry.c may read them. */
static void observe(void *hash, int unit, const UnitTensors *w)
{
    (void)w;
    if (unit == 0)
        return;
    const Acts *a = &observed->unit_acts[unit];
    const Tensor t[] = { a->mlp_res,      a->attn_x,      a->mlp_x,         a->attn_branch,
                         a->mlp_branch,   a->attn_h,      a->mlp_h,         a->qkv_raw,
                         a->qkv_saved,    a->qkv_rotated, a->attn_out,      a->attn_saved,
                         a->attn_operand, a->gate_up_raw, a->gate_up_saved, a->swiglu_operand,
                         a[1].attn_res };
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (t[i].data)
            see(hash, t[i].data, tensor_numel(t[i]) * dtype_size(t[i].format.dtype));
    see(hash, a->attn_stats, 2 * sizeof(float) * (size_t)observed->text.N);
    see(hash, a->mlp_stats, 2 * sizeof(float) * (size_t)observed->text.N);
}

static void fill_tokens(int *tokens, int count, PassKind pass, const Config *c)
{
    for (int n = 0; n < count; n++)
        tokens[n] = test_token((uint64_t)pass, (uint64_t)n, c->model.vocab_size);
}

/* Runs a forward pass and computes two rows of its logits. Then, if the model trains, runs two
 * micro-batches of a step with different tokens. A pass must not need contents of shared memory
 * from an earlier pass. */
static void make_passes(Model *m, ParamStore *store, const Config *c, Result *r)
{
    int tokens[TOKENS];
    assert_int_equal(m->text.N, TOKENS);
    for (PassKind pass = PASS_FORWARD;
         pass <= (m->text.forward_only ? PASS_FORWARD : PASS_COMPLETE); pass++) {
        fill_tokens(tokens, m->text.N, pass, c);
        fill_with_nan(m->shared_memory, m->shared_bytes);
        model_micro_batch(m, store, tokens, tokens, NULL, 1.0f / (float)m->text.N, 0, pass);
        r->loss[pass] = (float)take_losses(m).loss;
    }
    fill_with_nan(m->shared_memory, m->shared_bytes);
    pass_forward(m, store);
    model_logits(m, store, 0, r->logits[0]);
    model_logits(m, store, m->text.N - 1, r->logits[1]);
}

/* Decodes a prompt, then one token after the other. */
static void generate(Model *m, ParamStore *store, const Config *c, Result *r)
{
    enum { PROMPT = 9, ALL = 12 };
    int tokens[ALL];
    fill_tokens(tokens, ALL, PASS_FORWARD, c);
    decode_begin(m);
    for (int done = 0; done < ALL; done = done ? done + 1 : PROMPT) {
        fill_with_nan(m->shared_memory, m->shared_bytes);
        decode_append(m, store, tokens + done, done ? 1 : PROMPT);
    }
    decode_logits(m, store, r->logits[0]);
}

static Result run(Model *m, ParamStore *store, const Config *c)
{
    Result r = { 0 };
    store_init(store, &c->model, 3);
    test_fill_adapters(store, 9);
    observed = m;
    m->observer = &r.seen;
    m->observe = m->observed ? observe : NULL;
    const Watch *before = operations_watch(&operations);
    (c->generate ? generate : make_passes)(m, store, c, &r);
    operations_watch(before);
    r.grads = keep(m->bytes.units);
    for (int u = 0; u < store->num_units; u++) {
        const Tensor g = store->shard[u].grad;
        if (!g.data)
            continue;
        device_get(r.grads + r.bytes, g.data, tensor_bytes(g));
        r.bytes += tensor_bytes(g);
    }
    model_free(m, store);
    return r;
}

static Result run_placed(const Config *c, int placement)
{
    Model m;
    ParamStore store;
    create(&m, &store, c, placement);
    return run(&m, &store, c);
}

static bool are_equal(const Result *a, const Result *b)
{
    assert_int_equal(a->bytes, b->bytes);
    return memcmp(a->loss, b->loss, sizeof a->loss) == 0 &&
           memcmp(a->logits, b->logits, sizeof a->logits) == 0 && a->seen == b->seen &&
           memcmp(a->grads, b->grads, a->bytes) == 0;
}

static void check_placements(const Config *c, int at_random)
{
    const Result apart = run_placed(c, APART);
    assert_true(isfinite(apart.loss[PASS_FORWARD]));
    for (int i = AS_PLANNED; i < AT_RANDOM + at_random; i++) {
        const Result shared = run_placed(c, i);
        if (!are_equal(&apart, &shared))
            fail_msg("%s, keep %d, recompute %d: placement %d changes losses, logits, gradients or "
                     "what is observed",
                     c->recipe.name, c->recipe.keep, c->recipe.recompute, i);
        if (*problem)
            fail_msg("%s, keep %d, recompute %d, placement %d: %s", c->recipe.name, c->recipe.keep,
                     c->recipe.recompute, i, problem);
    }
    release();
}

static void configure(Config *c, const ModelConfig *m, const char *recipe, Keep keep, bool observes,
                      bool fp8_head, ScalesPer scales)
{
    model_config(c, m, recipe, B);
    c->recipe.keep = keep;
    c->recipe.scales = scales;
    c->recipe.head = fp8_head ? (Format){ E5M2, 0, false } : c->recipe.residual;
    c->quant_stats_interval = observes;
}

static void check(const ModelConfig *m, const char *recipe, Keep keep, bool observes, bool fp8_head,
                  ScalesPer scales)
{
    Config c;
    configure(&c, m, recipe, keep, observes, fp8_head, scales);
    check_placements(&c, !SANITIZED);
}

static ModelConfig small(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.d_model = 32;
    m.head_dim = 16;
    m.mlp_width = a % 2 ? 32 : 96;
    m.max_sequence_length = TOKENS / B;
    return m;
}

/* Every architecture, recipe and keep. Half of them have the head in FP8, and scales of the
 * step. */
TEST(test_bits)
{
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 4; r++)
            for (Keep k = KEEP_ALL; k <= KEEP_BLOCK; k++) {
                const ModelConfig m = small(a);
                check(&m, names[r], k, false, (a + r + k) % 2,
                      (a / 2 + r + k) % 2 ? PER_STEP : PER_MICROBATCH);
            }
}

/* Two tiles of the MLP, the last one smaller; also in only one of two blocks. */
TEST(test_tiles)
{
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 4; r++) {
            const ModelConfig plain = small(a),
                              m = (a + r) % 3 ? plain
                                              : with_adapters(plain, 8, ALL_MODULES, BASE_E4M3);
            Config c;
            configure(&c, &m, names[r], (a + r) % 2 ? KEEP_ATTENTION : KEEP_BLOCK, false, a % 2,
                      r % 2 ? PER_STEP : PER_MICROBATCH);
            if (a % 4 == 3) {
                c.recipe.keep = KEEP_INPUTS;
                c.recipe.recompute = 2;
            }
            c.tiled_mlp_tokens = 48;
            check_placements(&c, 1);
        }
}

TEST(test_adapters)
{
    static const char *const names[] = { "bf16", "fp8", "coat-lean" };
    static const BaseFormat base[] = { BASE_AS_FROZEN, BASE_E4M3, BASE_NF4 };
    for (int r = 0; r < 3; r++)
        for (Keep k = KEEP_ALL; k <= KEEP_BLOCK; k++) {
            const ModelConfig m =
                with_adapters(small(r == 1 ? OLMO2 : LLAMA_GQA), 8, ALL_MODULES, base[(r + k) % 3]);
            check(&m, names[r], k, r == 2, k == KEEP_INPUTS,
                  (r + k) % 2 ? PER_STEP : PER_MICROBATCH);
        }
}

/* Only one of the two blocks keeps its input; the other uses shared memory. */
TEST(test_parts)
{
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    static const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN3 };
    for (int i = 0; i < 3 * 4 * 2; i++) {
        const ModelConfig plain = small(models[i % 3]),
                          m = i % 5 ? plain : with_adapters(plain, 8, ALL_MODULES, BASE_E4M3);
        Config c;
        configure(&c, &m, names[i / 3 % 4], i / 12 ? KEEP_INPUTS : KEEP_ALL, i % 7 == 0, i % 4 > 1,
                  i % 2 ? PER_STEP : PER_MICROBATCH);
        c.recipe.recompute = i % 2 ? 2 : -3;
        check_placements(&c, 1);
        c.eval_only = true;
        check_placements(&c, 1);
    }
}

static size_t block_bytes(const char *recipe, Keep keep, int recompute)
{
    Model m;
    ParamStore store;
    Config c;
    ModelConfig model = small(LLAMA);
    model.n_layers = 24;
    model_config(&c, &model, recipe, B);
    c.recipe.keep = keep;
    c.recipe.recompute = recompute;
    model_plan(&m, &store, &c, (ShardChoice){ 1, 0, true });
    const size_t bytes = m.bytes.blocks;
    model_free(&m, &store);
    return bytes;
}

/* Each block has exactly the memory that it keeps, rounded up to 256 bytes. */
TEST(test_parts_bytes)
{
    static const struct {
        int recompute, blocks;
    } part[] = { { 2, 12 }, { 3, 8 }, { 4, 6 }, { 8, 3 }, { -3, 16 }, { -4, 18 } };
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (int r = 0; r < 4; r++)
        for (Keep k = KEEP_ALL; k <= KEEP_INPUTS; k++) {
            const size_t own = block_bytes(names[r], k, 0) / 24,
                         input = block_bytes(names[r], KEEP_BLOCK, 0) / 24;
            assert_true(input < own);
            for (int i = 0; i < 6; i++) {
                const size_t sum =
                    (24 - (size_t)part[i].blocks) * own + (size_t)part[i].blocks * input;
                assert_in_range(block_bytes(names[r], k, part[i].recompute), sum - 24 * 256,
                                sum + 24 * 256);
            }
        }
}

/* Without a backward pass, nothing is kept for it, whatever the recipe keeps. Lifetimes are then
 * shorter. Several placements are tried, so a write after a buffer's lifetime probably overwrites
 * another buffer. */
TEST(test_forward_only)
{
    static const char *const names[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 5; r++)
            for (int generates = 0; generates < 2; generates++) {
                const bool adapters = (a + r) % 4 == 0;
                const ModelConfig plain = small(a),
                                  m = adapters
                                          ? with_adapters(plain, 8, ALL_MODULES, BASE_AS_FROZEN)
                                          : plain;
                Config c;
                model_config(&c, &m, names[r], generates ? 1 : B);
                c.recipe.keep = (Keep)((a + r) % 3);
                c.eval_only = !generates;
                c.generate = generates ? "prompts" : NULL;
                check_placements(&c, SANITIZED ? 1 : 12);
            }
}

/* Buffers that are planned to be live at the same time really are: if two of them are overlaid,
 * results change, or an operation overwrites its input. They are overlaid with an offset, because
 * operations may skip a copy if two tensors are the same memory. */
static void check_meetings(const char *recipe, Keep keep)
{
    enum { SHIFT = 256 };
    const ModelConfig m = small(LLAMA_GQA);
    Config c;
    Model model;
    ParamStore store;
    OverlaidBuffer s[NUM_BUFFERS];
    model_config(&c, &m, recipe, B);
    c.recipe.keep = keep;
    const Result apart = run_placed(&c, APART);
    model_plan(&model, &store, &c, (ShardChoice){ 1, 0, true });
    memcpy(s, model.shared, sizeof s);
    model_free(&model, &store);
    for (Buffer a = 0; a < NUM_BUFFERS; a++)
        for (Buffer b = a + 1; b < NUM_BUFFERS; b++) {
            size_t bytes = 0;
            if (!buffers_have(&s[a].meets, b) || !s[a].bytes || !s[b].bytes)
                continue;
            model_plan(&model, &store, &c, (ShardChoice){ 1, 0, true });
            for (int i = 0; i < NUM_BUFFERS; bytes += s[i++].bytes + SHIFT)
                model.shared[i].at = bytes;
            const Buffer small = s[a].bytes < s[b].bytes ? a : b, large = small == a ? b : a;
            model.shared[small].at = model.shared[large].at + SHIFT;
            model_alloc_shared(&model, &store, &c, bytes);
            const Result over = run(&model, &store, &c);
            if (are_equal(&apart, &over) && !*problem)
                fail_msg("%s, keep %d: buffers %d and %d never hold something at the same time, "
                         "but may not share memory",
                         recipe, keep, a, b);
            *problem = '\0';
        }
    release();
}

TEST(test_meetings)
{
    if (!SANITIZED)
        check_meetings("coat", KEEP_INPUTS);
    check_meetings("bf16", KEEP_BLOCK);
}

/* Tensor ranks gather rows of a gradient, which they encode from BUFFER_own, while they recompute
 * attention's output. So a buffer is live until its exchange has ended. */
TEST(test_exchange)
{
    const ModelConfig m = without_wide_norms(small(OLMO2));
    const Mesh mesh = mesh_of_tensor(2, 1, 1, 1, 2);
    Config c;
    Model model;
    ParamStore store;
    add_after_architecture();
    model_config(&c, &m, "fp8", B);
    c.strategy.tensor_ranks = 2;
    comm_pretend(&mesh, 0);
    model_plan(&model, &store, &c, (ShardChoice){ 1, 0, true, .tensor_ranks = 2 });
    comm_pretend(NULL, 0);
    assert_true(buffers_have(&model.shared[BUFFER_own].meets, BUFFER_attn_operand_T));
    model_free(&model, &store);
}

/* If an operation is missing, another one reads memory that was not written: here half of the
 * head's memory. */
TEST(test_forgotten)
{
    const ModelConfig m = small(LLAMA);
    Config c;
    Model model;
    ParamStore store;
    model_config(&c, &m, "bf16", B);
    model_plan(&model, &store, &c, (ShardChoice){ 1, 0, true });
    lifetimes_separate(model.shared);
    model_place_tensors(&model, &store, &c); /* places without memory, to plan again */
    lifetimes_record(&model, &store);
    model.text.N /= 2;
    DIES("norm_backward reads bytes 0 to 4096 of dh; no operation before it writes bytes "
         "2048 to 4096",
         lifetimes_record(&model, &store));
    model_free(&model, &store);
}

/* The size is within a tenth of the lower bound of any placement. */
TEST(test_bytes)
{
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (int i = 0; i < 4 * 3 * 2; i++) {
        Model m;
        ParamStore store;
        Config c;
        ModelConfig large = architecture(i & 1 ? LLAMA : LLAMA_GQA);
        large.d_model = 4096, large.head_dim = 128, large.n_heads = 32,
        large.n_kv_heads = i & 1 ? 32 : 8;
        large.mlp_width = i & 1 ? 11008 : 14336, large.max_sequence_length = 2048;
        model_config(&c, &large, names[i / 6], 8);
        c.recipe.keep = i / 2 % 3;
        model_plan(&m, &store, &c, (ShardChoice){ 1, 0, true });
        assert_in_range(m.shared_bytes, m.shared_least, m.shared_least + m.shared_least / 10);
        model_free(&m, &store);
    }
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
