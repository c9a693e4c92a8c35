/* The table of pipeline passes, exhaustively for small numbers: every pass occurs once, in an order
 * without deadlock, with the memory and the bubble that the literature states. */
#include <math.h>
#include <stdio.h>

#include "tests/test.h"
#include "tests/kit.h"

#include "model/shape/pipeline.h"
#include "model/shape/units.h"

enum { MAX_STAGES = 8, MAX_MICRO = 32, MAX_CHUNKS = 4, MAX_ROWS = 2 * MAX_MICRO * MAX_CHUNKS };

typedef struct {
    PipelineRow row[MAX_ROWS];
    int count;
} Table;

/* Calls check for all numbers of stages, micro-batches and chunks that a schedule takes. */
static void for_all(void (*check)(Pipeline p))
{
    for (int stages = 1; stages <= MAX_STAGES; stages++)
        for (int micro = 1; micro <= MAX_MICRO; micro++) {
            check((Pipeline){ stages, 0, 1, PIPELINE_1F1B, micro });
            check((Pipeline){ stages, 0, 1, PIPELINE_ONE, micro });
            for (int chunks = 2; chunks <= MAX_CHUNKS; chunks++) {
                check((Pipeline){ stages, 0, chunks, PIPELINE_INTERLEAVED, micro });
                check((Pipeline){ stages, 0, chunks, PIPELINE_ONE, micro });
            }
        }
}

static const char *name_of(const Pipeline *p)
{
    static char text[96];
    snprintf(text, sizeof text, "schedule %d, stage %d of %d, %d chunks, %d micro-batches",
             (int)p->schedule, p->stage, p->stages, p->chunks, p->micro_batches);
    return text;
}

/* ---- one stage ------------------------------------------------------------------------------- */

/* Each chunk has all micro-batches in order, forward before backward. At most as many are in flight
 * as pipeline_in_flight says, and at some time exactly as many. Returns the largest number in
 * flight in all chunks. */
static int check_stage(const Pipeline *p, const Table *t)
{
    int forward[MAX_CHUNKS] = { 0 }, back[MAX_CHUNKS] = { 0 }, most[MAX_CHUNKS] = { 0 }, all = 0,
        most_of_all = 0;
    for (int i = 0; i < t->count; i++) {
        const PipelineRow *r = &t->row[i];
        assert_in_range(r->chunk, 0, p->chunks - 1);
        int *next = r->backward ? back : forward;
        if (r->micro != next[r->chunk]++ || back[r->chunk] > forward[r->chunk])
            fail_msg("%s: row %d is %s of micro-batch %d in chunk %d", name_of(p), i,
                     r->backward ? "backward" : "forward", r->micro, r->chunk);
        const int now = forward[r->chunk] - back[r->chunk];
        most[r->chunk] = now > most[r->chunk] ? now : most[r->chunk];
        all += r->backward ? -1 : 1;
        most_of_all = all > most_of_all ? all : most_of_all;
        /* the next pass would overwrite the head's gradient */
        if (pipeline_is_last(p, r->chunk) && !r->backward)
            assert_true(t->row[i + 1].backward && t->row[i + 1].chunk == r->chunk &&
                        t->row[i + 1].micro == r->micro);
    }
    for (int k = 0; k < p->chunks; k++) {
        assert_int_equal(forward[k], p->micro_batches);
        assert_int_equal(back[k], p->micro_batches);
        assert_int_equal(most[k], pipeline_in_flight(p, k));
    }
    return most_of_all;
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

static void check_tables(Pipeline p)
{
    static Table t;
    for (p.stage = 0; p.stage < p.stages; p.stage++) {
        t.count = pipeline_rows(t.row, &p);
        assert_int_equal(t.count, 2 * p.chunks * p.micro_batches);
        /* the stages after this one [Narayanan et al. 2021, sec. 2.2; for chunks Korthikanti et al.
         * 2022, arXiv 2205.05198, sec. 4.2: p v + p - 1 on the first stage] */
        const int later = p.stages - 1 - p.stage, most = check_stage(&p, &t);
        if (p.schedule == PIPELINE_1F1B)
            assert_int_equal(most, least(later + 1, p.micro_batches));
        else if (p.schedule == PIPELINE_INTERLEAVED && p.micro_batches % p.stages == 0)
            assert_int_equal(
                most, least(p.stages * (p.chunks - 1) + 2 * later + 1, p.chunks * p.micro_batches));
        else /* a micro-batch is in each chunk once */
            assert_int_equal(most, p.chunks);
    }
}

TEST(test_tables)
{
    for_all(check_tables);
}

/* ---- all stages ------------------------------------------------------------------------------ */

/* Simulates the running stages. A message is in transit from the moment when its stage hands it to
 * the send queue. The send queue sends messages one after the other, each when the receiver waits
 * for it, as NCCL does without buffers. A stage has memory for one message per direction; it waits
 * with the next message until the previous one has left. A pass of a chunk takes one unit of
 * time. */
typedef enum { FORWARD, BACK } Flow;
/* chunk: number of the sender's chunk among all chunks */
typedef struct {
    Flow flow;
    int micro, chunk;
} Message;
typedef struct {
    const Table *t;
    int at;
    bool sends;
    Message queue[2];
    int queued;
    long time, sent[2], ready[2];
} Stage;

static int number_of(const Pipeline *p, int stage, int chunk)
{
    return chunk * p->stages + stage;
}

/* Returns the message for which the row waits; false: none. */
static bool needs(const Pipeline *p, int stage, const PipelineRow *r, Message *m)
{
    const int n = number_of(p, stage, r->chunk), all = p->stages * p->chunks;
    *m = (Message){ r->backward ? BACK : FORWARD, r->micro, r->backward ? n + 1 : n - 1 };
    return r->backward ? n + 1 < all : n > 0;
}

static bool makes(const Pipeline *p, int stage, const PipelineRow *r, Message *m)
{
    const int n = number_of(p, stage, r->chunk), all = p->stages * p->chunks;
    *m = (Message){ r->backward ? BACK : FORWARD, r->micro, n };
    return r->backward ? n > 0 : n + 1 < all;
}

/* Returns whether `wanted` is at the front of the sender's queue, and removes it from there. */
static bool receive(Stage *from, Message wanted, long *time)
{
    const Message *m = from->queue;
    if (from->queued == 0 || m->flow != wanted.flow)
        return false;
    /* a channel keeps its order */
    assert_true(m->micro == wanted.micro && m->chunk == wanted.chunk);
    *time = from->ready[m->flow] > *time ? from->ready[m->flow] : *time;
    from->queue[0] = from->queue[1];
    from->queued--;
    from->sent[wanted.flow] = *time;
    return true;
}

static bool has(const Stage *s, Flow flow)
{
    return (s->queued > 0 && s->queue[0].flow == flow) ||
           (s->queued > 1 && s->queue[1].flow == flow);
}

/* Makes the passes that are possible; returns whether there was any. */
static bool advance(const Pipeline *p, Stage *all, int stage)
{
    Stage *s = &all[stage];
    const PipelineRow *r = &s->t->row[s->at];
    Message m;
    if (s->at == s->t->count)
        return false;
    if (!s->sends) {
        const int from = (stage + (r->backward ? 1 : p->stages - 1)) % p->stages;
        if (needs(p, stage, r, &m) && !receive(&all[from], m, &s->time))
            return false;
        s->time++;
        s->sends = true;
    }
    if (makes(p, stage, r, &m)) {
        if (has(s, m.flow))
            return false;
        s->time = s->sent[m.flow] > s->time ? s->sent[m.flow] : s->time;
        s->ready[m.flow] = s->time;
        s->queue[s->queued++] = m;
    }
    s->sends = false;
    s->at++;
    return true;
}

static void check_run(Pipeline p)
{
    static Table table[MAX_STAGES];
    Stage stage[MAX_STAGES] = { 0 };
    long end = 0;
    for (p.stage = 0; p.stage < p.stages; p.stage++) {
        table[p.stage].count = pipeline_rows(table[p.stage].row, &p);
        stage[p.stage].t = &table[p.stage];
    }
    for (bool moves = true; moves;) {
        moves = false;
        for (int s = 0; s < p.stages; s++)
            while (advance(&p, stage, s))
                moves = true;
    }
    for (int s = 0; s < p.stages; s++) {
        p.stage = s;
        if (stage[s].at < table[s].count)
            fail_msg("%s waits for ever in row %d of %d", name_of(&p), stage[s].at, table[s].count);
        end = stage[s].time > end ? stage[s].time : end;
    }
    const double bubble = 1 - (double)table[0].count / (double)end, said = pipeline_bubble(&p);
    if (fabs(bubble - said) > 1e-9)
        fail_msg("%s: a bubble of %.4f, which is said to be %.4f", name_of(&p), bubble, said);
}

TEST(test_runs)
{
    for_all(check_run);
}

/* ---- units ----------------------------------------------------------------------------------- */

TEST(test_units)
{
    for (int stages = 1; stages <= MAX_STAGES; stages++)
        for (int chunks = 1; chunks <= MAX_CHUNKS; chunks++)
            for (int layers = stages * chunks; layers <= 40; layers++) {
                const ModelConfig c = { .n_layers = layers };
                int next = 0, fewest = layers, most = 0;
                for (int n = 0; n < stages * chunks; n++) {
                    const Pipeline p = { stages, n % stages, chunks, PIPELINE_1F1B, 1 };
                    const UnitRange r = pipeline_units(&p, &c, n / stages);
                    const int blocks = r.end - r.first - (n == 0) - (n == stages * chunks - 1);
                    assert_int_equal(r.first, next);
                    next = r.end;
                    fewest = least(blocks, fewest);
                    most = blocks > most ? blocks : most;
                    for (int u = 0; u < unit_count(&c); u++)
                        if (u >= r.first && u < r.end)
                            assert_true(pipeline_holds(&p, &c, u) &&
                                        pipeline_stage_of(&p, &c, u) == n % stages);
                }
                assert_int_equal(next, unit_count(&c));
                assert_true(fewest > 0 && most - fewest <= 1);
            }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
