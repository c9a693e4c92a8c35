/* Allocates and frees batches. */
#include "data/batch.h"

#include "kernels/runtime/error.h"

#include <stdlib.h>

Batch batch_make(int sequences, int T, bool images, int value_bytes)
{
    const size_t n = (size_t)sequences, tokens = n * (size_t)T;
    Batch b = { .index = xmalloc(n * sizeof *b.index), .source = xcalloc(n, sizeof *b.source) };
    b.tokens = xmalloc(tokens * sizeof *b.tokens);
    b.targets = xmalloc(tokens * sizeof *b.targets);
    b.begins = xmalloc(tokens);
    b.images = images ? xcalloc(tokens, sizeof *b.images) : NULL;
    b.values = value_bytes > 0 ? xcalloc(tokens, (size_t)value_bytes) : NULL;
    return b;
}

void batch_free(Batch *b)
{
    free(b->tokens), free(b->targets), free(b->begins), free(b->index), free(b->source),
        free(b->images), free(b->values);
}
