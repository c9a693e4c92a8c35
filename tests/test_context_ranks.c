/* Ranks that share sequences compute what one rank computes: losses of tokens, gradients and their
 * norm in f32, and, if they share the maxima of FP8 operands, the bits of all losses in FP8. On 1,
 * 2 and 4 ranks. */
#include "model/parallel/context_work.h"
#include "tests/test.h"
#include "tests/ranks_parts.h"

/* The rows of a micro-batch are those of no weight, whichever number of ranks shares them. NOTE:
 * with AVX-512 OpenBLAS has another kernel for products by a transposed matrix with up to 1,200
 * results. No rank has so few: RANK * MICRO * T / 4 are more. */
enum { T = 96, RANK = 26, TOKENS = SEQUENCES * T };

/* ---- documents that are exchanged though they lie in one rank's part ------------------------- */

static int stays = 2; /* every second of those that could stay does; 1: all do */
static bool has_window;

int __wrap_context_leave_out(OwnDocument *d, int count, ContextWork *work);

/* All tokens of a rank's part are in documents of its own, or exchanged in any case. At most one
 * document is exchanged at each border of two parts, and n documents of t tokens in all have at
 * least t^2 / 2n pairs. */
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
    if (work->exchanged[0] > 0 || count > 0) /* else there are no documents */
        check_work(d, count, work);
    for (int i = 0; i * stays < count; i++)
        d[i] = d[i * stays];
    return (count + stays - 1) / stays;
}

/* ---- comparisons ----------------------------------------------------------------------------- */

/* Each of 4 ranks can have the same number of heads. 2 or 4 ranks share a key head, or none do. */
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

/* A GPU's tensor cores round sums in F32 towards zero [Fasi et al. 2021, "Numerical behavior of
 * NVIDIA tensor cores"]. There the gradient of a key head is a sum of three products (mma.cuh) for
 * each eight queries of each query head that reads it, so another order of query heads may change
 * it by 2^-24 of each partial sum. Other sums have the same order on all ranks. */
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

/* All documents stay in one rank's part, or none does. */
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

/* Blocks that are run again, and attention that stays. */
TEST(test_kept)
{
    static const Keep keeps[] = { KEEP_INPUTS, KEEP_BLOCK, KEEP_ATTENTION };
    for (int i = 0; i < 3; i++)
        check_f32(
            &(Case){ "f32", i == 1 ? OLMO2 : LLAMA_GQA, .documents = true, .keep = (int)keeps[i] });
}

/* Tokens in rank r's part of all sequences whose document has tokens in other parts too. Documents:
 * those of run_same_sequences. */
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

/* Documents that stay are not sent. To whole sequences go q, k, v and, backward, the output's
 * gradient, q, k, v and the output; back go the output and, backward, the gradients of q, k, v. */
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
        /* K = H */
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

/* The sums of weight gradients are rounded to BF16 after other parts of the tokens. Ranks with the
 * same key head round their parts of its gradients first, by 2^-8: that changes the E5M2 code of
 * 2^-6 of them, as the distance of codes is 2^-2, which is sqrt(2^-6 2^-4) = 2^-5 of the tensor.
 * Gradients of the block before differ by as much, and their codes by sqrt(2^-5 2^-2): less than
 * 2^-3. */
TEST(test_fp8)
{
    static const char *const recipes[] = { "bf16", "fp8", "coat", "coat-lean" };
    if (!__real_scale_within_range)
        skip();
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (int r = 0; r < 4; r++) {
            const Case k = { recipes[r], a, a == LLAMA_GQA ? ALL_MODULES : 0, .lora_rank = RANK,
                             .documents = r % 2 };
            /* a GEMM of experts has the rows of other tokens on each rank, so its bits differ */
            if ((a + r) % 2 && a != OLMOE)
                check_all(&k, 0, r > 0 && model_of(&k).n_kv_heads < comm_size() ? 0x1p-3 : 0x1p-6);
        }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
