/* Both layers of the projector, and the placement of its rows in a micro-batch. */
#include "model/block/projector.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/values.h"
#include "model/plan/plan.h"

enum { ROWS_TOGETHER = 256 };

/* ---- rows of a micro-batch ------------------------------------------------------------------- */

static int padded(const Model *m, int rows)
{
    const int whole = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER,
              least = rows > 0 ? whole : ROWS_TOGETHER;
    return least < m->text.N ? least : m->text.N;
}

void projector_plan_rows(Arena *arena, Model *m)
{
    ImageBuffers *b = &m->image;
    if (m->text.config->image.feature_size == 0)
        return;
    b->x =
        tensor_alloc(arena, m->text.recipe.residual, m->text.N, m->text.config->image.feature_size);
    b->at = arena_alloc(arena, sizeof *b->at * (size_t)m->text.N);
    b->rows = m->text.N; /* a plan must fit any micro-batch */
    if (!b->host_at) {
        b->host_at = xmalloc(sizeof *b->host_at * (size_t)m->text.N);
        b->host_x = xmalloc(tensor_bytes(b->x));
    }
}

void projector_free(Model *m)
{
    free(m->image.host_at);
    free(m->image.host_x);
}

/* Writes row i of x on the host. */
static void copy_row(Model *m, int i, const void *values)
{
    ImageBuffers *b = &m->image;
    const size_t cols = (size_t)b->x.cols, bytes = cols * dtype_size(b->x.format.dtype);
    Tensor x = tensor_at(b->host_x, b->x.format, b->x.rows, b->x.cols);
    const Tensor from =
        tensor_at((void *)values, (Format){ m->images.dtype, 0, false }, 1, b->x.cols);
    if (m->images.dtype == b->x.format.dtype) {
        memcpy((char *)b->host_x + (size_t)i * bytes, values, bytes);
        return;
    }
    float *row = xmalloc(sizeof *row * cols);
    tensor_load(row, from, 0, cols);
    tensor_store(x, (size_t)i * cols, row, cols);
    free(row);
}

/* Token (b, t) is this rank's token b T' + t - context_rank T' if t is in this rank's part of the
 * sequence (context.h). */
void projector_put(Model *m, const void *const *rows)
{
    ImageBuffers *b = &m->image;
    const int own = m->text.attn.T;
    int count = 0;
    if (m->text.config->image.feature_size == 0 || !b->x.data)
        return;
    for (int n = 0; n < m->text.N && rows; n++) {
        const void *values = rows[(size_t)(n / own) * (size_t)m->text.T +
                                  (size_t)(m->text.context_rank * own + n % own)];
        if (!values)
            continue;
        copy_row(m, count, values);
        b->host_at[count++] = n;
    }
    b->rows = padded(m, count);
    const size_t bytes = (size_t)b->x.cols * dtype_size(b->x.format.dtype);
    memset((char *)b->host_x + (size_t)count * bytes, 0, (size_t)(b->rows - count) * bytes);
    for (int i = count; i < b->rows; i++)
        b->host_at[i] = -1;
    device_put(b->x.data, b->host_x, (size_t)b->rows * bytes);
    device_put(b->at, b->host_at, sizeof *b->at * (size_t)b->rows);
}

/* ---- forward and backward -------------------------------------------------------------------- */

/* Places the buffers of the unit: the embedding's output, which nothing reads later; h; gelu(h) or
 * the gradient of h; y or its gradient. */
void projector_plan(Model *m, int u)
{
    const Format f = m->text.recipe.residual;
    const int C = m->text.config->d_model;
    m->unit_acts[u].attn_res = plan_shared_rows(m, BUFFER_image_res, f, m->text.N, C);
    m->image.y = plan_shared_rows(m, BUFFER_image_y, f, m->text.N, C);
    if (m->text.config->image.projector == PROJECTOR_LINEAR)
        return;
    m->image.h = plan_shared_rows(m, BUFFER_image_h, f, m->text.N, C);
    m->image.act = plan_shared_rows(m, BUFFER_image_act, f, m->text.N, C);
}

static Tensor of_rows(const Model *m, Tensor t)
{
    return tensor_rows(t, 0, m->image.rows);
}

/* Computes h and gelu(h). */
static void first_layer(const Model *m, const UnitTensors *w)
{
    matmul(of_rows(m, m->image.h), of_rows(m, m->image.x), w->image_in, w->image_in_bias);
    gelu_forward(of_rows(m, m->image.act), of_rows(m, m->image.h));
}

void projector_forward(Model *m, const UnitTensors *w, int u)
{
    const Tensor y = of_rows(m, m->image.y), stream = m->unit_acts[u + 1].attn_res;
    if (m->text.config->image.projector == PROJECTOR_LINEAR)
        matmul(y, of_rows(m, m->image.x), w->image_in, w->image_in_bias);
    else {
        first_layer(m, w);
        matmul(y, of_rows(m, m->image.act), w->image_out, w->image_out_bias);
    }
    quantize(stream, m->unit_acts[u].attn_res); /* this copies: both tensors have the same format */
    place_rows(stream, m->image.at, y);
}

static bool trains(const UnitTensors *dw)
{
    return dw->image_in.data || dw->image_in_bias.data || dw->image_out.data ||
           dw->image_out_bias.data;
}

void projector_backward(Model *m, const UnitTensors *w, UnitTensors *dw)
{
    Tensor dh = of_rows(m, m->image.y);
    take_rows(dh, m->image.at, m->text.work.dres);
    if (!trains(dw))
        return;
    if (m->text.config->image.projector != PROJECTOR_LINEAR) {
        const Tensor dy = dh;
        first_layer(m, w);
        matmul_db(dw->image_out_bias, dy);
        matmul_dw(dw->image_out, dy, of_rows(m, m->image.act));
        dh = of_rows(m, m->image.act);
        matmul_dx(dh, dy, w->image_out, false);
        gelu_backward(dh, dh, of_rows(m, m->image.h));
    }
    matmul_db(dw->image_in_bias, dh);
    matmul_dw(dw->image_in, dh, of_rows(m, m->image.x));
}
