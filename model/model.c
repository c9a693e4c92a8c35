/* The model after planning: allocates and places its memory. Work before and after a pass: copies
 * tokens and settings in, reads losses and logits. */
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/values.h"
#include "model/parallel/context.h"
#include "model/block/experts.h"
#include "model/block/head.h"
#include "model/store/offload.h"
#include "model/plan_model.h"
#include "model/block/projector.h"
#include "model/shape/rope_table.h"
#include "model/parallel/stages.h"
#include "model/parallel/tensor_ranks.h"

static void fill_rope(const Stream *s)
{
    const size_t bytes = sizeof(float) * (size_t)s->P * (size_t)s->attn.D;
    float *table = xmalloc(bytes);
    for (Rotation i = 0; i < NUM_ROTATIONS; i++) {
        if (!s->rope[i])
            continue;
        rope_table(table, s->config, i, s->P);
        device_put(s->rope[i], table, bytes);
    }
    free(table);
}

void model_alloc(Model *m, ParamStore *store, const Config *c)
{
    m->memory = comm_alloc(m->bytes.total, FOR_ACTIVATIONS);
    store_alloc_gathered(store);
    model_place_tensors(m, store, c);
    offload_alloc(m);
    fill_rope(&m->text);
    experts_set_bias(&m->text, NULL);
}

/* Addresses without memory. They are farther apart than the size of any memory. */
static void *nowhere(int number)
{
    return (void *)((uintptr_t)(unsigned)number << 44);
}

void model_rehearse(Model *m, ParamStore *store, const Config *c)
{
    m->memory = nowhere(1);
    store->gathered.memory = nowhere(2);
    store->host.memory = nowhere(3);
    store->exchange.memory = nowhere(5);
    store->placed = true;
    model_place_tensors(m, store, c);
    offload_place(m, nowhere(4));
}

bool model_on_host(const void *p)
{
    return (uintptr_t)p >= (uintptr_t)nowhere(3) && (uintptr_t)p < (uintptr_t)nowhere(5);
}

void model_rehearsed(Model *m, ParamStore *store)
{
    m->memory = store->gathered.memory = store->exchange.memory = NULL;
    store->host.memory = m->offload.host = NULL;
    model_free(m, store);
}

static void stream_free(Stream *s)
{
    free(s->host_doc_start);
    free(s->host_part);
    tp_close(s);
    context_free(s);
}

void model_free(Model *m, ParamStore *store)
{
    if (m->memory)
        comm_free(m->memory);
    offload_free(m);
    store_free(store);
    for (Neighbour n = 0; n < NUM_NEIGHBOURS; n++)
        transfer_free(&m->outgoing[n].message);
    free(m->sets);
    free(m->amax_at);
    stream_free(&m->text);
    free(m->host_sorted);
    free(m->weighed.host);
    free(m->soft.host);
    projector_free(m);
}

/* A rehearsal does not sort: no operation reads the order, and sorting would take half of the
 * time. */
void model_put_tokens(Model *m, const int *tokens, int count)
{
    if (m->memory != nowhere(1))
        sort_tokens(m->host_sorted, tokens, count, m->text.config->embedding_size);
    device_put(m->sorted, m->host_sorted, sizeof *m->sorted * (size_t)count);
    m->text.docs = (Documents){ 0 };
    context_divide(&m->text);
    projector_put(m, NULL);
}

void model_use_images(Model *m, ImageRows images)
{
    m->images = images;
}

void model_use_weights(Model *m, WeighedRows rows)
{
    m->weighed_rows = rows;
}

void model_use_soft_labels(Model *m, SoftRows rows)
{
    m->soft_rows = rows;
}

void model_put_sequences(Model *m, const int *tokens)
{
    model_put_tokens(m, context_part(&m->text, tokens), m->text.N);
}

/* The place, in the arrays (B, T) of a micro-batch, of token n of this rank's tokens. */
static size_t place_of(const Stream *s, size_t n)
{
    const size_t own = (size_t)s->attn.T, at = (size_t)s->tensor_rank * (size_t)s->N + n;
    return at / own * (size_t)s->T + (size_t)s->context_rank * own + at % own;
}

/* Ids beyond the vocabulary, of which a teacher may have more, belong to the tail. */
static void decode_soft_labels(Model *m, const uint64_t *words)
{
    const SoftBuffers *s = &m->soft;
    const size_t N = (size_t)m->text.N, k = (size_t)s->k;
    int *column = (int *)s->host;
    float *probability = s->host + N * k, *tail = probability + N * k;
    memset(column, -1, sizeof *column * N * k);
    for (size_t n = 0; n < N; n++, column += k, probability += k) {
        const uint64_t word = words[place_of(&m->text, n)];
        const uint8_t *entry = m->soft_rows.entries + SOFT_ENTRY * soft_first(word);
        tail[n] = word ? soft_tail(word) : 0;
        for (int i = 0; i < soft_count(word); i++, entry += SOFT_ENTRY) {
            float p;
            const uint32_t id = soft_id(entry, &p);
            if (id < (uint32_t)m->text.config->vocab_size)
                column[i] = (int)id, probability[i] = p;
            else
                tail[n] += p;
        }
    }
}

static void load_soft_labels(Model *m, const uint64_t *words)
{
    const SoftBuffers *s = &m->soft;
    const size_t N = (size_t)m->text.N, k = (size_t)s->k, bytes = sizeof(float) * N * k;
    decode_soft_labels(m, words);
    device_put(s->column, s->host, bytes);
    device_put(s->probability, s->host + N * k, bytes);
    device_put(s->tail, s->host + 2 * N * k, sizeof *s->tail * N);
}

/* at: index of the first token in the batch. */
static void load_batch(Model *m, const int *tokens, const int *targets, const uint8_t *begins,
                       size_t at)
{
    model_put_sequences(m, tokens);
    if (m->images.row)
        projector_put(m, m->images.row + at);
    if (m->weighed_rows.given) {
        const size_t each = m->policy.kind == POLICY_NONE ? 1 : POLICY_VALUES;
        m->weighed.targets = targets;
        m->weighed.begins = begins;
        m->weighed.values = m->weighed_rows.values ? m->weighed_rows.values + each * at : NULL;
        m->weighed.sft_scale = m->weighed_rows.sft_scale;
    }
    m->soft.given = m->soft_rows.words != NULL;
    if (m->soft.given && m->has_head)
        load_soft_labels(m, m->soft_rows.words + at);
    device_put(m->targets, context_part(&m->text, targets), sizeof(int) * (size_t)m->text.N);
    if (m->text.documents) {
        m->text.docs.count = document_starts(m->text.host_doc_start, &m->text.docs.longest, begins,
                                             m->text.attn.B, m->text.T);
        m->text.docs.start = m->text.doc_start;
        m->text.docs.host_start = m->text.host_doc_start;
        device_put(m->text.doc_start, m->text.host_doc_start,
                   sizeof(int) * (m->text.docs.count + 1));
        context_divide(&m->text);
    }
}

/* The kind of pass of a schedule row: only the last micro-batch completes the step. */
static PassKind pass_of(PipelineRow r, int count, PassKind pass)
{
    return pass == PASS_COMPLETE && r.micro < count - 1 ? PASS_ACCUMULATE : pass;
}

void model_micro_batches(Model *m, ParamStore *store, const int *tokens, const int *targets,
                         const uint8_t *begins, int count, float scale, float z_weight,
                         PassKind pass)
{
    const size_t numel = (size_t)m->text.attn.B * (size_t)m->text.T;
    Pipeline p = store->pipe;
    p.micro_batches = count;
    PipelineRow *row = xmalloc(2 * (size_t)p.chunks * (size_t)count * sizeof *row);
    const int rows = pipeline_rows(row, &p);
    CHECK(count == 1 || count <= store->pipe.micro_batches || p.stages == 1,
          "%d micro-batches; the plan is for %d", count, store->pipe.micro_batches);
    CHECK(count == 1 || !m->in_step || p.stages == 1,
          "with stages, a step needs all micro-batches in one call");
    if (pass != PASS_FORWARD)
        offload_begin(m, store, row, rows);
    stages_enter(store);
    for (int i = 0, loaded = -1; i < rows; i++) {
        const size_t at = (size_t)row[i].micro * numel;
        if (row[i].backward && pass == PASS_FORWARD)
            continue;
        if (row[i].micro != loaded)
            load_batch(m, tokens + at, targets + at, begins ? begins + at : NULL, at);
        loaded = row[i].micro;
        m->scales_reused = pass != PASS_FORWARD && (m->in_step || row[i].micro > 0);
        pass_row(m, store, row[i], scale, z_weight, pass_of(row[i], count, pass));
    }
    offload_end(m);
    if (pass == PASS_COMPLETE) {
        stages_sum_tied(store);
        fsdp_wait_grads(store);
    }
    watchdog_set_stage(-1);
    m->scales_reused = false;
    m->in_step = pass == PASS_ACCUMULATE;
    m->images = (ImageRows){ 0 };
    m->weighed_rows = (WeighedRows){ 0 };
    m->weighed.targets = NULL;
    m->soft_rows = (SoftRows){ 0 };
    free(row);
}

void model_micro_batch(Model *m, ParamStore *store, const int *tokens, const int *targets,
                       const uint8_t *begins, float scale, float z_weight, PassKind pass)
{
    model_micro_batches(m, store, tokens, targets, begins, 1, scale, z_weight, pass);
}

void model_logits(Model *m, ParamStore *store, int row, float *logits)
{
    head_logits(m, store, row);
    Tensor y = tensor_rows(m->logits, 0, 1);
    watchdog_mark_together("reading logits", -1);
    y.cols = m->text.config->vocab_size;
    void *stored = xmalloc(tensor_bytes(y));
    device_get(stored, y.data, tensor_bytes(y));
    y.data = stored;
    tensor_load(logits, y, 0, (size_t)y.cols);
    free(stored);
}

void model_zero_losses(Model *m)
{
    const Tensor router = m->text.router.sums;
    device_zero(m->sums, 2 * sizeof *m->sums);
    memset(m->pair_sums, 0, sizeof m->pair_sums);
    memset(m->policy_sums, 0, sizeof m->policy_sums);
    if (router.data)
        device_zero(router.data, tensor_bytes(router));
}

void model_begin_step(Model *m, int sequences)
{
    model_zero_losses(m);
    if (m->text.config->experts.count > 0)
        experts_begin_step(&m->text, sequences);
}

Losses model_losses(const Model *m)
{
    float s[2];
    device_get(s, m->sums, sizeof s);
    return (Losses){ s[0], s[1] };
}

/* Copies (N, ...) device memory of `bytes` bytes per token to (B, T, ...). Tokens of other ranks get
 * bytes `other`. */
static void get_rows(const Model *m, void *rows, const void *device, size_t bytes, int other)
{
    const size_t N = (size_t)m->text.N, own = (size_t)m->text.attn.T;
    memset(rows, other, bytes * (size_t)m->text.attn.B * (size_t)m->text.T);
    for (size_t n = 0, count; n < N && m->has_head; n += count) {
        const size_t left = own - ((size_t)m->text.tensor_rank * N + n) % own;
        count = left < N - n ? left : N - n;
        device_get((char *)rows + place_of(&m->text, n) * bytes, (const char *)device + n * bytes,
                   bytes * count);
    }
}

void model_token_losses(const Model *m, float *losses)
{
    get_rows(m, losses, m->losses, sizeof *losses, 0);
}

void model_chosen_columns(const Model *m, int *columns, float *logps)
{
    const size_t bytes = sizeof *logps * (size_t)m->soft.k;
    get_rows(m, columns, m->soft.column, bytes, -1);
    get_rows(m, logps, m->soft.probability, bytes, 0);
}
