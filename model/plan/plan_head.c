/* Plans the buffers of the head and the losses. */
#include "model/plan/plan_head.h"

#include "model/parallel/context.h"
#include "model/plan/plan.h"

/* The number of tokens whose logits exist at once: chunks of at most 512 MiB and at least one
 * token, as equal as possible. The number is a multiple of 16 if the head has FP8 operands. */
static int loss_chunk(const Config *c, int N, bool fp8)
{
    if (c->loss_chunk > 0)
        return c->loss_chunk < N ? c->loss_chunk : N;
    size_t row = (size_t)c->model.embedding_size * dtype_size(c->recipe.residual.dtype);
    int count = (int)((row * N + (512u << 20) - 1) / (512u << 20)), rows = (N + count - 1) / count;
    if (fp8)
        rows = fp8_padded(rows);
    return rows < N ? rows : N;
}

static Tensor head_operand(Arena *arena, Model *m, Buffer b, Format f, int rows, int cols)
{
    const size_t bytes = (size_t)rows * (size_t)cols;
    void *data = plan_shared(m, b, bytes);
    return (Tensor){
        .data = data, .scale = arena_alloc(arena, 16), .format = f, .rows = rows, .cols = cols
    };
}

/* Plans the FP8 operands of the head's backward. They are padded along both dimensions over which
 * their GEMMs sum: vocabulary and tokens. The gradient's transpose overwrites the logits. */
static void plan_head_operands(Arena *arena, Model *m)
{
    const Format e4m3 = { E4M3, 0, false };
    const int chunk = fp8_padded(m->logits.rows), V = fp8_padded(m->logits.cols),
              C = m->text.config->d_model;
    const size_t bytes = (size_t)chunk * (size_t)V, logits = tensor_bytes(m->logits);
    m->dlogits = head_operand(arena, m, BUFFER_dlogits, m->text.recipe.head, chunk, V);
    m->dlogits.data_t = plan_shared(m, BUFFER_logits, bytes > logits ? bytes : logits);
    m->head_h = head_operand(arena, m, BUFFER_head_h, e4m3, chunk, C);
    m->head_h.data_t = plan_shared(m, BUFFER_head_h_T, (size_t)chunk * (size_t)C);
    m->head_w = head_operand(arena, m, BUFFER_head_w, e4m3, V, C);
    m->head_w.data_t = m->head_w.data;
    m->head_w.data = NULL;
}

void plan_head(Arena *arena, Model *m, const Config *c)
{
    const bool fp8 = format_is_fp8(m->text.recipe.head) && !m->text.forward_only;
    int N = m->text.N;
    m->temperature = c->loss_temperature > 0 ? (float)c->loss_temperature : 1;
    m->final_stats = arena_alloc(arena, 2 * sizeof(float) * N);
    m->final_h =
        plan_shared_rows(m, BUFFER_final_h, m->text.recipe.residual, m->text.N, c->model.d_model);
    m->logits = plan_shared_rows(m, BUFFER_logits, m->text.recipe.residual, loss_chunk(c, N, fp8),
                                 c->model.embedding_size);
    if (fp8)
        plan_head_operands(arena, m);
    m->targets = arena_alloc(arena, sizeof(int) * N);
    m->sorted = arena_alloc(arena, sizeof *m->sorted * N);
    m->text.doc_start =
        arena_alloc(arena, sizeof(int) * ((size_t)m->text.rows * (size_t)m->text.context + 1));
    m->text.own_doc_start = context_skips(&m->text)
                                ? arena_alloc(arena, sizeof(int) * ((size_t)m->text.rows + 1))
                                : NULL;
    if (c->preference.kind != PREFERENCE_NONE) {
        m->pairs.settings = c->preference;
        m->pairs.weight = arena_alloc(arena, sizeof(float) * N);
    }
    m->losses = arena_alloc(arena, 2 * sizeof(float) * N);
    m->sums = arena_alloc(arena, 2 * sizeof(float));
}
