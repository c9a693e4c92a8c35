/* Buffers that share memory: a step gives the bits that it gives where each buffer has memory of its own. A buffer that is said to
 * be dead too early is overwritten by whatever was laid over it, so several placements are tried. */
#include "tests/kit.h"

#include "model/decode.h"
#include "model/plan.h"
#include "tests/models.h"

enum { B = 2, TOKENS = 64 };

/* ---- operations ------------------------------------------------------------------------------------------------ */

/* On the CPU an operation has read all before it writes, on a GPU not: so what one writes may overlap what it reads or else writes
 * only where they are the same bytes, in place. The linker puts each behind a wrapper that looks. */
typedef struct { const char *p; size_t bytes; } Range;

static Range scratch;                   /* lent to attention */
static char problem[128];

static void check_ranges(const char *operation, const Range *r, int written, int count)
{
    for (int i = 0; i < written; i++)
        for (int j = i + 1; j < count; j++)
            if (r[i].p && r[j].p && (r[i].p != r[j].p || r[i].bytes != r[j].bytes) && r[i].p < r[j].p + r[j].bytes
                && r[j].p < r[i].p + r[i].bytes && !*problem)
                snprintf(problem, sizeof problem, "%s: what it writes (%d) overlaps another of its tensors (%d)", operation, i, j);
}

static Range codes_of(Tensor t)
{
    return (Range){ t.data, tensor_numel(t) * dtype_size(t.format.dtype) };
}

static Range turned(Tensor t)
{
    return (Range){ t.data_t, tensor_numel(t) };
}

static Range columns(Tensor t)
{
    return format_is_fp8(t.format) ? turned(t) : codes_of(t);
}

static Range sums(const float *lse, Attention a)
{
    return (Range){ (const char *)lse, sizeof(float) * (size_t)a.B * (size_t)a.T * (size_t)a.H };
}

/* Of a norm, two numbers a row. */
static Range stats_of(const float *stats, Tensor x)
{
    return (Range){ (const char *)stats, 2 * sizeof(float) * (size_t)x.rows };
}

#define D(t) codes_of(t)
#define T(t) turned(t)
#define OP(name, parameters, arguments, written, ...)                       \
    extern __typeof__(name) __real_##name, __wrap_##name;                   \
    void __wrap_##name parameters                                           \
    {                                                                       \
        const Range r[] = { __VA_ARGS__ };                                  \
        check_ranges(#name, r, written, (int)(sizeof r / sizeof r[0]));     \
        __real_##name arguments;                                            \
    }

OP(quantize_with_amax, (Tensor y, Tensor x, const float *a), (y, x, a), 2, D(y), T(y), D(x))
OP(quantize_codes, (Tensor y, Tensor x), (y, x), 2, D(y), T(y), D(x))
OP(quantize_in_range, (Tensor y, Tensor x), (y, x), 2, D(y), T(y), D(x))
OP(expand_operand, (Tensor y, Tensor x), (y, x), 2, D(y), T(x), D(x))
OP(norm_forward, (Tensor y, Tensor x, float *s, Tensor r0, Tensor w, Tensor add, Norm n), (y, x, s, r0, w, add, n), 4, D(y), T(y),
   D(x), stats_of(s, r0), D(r0), D(add))
OP(norm_forward_exact, (Tensor y, Tensor x, float *s, Tensor r0, Tensor w, Tensor add, Norm n), (y, x, s, r0, w, add, n), 4, D(y),
   T(y), D(x), stats_of(s, r0), D(r0), D(add))
OP(norm_again, (Tensor y, Tensor x, const float *s, Tensor w), (y, x, s, w), 2, D(y), T(y), D(x),
   stats_of(s, x))
OP(norm_backward, (Tensor dx, float *m, Tensor dw, Tensor dy, Tensor x, const float *s, Tensor w, Norm n, bool add),
   (dx, m, dw, dy, x, s, w, n, add), 2, D(dx), T(dx), D(dy), D(x), stats_of(s, x))
OP(matmul, (Tensor y, Tensor x, Tensor w, Tensor add), (y, x, w, add), 1, D(y), D(x), D(w), D(add))
OP(matmul_dx, (Tensor dx, Tensor dy, Tensor w, bool add), (dx, dy, w, add), 1, D(dx), D(dy), columns(w))
OP(matmul_dw, (Tensor dw, Tensor dy, Tensor x), (dw, dy, x), 1, D(dw), columns(dy), columns(x))
OP(lora_narrow, (Tensor low, Tensor x, LowRank m, float scale), (low, x, m, scale), 1, D(low), D(x))
OP(lora_widen, (Tensor y, Tensor low, LowRank m, Tensor add), (y, low, m, add), 1, D(y), D(low), D(add))
OP(rope_forward, (Tensor y, Tensor g, float *s, Tensor x, LowProduct p, Tensor q, Tensor k, Attention a),
   (y, g, s, x, p, q, k, a), 3, D(y), D(g), D(x), D(p.low))
OP(rope_forward_exact, (Tensor y, Tensor g, float *s, Tensor x, LowProduct p, Tensor q, Tensor k, Attention a),
   (y, g, s, x, p, q, k, a), 3, D(y), D(g), D(x), D(p.low))
OP(rope_backward, (Tensor dx, Tensor dq, Tensor dk, Tensor dy, Tensor x, const float *s, Tensor q, Tensor k, Attention a),
   (dx, dq, dk, dy, x, s, q, k, a), 3, D(dx), T(dx), D(dy), D(x))
OP(attention_forward, (Tensor y, float *l, Tensor x, Attention a, Documents d), (y, l, x, a, d), 3, D(y), sums(l, a), scratch,
   D(x))
OP(attention_backward, (Tensor dx, Tensor dy, Tensor x, Tensor y, const float *l, Attention a, Documents d),
   (dx, dy, x, y, l, a, d), 2, D(dx), scratch, D(dy), D(x), D(y), sums(l, a))
OP(swiglu_forward, (Tensor y, Tensor g, Tensor x, LowProduct p), (y, g, x, p), 4, D(y), T(y), D(g), D(x), D(p.low))
OP(swiglu_forward_exact, (Tensor y, Tensor g, Tensor x, LowProduct p), (y, g, x, p), 4, D(y), T(y), D(g), D(x), D(p.low))
OP(matmul_swiglu, (Tensor y, Tensor g, Tensor h, Tensor x, Tensor w), (y, g, h, x, w), 4, D(y), T(y), D(g), D(h), D(x), D(w))
OP(swiglu_backward, (Tensor dg, Tensor y, Tensor dy, LowProduct p, Tensor g), (dg, y, dy, p, g), 5, D(dg), T(dg), D(y), T(y), D(dy),
   D(g), D(p.low))
OP(matmul_dx_swiglu, (Tensor dg, Tensor y, Tensor h, Tensor dy, Tensor w, Tensor g), (dg, y, h, dy, w, g), 5, D(dg), T(dg), D(y), T(y),
   D(h), D(dy), columns(w), D(g))
OP(cross_entropy_codes, (Tensor g, float a, Tensor x, float *l, float *z, const int *t, int v, float s, float w),
   (g, a, x, l, z, t, v, s, w), 1, D(g), D(x))
OP(device_lend, (void *p, size_t n), (p, n), 0, scratch = (Range){ p, n })

/* ---- placements ------------------------------------------------------------------------------------------------- */

/* kept: gradients; where nothing is trained, of each token the loss, or of the last one the logits. */
typedef struct { float loss[PASS_COMPLETE + 1]; size_t bytes; char *kept; } Result;

/* Lays buffer after buffer, in the order of random numbers, into the lowest place that is free. */
static size_t lay_out(SharedBuffer *s, uint64_t seed)
{
    bool done[NUM_BUFFERS] = { false };
    size_t end = 0;
    for (int n = 0; n < NUM_BUFFERS; n++) {
        int b = test_token(seed, (uint64_t)n, NUM_BUFFERS);
        while (done[b])
            b = (b + 1) % NUM_BUFFERS;
        s[b].at = 0;
        for (int o = 0; o < NUM_BUFFERS; o++)
            if (done[o] && s[o].alive & s[b].alive && s[o].at < s[b].at + s[b].bytes && s[b].at < s[o].at + s[o].bytes) {
                s[b].at = s[o].at + s[o].bytes;
                o = -1;
            }
        done[b] = true;
        end = s[b].at + s[b].bytes > end ? s[b].at + s[b].bytes : end;
    }
    return end;
}

enum { APART, AS_PLANNED, AT_RANDOM };

static void create(Model *m, Fsdp *f, const Config *c, int placement)
{
    static uint64_t seed;
    if (placement == APART)
        model_create_apart(m, f, c);
    else if (placement == AS_PLANNED)
        model_create(m, f, c);
    else {
        model_plan(m, f, c, (Placement){ 1, 0, true });
        const size_t bytes = lay_out(m->shared, seed++);
        m->bytes.total += bytes - m->shared_bytes;
        m->shared_bytes = bytes;
        model_place(m, f, c);
    }
}

/* What a pass leaves there the next one must not need. */
static void poison(Model *m)
{
    char *nans = keep(m->shared_bytes);
    memset(nans, 0xff, m->shared_bytes);
    device_put(m->shared_memory, nans, m->shared_bytes);
}

static void make_step(Model *m, Fsdp *f, Pass pass, float *loss)
{
    int tokens[TOKENS];
    assert_int_equal(m->N, TOKENS);
    for (int n = 0; n < m->N; n++)
        tokens[n] = test_token((uint64_t)pass, (uint64_t)n, m->config->vocab_size);
    poison(m);
    model_step(m, f, tokens, tokens, NULL, 1.0f / (float)m->N, 0, pass);
    *loss = (float)model_losses(m).loss;
}

/* A forward pass alone, then two micro-batches of a step, the second with other tokens. */
static Result train(Model *m, Fsdp *f)
{
    Result r = { .kept = keep(m->bytes.units) };
    for (Pass pass = PASS_FORWARD; pass <= PASS_COMPLETE; pass++)
        make_step(m, f, pass, &r.loss[pass]);
    for (int u = 0; u < f->num_units; u++) {
        const Tensor g = f->shard[u].grad;
        if (!g.data)
            continue;
        device_get(r.kept + r.bytes, g.data, tensor_bytes(g));
        r.bytes += tensor_bytes(g);
    }
    return r;
}

static Result evaluate(Model *m, Fsdp *f)
{
    Result r = { .kept = keep(sizeof(float) * TOKENS), .bytes = sizeof(float) * TOKENS };
    make_step(m, f, PASS_FORWARD, &r.loss[PASS_FORWARD]);
    model_token_losses(m, (float *)r.kept);
    return r;
}

/* A prompt, then a token after the other. */
static Result generate(Model *m, Fsdp *f)
{
    enum { PROMPT = 9, ALL = 12 };
    const size_t vocabulary = (size_t)m->config->vocab_size;
    Result r = { .kept = keep(sizeof(float) * vocabulary), .bytes = sizeof(float) * vocabulary };
    int tokens[ALL];
    for (int n = 0; n < ALL; n++)
        tokens[n] = test_token(7, (uint64_t)n, m->config->vocab_size);
    decode_begin(m);
    for (int done = 0; done < ALL; done = done ? done + 1 : PROMPT) {
        poison(m);
        decode_append(m, f, tokens + done, done ? 1 : PROMPT);
    }
    decode_logits(m, f, (float *)r.kept);
    return r;
}

static Result run(const Config *c, int placement)
{
    Model m;
    Fsdp f;
    create(&m, &f, c, placement);
    fsdp_init(&f, &c->model, 3);
    test_fill_adapters(&f, 9);
    const Result r = (c->generate ? generate : c->eval_only ? evaluate : train)(&m, &f);
    model_free(&m, &f);
    return r;
}

static void compare(const Config *c, int random_placements)
{
    const Result apart = run(c, APART);
    for (int i = AS_PLANNED; i < AT_RANDOM + random_placements; i++) {
        const Result shared = run(c, i);
        assert_int_equal(shared.bytes, apart.bytes);
        if (memcmp(shared.loss, apart.loss, sizeof apart.loss) || memcmp(shared.kept, apart.kept, apart.bytes))
            fail_msg("%s, keep %d, recompute %d: placement %d changes losses, logits or gradients", c->recipe.name, c->recipe.keep,
                     c->recipe.recompute, i);
        if (*problem)
            fail_msg("%s, keep %d, recompute %d, placement %d: %s", c->recipe.name, c->recipe.keep, c->recipe.recompute, i,
                     problem);
    }
    release();
}

static void check_part(const ModelConfig *m, const char *recipe, Keep kept, int recompute, bool observed, bool fp8_head,
                       ScalesOf scales)
{
    Config c;
    model_config(&c, m, recipe, B);
    c.recipe.keep = kept;
    c.recipe.recompute = recompute;
    c.recipe.scales = scales;
    c.recipe.head = fp8_head ? (Format){ E5M2, 0, false } : c.recipe.stream;
    c.quant_stats_interval = observed;
    compare(&c, 1);
}

static void check(const ModelConfig *m, const char *recipe, Keep kept, bool observed, bool fp8_head, ScalesOf scales)
{
    check_part(m, recipe, kept, 0, observed, fp8_head, scales);
}

static ModelConfig small(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.d_model = 64;
    m.head_dim = 16;
    m.mlp_width = a % 2 ? 64 : 192;
    m.max_sequence_length = TOKENS / B;
    return m;
}

/* Every architecture, recipe, and what forward leaves; half of each with the head in FP8, and with scales of the step. */
static void test_bits(void **state)
{
    (void)state;
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 4; r++)
            for (Keep k = KEEP_ALL; k <= KEEP_BLOCK; k++) {
                const ModelConfig m = small(a);
                check(&m, names[r], k, false, (a + r + k) % 2, (a / 2 + r + k) % 2 ? OF_STEP : OF_MICROBATCH);
            }
}

static void test_adapters(void **state)
{
    (void)state;
    static const char *const names[] = { "bf16", "fp8", "coat-lean" };
    static const BaseFormat base[] = { BASE_AS_FROZEN, BASE_E4M3, BASE_NF4 };
    for (int r = 0; r < 3; r++)
        for (Keep k = KEEP_ALL; k <= KEEP_BLOCK; k++) {
            const ModelConfig m = with_adapters(small(r == 1 ? OLMO2 : LLAMA_GQA), 8, ALL_MODULES, base[(r + k) % 3]);
            check(&m, names[r], k, r == 2, k == KEEP_INPUTS, (r + k) % 2 ? OF_STEP : OF_MICROBATCH);
        }
}

/* The input of one of the two blocks alone is kept; the other takes what it takes of memory that they share. */
static void test_parts(void **state)
{
    (void)state;
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    static const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN3 };
    for (int i = 0; i < 3 * 4 * 2; i++) {
        const ModelConfig plain = small(models[i % 3]), m = i % 5 ? plain : with_adapters(plain, 8, ALL_MODULES, BASE_E4M3);
        check_part(&m, names[i / 3 % 4], i / 12 ? KEEP_INPUTS : KEEP_ALL, i % 2 ? 2 : -3, i % 7 == 0, i % 4 > 1,
                   i % 2 ? OF_STEP : OF_MICROBATCH);
    }
}

static size_t block_bytes(const char *recipe, Keep kept, int recompute)
{
    Model m;
    Fsdp f;
    Config c;
    ModelConfig model = small(LLAMA);
    model.n_layers = 24;
    model_config(&c, &model, recipe, B);
    c.recipe.keep = kept;
    c.recipe.recompute = recompute;
    model_plan(&m, &f, &c, (Placement){ 1, 0, true });
    const size_t bytes = m.bytes.blocks;
    model_free(&m, &f);
    return bytes;
}

/* Each block has what it keeps, and no more; but for 256 bytes, to whose multiples tensors are laid. */
static void test_parts_bytes(void **state)
{
    (void)state;
    static const struct { int recompute, blocks; } part[] = { { 2, 12 }, { 3, 8 }, { 4, 6 }, { 8, 3 }, { -3, 16 }, { -4, 18 } };
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (int r = 0; r < 4; r++)
        for (Keep k = KEEP_ALL; k <= KEEP_INPUTS; k++) {
            const size_t own = block_bytes(names[r], k, 0) / 24, input = block_bytes(names[r], KEEP_BLOCK, 0) / 24;
            assert_true(input < own);
            for (int i = 0; i < 6; i++) {
                const size_t sum = (24 - (size_t)part[i].blocks) * own + (size_t)part[i].blocks * input;
                assert_in_range(block_bytes(names[r], k, part[i].recompute), sum - 24 * 256, sum + 24 * 256);
            }
        }
}

/* Without a backward pass buffers live shorter, and there are fewer: what one writes after its life is likelier to be in the
 * way of another in some of several placements. */
static void test_forward_only(void **state)
{
    (void)state;
    static const char *const names[] = { "f32", "bf16", "fp8", "coat", "coat-lean" };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 5; r++)
            for (int generates = 0; generates < 2; generates++) {
                const bool adapters = (a + r) % 4 == 0;
                const ModelConfig plain = small(a), m = adapters ? with_adapters(plain, 8, ALL_MODULES, BASE_AS_FROZEN) : plain;
                Config c;
                model_config(&c, &m, names[r], generates ? 1 : B);
                c.eval_only = !generates;
                c.generate = generates ? "prompts" : NULL;
                compare(&c, 12);
            }
}

/* What no placement can be smaller than is reached, but for a tenth. */
static void test_bytes(void **state)
{
    (void)state;
    static const char *const names[] = { "bf16", "fp8", "coat", "coat-lean" };
    for (int i = 0; i < 4 * 3 * 2; i++) {
        Model m;
        Fsdp f;
        Config c;
        size_t most = 0;
        ModelConfig large = architecture(i & 1 ? LLAMA : LLAMA_GQA);
        large.d_model = 4096, large.head_dim = 128, large.n_heads = 32, large.n_kv_heads = i & 1 ? 32 : 8;
        large.mlp_width = i & 1 ? 11008 : 14336, large.max_sequence_length = 2048;
        model_config(&c, &large, names[i / 6], 8);
        c.recipe.keep = i / 2 % 3;
        model_plan(&m, &f, &c, (Placement){ 1, 0, true });
        for (Phase p = 0; p < NUM_PHASES; p++) {
            size_t bytes = 0;
            for (int b = 0; b < NUM_BUFFERS; b++)
                bytes += m.shared[b].alive >> p & 1 ? m.shared[b].bytes : 0;
            most = bytes > most ? bytes : most;
        }
        assert_in_range(m.shared_bytes, most, most + most / 10);
        model_free(&m, &f);
    }
}

int main(void)
{
    device_init(0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits), cmocka_unit_test(test_adapters), cmocka_unit_test(test_parts),
        cmocka_unit_test(test_forward_only), cmocka_unit_test(test_bytes), cmocka_unit_test(test_parts_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
