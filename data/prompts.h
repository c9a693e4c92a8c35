/* Prompts for a model, as tokens. */
#pragma once
#include <stddef.h>

typedef struct {
    int     count;
    size_t *start;             /* [count + 1]: prompt i is token[start[i]] .. token[start[i + 1] - 1] */
    int    *token;
} Prompts;

/* Reads a file with one prompt per line: a JSON object with "tokens", a list of ids (other keys are ignored), or only that list;
 * empty lines are ignored. Dies on any other line, an id that is not in [0, vocab), a prompt without tokens or with more than
 * `most`, or a file without prompts. */
void prompts_read(Prompts *p, const char *path, int vocab, int most);
void prompts_free(Prompts *p);

/* Tokens of prompt i, and of the longest. */
int  prompts_length (const Prompts *p, int i);
int  prompts_longest(const Prompts *p);
