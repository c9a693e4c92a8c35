/* Runs the blocks as in training, but only on as many rows of their buffers as there are new
 * tokens. */
#include "model/decode.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/plan_model.h"
#include "model/block/projector.h"
#include "model/block/tile.h"

static void set_rows(Acts *a, int rows)
{
    for (int i = 0; i < NUM_ACTS; i++)
        if (tensor_exists(a->tensor[i]))
            a->tensor[i].rows = tile_rows_of(i) == ROWS_HIDDEN
                                    ? hidden_rows(rows, a->experts.experts, a->experts.top_k)
                                    : rows;
    a->experts.tokens = rows;
}

void decode_begin(Model *m)
{
    CHECK(m->bytes.cache > 0 && m->text.attn.B == 1, "the model is not planned for generating");
    for (int l = 0; l < m->text.L; l++)
        m->acts[l].cache.length = 0;
}

/* Passes on the images of the next `count` tokens. Padding rows have no images. */
static void put_images(Model *m, int count)
{
    const void **rows = xcalloc((size_t)m->text.N, sizeof *rows);
    memcpy(rows, m->images.row, sizeof *rows * (size_t)count);
    projector_put(m, rows);
    m->images.row += count;
    free(rows);
}

/* The new rows follow the positions in the caches, so the rotary tables of these rows start
 * there. */
static void append(Model *m, ParamStore *store, const int *tokens, int count)
{
    const int past = m->acts[0].cache.length, rows = decode_rows(&m->text.recipe, count);
    CHECK(rows <= m->text.P - past, "%d more tokens after %d tokens; the caches have space for %d",
          count, past, m->text.P);
    int *padded = xmalloc(sizeof *padded * (size_t)rows);
    for (int i = 0; i < rows; i++)
        padded[i] = tokens[i < count ? i : count - 1];
    for (int u = 0; u < store->num_units; u++)
        set_rows(&m->unit_acts[u], rows);
    for (int l = 0; l < m->text.L; l++) {
        m->acts[l].attn.T = rows;
        m->acts[l].attn.rope =
            m->text.rope[layer_rotation(m->text.config, l)] + (size_t)past * (size_t)m->text.attn.D;
    }
    model_put_tokens(m, padded, rows);
    if (m->images.row)
        put_images(m, count);
    pass_forward(m, store);
    for (int l = 0; l < m->text.L; l++)
        m->acts[l].cache.length += count;
    m->text.last = count - 1;
    free(padded);
}

void decode_append(Model *m, ParamStore *store, const int *tokens, int count)
{
    for (int done = 0; done < count; done += m->text.N)
        append(m, store, tokens + done, count - done < m->text.N ? count - done : m->text.N);
    m->images.row = NULL;
}

void decode_logits(Model *m, ParamStore *store, float *logits)
{
    model_logits(m, store, m->text.last, logits);
}
