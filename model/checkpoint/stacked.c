#include "model/checkpoint/stacked.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

/* A kind of stacked tensor, and the tensors that it contains: each has the same number of rows of
 * each expert. */
typedef struct {
    const char *end;
    int count;
    const char *part[2];
} Stack;
static const Stack stacks[] = {
    { ".experts.gate_up_proj", 2, { "gate_proj", "up_proj" } },
    { ".experts.down_proj", 1, { "down_proj" } },
};

/* Returns NULL if t is not stacked. */
static const Stack *stack_of(const SafeTensor *t)
{
    for (size_t i = 0; i < sizeof stacks / sizeof *stacks; i++)
        if (t->dims == 3 && text_ends_with(t->name, stacks[i].end) &&
            t->shape[1] % (size_t)stacks[i].count == 0)
            return &stacks[i];
    return NULL;
}

/* Writes the tensors that t contains to `to`, in the order of their bytes. Returns their number. */
static size_t split(SafeTensor *to, const SafeTensor *t, const Stack *s)
{
    const size_t parts = t->shape[0] * (size_t)s->count,
                 bytes = parts > 0 ? (t->end - t->begin) / parts : 0;
    const int prefix = (int)(strlen(t->name) - strlen(strrchr(t->name, '.')));
    for (size_t i = 0; i < parts; i++) {
        to[i] = *t;
        to[i].name = xasprintf("%.*s.%zu.%s.weight", prefix, t->name, i / (size_t)s->count,
                               s->part[i % (size_t)s->count]);
        to[i].dims = 2;
        to[i].shape[0] = t->shape[1] / (size_t)s->count;
        to[i].shape[1] = t->shape[2];
        to[i].begin = t->begin + i * bytes;
        to[i].end = to[i].begin + bytes;
    }
    return parts;
}

void stacked_split(SafeFile *f)
{
    size_t count = 0;
    for (int i = 0; i < f->count; i++) {
        const Stack *s = stack_of(&f->tensor[i]);
        count += s ? f->tensor[i].shape[0] * (size_t)s->count : 1;
    }
    if (count == (size_t)f->count)
        return;
    SafeTensor *all = xmalloc(count * sizeof *all), *to = all;
    for (int i = 0; i < f->count; i++) {
        const Stack *s = stack_of(&f->tensor[i]);
        if (!s) {
            *to++ = f->tensor[i];
            continue;
        }
        to += split(to, &f->tensor[i], s);
        free(f->tensor[i].name);
    }
    free(f->tensor);
    f->tensor = all;
    f->count = (int)count;
    safetensors_renamed(f);
}
