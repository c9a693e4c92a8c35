/* Mutations of inputs for tests/fuzz.c: changes of bits and bytes, ranges, lines, numbers and
 * words, and pieces of another input. Each change depends only on the generator's seed. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t seed, drawn;
} Draws;

uint64_t draw(Draws *d, uint64_t below); /* uniform in 0 .. below - 1; below > 0 */

typedef struct {
    char *data;
    size_t size;
} Input; /* malloc'ed */

Input input_copy(const void *data, size_t size);
Input input_read(const char *path); /* dies if it cannot be read */
void input_write(const Input *in, const char *path);
void input_free(Input *in);

/* Replaces in's bytes [at, at + without) by `size` bytes. */
void input_replace(Input *in, size_t at, size_t without, const void *data, size_t size);

/* A number or a text that tends to break programs: limits of types, infinities, syntax of YAML and
 * JSON, invalid UTF-8. */
const char *odd_value(Draws *d);

/* Makes one to four changes. `other`: the input from which pieces are taken. `words`: a
 * NULL-terminated list of words that are inserted unchanged. */
void input_mutate(Input *in, Draws *d, const Input *other, const char *const *words);
