/* Context ranks compute what one rank computes: in f32, the losses of tokens, the gradients and
 * their norm, within rounding. In FP8, if the ranks share the maxima of operands, the losses are
 * the same bit for bit. On 1, 2 and 4 ranks. */
#include "model/parallel/context_work.h"
#include "tests/test.h"
#include "tests/ranks_parts.h"

/* No weight has as many rows as a micro-batch, on any number of ranks, so operands of activations
 * and weights are told apart. NOTE: with AVX-512, OpenBLAS has another kernel for products with a
 * transposed matrix of up to 1,200 results. No rank has so few: each has at least RANK MICRO T /
 * 4. */
enum { T = 96, RANK = 26, TOKENS = SEQUENCES * T };

/* ---- documents that are exchanged though they lie in one rank's part ------------------------- */

/* 2: every second document that may skip the exchange does; 1: every such document does */
static int stays = 2;
static bool has_window;

int __wrap_context_leave_out(OwnDocument *d, int count, ContextWork *work);

/* Each token of a rank is either exchanged or in a document of this rank. At most one document
 * crosses each border between two ranks, and n documents with t tokens in total have at least t^2 /
 * 2n pairs. */
static void check_work(const OwnDocument *d, int count, const ContextWork *w)
{
    double exchanged = 0;
    assert_int_equal(w->ranks, comm_group_size(RANKS_CONTEXT));
    assert_true(w->token_pairs > 0);
    for (int r = 0; r < w->ranks; r++) {
        double tokens = w->exchanged[r];
        for (int i = 0; i < count; i++)
            tokens += d[i].rank == r ? d[i].tokens : 0;
        assert_true(tokens == MICRO * T / w->ranks);
        exchanged += w->exchanged[r];
    }
    const double documents = MICRO * (w->ranks - 1);
    assert_true(w->pairs <= exchanged * T / 2 &&
                (has_window || w->pairs >= exchanged * exchanged / (2 * documents)));
    for (int i = 0; i < count; i++)
        assert_true(d[i].pairs > 0 &&
                    (has_window || d[i].pairs == d[i].tokens * d[i].tokens / 2.0));
}

int __wrap_context_leave_out(OwnDocument *d, int count, ContextWork *work)
{
    if (work->exchanged[0] > 0 || count > 0) /* otherwise there are no documents */
        check_work(d, count, work);
    for (int i = 0; i * stays < count; i++)
        d[i] = d[i * stays];
    return (count + stays - 1) / stays;
}

/* ---- comparisons ----------------------------------------------------------------------------- */

/* All of 4 ranks can have the same number of heads. 2 or 4 ranks share a key head, or none do. */
static ModelConfig model_of(const Case *k)
{
    ModelConfig m = architecture(k->model);
    m.n_kv_heads = m.n_kv_heads == m.n_heads ? 8 : k->model == LLAMA_GQA ? 1 : 2;
    m.n_heads = 8;
    m.max_sequence_length = T;
    m.sliding_window *= 5;
    has_window = m.sliding_window > 0;
    return m;
}

static void check_all(const Case *k, double loss, double grads)
{
    Strategy ways[8];
    int count = 0;
    for (int context = 2; context <= comm_size(); context *= 2)
        for (int shard = context; shard <= comm_size(); shard *= 2)
            ways[count++] = (Strategy){ .shard_ranks = shard, .context_ranks = context };
    if (count > 0)
        check_parts(k, model_of(k), ways, count, (Bounds){ loss, grads }, false);
}

/* The tensor cores of a GPU round F32 sums towards zero [Fasi et al. 2021, "Numerical behavior of
 * NVIDIA tensor cores"]. There, the gradient of a key head is a sum of three products (mma.cuh) for
 * each eight queries of each query head that reads it. So another order of query heads may change
 * the gradient by 2^-24 of each partial sum. All other sums have the same order on all ranks. */
static void check_f32(const Case *k)
{
    const ModelConfig m = model_of(k);
    const bool in_tensor_cores = !__real_scale_within_range && m.n_kv_heads < comm_size();
    check_all(k, 1e-6, in_tensor_cores ? 3 * (m.n_heads / m.n_kv_heads) * (T / 8) * 0x1p-24 : 1e-6);
}

TEST(test_f32)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int documents = 0; documents < 2; documents++) {
            check_f32(&(Case){ "f32", a, .documents = documents });
            if (documents == (int)a % 2)
                check_f32(&(Case){ "f32", a, ALL_MODULES, (BaseFormat)(a % 3), .lora_rank = RANK,
                                   .documents = documents });
        }
}

/* Every document lies on one rank, or none does. */
TEST(test_documents)
{
    stays = 1;
    for (int all = 0; all < 2; all++) {
        document_length = all ? T / 4 : T;
        check_f32(&(Case){ "f32", LLAMA, .documents = true });
    }
    document_length = 0;
    stays = 2;
}

/* Blocks that backward recomputes, and saved attention. */
TEST(test_kept)
{
    static const Keep keeps[] = { KEEP_INPUTS, KEEP_BLOCK, KEEP_ATTENTION };
    for (int i = 0; i < 3; i++)
        check_f32(
            &(Case){ "f32", i == 1 ? OLMO2 : LLAMA_GQA, .documents = true, .keep = (int)keeps[i] });
}

/* Returns the number of rank r's tokens whose document also has tokens on other ranks. The
 * documents are those of run_same_sequences. */
static size_t tokens_that_cross(int r, int context)
{
    const int part = T / context;
    size_t count = 0;
    for (int i = 0; i < TOKENS; i++) {
        int first = i, last = i;
        while (first % T > 0 && first % 41 != 20)
            first--;
        while (last % T < T - 1 && (last + 1) % 41 != 20)
            last++;
        count += i % T / part == r && first % T / part != last % T / part;
    }
    return count;
}

/* Documents that skip the exchange are not sent. The exchange to heads has q, k and v and, in
 * backward, dy, q, k, v and y. The exchange to tokens has y and, in backward, dq, dk and dv. */
TEST(test_bytes)
{
    const Case k = { "f32", LLAMA, .documents = true };
    const ModelConfig m = model_of(&k);
    stays = 1;
    for (int context = 2; context <= comm_size(); context *= 2) {
        const size_t before = comm_sent(SENT_EXCHANGES);
        run_parts(&k, m, (Strategy){ .shard_ranks = context, .context_ranks = context }, false,
                  false);
        const int own = comm_group_rank(RANKS_CONTEXT);
        size_t theirs = 0, all = 0;
        for (int r = 0; r < context; r++) {
            all += tokens_that_cross(r, context);
            theirs += r == own ? 0 : tokens_that_cross(r, context);
        }
        /* the model has K = H */
        const size_t out = (size_t)(m.n_heads / context * m.head_dim) * sizeof(float),
                     qkv = 3 * out;
        const size_t there =
            (size_t)(context - 1) * tokens_that_cross(own, context) * (qkv + out + qkv + out);
        const size_t sent = comm_sent(SENT_EXCHANGES) - before,
                     expected = (size_t)m.n_layers * (there + theirs * (out + qkv));
        assert_true(all > 0 && all < TOKENS);
        assert_int_equal(sent, expected);
        release();
    }
    stays = 2;
}

/* With context ranks, the sums of weight gradients are rounded to BF16 after other subsets of the
 * tokens. Ranks that share a key head first round their parts of its gradients, by 2^-8. This
 * changes the E5M2 code of 2^-6 of the gradients, because codes are 2^-2 apart: an error of
 * sqrt(2^-6 2^-4) = 2^-5 of the tensor. The gradients of the preceding block differ by as much, and
 * their codes by sqrt(2^-5 2^-2), less than 2^-3. */
TEST(test_fp8)
{
    static const char *const recipes[] = { "bf16", "fp8", "coat", "coat-lean" };
    if (!__real_scale_within_range)
        skip();
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 4; r++) {
            const Case k = { recipes[r], a, a == LLAMA_GQA ? ALL_MODULES : 0, .lora_rank = RANK,
                             .documents = r % 2 };
            /* on each rank, a GEMM of experts has rows of other tokens, so its bits differ */
            if ((a + r) % 2 && a != OLMOE)
                check_all(&k, 0, r > 0 && model_of(&k).n_kv_heads < comm_size() ? 0x1p-3 : 0x1p-6);
        }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
