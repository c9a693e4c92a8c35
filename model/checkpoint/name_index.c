#include "model/checkpoint/name_index.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

struct IndexedName {
    char *name;
    int at;
};

void name_index_add(NameIndex *x, const char *name, int at)
{
    if ((x->count & (x->count - 1)) == 0)
        x->name = xrealloc(x->name, (x->count ? 2 * (size_t)x->count : 1) * sizeof *x->name);
    x->name[x->count++] = (struct IndexedName){ xstrdup(name), at };
}

static int by_name(const void *a, const void *b)
{
    const struct IndexedName *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

void name_index_sort(NameIndex *x)
{
    if (x->count)
        qsort(x->name, (size_t)x->count, sizeof *x->name, by_name);
}

int name_index_find(const NameIndex *x, const char *name)
{
    int first = 0;
    for (int end = x->count; first < end;) {
        const int middle = first + (end - first) / 2;
        if (strcmp(x->name[middle].name, name) < 0)
            first = middle + 1;
        else
            end = middle;
    }
    return first < x->count && strcmp(x->name[first].name, name) == 0 ? x->name[first].at : -1;
}

void name_index_free(NameIndex *x)
{
    for (int i = 0; i < x->count; i++)
        free(x->name[i].name);
    free(x->name);
    *x = (NameIndex){ 0 };
}
