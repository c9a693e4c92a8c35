/* Copies the tensors of the vision tower from file to file. */
#include "model/checkpoint/tower.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/hash.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/crc32c.h"

static const char file_name[] = "model-vision_tower.safetensors";

static SafeFile **opened;
static int num_opened;

bool tower_owns(const char *name)
{
    static const char prefix[] = "vision_tower.";
    return strncmp(name, prefix, sizeof prefix - 1) == 0;
}

static bool has_tower(const SafeFile *f)
{
    int t = 0;
    while (t < f->count && !tower_owns(f->tensor[t].name))
        t++;
    return t < f->count;
}

static SafeFile *reopen(const SafeFile *f)
{
    SafeFile *reopened = safetensors_open(f->path);
    for (int t = 0; t < f->count && t < reopened->count; t++) {
        reopened->tensor[t].has_sum = f->tensor[t].has_sum;
        reopened->tensor[t].sum = f->tensor[t].sum;
    }
    return reopened;
}

void tower_read(const WeightFiles *s)
{
    for (int i = 0; i < num_opened; i++)
        safetensors_close(opened[i]);
    num_opened = 0;
    opened = xrealloc(opened, (size_t)(s->count + 1) * sizeof *opened);
    for (int i = 0; i < s->count; i++)
        if (has_tower(s->file[i]))
            opened[num_opened++] = reopen(s->file[i]);
}

/* Returns `name` without the prefix `first`, if it has this prefix. */
static const char *without(const char *name, const char *first)
{
    const size_t n = strlen(first);
    return strncmp(name, first, n) == 0 ? name + n : name;
}

static uint64_t hash_of(const SafeFile *f, const SafeTensor *t)
{
    enum { VALUES = 256, WIDEST = 4 };
    const size_t size = safetensors_dtype_size(t->dtype), all = (t->end - t->begin) / size,
                 n = all < VALUES ? all : VALUES;
    const size_t offset[] = { 0, (all - n) / 2, all - n };
    const char *name = without(without(t->name, "vision_tower."), "vision_model.");
    char raw[VALUES * WIDEST];
    float values[VALUES];
    uint64_t hash = hash_bytes(HASH_OF_NOTHING, name, strlen(name) + 1);
    for (int i = 0; i < 3; i++) {
        safetensors_read(f, raw, t, offset[i] * size, n * size);
        convert_decode(values, t->dtype, raw, n);
        hash = hash_bytes(hash, values, n * sizeof *values);
    }
    return hash;
}

uint64_t tower_fingerprint(const WeightFiles *s)
{
    uint64_t sum = 0;
    for (int i = 0; i < s->count; i++)
        for (int k = 0; k < s->file[i]->count; k++) {
            const SafeTensor *t = &s->file[i]->tensor[k];
            if (tower_owns(t->name) && convert_knows(t->dtype))
                sum += hash_of(s->file[i], t);
        }
    return sum;
}

bool tower_exists(void)
{
    return num_opened > 0;
}

/* Copies a tensor. Returns its checksum. */
static uint32_t copy(SafeFile *to, const SafeFile *from, const SafeTensor *t)
{
    const SafeTensor *at = safetensors_find(to, t->name);
    const size_t bytes = t->end - t->begin;
    char *data = xmalloc(safetensors_chunk);
    uint32_t sum = 0;
    for (size_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < safetensors_chunk ? bytes - i : safetensors_chunk;
        safetensors_read(from, data, t, i, n);
        sum = crc32c(sum, data, n);
        if (!safetensors_write(to, at, i, data, n))
            die("%s", to->problem);
    }
    free(data);
    return sum;
}

static void describe(SafeFile *to)
{
    for (int i = 0; i < num_opened; i++)
        for (int k = 0; k < opened[i]->count; k++) {
            const SafeTensor *t = &opened[i]->tensor[k];
            if (tower_owns(t->name))
                safetensors_add(to, t->name, t->dtype, t->dims, t->shape);
        }
    safetensors_lay_out(to);
    safetensors_create(to);
}

size_t tower_write(const char *folder, json_t *map, json_t *files, json_t *sums)
{
    if (!tower_exists())
        return 0;
    char *path = xasprintf("%s/%s", folder, file_name);
    SafeFile *to = safetensors_new(path);
    describe(to);
    for (int i = 0; i < num_opened; i++)
        for (int k = 0; k < opened[i]->count; k++) {
            const SafeTensor *t = &opened[i]->tensor[k];
            if (!tower_owns(t->name))
                continue;
            const uint32_t sum = copy(to, opened[i], t);
            if (t->has_sum && t->sum != sum)
                die("%s: tensor %s has the checksum %08" PRIx32 ", expected %08" PRIx32
                    ": it is damaged",
                    opened[i]->path, t->name, sum, t->sum);
            if (sums)
                json_object_set_new(sums, t->name, json_sprintf("%08" PRIx32, sum));
            if (map)
                json_object_set_new(map, t->name, json_string(file_name));
        }
    if (!safetensors_sync(to))
        die("%s", to->problem);
    const size_t bytes = to->bytes;
    if (files)
        json_object_set_new(files, file_name, json_integer((json_int_t)(to->data + bytes)));
    safetensors_close(to);
    free(path);
    return bytes;
}
