/* Functions on texts and paths that the C library lacks. */
#pragma once
#include <stdbool.h>
#include <string.h>

static inline bool text_ends_with(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Returns true if text is one of these words, which are separated by |. */
static inline bool text_is_among(const char *text, const char *words)
{
    const size_t n = strlen(text);
    for (const char *word = words; word; word = strchr(word, '|'), word += word != NULL)
        if (strncmp(word, text, n) == 0 && (word[n] == '|' || !word[n]))
            return true;
    return false;
}

/* Returns the last folder and the name of a path: "step10/model.safetensors". */
static inline const char *path_tail(const char *path)
{
    const char *tail = path + strlen(path);
    for (int slashes = 0; tail > path && (slashes += tail[-1] == '/') < 2;)
        tail--;
    return tail;
}
