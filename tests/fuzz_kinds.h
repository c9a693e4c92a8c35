/* What tests/fuzz.c gives to the program: kinds of inputs, each with good ones to begin with and the reader that it goes to. */
#pragma once
#include <stdbool.h>

#include "tests/mutate.h"

enum { MAX_SEEDS = 256, BROKEN = 3 };

typedef struct {
    const char *name;               /* of kept inputs: tests/fuzz/<name>-<anything> */
    const char *file;               /* what an input is written to, in a folder of the kind's own */
    void      (*read)(void);        /* reads it there */
    bool        roams;              /* it may name files elsewhere that are read */
    const char *words[24];          /* put into inputs */
    Input       seed[MAX_SEEDS];
    int         num_seeds;
    char        folder[128];
} Kind;

extern Kind kinds[];
extern const int num_kinds;
extern Kind *now;                   /* of the input that this process reads; NULL: it reads none */

/* Makes the kinds' folders and good inputs; returns the folder that holds them, which kinds_remove deletes. */
const char *kinds_make(void);
void        kinds_remove(void);

/* Input number `number` of that kind: a function of these and of the good ones. */
Input make_input(const Kind *k, uint64_t number);

/* Ends the process with BROKEN unless it holds. */
void demand(bool holds, const char *what);
