#include "model/checkpoint/stacked_adapters.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

/* A kind of stacked adapter, and the layers of an expert that it adapts. */
typedef struct {
    const char *end;
    bool is_b;
    int count;
    const char *part[2];
} Stack;
static const Stack stacks[] = {
    { ".experts.base_layer.lora_A.weight", false, 2, { "gate_proj", "up_proj" } },
    { ".experts.base_layer.lora_B.weight", true, 2, { "gate_proj", "up_proj" } },
    { ".experts.lora_A.weight", false, 1, { "down_proj" } },
    { ".experts.lora_B.weight", true, 1, { "down_proj" } },
};

static const Stack *stack_of(const SafeTensor *t)
{
    for (size_t i = 0; i < sizeof stacks / sizeof *stacks; i++)
        if (t->dims == 2 && text_ends_with(t->name, stacks[i].end))
            return &stacks[i];
    return NULL;
}

/* A stacked tensor t with R ranks per expert. Part p begins at rank p * step. */
typedef struct {
    const SafeTensor *t;
    const Stack *kind;
    size_t experts, r, R, step, rows, cols; /* rows, cols: the shape of an expert's part */
} Stacked;

static Stacked describe(const SafeFile *f, const SafeTensor *t, const Stack *k, int r, bool fused)
{
    const bool joined = fused && k->count == 2;
    Stacked s = { .t = t, .kind = k, .r = (size_t)r, .R = (size_t)r * (joined ? 2 : 1) };
    const size_t ranks = t->shape[k->is_b], parts = k->is_b ? (size_t)k->count : 1;
    s.experts = ranks / s.R;
    s.step = joined ? s.r : 0;
    s.rows = k->is_b ? t->shape[0] / parts : s.r;
    s.cols = k->is_b ? s.r : t->shape[1];
    if (ranks % s.R != 0 || ranks == 0 || t->shape[0] % parts != 0)
        die("%s: %s is %s; expected a multiple of %zu, the rank of an expert's adapter, as its %s",
            f->path, t->name, safetensors_shape(t), s.R, k->is_b ? "columns" : "rows");
    return s;
}

static char *name_of(const Stacked *s, size_t e, int part)
{
    const int prefix = (int)(strlen(s->t->name) - strlen(s->kind->end) + strlen(".experts"));
    return xasprintf("%.*s.%zu.%s.lora_%c.weight", prefix, s->t->name, e, s->kind->part[part],
                     s->kind->is_b ? 'B' : 'A');
}

/* Dies unless B is block diagonal: gate's rows must be 0 at up's ranks, and up's rows at gate's
 * ranks. */
static void check_blocks(const SafeFile *f, const Stacked *s, const char *data, size_t size)
{
    static const char zero[8] = { 0 };
    const size_t columns = s->R * s->experts;
    for (size_t row = 0; s->step > 0 && row < s->t->shape[0]; row++)
        for (size_t c = 0; c < columns; c++)
            if (row / s->rows != c / s->experts / s->r &&
                memcmp(data + (row * columns + c) * size, zero, size) != 0)
                die("%s: %s connects gate_proj with the ranks of up_proj, or the reverse; such "
                    "adapters are not supported, because each of the two has its own rank %zu",
                    f->path, s->t->name, s->r);
}

/* Writes the part of an expert to `to`. data: the elements of t, of `size` bytes each. */
static void gather(char *to, const Stacked *s, const char *data, size_t size, size_t e, int part)
{
    const size_t first = (size_t)part * s->step;
    if (!s->kind->is_b) {
        memcpy(to, data + (e * s->R + first) * s->cols * size, s->rows * s->cols * size);
        return;
    }
    for (size_t row = 0; row < s->rows; row++)
        for (size_t j = 0; j < s->r; j++, to += size)
            memcpy(to,
                   data + (((size_t)part * s->rows + row) * s->R * s->experts +
                           (first + j) * s->experts + e) *
                              size,
                   size);
}

static void copy_parts(SafeFile *to, const SafeFile *f, const Stacked *s)
{
    const size_t size = safetensors_dtype_size(s->t->dtype), bytes = s->rows * s->cols * size;
    char *data = xmalloc(s->t->end - s->t->begin), *part = xmalloc(bytes);
    safetensors_read(f, data, s->t, 0, s->t->end - s->t->begin);
    if (s->kind->is_b)
        check_blocks(f, s, data, size);
    for (size_t e = 0; e < s->experts; e++)
        for (int p = 0; p < s->kind->count; p++) {
            char *name = name_of(s, e, p);
            gather(part, s, data, size, e, p);
            if (!safetensors_write(to, safetensors_find(to, name), 0, part, bytes))
                die("%s", to->problem);
            free(name);
        }
    free(data);
    free(part);
}

/* Removes the stacked tensors from f. */
static void keep_others(SafeFile *f)
{
    int count = 0;
    for (int i = 0; i < f->count; i++)
        if (stack_of(&f->tensor[i]))
            free(f->tensor[i].name);
        else
            f->tensor[count++] = f->tensor[i];
    f->count = count;
    safetensors_renamed(f);
}

SafeFile *stacked_adapters(SafeFile *f, int r, bool fused)
{
    Stacked *all = xcalloc((size_t)f->count + 1, sizeof *all);
    int count = 0;
    for (int i = 0; i < f->count; i++) {
        const Stack *k = stack_of(&f->tensor[i]);
        if (k)
            all[count++] = describe(f, &f->tensor[i], k, r, fused);
    }
    SafeFile *to = count > 0 ? safetensors_new(f->path) : NULL;
    for (int i = 0; i < count; i++)
        for (size_t e = 0; e < all[i].experts; e++)
            for (int p = 0; p < all[i].kind->count; p++) {
                char *name = name_of(&all[i], e, p);
                safetensors_add(to, name, all[i].t->dtype, 2,
                                (size_t[]){ all[i].rows, all[i].cols });
                free(name);
            }
    if (to) {
        safetensors_lay_out(to);
        to->fd = memfd_create("adapters", MFD_CLOEXEC);
        if (to->fd < 0 || ftruncate(to->fd, (off_t)(to->data + to->bytes)) != 0)
            die("%s: no memory for the adapters of single experts", f->path);
        for (int i = 0; i < count; i++)
            copy_parts(to, f, &all[i]);
        keep_others(f);
    }
    free(all);
    return to;
}
