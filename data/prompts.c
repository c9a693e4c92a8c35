#include "data/prompts.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

typedef struct {
    const char *path;
    long line;
    const TokenLimits *limits;
} PromptLine;

static const char expected[] = "{\"tokens\": [1, 2, ...]} or [1, 2, ...]";

static void add_token(Prompts *p, const PromptLine *at, size_t i, const json_t *id)
{
    const json_int_t x = json_integer_value(id);
    if (!json_is_integer(id))
        die("%s:%ld: element %zu of the tokens is not an integer; expected %s", at->path, at->line,
            i, expected);
    if (x < 0 || x >= at->limits->vocab)
        die("%s:%ld: token %lld is not in the vocabulary, which has ids from 0 to %d; was another "
            "tokenizer used?",
            at->path, at->line, (long long)x, at->limits->vocab - 1);
    p->token[p->start[p->count] + i] = (int)x;
}

/* list: the prompt's images; NULL: none. */
static void add_images(Prompts *p, const PromptLine *at, const json_t *list)
{
    const size_t first = p->start[p->count];
    size_t images = p->first_image[p->count];
    char *wrong = shown_images_read(&p->image, &images, list);
    if (!wrong)
        wrong = shown_images_wrong(p->token + first, p->start[p->count + 1] - first,
                                   images - p->first_image[p->count], at->limits);
    if (wrong)
        die("%s:%ld: %s", at->path, at->line, wrong);
    p->first_image = xrealloc(p->first_image, sizeof *p->first_image * (size_t)(p->count + 2));
    p->first_image[p->count + 1] = images;
}

static void add_prompt(Prompts *p, const PromptLine *at, const json_t *line)
{
    const json_t *list = json_is_object(line) ? json_object_get(line, "tokens") : line;
    const size_t n = json_array_size(list), first = p->start[p->count];
    if (!json_is_array(list))
        die("%s:%ld: no list of tokens; expected %s", at->path, at->line, expected);
    if (n == 0)
        die("%s:%ld: a prompt without tokens; there is nothing to continue", at->path, at->line);
    if (n > (size_t)at->limits->most)
        die("%s:%ld: a prompt of %zu tokens; expected at most %d: the prompt and one more token "
            "must fit model.max_sequence_length",
            at->path, at->line, n, at->limits->most);
    p->token = xrealloc(p->token, sizeof *p->token * (first + n));
    for (size_t i = 0; i < n; i++)
        add_token(p, at, i, json_array_get(list, i));
    p->start = xrealloc(p->start, sizeof *p->start * (size_t)(p->count + 2));
    p->start[p->count + 1] = first + n;
    add_images(p, at, json_object_get(line, "images"));
    p->count++;
}

void prompts_read(Prompts *p, const char *path, const TokenLimits *limits)
{
    PromptLine at = { path, 0, limits };
    char *text = NULL;
    size_t size = 0;
    ssize_t n;
    check_regular(path);
    FILE *f = fopen(path, "r");
    if (!f)
        die("%s: cannot read the prompts: %s", path, strerror(errno));
    *p = (Prompts){ .start = xcalloc(1, sizeof *p->start),
                    .first_image = xcalloc(1, sizeof *p->first_image) };
    while ((n = getline(&text, &size, f)) > 0) {
        json_error_t error;
        at.line++;
        if (strspn(text, " \t\r\n") == (size_t)n)
            continue;
        json_t *line = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &error);
        if (!line)
            die("%s:%ld: not JSON: %s; expected %s", path, at.line, error.text, expected);
        add_prompt(p, &at, line);
        json_decref(line);
    }
    if (ferror(f))
        die("%s: cannot read the prompts: %s", path, strerror(errno));
    if (p->count == 0)
        die("%s: there are no prompts; expected one prompt per line, as %s", path, expected);
    free(text);
    fclose(f);
}

void prompts_free(Prompts *p)
{
    free(p->start);
    free(p->token);
    free(p->first_image);
    free(p->image);
}

int prompts_length(const Prompts *p, int i)
{
    return (int)(p->start[i + 1] - p->start[i]);
}

int prompts_longest(const Prompts *p)
{
    int longest = 0;
    for (int i = 0; i < p->count; i++)
        longest = prompts_length(p, i) > longest ? prompts_length(p, i) : longest;
    return longest;
}
