/* Finds a name in a list by binary search. */
#pragma once

typedef struct {
    struct IndexedName *name; /* [count], sorted */
    int count;
} NameIndex;

/* Adds a copy of a name, which belongs to number `at` of a list. After the last one: sort. */
void name_index_add(NameIndex *x, const char *name, int at);
void name_index_sort(NameIndex *x);

/* The lowest number with that name; -1: none. */
int name_index_find(const NameIndex *x, const char *name);

void name_index_free(NameIndex *x);
