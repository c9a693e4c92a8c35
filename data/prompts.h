/* Prompts: texts as tokens, which a model continues. */
#pragma once
#include <stddef.h>

typedef struct {
    int     count;
    size_t *start;             /* [count + 1]: prompt i is token[start[i]] .. token[start[i + 1] - 1] */
    int    *token;
} Prompts;

/* Reads a file of a prompt a line: a JSON object with "tokens", a list of ids, whose other keys do not count, or that list alone;
 * empty lines do not count. Dies of a line that is anything else, of an id that is not in [0, vocab), of a prompt without tokens or
 * of more than `most`, of a file without prompts. */
void prompts_read(Prompts *p, const char *path, int vocab, int most);
void prompts_free(Prompts *p);

/* Tokens of prompt i, and of the longest. */
int  prompts_length (const Prompts *p, int i);
int  prompts_longest(const Prompts *p);
