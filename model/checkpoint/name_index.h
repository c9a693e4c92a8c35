/* An index of names for binary search. */
#pragma once

typedef struct {
    struct IndexedName *name; /* [count], sorted */
    int count;
} NameIndex;

/* Adds a copy of a name, which belongs to entry `at` of a list. After the last name, call
 * name_index_sort. */
void name_index_add(NameIndex *x, const char *name, int at);
void name_index_sort(NameIndex *x);

/* Returns the lowest entry with this name; -1: none. */
int name_index_find(const NameIndex *x, const char *name);

void name_index_free(NameIndex *x);
