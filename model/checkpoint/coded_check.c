/* The reader derives the size of groups from the number of scales; other programs read it from the
 * settings. The two sizes must agree. */
#include "model/checkpoint/coded_check.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/coded_source.h"

/* Number of groups of `tile` elements in a row or column of `all` elements; tile 0: one group. */
static size_t tiles(size_t all, json_int_t tile)
{
    return tile == 0 ? 1 : (all + (size_t)tile - 1) / (size_t)tile;
}

/* Whether the shape of the scales agrees with the settings. For packed codes, the size of a group
 * must also divide the length of a row, because coded_source.c computes it from the number of
 * scales. */
static bool fits(const CodedShape *m, const Coding *c)
{
    const SafeTensor *t = m->scale.tensor;
    const size_t down = tiles(m->rows, c->high), across = tiles(m->cols, c->wide);
    const size_t first = m->by_inputs ? across : down, second = m->by_inputs ? down : across;
    if (m->bits > 0 && c->bits > 0 && m->bits != (size_t)c->bits)
        return false;
    if (!c->has_scales)
        return true;
    if (m->bits > 0 && !m->by_inputs && c->wide > 0 && m->cols % (size_t)c->wide != 0)
        return false;
    return t->dims == 2   ? t->shape[0] == first && t->shape[1] == second
           : t->dims == 0 ? down * across == 1
                          : t->dims == 1 && t->shape[0] == down * across;
}

/* Returns a text such as "4 bits and a scale for each 1 x 48 weights, or 8 bits and a scale for
 * each 1 x 64 weights". */
static char *say(const CodedShape *m, const Coding *said, int count)
{
    char *text = xstrdup("");
    for (int i = 0; i < count; i++) {
        const Coding *c = &said[i];
        text = xasprintf("%s%s", text, i ? ", or " : "");
        if (c->bits > 0)
            text =
                xasprintf("%s%lld bits%s", text, (long long)c->bits, c->has_scales ? " and " : "");
        if (c->has_scales)
            text =
                xasprintf("%sa scale for each %zu x %zu weights", text,
                          c->high ? (size_t)c->high : m->rows, c->wide ? (size_t)c->wide : m->cols);
    }
    return text;
}

static _Noreturn void die_of_coding(const CodedShape *m, const char *name, const Coding *said,
                                    int count)
{
    char *bits = m->bits > 0 ? xasprintf(" in %zu bits", m->bits) : "";
    die("%s: tensor %s is %s, for %s of %zu x %zu%s. By the quantization_config of its folder this "
        "matrix has %s%s. Correct the "
        "config, or copy the folder again",
        m->scale.file->path, m->scale.tensor->name, safetensors_shape(m->scale.tensor), name,
        m->rows, m->cols, bits, say(m, said, count),
        m->bits > 0 && !m->by_inputs ? ", and the size of a group must divide the length of a row"
                                     : "");
}

/* Checks that each group of GPTQ has group_size inputs. With in_order these must be consecutive:
 * some programs do not read g_idx. */
static void check_order(const CodedShape *m, const Coding *c)
{
    const SafeTensor *t = m->order.tensor;
    const size_t groups = tiles(m->cols, c->wide), wide = c->wide ? (size_t)c->wide : m->cols;
    if (!t || !c->has_scales || strcmp(t->dtype, "I32") != 0 ||
        t->end - t->begin != m->cols * sizeof(uint32_t))
        return; /* the reader refuses such a matrix */
    uint32_t *group = xmalloc(t->end - t->begin);
    size_t *found = xcalloc(groups, sizeof *found);
    safetensors_read(m->order.file, group, t, 0, t->end - t->begin);
    for (size_t i = 0; i < m->cols; i++) {
        if (c->in_order && group[i] != i / wide)
            die("%s: tensor %s: input %zu is in group %u; expected %zu, as desc_act is false and "
                "group_size is %zu. Correct "
                "config.json, or copy the folder again",
                m->order.file->path, t->name, i, group[i], i / wide, wide);
        found[group[i] < groups ? group[i] : 0]++;
    }
    for (size_t k = 0; k < groups; k++) {
        const size_t expected = k + 1 < groups ? wide : m->cols - k * wide;
        if (found[k] != expected)
            die("%s: tensor %s: group %zu has %zu inputs; expected %zu, as group_size is %zu. "
                "Correct the config, or copy the "
                "folder again",
                m->order.file->path, t->name, k, found[k], expected, wide);
    }
    free(group);
    free(found);
}

void coded_check(SafeFile *const *file, int count, const char *name, const Coding *said,
                 int count_said)
{
    CodedShape m;
    int i = 0;
    if (count_said <= 0 || !coded_source_shape(&m, file, count, name))
        return;
    while (i < count_said && !fits(&m, &said[i]))
        i++;
    if (i == count_said)
        die_of_coding(&m, name, said, count_said);
    if (m.by_inputs)
        check_order(&m, &said[i]);
}
