/* Finds the key that a misspelled name means. */
#include "model/config/suggest.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "model/keys/key.h"

/* Number of insertions, deletions, replacements and swaps of neighbouring letters that make a equal
 * to b. */
static int edit_distance(const char *a, const char *b)
{
    enum { LONGEST = 128 };
    int rows[3][LONGEST + 1] = { { 0 } }; /* row i is in rows[i % 3] */
    int m = (int)strlen(a), n = (int)strlen(b);
    if (m > LONGEST || n > LONGEST)
        return INT_MAX / 2;
    for (int j = 0; j <= n; j++)
        rows[0][j] = j;
    for (int i = 1; i <= m; i++) {
        int *row = rows[i % 3], *above = rows[(i + 2) % 3], *second = rows[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best)
                best = above[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                second[j - 2] + 1 < best)
                best = second[j - 2] + 1;
            row[j] = best;
        }
    }
    return rows[m % 3][n];
}

static const char *last_component(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Whether an abbreviation matches: `lr` matches learning_rate. */
static bool are_initials(const char *letters, const char *words)
{
    const char *end = strchr(words, '_');
    return *letters == *words && (end ? are_initials(letters + 1, end + 1) : !letters[1]);
}

/* The distance between the whole names; or, if only the section is wrong, one plus the distance
 * between the last components. */
static int name_distance(const char *name, const char *candidate)
{
    if (strlen(last_component(name)) > 1 &&
        are_initials(last_component(name), last_component(candidate)))
        return 0;
    int whole = edit_distance(name, candidate),
        last = 1 + edit_distance(last_component(name), last_component(candidate));
    return last <= 1 + (int)strlen(last_component(name)) / 3 && last < whole ? last : whole;
}

/* Searches the table's keys and sections. If one is more similar to `name` than `best`, which has
 * the distance *best_distance, replaces `best`. */
static void suggest(char best[128], int *best_distance, const ConfigKey *keys, const char *name)
{
    const size_t first = key_element_prefix(name);
    for (const ConfigKey *k = keys; k->name; k++) {
        if (strncmp(k->name, name, first) != 0)
            continue;
        for (size_t end = first + strcspn(k->name + first, ".[");;
             end += 1 + strcspn(k->name + end + 1,
                                ".[")) { /* "a", "a.b", "a.b.c": sections, then the key */
            char candidate[128];
            snprintf(candidate, sizeof candidate, "%.*s", (int)end, k->name);
            int distance = name_distance(name, candidate);
            /* candidate is a section of `name` */
            bool around = strncmp(name, candidate, end) == 0 && name[end] == '.';
            if (distance < *best_distance && !around) {
                *best_distance = distance;
                strcpy(best, candidate);
            }
            if (!k->name[end] || k->name[end] == '[')
                break;
        }
    }
}

const char *suggest_key(const ConfigKey *const *tables, int count, const char *name)
{
    static char best[128];
    int distance = 1 + (int)strlen(name) / 3;
    best[0] = '\0';
    for (int i = 0; i < count; i++)
        suggest(best, &distance, tables[i], name);
    return best[0] ? best : NULL;
}
