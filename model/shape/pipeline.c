/* Computes the order of a stage's passes, and the units of a stage. */
#include "model/shape/pipeline.h"

#include "model/shape/units.h"

/* Number of micro-batches that go through one chunk before the next chunk: the number of stages, or
 * one. */
static int group(const Pipeline *p)
{
    return p->schedule != PIPELINE_ONE && (p->chunks == 1 || p->micro_batches % p->stages == 0)
               ? p->stages
               : 1;
}

/* Number of forward passes before backward pass number `back`. If micro-batches run one after the
 * other, these are the passes of the same and all earlier micro-batches; otherwise, enough
 * additional ones to keep all stages busy. */
static int forward_before(const Pipeline *p, int back)
{
    const int behind = p->stages - 1 - p->stage, all = p->chunks * p->micro_batches;
    const int ahead = p->chunks == 1 ? behind : 2 * behind + (p->chunks - 1) * p->stages;
    const int n = group(p) == 1 ? (back / p->chunks + 1) * p->chunks : back + ahead + 1;
    return n < all ? n : all;
}

/* Pass number i of a direction: a group of micro-batches through each chunk in turn, then the next
 * group. */
static PipelineRow row(const Pipeline *p, bool backward, int i)
{
    const int size = group(p), round = size * p->chunks, chunk = i % round / size;
    return (PipelineRow){ backward, i / round * size + i % size,
                          backward ? p->chunks - 1 - chunk : chunk };
}

int pipeline_rows(PipelineRow *rows, const Pipeline *p)
{
    const int all = p->chunks * p->micro_batches;
    int n = 0, forward = 0;
    for (int back = 0; back < all; back++) {
        while (forward < forward_before(p, back))
            rows[n++] = row(p, false, forward++);
        rows[n++] = row(p, true, back);
    }
    return n;
}

int pipeline_in_flight(const Pipeline *p, int chunk)
{
    const int all = p->chunks * p->micro_batches;
    int now = 0, most = 0;
    for (int back = 0, forward = 0; back < all; back++) {
        for (; forward < forward_before(p, back); forward++)
            now += row(p, false, forward).chunk == chunk;
        most = now > most ? now : most;
        now -= row(p, true, back).chunk == chunk;
    }
    return most;
}

/* The chunk's number among the chunks of all stages. */
static int number(const Pipeline *p, int chunk)
{
    return chunk * p->stages + p->stage;
}

bool pipeline_is_first(const Pipeline *p, int chunk)
{
    return number(p, chunk) == 0;
}

bool pipeline_is_last(const Pipeline *p, int chunk)
{
    return number(p, chunk) == p->stages * p->chunks - 1;
}

/* The first unit of chunk number n. If n is the number of chunks: the end of the last chunk. */
static int first_unit(const Pipeline *p, const ModelConfig *c, int n)
{
    const int all = p->stages * p->chunks;
    return n == 0     ? 0
           : n == all ? unit_count(c)
                      : unit_of_layer(c, (int)((long)n * c->n_layers / all));
}

UnitRange pipeline_units(const Pipeline *p, const ModelConfig *c, int chunk)
{
    const int n = number(p, chunk);
    return (UnitRange){ first_unit(p, c, n), first_unit(p, c, n + 1) };
}

bool pipeline_holds(const Pipeline *p, const ModelConfig *c, int unit)
{
    return pipeline_stage_of(p, c, unit) == p->stage ||
           (p->stage == p->stages - 1 && unit == unit_of_head_matrix(c));
}

int pipeline_stage_of(const Pipeline *p, const ModelConfig *c, int unit)
{
    int n = 0;
    while (unit >= first_unit(p, c, n + 1))
        n++;
    return n % p->stages;
}

double pipeline_bubble(const Pipeline *p)
{
    const double waits = p->stages - 1,
                 works = group(p) == 1 ? 1 : (double)p->chunks * p->micro_batches;
    return waits / (works + waits);
}
