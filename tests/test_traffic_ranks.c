/* The bytes that ranks send in a step, as collectives count them, equal the bytes in a rehearsal of
 * the step, for every mesh of these ranks, strategies and recipes. They also equal a formula, where
 * a formula is short. Runs by hand on up to 64 ranks; strategies and recipes then alternate from
 * mesh to mesh:
 *
 *     OPENBLAS_NUM_THREADS=1 mpirun --oversubscribe --bind-to none -n 64
 * build/cpu/tests/test_traffic_ranks */
#include <string.h>
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "model/predict/memory.h"
#include "model/predict/rehearsal.h"
#include "model/shape/units.h"
#include "tests/ranks_case.h"

enum { MICRO_BATCHES = 2, MOST_RANKS = 64 };

static const char *const names[NUM_SENT] = { "gathers", "scattered sums", "sums",       "exchanges",
                                             "codes",   "messages",       "host values" };

/* least_tensor, most_tensor: allowed numbers of tensor ranks. key_heads: 0: as many as query
 * heads. */
typedef struct {
    Case k;
    HostUse host;
    int least_tensor, most_tensor, chunks, key_heads;
    Wire wire; /* with hosts of two ranks */
} Row;

static int chunks_of(const Row *row, const Strategy *s)
{
    return s->pipeline_stages > 1 && row->chunks > 1 ? row->chunks : 1;
}

/* Returns a number of micro-batches that the schedule can divide. */
static int micro_batches_of(const Row *row, const Strategy *s)
{
    return chunks_of(row, s) > 1 ? s->pipeline_stages : MICRO_BATCHES;
}

/* Each chunk of a stage has at least one block; with up to 16 ranks there are at least two blocks.
 * Each rank has a multiple of 16 tokens. With the states of coat, each tensor rank has whole
 * groups. */
static void configure_row(Run *r, const Row *row, Strategy s)
{
    enum { GROUP = 128, HEADS = 8 };
    ModelConfig m = architecture(row->k.model);
    s.wire = row->wire;
    s.ranks_per_host = 2;
    s.pipeline_chunks = chunks_of(row, &s);
    s.pipeline_schedule = s.pipeline_chunks > 1 ? PIPELINE_INTERLEAVED : PIPELINE_1F1B;
    const int blocks = s.pipeline_stages * s.pipeline_chunks, least = comm_size() <= 16 ? 2 : 1;
    m.n_layers = blocks > least ? blocks : least;
    int heads = HEADS; /* heads of a tensor rank */
    while (heads % s.context_ranks != 0)
        heads += HEADS;
    m.n_heads = heads * s.tensor_ranks;
    m.n_kv_heads = row->key_heads ? row->key_heads : m.n_heads;
    if (strcmp(row->k.recipe, "coat") == 0)
        m.mlp_width = GROUP * s.tensor_ranks;
    else if (s.tensor_ranks > 1)
        m.mlp_width = 48 * s.tensor_ranks;
    m.max_sequence_length = 16 * s.context_ranks * s.tensor_ranks;
    configure(r, &row->k, m, s);
    r->config.global_train_batch_size *= micro_batches_of(row, &s);
    r->config.offload.optimizer = r->config.offload.master = r->config.offload.frozen = row->host;
}

/* ---- a step, and its rehearsal --------------------------------------------------------------- */

static void step(Run *r, int micro_batches, size_t sent[NUM_SENT])
{
    static int tokens[MICRO_BATCHES * 16 * MOST_RANKS];
    const int count = micro_batches * r->config.model.max_sequence_length;
    assert_true(count <= (int)(sizeof tokens / sizeof *tokens));
    for (int i = 0; i < count; i++)
        tokens[i] = test_token(11, (uint64_t)i, r->config.model.vocab_size);
    for (Sent s = 0; s < NUM_SENT; s++)
        sent[s] = comm_sent(s);
    fsdp_empty_grads(&r->store);
    model_zero_losses(&r->model);
    model_micro_batches(&r->model, &r->store, tokens, tokens, NULL, micro_batches, 1e-3f, 0,
                        PASS_COMPLETE);
    optimizer_grad_norm(&r->store);
    optimizer_step(&r->store, &r->config, 1, 1e-3, 1);
    for (Sent s = 0; s < NUM_SENT; s++)
        sent[s] = comm_sent(s) - sent[s];
}

/* ---- formulas -------------------------------------------------------------------------------- */

static size_t bytes_of(Format f)
{
    return dtype_size(f.dtype);
}

static size_t layers(const ParamStore *store)
{
    size_t n = 0;
    for (int u = 0; u < store->num_units; u++)
        n += store->shape[u].kind->is_layer && store_holds(store, u);
    return n;
}

/* Each layer gathers and scatters rows of the stream over tensor ranks, forward and backward, for
 * attention and for the MLP. */
static size_t rows_of_ranks(const Model *m, const ParamStore *store, const Config *c, size_t passes)
{
    return passes * (size_t)m->text.N * (size_t)c->model.d_model * bytes_of(c->recipe.residual) *
           (size_t)(store->tensor_ranks - 1);
}

/* Muon gathers the BF16 updates of units with matrices, and scatters the orthogonalized updates. */
static size_t updates(const ParamStore *store)
{
    size_t bytes = 0;
    for (int u = 0; u < store->num_units && store->optimizer->orthogonalizes; u++)
        bytes += store->shape[u].matrices && store_holds(store, u)
                     ? store->shard[u].slice[TRAINED].count * dtype_size(BF16)
                     : 0;
    return bytes * (size_t)(store->shards - 1);
}

/* All weights are gathered once per step, if all compute in one format. */
static size_t gathers(const Model *m, const ParamStore *store, const Config *c,
                      size_t micro_batches)
{
    size_t bytes = updates(store);
    for (int u = 0; u < store->num_units; u++)
        bytes += store->shard[u].slice[TRAINED].count * bytes_of(c->recipe.residual) *
                 (size_t)(fsdp_shards(store, u) - 1);
    return bytes + rows_of_ranks(m, store, c, micro_batches * 4 * layers(store));
}

/* Whether the unit's matrices are sent as codes. */
static bool is_coded(const ParamStore *store, int u)
{
    return store->wire != WIRE_NONE && store->shape[u].matrices > 0 && store_holds(store, u);
}

/* Each rank sends the parts of all others of its host, then one part to each other host; each
 * replica a part of the slice to each other. Records of 256 codes have two scales. */
static size_t codes(const ParamStore *store, size_t micro_batches)
{
    const size_t near = (size_t)comm_group_size(comm_near()),
                 hosts = (size_t)comm_group_size(RANKS_HOSTS),
                 replicas = (size_t)comm_group_size(RANKS_REPLICA);
    size_t bytes = 0;
    for (int u = 0; u < store->num_units; u++) {
        const size_t slice = store->shard[u].slice[TRAINED].count / 256 * (256 + 2 * sizeof(float));
        if (is_coded(store, u))
            bytes +=
                (hosts * (near - 1) + hosts - 1) * slice * (store->sum_once ? 1 : micro_batches) +
                (replicas - 1) * slice / replicas;
    }
    return bytes;
}

/* If there are no trained weights before the first block, its gradient ends in its adapters. */
static size_t scattered(const Model *m, const ParamStore *store, const Config *c,
                        size_t micro_batches, bool ends)
{
    size_t bytes = 0;
    for (int u = 0; u < store->num_units; u++)
        bytes += is_coded(store, u)
                     ? 0
                     : store->shard[u].slice[TRAINED].count * bytes_of(c->recipe.grads) *
                           (size_t)(fsdp_shards(store, u) - 1);
    return bytes * (store->sum_once ? 1 : micro_batches) + updates(store) +
           rows_of_ranks(m, store, c,
                         micro_batches * (4 * layers(store) - (ends && store->pipe.stage == 0)));
}

/* Each chunk sends the stream of each micro-batch and the sum of squares so far forward, and the
 * gradient of the stream and its maximum backward. The first and the last stage exchange the
 * gradients of the matrix that both have. */
static size_t messages(const Model *m, const ParamStore *store, const Config *c,
                       size_t micro_batches)
{
    const int stages = store->pipe.stages, stage = store->pipe.stage,
              chunks = c->strategy.pipeline_chunks;
    const size_t stream =
        (size_t)m->text.N * (size_t)c->model.d_model * bytes_of(c->recipe.residual);
    const size_t amax = m->text.work.dres_amax ? sizeof(float) : 0;
    const size_t forward = (size_t)(chunks - (stage == stages - 1)),
                 back = (size_t)(chunks - (stage == 0));
    const bool shares = c->model.weight_tying && (stage == 0 || stage == stages - 1);
    if (stages <= 1)
        return 0;
    return forward * (micro_batches * stream + sizeof(float)) +
           back * micro_batches * (stream + amax) +
           (shares ? store->shard[0].slice[TRAINED].count * bytes_of(c->recipe.grads) : 0);
}

/* Forward: q, k, v to whole sequences, and the output back. Backward: the output's gradient, q, k,
 * v and the output to whole sequences, and the gradients of q, k, v back. Each context rank gets a
 * key head; if there are fewer key heads than ranks, several ranks get the same. */
static size_t exchanges(const Model *m, const ParamStore *store, const Config *c,
                        size_t micro_batches)
{
    const size_t heads = (size_t)(c->model.n_heads / store->tensor_ranks),
                 context = (size_t)m->text.context;
    const size_t own = (size_t)(c->model.n_kv_heads / store->tensor_ranks),
                 key_heads = own > context ? own : context;
    const size_t head =
        (size_t)m->text.rows * (size_t)c->model.head_dim * bytes_of(c->recipe.residual);
    return micro_batches * layers(store) * 3 * (heads + 2 * key_heads + heads) * head *
           (context - 1) / context;
}

static void check_formulas(const size_t sent[NUM_SENT], const Run *r, size_t micro_batches)
{
    const Model *m = &r->model;
    const ParamStore *store = &r->store;
    const Config *c = &r->config;
    const bool adapters = c->model.lora.rank > 0;
    assert_int_equal(sent[SENT_SCATTERED_SUMS], scattered(m, store, c, micro_batches, adapters));
    assert_int_equal(sent[SENT_CODES], codes(store, micro_batches));
    assert_int_equal(sent[SENT_MESSAGES], messages(m, store, c, micro_batches));
    assert_int_equal(sent[SENT_EXCHANGES], exchanges(m, store, c, micro_batches));
    if (store->resident == store->num_units && store->wire == WIRE_NONE &&
        !format_is_fp8(c->recipe.operand) && !adapters)
        assert_int_equal(sent[SENT_GATHERS], gathers(m, store, c, micro_batches));
    assert_true(comm_size() > 1 ||
                sent[SENT_GATHERS] + sent[SENT_SUMS] + sent[SENT_HOST_VALUES] == 0);
}

/* ---- all meshes ------------------------------------------------------------------------------ */

static int meshes, steps; /* number of compared meshes and steps */

/* Returns the bytes that the second of two steps sends. */
static void check(const Row *row, Strategy s)
{
    const Case *k = &row->k;
    const int micro_batches = micro_batches_of(row, &s);
    size_t sent[NUM_SENT];
    Run r;
    Rehearsal rehearsal;
    configure_row(&r, row, s);
    place_run(&r);
    step(&r, micro_batches, sent);
    step(&r, micro_batches, sent);
    Config dry = r.config;
    dry.dry_run = true;
    dry.ranks = comm_size();
    rehearse(&rehearsal, &micro_batches, 1, &dry, r.store.pipe.stage);
    /* The rehearsal is that of the first shard. Sums over copies of tensor ranks, and of replicas'
     * gradients that are not sent as codes, count on the shard that has them. */
    const bool sums = (s.tensor_ranks == 1 && !row->wire) || r.store.rank == 0;
    for (Sent what = 0; what < NUM_SENT; what++)
        if (sent[what] != rehearsal.sent[what] && (sums || what != SENT_SUMS))
            fail_msg("%s, %s, modules %#x, host %d, %d stages of %d shards with %d context ranks "
                     "of %d tensor ranks, gathering %d, "
                     "sum %d: rank %d sent %zu bytes of %s, its rehearsal %zu",
                     k->recipe, architecture_name(k->model), k->modules, row->host,
                     s.pipeline_stages, s.shard_ranks, s.context_ranks, s.tensor_ranks, s.gathering,
                     s.grad_sum, comm_rank(), sent[what], names[what], rehearsal.sent[what]);
    check_formulas(sent, &r, (size_t)micro_batches);
    rehearsal_free(&rehearsal);
    close_run(&r);
    release();
    steps++;
}

/* Stages gather and sum once per step. With few ranks, each mesh tries all six strategies, with up
 * to 16 ranks two, otherwise one; the next mesh tries the next strategies. */
static void check_strategies(const Row *row, Strategy s)
{
    const bool stages = s.pipeline_stages > 1;
    const Gathering first_gathering =
        stages && s.shard_ranks * s.tensor_ranks > 1 ? GATHER_ONCE : GATHER_OFTEN;
    const GradSum first_sum = stages ? SUM_ONCE : SUM_OFTEN;
    const int sums = SUM_ONCE - first_sum + 1, count = (GATHER_ONCE - first_gathering + 1) * sums;
    const int each = count == 1 || (comm_size() <= 4 && s.tensor_ranks == 1) ? 1
                     : comm_size() <= 16                                     ? count / 2
                                                                             : count;
    for (int i = meshes % each; i < count; i += each) {
        s.gathering = first_gathering + (Gathering)(i / sums);
        s.grad_sum = first_sum + (GradSum)(i % sums);
        check(row, s);
    }
}

/* coat: its states need wide slices, so few tensor ranks are tried. The update encodes master
 * weights on the host, and exchanges their maxima. */
static const Row rows[] = {
    { { "bf16", LLAMA }, .least_tensor = 1, .most_tensor = MOST_RANKS },
    { { "coat", LLAMA, .tied = true }, .least_tensor = 1, .most_tensor = 8 },
    { { "bf16", QWEN2 }, .least_tensor = 1, .most_tensor = 2, .wire = WIRE_FP8 },
    { { "fp8-lm", LLAMA }, .least_tensor = 1, .most_tensor = 1, .wire = WIRE_FP8_LM },
    { { "fp8", LLAMA, ALL_MODULES }, .least_tensor = 2, .most_tensor = MOST_RANKS },
    { { "coat-lean", OLMO2 }, .host = HOST_ALL, .least_tensor = 1, .most_tensor = 1 },
    { { "coat-lean", LLAMA, ALL_MODULES, BASE_NF4 }, .least_tensor = 1, .most_tensor = 1 },
    { { "bf16", LLAMA, .optimizer = "muon" },
      .chunks = 2,
      .key_heads = 1,
      .least_tensor = 1,
      .most_tensor = 1 },
};

/* On more than 16 ranks, the rows alternate, too. */
static void check_mesh(Strategy s)
{
    const Row *allowed[sizeof rows / sizeof *rows];
    int count = 0;
    for (const Row *row = rows; row < rows + sizeof rows / sizeof *rows; row++)
        if (s.tensor_ranks >= row->least_tensor && s.tensor_ranks <= row->most_tensor)
            allowed[count++] = row;
    for (int i = 0; i < count; i++)
        if (comm_size() <= 16 || i == meshes % count)
            check_strategies(allowed[i], s);
    meshes++;
}

static bool divides(int a, int b)
{
    return b % a == 0;
}

TEST(test_meshes)
{
    for (int tensor = 1; tensor <= comm_size(); tensor++) {
        const int ranks = comm_size() / tensor;
        for (int stages = 1; divides(tensor, comm_size()) && stages <= ranks; stages++)
            for (int replicas = 1; divides(stages, ranks) && replicas <= ranks / stages; replicas++)
                for (int context = 1;
                     divides(replicas, ranks / stages) && context <= ranks / stages / replicas;
                     context++)
                    if (divides(context, ranks / stages / replicas))
                        check_mesh((Strategy){ .shard_ranks = ranks / stages / replicas,
                                               .context_ranks = context,
                                               .tensor_ranks = tensor,
                                               .pipeline_stages = stages });
    }
}

static int print_count(void **state)
{
    (void)state;
    if (comm_rank() == 0)
        print_message("%d meshes, %d steps\n", meshes, steps);
    return 0;
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    alarm(comm_size() > 4 || SANITIZED ? 3600 : 600);
    return finish_ranks(run_all_tests(NULL, print_count));
}
