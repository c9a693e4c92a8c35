/* What ranks send in a step, as collectives count it, is what a rehearsal of the step says, to the byte: of every mesh of these
 * ranks, strategy, and recipes; and what formulas say, where a formula is short. */
#include <string.h>

#include "tests/kit.h"

#include "model/run/memory.h"
#include "model/run/rehearsal.h"
#include "model/units.h"
#include "model/update.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

/* Each of so many context ranks has whole sixteens of tokens, and each of so many stages a block. */
enum { MICRO_BATCHES = 2, MOST_RANKS = 64, HEADS = 64 };

static int tokens_of_sequence(void)
{
    return 16 * comm_size();
}


static const char *const names[NUM_SENT] = { "gathers", "scattered sums", "sums", "exchanges", "messages", "host values" };

typedef struct {
    const char *recipe;
    SmallModel model;
    unsigned modules;
    BaseFormat base;
    HostUse host;
    bool tied;
} Case;

typedef struct { int stages, replicas, shard, context, tensor; Gathering gathering; GradSum sum; } Setting;

static ModelConfig model_of(const Case *k)
{
    ModelConfig m = architecture(k->model);
    m.n_layers = comm_size() > 2 ? comm_size() : 2;
    m.n_kv_heads = m.n_heads = comm_size() > 8 ? HEADS : 8;
    m.max_sequence_length = tokens_of_sequence();
    m.weight_tying = k->tied;
    return k->modules ? with_adapters(m, 4, k->modules, k->base) : m;
}

static Config config_of(const Case *k, const ModelConfig *model, const Setting *s)
{
    Config c;
    model_config(&c, model, k->recipe, 1);
    c.global_train_batch_size = MICRO_BATCHES * comm_size() / (s->stages * s->context * s->tensor);
    c.strategy = (Strategy){ .shard_ranks = s->shard * s->context, .gathering = s->gathering, .grad_sum = s->sum,
                             .context_ranks = s->context, .tensor_ranks = s->tensor, .pipeline_stages = s->stages, .pipeline_chunks = 1 };
    c.host.moments = c.host.master = c.host.frozen = k->host;
    return c;
}

/* ---- a step, and its rehearsal ----------------------------------------------------------------------------------- */

static void step(Model *m, ParamStore *f, const Config *c)
{
    static int tokens[MICRO_BATCHES * 16 * MOST_RANKS];
    assert_true(comm_size() <= MOST_RANKS);
    for (int i = 0; i < MICRO_BATCHES * tokens_of_sequence(); i++)
        tokens[i] = test_token(11, (uint64_t)i, c->model.vocab_size);
    fsdp_empty_grads(f);
    model_zero_losses(m);
    model_batch(m, f, tokens, tokens, NULL, MICRO_BATCHES, 1e-3f, 0, PASS_COMPLETE);
    optimizer_grad_norm(f);
    optimizer_step(f, c, 1, 1, 1e-3, 1);
}

static void read_sent(size_t sent[NUM_SENT])
{
    for (Sent s = 0; s < NUM_SENT; s++)
        sent[s] = comm_sent(s);
}

/* What the second of two steps sends. */
static void measure(size_t sent[NUM_SENT], Model *m, ParamStore *f, const Config *c)
{
    size_t before[NUM_SENT];
    memory_plan(m, f, c);
    model_place(m, f, c);
    store_init(f, &c->model, 5);
    step(m, f, c);
    read_sent(before);
    step(m, f, c);
    read_sent(sent);
    for (Sent s = 0; s < NUM_SENT; s++)
        sent[s] -= before[s];
}

/* ---- formulas ---------------------------------------------------------------------------------------------------- */

static size_t bytes_of(Format f)
{
    return dtype_size(f.dtype);
}

static size_t layers(const ParamStore *f)
{
    size_t n = 0;
    for (int u = 0; u < f->num_units; u++)
        n += f->shape[u].kind->is_layer && store_holds(f, u);
    return n;
}

/* Between tensor ranks each layer gathers and scatters rows of the stream, forward and backward, for attention and the MLP. */
static size_t rows_of_ranks(const Model *m, const ParamStore *f, const Config *c, size_t layers_of_ranks)
{
    return MICRO_BATCHES * layers_of_ranks * (size_t)m->N * (size_t)c->model.d_model * bytes_of(c->recipe.stream)
         * (size_t)(f->tensor_ranks - 1);
}

/* All weights gathered once in the step, where all compute in one format. */
static size_t gathers(const Model *m, const ParamStore *f, const Config *c)
{
    size_t bytes = 0;
    for (int u = 0; u < f->num_units; u++)
        bytes += f->shard[u].slice[TRAINED].count * bytes_of(c->recipe.stream) * (size_t)(fsdp_shards(f, u) - 1);
    return bytes + rows_of_ranks(m, f, c, 4 * layers(f));
}

/* Without trained weights before it the first block's gradient ends in its adapters. */
static size_t scattered(const Model *m, const ParamStore *f, const Config *c, bool ends)
{
    size_t bytes = 0;
    for (int u = 0; u < f->num_units; u++)
        bytes += f->shard[u].slice[TRAINED].count * bytes_of(c->recipe.grads) * (size_t)(fsdp_shards(f, u) - 1);
    return bytes * (f->sum_once ? 1 : MICRO_BATCHES) + rows_of_ranks(m, f, c, 4 * layers(f) - (ends && f->pipe.stage == 0));
}

/* Each way the stream of each micro-batch, back also its maximum; to the next stage also the sum of squares. Between the first and
 * the last stage the gradients of the matrix that both have. */
static size_t messages(const Model *m, const ParamStore *f, const Config *c)
{
    const int stages = f->pipe.stages, stage = f->pipe.stage;
    const size_t stream = (size_t)m->N * (size_t)c->model.d_model * bytes_of(c->recipe.stream);
    const bool shares = c->model.weight_tying && stages > 1 && (stage == 0 || stage == stages - 1);
    return (shares ? f->shard[0].slice[TRAINED].count * bytes_of(c->recipe.grads) : 0)
         + (stage < stages - 1 ? MICRO_BATCHES * stream + sizeof(float) : 0)
         + (stage > 0 ? MICRO_BATCHES * (stream + (m->work.dres_amax ? sizeof(float) : 0)) : 0);
}

/* Forward: q, k, v to whole sequences, the output back. Backward: the output's gradient, q, k, v and the output to whole sequences,
 * the gradients of q, k, v back. With as many key heads as heads, q, k and v
 * have the width of three outputs. */
static size_t exchanges(const Model *m, const ParamStore *f, const Config *c)
{
    const size_t tensor = (size_t)m->N * (size_t)(c->model.n_heads * c->model.head_dim) * bytes_of(c->recipe.stream);
    const size_t context = (size_t)m->context;
    return MICRO_BATCHES * layers(f) * (3 + 1 + 1 + 3 + 1 + 3) * tensor * (context - 1) / context;
}

static void check_formulas(const size_t sent[NUM_SENT], const Model *m, const ParamStore *f, const Config *c, const Case *k)
{
    assert_int_equal(sent[SENT_SCATTERED_SUMS], scattered(m, f, c, k->modules != 0));
    assert_int_equal(sent[SENT_MESSAGES], messages(m, f, c));
    assert_int_equal(sent[SENT_EXCHANGES], exchanges(m, f, c));
    if (f->resident == f->num_units && !format_is_fp8(c->recipe.operand) && !k->modules)
        assert_int_equal(sent[SENT_GATHERS], gathers(m, f, c));
    assert_true(comm_size() > 1 || sent[SENT_GATHERS] + sent[SENT_SUMS] + sent[SENT_HOST_VALUES] == 0);
}

/* ---- all meshes -------------------------------------------------------------------------------------------------- */

static void check(const Case *k, const Setting *s)
{
    const ModelConfig model = model_of(k);
    Config c = config_of(k, &model, s), dry = c;
    const int micro_batches = MICRO_BATCHES;
    size_t sent[NUM_SENT];
    Model m;
    ParamStore f;
    Rehearsal r;
    dry.dry_run = true;
    dry.ranks = comm_size();
    divide_in_tensor(s->stages, c.strategy.shard_ranks, s->context, s->tensor);
    measure(sent, &m, &f, &c);
    rehearse(&r, &micro_batches, 1, &dry, f.pipe.stage);
    /* The rehearsal is of the first shard; sums of what tensor ranks have copies of are those of the shard that has it. */
    const bool sums = s->tensor == 1 || f.rank == 0;
    for (Sent what = 0; what < NUM_SENT; what++)
        if (sent[what] != r.sent[what] && (sums || what != SENT_SUMS))
            fail_msg("%s, %s, modules %#x, host %d, %d stages, %d replicas, %d shards of %d context ranks of %d tensor ranks, "
                     "gathering %d, sum %d: rank %d sent %zu bytes of %s, its rehearsal %zu", k->recipe, architecture_name(k->model), k->modules, k->host,
                     s->stages, s->replicas, s->shard, s->context, s->tensor, s->gathering, s->sum, comm_rank(), sent[what], names[what],
                     r.sent[what]);
    check_formulas(sent, &m, &f, &c, k);
    rehearsal_free(&r);
    model_free(&m, &f);
    release();
}

/* Stages gather and sum once per step. On many ranks a mesh has one strategy, the next one another. */
static void check_strategies(const Case *k, Setting s)
{
    static int turn;
    const bool shards = s.shard * s.context > 1;
    for (s.gathering = s.stages > 1 && shards ? GATHER_ONCE : GATHER_OFTEN; s.gathering <= GATHER_ONCE; s.gathering++)
        for (s.sum = s.stages > 1 ? SUM_ONCE : SUM_OFTEN; s.sum <= SUM_ONCE; s.sum++)
            if ((comm_size() <= 4 && s.tensor == 1) || turn++ % 3 == 0)
                check(k, &s);
}

static void check_meshes(const Case *k, int tensor)
{
    const int ranks = comm_size() / tensor;
    for (int stages = 1; stages <= ranks; stages *= 2)
        for (int replicas = 1; replicas <= ranks / stages; replicas *= 2)
            for (int context = 1; context <= ranks / stages / replicas && context * tensor <= model_of(k).n_heads;
                 context *= 2)
                check_strategies(k, (Setting){ stages, replicas, ranks / stages / replicas / context, context, tensor });
}

static void test_bf16(void **state)
{
    (void)state;
    for (int tensor = 1; tensor <= comm_size(); tensor *= 2)
        check_meshes(&(Case){ "bf16", LLAMA }, tensor);
}

static void test_coat(void **state)
{
    (void)state;
    check_meshes(&(Case){ "coat", LLAMA, .tied = true }, 1);
    for (int tensor = 2; tensor <= comm_size(); tensor *= 2)
        check_meshes(&(Case){ "fp8", LLAMA, ALL_MODULES }, tensor);
}

/* Master weights on the host are encoded by the update, which exchanges their maxima. */
static void test_host(void **state)
{
    (void)state;
    check_meshes(&(Case){ "coat-lean", OLMO2, .host = HOST_ALL }, 1);
}

static void test_adapters(void **state)
{
    (void)state;
    check_meshes(&(Case){ "coat-lean", LLAMA, ALL_MODULES, BASE_NF4 }, 1);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_bf16), cmocka_unit_test(test_coat), cmocka_unit_test(test_host),
                                        cmocka_unit_test(test_adapters) };
    start_ranks(&argc, &argv);
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
