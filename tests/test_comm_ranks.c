/* Collectives on any number of ranks: correct values, and the same bits on every rank and in every
 * call. */
#include "kernels/runtime/watchdog.h"
#include "kernels/runtime/watchdog_marks.h"
#include "tests/test.h"
#include "tests/kit.h"

#include "tests/ranks.h"

TEST(test_host_values)
{
    const int W = comm_size(), own = comm_rank();
    assert_true(own >= 0 && own < W && comm_local_rank() < comm_local_size() &&
                comm_local_size() <= W);
    double x[3] = { own + 1, 0.1 * own, -own }, y[2] = { own, -own }, expected = 0;
    comm_sum(x, 3);
    for (int r = 0; r < W; r++)
        expected += 0.1 * r;
    assert_true(x[0] == W * (W + 1) / 2 && x[1] == expected && x[2] == -W * (W - 1) / 2);
    comm_max(y, 2);
    assert_true(y[0] == W - 1 && y[1] == 0);
    char text[32];
    snprintf(text, sizeof text, "rank %d speaks", own);
    comm_broadcast(text, sizeof text, W - 1);
    char last[32];
    snprintf(last, sizeof last, "rank %d speaks", W - 1);
    assert_string_equal(text, last);
    comm_barrier();
}

/* Gathers any number of bytes, only within a group. */
TEST(test_gather)
{
    const int W = comm_size(), shards = W > 2 ? W / 2 : W;
    unsigned char own[7], all[7 * 64];
    assert_true(W <= 64);
    memset(own, comm_rank() + 1, sizeof own);
    comm_gather(all, own, sizeof own, RANKS_ALL);
    for (int i = 0; i < 7 * W; i++)
        assert_int_equal(all[i], i / 7 + 1);
    divide((Strategy){ .shard_ranks = shards });
    comm_gather(all, own, sizeof own, RANKS_SHARD);
    for (int i = 0; i < 7 * shards; i++)
        assert_int_equal(all[i], comm_rank() / shards * shards + i / 7 + 1);
    divide(ALONE);
    comm_gather(all, own, sizeof own, RANKS_SHARD);
    assert_memory_equal(all, own, sizeof own);
}

/* The sum of W numbers in F32 has an error of (W - 1) u of their sizes, in any order. Then the CPU
 * rounds once to BF16; NCCL rounds each of the W - 1 partial sums. check_close includes the last
 * rounding. */
static void all_reduce_case(Format f, int n)
{
    const int W = comm_size();
    const double u = on_cpu() || W < 3 ? U24 : unit_roundoff(f);
    double *total = keep((size_t)n * sizeof *total), *bound = keep((size_t)n * sizeof *bound);
    Tensor t = make(f, 1, n);
    for (int r = 0; r < W; r++) {
        fill(t, (uint64_t)r, -1, 1);
        const double *v = values(t);
        for (int i = 0; i < n; i++)
            total[i] += v[i], bound[i] += (W - 1) * u * fabs(v[i]);
    }
    fill(t, (uint64_t)comm_rank(), -1, 1);
    TWICE(comm_all_reduce(t, RANKS_ALL), t);
    check_close("comm_all_reduce", t, total, bound);

    void *bits = tensor_snapshot(t), *first = keep(tensor_bytes(t));
    memcpy(first, bits, tensor_bytes(t));
    comm_broadcast(first, tensor_bytes(t), 0);
    check_same_bytes("comm_all_reduce on rank 0", bits, first, tensor_bytes(t));
    release();
}

TEST(test_all_reduce)
{
    static const int sizes[] = { 1, 3, 1000, (1 << 20) + (1 << 18) + 5 };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        all_reduce_case((Format){ F32, 0 }, sizes[i]);
        all_reduce_case((Format){ BF16, 0 }, sizes[i]);
    }
}

/* Groups of every size: their members, gathers, sums of slices, and maxima, all only over the ranks
 * of the group. */
static void groups_case(int shards)
{
    enum { N = 700 };
    divide((Strategy){ .shard_ranks = shards });
    const int own = comm_group_rank(RANKS_SHARD), first = comm_rank() - own;
    assert_int_equal(comm_group_size(RANKS_SHARD), shards);
    assert_int_equal(comm_group_size(RANKS_REPLICA), comm_size() / shards);
    assert_int_equal(own, comm_rank() % shards);
    assert_int_equal(comm_group_rank(RANKS_REPLICA), comm_rank() / shards);
    double x = comm_rank(), sum = 0;
    comm_sum_over(&x, 1, RANKS_REPLICA);
    for (int r = comm_rank() % shards; r < comm_size(); r += shards)
        sum += r;
    assert_true(x == sum);

    const size_t bytes = N * sizeof(float), W = (size_t)shards;
    char *memory = comm_alloc((W + 1) * bytes, FOR_WEIGHTS);
    Tensor part = tensor_at(memory, (Format){ F32, 0 }, 1, N),
           whole = tensor_at(memory + bytes, part.format, 1, shards * N);
    fill(part, (uint64_t)comm_rank(), -1, 1);
    comm_all_gather(whole.data, part.data, bytes, RANKS_SHARD);
    const double *all = values(whole);
    for (int i = 0; i < shards * N; i++)
        assert_true(all[i] == uniform((uint64_t)(first + i / N), (size_t)(i % N), -1, 1));
    device_zero(whole.data, W * bytes);
    char *own_slice = (char *)whole.data + (size_t)own * bytes;
    device_copy(own_slice, part.data, bytes);
    comm_all_gather(whole.data, own_slice, bytes, RANKS_SHARD);
    check_same_bytes("gathered in place", values(whole), all, W * N * sizeof *all);

    /* all ranks have the same value: the sum is W times this value, exact in F32 if W is a power of
     * two */
    comm_reduce_scatter(part, whole, RANKS_SHARD);
    const double *sums = values(part);
    for (int i = 0; i < N; i++)
        assert_true(sums[i] == shards * all[own * N + i]);

    fill(part, (uint64_t)comm_rank(), -1, 1);
    comm_all_reduce_max(part, RANKS_SHARD);
    const double *most = values(part);
    for (int i = 0; i < N; i++) {
        double expected = -1;
        for (int r = first; r < first + shards; r++)
            expected = fmax(expected, uniform((uint64_t)r, (size_t)i, -1, 1));
        assert_true(most[i] == expected);
    }
    comm_free(memory);
    release();
}

TEST(test_groups)
{
    for (int shards = comm_size(); shards > 0; shards /= 2)
        groups_case(shards);
}

/* The ranks with the same tensor coordinate are not consecutive: a sum, and a gather in the order
 * of ranks. */
TEST(test_strided_group)
{
    const int W = comm_size();
    if (W % 2 != 0)
        return;
    divide(mesh(1, 1, 2));
    float own = (float)comm_rank(),
          *all = comm_alloc(sizeof *all * (size_t)(W / 2 + 1), FOR_WEIGHTS);
    device_put(all, &own, sizeof own);
    comm_all_gather(all + 1, all, sizeof own, RANKS_SHARD);
    Tensor sum = tensor_at(all, (Format){ F32, 0 }, 1, 1);
    comm_all_reduce(sum, RANKS_SHARD);
    float got[64];
    device_get(got, all, sizeof *got * (size_t)(W / 2 + 1));
    float expected = 0;
    for (int i = 0; i < W / 2; i++) {
        assert_true(got[i + 1] == (float)(2 * i + comm_rank() % 2));
        expected += got[i + 1];
    }
    assert_true(got[0] == expected);
    comm_free(all);
    divide(ALONE);
}

/* Stores floats in a tensor, rounded to its format. */
static void put_rounded(Tensor t, const float *x)
{
    const Tensor wide = make_f32(t.rows, t.cols);
    put(wide, x);
    quantize(t, wide);
}

/* Multiples of 1/16 below 1. Products with small numbers, and sums, are exact in BF16. */
static void fill_sixteenths(Tensor x, uint64_t seed)
{
    const size_t n = tensor_numel(x);
    float *host = keep(n * sizeof *host);
    for (size_t i = 0; i < n; i++)
        host[i] = (float)(random_bits(seed, i) % 16) / 16;
    put_rounded(x, host);
}

enum { ITEMS = 2, TOKENS = 3 };

/* Returns pieces of TOKENS rows, ITEMS pieces of each rank. by_rank: the tensor is ordered by rank,
 * then item; else by item, then rank, as whole sequences are. */
static const RowRange *equal_pieces(int ranks, bool by_rank)
{
    RowRange *piece = keep(sizeof *piece * (size_t)(ranks * ITEMS));
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < ITEMS; i++)
            piece[r * ITEMS + i] =
                (RowRange){ (by_rank ? r * ITEMS + i : i * ranks + r) * TOKENS, TOKENS };
    return piece;
}

/* Each context rank has two sequences of 3 tokens, with 2 query heads and 1 key head per rank;
 * `shared` ranks share a key head. Tokens become heads, and back. Before the way back, rank r
 * multiplies its values by r + 1, and the values of a shared key head are added. */
static void exchange_case(int context, int shared, Format f)
{
    enum { H = 2, K = 1, D = 8 };
    const RowRange *by_rank = equal_pieces(context, true), *whole = equal_pieces(context, false);
    const int N = ITEMS * TOKENS, part = (H + 2 * K) * D, own = comm_group_rank(RANKS_CONTEXT),
              group = comm_rank() / context;
    const int all = (context * H + 2 * (context / shared) * K) * D;
    const Attention heads = { .H = H, .K = K, .D = D };
    const Tensor x = make(f, N, all), y = make(f, context * N, part), z = make(f, N, all),
                 exchanged = make(f, context * N, part);
    fill_sixteenths(x, (uint64_t)comm_rank());
    heads_split(exchanged, x, heads);
    comm_exchange(y, whole, exchanged, by_rank, ITEMS, RANKS_CONTEXT);
    const double *found = values(y), *mine = values(x);
    float *scaled = keep(sizeof *scaled * (size_t)(context * N * part));
    for (int r = 0; r < context; r++) {
        const Tensor theirs = make(f, N, all);
        fill_sixteenths(theirs, (uint64_t)(group * context + r));
        const double *whole = values(theirs);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < part; i++) {
                const int section = i < H * D         ? 0
                                    : i < (H + K) * D ? 1
                                                      : 2,
                          begin = (section ? context * H : 0) * D;
                const int at = section ? own / shared * K * D + i - (H + (section - 1) * K) * D
                                       : own * H * D + i;
                const int column = begin + (section == 2 ? context / shared * K * D : 0) + at;
                const int row = (n / TOKENS * context + r) * TOKENS + n % TOKENS;
                assert_true(found[row * part + i] == whole[n * all + column]);
                scaled[row * part + i] = (float)((own + 1) * found[row * part + i]);
            }
    }
    put_rounded(y, scaled);
    comm_exchange(exchanged, by_rank, y, whole, ITEMS, RANKS_CONTEXT);
    heads_join(z, exchanged, heads);
    const double *back = values(z);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < all; i++) {
            const int q = context * H * D, key = (i - q) / (K * D) % (context / shared),
                      first = key * shared + 1;
            const int times = i < q ? i / (H * D) + 1 : shared * (2 * first + shared - 1) / 2;
            assert_true(back[n * all + i] == times * mine[n * all + i]);
        }
    release();
}

/* Returns the rows of item i that rank s sends to rank r. The position and the number of rows
 * differ for each item, and one unused row lies before each item. */
static RowRange uneven(int s, int r, int i)
{
    RowRange rows = { 0, 0 };
    for (int at = 0; at <= r * ITEMS + i; at++)
        rows = (RowRange){ rows.first + rows.count + 1, (s + 2 * (at / ITEMS) + at % ITEMS) % 3 };
    return rows;
}

/* Pieces of different sizes, some empty. Rows outside of all pieces do not change. */
static void uneven_case(int context)
{
    enum { COLS = 8 };
    const int own = comm_group_rank(RANKS_CONTEXT), rows = 4 * ITEMS * context;
    const Tensor x = make_f32(rows, COLS), y = make_f32(rows, COLS);
    float *host = keep(sizeof *host * (size_t)(rows * COLS)),
          *expected = keep(sizeof *host * (size_t)(rows * COLS));
    RowRange *sent = keep(sizeof *sent * (size_t)(context * ITEMS)),
             *received = keep(sizeof *sent * (size_t)(context * ITEMS));
    for (int i = 0; i < rows * COLS; i++) {
        host[i] = (float)(own * 1000 + i);
        expected[i] = -1;
    }
    put(x, host);
    put(y, expected);
    for (int r = 0, at = 0; r < context; r++)
        for (int i = 0; i < ITEMS; i++) {
            const RowRange theirs = uneven(r, own, i);
            sent[r * ITEMS + i] = uneven(own, r, i);
            received[r * ITEMS + i] = (RowRange){ at, theirs.count };
            for (int k = 0; k < theirs.count * COLS; k++)
                expected[at * COLS + k] = (float)(r * 1000 + theirs.first * COLS + k);
            at += theirs.count + 1;
        }
    comm_exchange(y, received, x, sent, ITEMS, RANKS_CONTEXT);
    const double *found = values(y);
    for (int i = 0; i < rows * COLS; i++)
        assert_true(found[i] == (double)expected[i]);
    release();
}

TEST(test_exchange)
{
    for (int context = 1; context <= comm_size(); context *= 2) {
        divide(mesh(1, context, 1));
        for (int shared = 1; shared <= context; shared *= 2) {
            exchange_case(context, shared, (Format){ F32, 0 });
            exchange_case(context, shared, (Format){ BF16, 0 });
        }
        uneven_case(context);
    }
    divide(ALONE);
}

/* The rows that stage `from` sends to this neighbour in message i. */
static void fill_message(Tensor x, int from, Neighbour to, int i)
{
    fill(x, (uint64_t)((from * NUM_NEIGHBOURS + (int)to) * 100 + i), -1, 1);
}

/* Sends two messages in each direction before any is received. The first buffer is overwritten
 * after it was sent. */
static void message_case(int stages, Format f)
{
    enum { MESSAGES = 2, ROWS = 3, COLS = 40 };
    divide(mesh(stages, 1, 1));
    const int own = comm_group_rank(RANKS_PIPELINE);
    const Tensor x = make(f, ROWS, COLS), y = make(f, ROWS, COLS), expected = make(f, ROWS, COLS);
    for (Neighbour n = 0; n < NUM_NEIGHBOURS; n++)
        for (int i = 0; i < MESSAGES; i++) {
            DeviceMark *sent = device_follow(QUEUE_SEND, NULL);
            fill_message(x, own, n, i);
            comm_send(x, n);
            device_unmark(sent);
        }
    device_queue(QUEUE_COMPUTE);
    for (int i = 0; i < MESSAGES; i++)
        for (Neighbour n = 0; n < NUM_NEIGHBOURS; n++) {
            const int from = (own + (n == NEXT_STAGE ? 1 : stages - 1)) % stages;
            comm_receive(y, n); /* not into x, which a send may still be reading */
            fill_message(expected, from, n == NEXT_STAGE ? PREVIOUS_STAGE : NEXT_STAGE, i);
            check_same_bytes("message", values(y), values(expected),
                             (size_t)(ROWS * COLS) * sizeof(double));
        }
    release();
}

TEST(test_messages)
{
    for (int stages = 2; stages <= comm_size(); stages *= 2) {
        message_case(stages, (Format){ F32, 0 });
        message_case(stages, (Format){ BF16, 0 });
    }
    divide(ALONE);
}

/* After a stop, a second stop does not wait. */
TEST(test_watchdog_stops)
{
    watchdog_start(60);
    watchdog_mark("a test", -1);
    watchdog_stop();
    if (comm_rank() == 0)
        watchdog_stop();
    comm_barrier();
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
