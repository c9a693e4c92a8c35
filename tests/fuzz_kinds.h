/* Kinds of inputs of tests/fuzz.c, each with valid seeds and its reader. */
#pragma once
#include <stdbool.h>

#include "tests/mutate.h"

enum { MAX_SEEDS = 256, BROKEN = 3 };

typedef struct {
    const char *name;      /* kept inputs are tests/fuzz/<name>-<anything> */
    const char *file;      /* the file of an input, in the folder of its kind */
    void (*read)(void);    /* reads that file */
    bool roams;            /* inputs may name other files, which are then read */
    const char *words[24]; /* words that mutations insert into inputs */
    Input seed[MAX_SEEDS];
    int num_seeds;
    char folder[128];
} Kind;

extern Kind kinds[];
extern const int num_kinds;
extern Kind *now; /* kind of the input that this process reads; NULL: it reads none */

/* Makes the folders and seeds of all kinds; returns their parent folder, which kinds_remove
 * deletes. */
const char *kinds_make(void);
void kinds_remove(void);

/* Makes input `number` of this kind. The input depends only on the number, the kind and its
 * seeds. */
Input make_input(const Kind *k, uint64_t number);

/* Ends the process with BROKEN if `holds` is false. */
void demand(bool holds, const char *what);
