/* Inputs made from other inputs, for tests/fuzz.c: bits and bytes, ranges, lines, numbers and words are changed, and pieces of
 * another input put in. Everything is a function of the generator's seed. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct { uint64_t seed, drawn; } Draws;

uint64_t draw(Draws *d, uint64_t below);            /* 0 .. below - 1; below > 0 */

typedef struct { char *data; size_t size; } Input;  /* malloc'ed */

Input input_copy(const void *data, size_t size);
Input input_read(const char *path);                 /* dies if it cannot be read */
void  input_write(const Input *in, const char *path);
void  input_free(Input *in);

/* Puts `size` bytes in the place of in's [at, at + without). */
void  input_replace(Input *in, size_t at, size_t without, const void *data, size_t size);

/* A number or a text that programs have stumbled over: limits of types, infinities, marks of YAML and JSON, no UTF-8. */
const char *odd_value(Draws *d);

/* One to four changes. `other`: where pieces come from; `words`: NULL-terminated, put in as they are. */
void  input_mutate(Input *in, Draws *d, const Input *other, const char *const *words);
