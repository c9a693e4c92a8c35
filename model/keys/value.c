/* Values of the table's types: YAML text is checked and stored in the C object of its row. Numbers
 * follow YAML 1.1, as in OLMo's files: 739_328, 1e-5; 5e12 can be an integer. */
#include "model/keys/value.h"

#include "kernels/runtime/error.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- scalars from text ----------------------------------------------------------------------- */

/* maximum length of a number in bytes, with sign, point and exponent */
enum { MAX_DIGITS = 128 };

static bool parse_double(double *out, const char *text)
{
    char digits[MAX_DIGITS], *end;
    size_t n = 0;
    /* excludes "inf" and "nan" */
    if (!text || !(isdigit((unsigned char)*text) || strchr("+-.", *text)))
        return false;
    for (const char *c = text; *c && n < sizeof digits; c++)
        if (*c != '_')
            digits[n++] = *c;
    if (n == 0 || n == sizeof digits)
        return false;
    digits[n] = '\0';
    *out = strtod(digits, &end);
    return !*end && isfinite(*out);
}

/* Integers beyond 2^53 keep all digits if they are written without a point or exponent. */
static bool parse_integer(uint64_t *out, bool *negative, const char *text)
{
    char digits[MAX_DIGITS], *end;
    size_t n = 0;
    double x;
    if (!parse_double(&x, text) || x != floor(x) || fabs(x) >= 1.8e19)
        return false;
    *negative = x < 0;
    for (const char *c = text + (*text == '-' || *text == '+'); *c; c++)
        if (*c != '_')
            digits[n++] = *c;
    digits[n] = '\0';
    *out = strtoull(digits, &end, 10);
    if (*end)
        *out = (uint64_t)fabs(x);
    return true;
}

/* Reads a truth value in the spellings of YAML 1.1. */
int value_truth(const char *text)
{
    static const char *const words[] = { "false", "true", "no", "yes", "off", "on" };
    for (int i = 0; text && i < 6; i++)
        if (strcasecmp(text, words[i]) == 0)
            return i % 2;
    return -1;
}

/* Reads a duration: "100", "2e9T" or "1ep". */
static bool parse_duration(Duration *out, const char *text)
{
    char number[64];
    double x;
    *out = (Duration){ 0 };
    if (!text || strlen(text) >= sizeof number)
        return false;
    strcpy(number, text);
    size_t n = strlen(number);
    if (n > 2 && strcmp(number + n - 2, "ep") == 0) {
        number[n - 2] = '\0';
        return parse_double(&out->epochs, number) && out->epochs > 0;
    }
    bool tokens = n > 1 && number[n - 1] == 'T';
    if (tokens)
        number[n - 1] = '\0';
    if (!parse_double(&x, number) || x != floor(x) || x < 1 || x > LONGS)
        return false;
    *(tokens ? &out->tokens : &out->steps) = (long)x;
    return true;
}

/* Numbers and truth values are compared by value: 0 equals 0.0, No equals false. */
static bool same_word(const char *word, const char *text)
{
    double a, b;
    return strcasecmp(word, text) == 0 ||
           (parse_double(&a, word) && parse_double(&b, text) && a == b) ||
           (value_truth(word) >= 0 && value_truth(word) == value_truth(text));
}

bool value_is_listed(const char *choices, const char *text)
{
    for (const char *c = choices; c && *c;) {
        char word[64];
        size_t n = strcspn(c, "|");
        snprintf(word, sizeof word, "%.*s", (int)n, c);
        if (same_word(word, text ? text : "null"))
            return true;
        c += n + (c[n] == '|');
    }
    return false;
}

/* Returns NULL if the text is none of the words. */
static const Word *find_word(const Word *words, const char *text)
{
    for (const Word *w = words; w->word; w++)
        if (same_word(w->word, text ? text : "null"))
            return w;
    return NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

static void range_text(char *out, size_t size, const char *what, const ConfigKey *k)
{
    if (k->min == TINY)
        snprintf(out, size, "%s above 0, at most %.10g", what, k->max);
    else if (k->max < LONGS)
        snprintf(out, size, "%s from %g to %.10g", what, k->min, k->max);
    else
        snprintf(out, size, "%s >= %g", what, k->min);
}

static void words_text(char *out, size_t size, const Word *words)
{
    int n = 0;
    for (const Word *w = words; w->word && n < (int)size; w++)
        n += snprintf(out + n, size - (size_t)n, "%s%s", w == words ? "" : "|", w->word);
}

bool value_is_list(int type)
{
    return type == PATHS || type == PATTERNS || type == NAMES;
}

void value_expected(char *out, size_t size, const ConfigKey *k)
{
    switch (k->type & TYPE_MASK) {
    case INT:
    case LONG:
    case U64: range_text(out, size, "an integer", k); break;
    case DOUBLE:
    case FLOAT: range_text(out, size, "a number", k); break;
    case BOOL: snprintf(out, size, "true or false"); break;
    case CHOICE: words_text(out, size, k->words); break;
    case FIXED:
    case FORMAT: snprintf(out, size, "%s", k->choices); break;
    case STRING: snprintf(out, size, "a text"); break;
    case PATHS: snprintf(out, size, "a path or a list [a, b] of paths"); break;
    case PATTERNS: snprintf(out, size, "a pattern or a list [a, b] of patterns"); break;
    case NAMES: snprintf(out, size, "a value or a list [a, b] of values"); break;
    case DATASETS: snprintf(out, size, "`name: [paths]` lines"); break;
    case SECTIONS: snprintf(out, size, "a list of sections"); break;
    case BETAS: snprintf(out, size, "[beta1, beta2], each from 0 to below 1"); break;
    case DURATION:
        snprintf(out, size, "steps (100), tokens (2e9T) or epochs (1ep), above 0");
        break;
    case LAYER_TYPES:
        snprintf(out, size, "a list of %s and %s", k->words[1].word, k->words[0].word);
        break;
    default: snprintf(out, size, "anything"); break;
    }
}

static _Noreturn void wrong(const ConfigKey *k, const YamlNode *n)
{
    char expected[256];
    value_expected(expected, sizeof expected, k);
    const char *found = n->kind == YAML_LIST  ? "a list"
                        : n->kind == YAML_MAP ? "a section"
                                              : "null";
    if (n->text)
        found = n->text;
    if ((k->type & TYPE_MASK) == FIXED)
        die("%s: %s: '%s' is not supported, only %s: %s", yaml_where(n), k->name, found, k->choices,
            k->help);
    if (n->kind == YAML_MAP && strcmp(k->name, "recipe") == 0)
        die("%s: recipe is a name, not a section. To change one format of a recipe, use a key of "
            "format.*, activations.* or fp8.*, for example --format.moment1=e5m2/128",
            yaml_where(n));
    /* `expected` does not mention this maximum */
    const bool without_most = k->max >= LONGS || (k->type & TYPE_MASK) == DURATION;
    die("%s: %s: expected %s%s, found '%s'", yaml_where(n), k->name, expected,
        without_most ? ", at most 9e+18" : "", found);
}

/* ---- lists of paths -------------------------------------------------------------------------- */

static void add_path(char ***paths, int *count, const char *path)
{
    *paths = xrealloc(*paths, (*count + 1) * sizeof **paths);
    (*paths)[(*count)++] = xstrdup(path);
}

/* Reads a path, a list of paths, or a list of lists. */
static void parse_paths(char ***paths, int *count, const ConfigKey *k, const YamlNode *n)
{
    if (n->kind == YAML_LIST)
        for (int i = 0; i < n->num_children; i++)
            parse_paths(paths, count, k, n->child[i]);
    else if (n->kind == YAML_SCALAR && n->text)
        add_path(paths, count, n->text);
    else
        wrong(k, n);
}

static void free_paths(char **paths, int count)
{
    for (int i = 0; i < count; i++)
        free(paths[i]);
    free(paths);
}

static void parse_datasets(NamedPaths **sets, int *count, const ConfigKey *k, const YamlNode *n)
{
    if (n->kind != YAML_MAP)
        wrong(k, n);
    *sets = xcalloc(n->num_children, sizeof **sets);
    for (int i = 0; i < n->num_children; i++) {
        NamedPaths *set = &(*sets)[(*count)++];
        set->name = xstrdup(n->child[i]->key);
        parse_paths(&set->paths, &set->num_paths, k, n->child[i]);
    }
}

static void parse_betas(double *betas, const ConfigKey *k, const YamlNode *n)
{
    if (n->kind != YAML_LIST || n->num_children != 2)
        wrong(k, n);
    for (int i = 0; i < 2; i++)
        if (!parse_double(&betas[i], n->child[i]->text) || betas[i] < 0 || betas[i] >= 1)
            wrong(k, n->child[i]);
}

static void parse_layer_types(LayerTypes *types, const ConfigKey *k, const YamlNode *n)
{
    if (n->kind != YAML_LIST || n->num_children > MAX_LAYERS)
        wrong(k, n);
    for (int i = 0; i < n->num_children; i++) {
        const Word *word = find_word(k->words, n->child[i]->text);
        if (!word)
            wrong(k, n->child[i]);
        types->marked[types->count++] = word->value;
    }
}

/* ---- one value ------------------------------------------------------------------------------- */

static void parse_number(void *field, const ConfigKey *k, const YamlNode *n)
{
    uint64_t integer = 0;
    bool negative = false, nothing = n->kind == YAML_SCALAR && !n->text;
    double x = k->none;
    int type = k->type & TYPE_MASK;
    bool whole = type != DOUBLE && type != FLOAT;
    if (nothing && isnan(k->none) && k->default_text && strcmp(k->default_text, "null") == 0)
        return;
    if (nothing ? isnan(k->none)
                : n->kind != YAML_SCALAR || !parse_double(&x, n->text) || x < k->min || x > k->max)
        wrong(k, n);
    if (whole && !nothing && !parse_integer(&integer, &negative, n->text))
        wrong(k, n);
    switch (type) {
    case INT: *(int *)field = (int)x; break;
    case LONG:
        *(long *)field = nothing ? (long)x : negative ? -(long)integer : (long)integer;
        break;
    case U64: *(uint64_t *)field = integer; break;
    case FLOAT: *(float *)field = (float)x; break;
    default: *(double *)field = x; break;
    }
}

static void parse_word(void *field, const ConfigKey *k, const YamlNode *n)
{
    const char *text = n->text;
    const Word *word;
    int truth;
    switch (k->type & TYPE_MASK) {
    case BOOL:
        if ((truth = value_truth(text)) < 0)
            wrong(k, n);
        *(bool *)field = truth;
        break;
    case CHOICE:
        if (!(word = find_word(k->words, text)))
            wrong(k, n);
        *(int *)field = word->value;
        break;
    case STRING:
        free(*(char **)field);
        *(char **)field = xstrdup(text);
        break;
    case FORMAT:
        if (!format_parse(field, text))
            wrong(k, n);
        break;
    case DURATION:
        if (!parse_duration(field, text))
            wrong(k, n);
        break;
    }
}

void value_parse(void *holder, const ConfigKey *k, const YamlNode *n)
{
    char *field = (char *)holder + k->offset;
    int type = k->type & TYPE_MASK;
    bool nothing = n->kind == YAML_SCALAR && !n->text;
    if (type == FIXED) {
        if (n->kind != YAML_SCALAR || !value_is_listed(k->choices, n->text))
            wrong(k, n);
    } else if (type <= FLOAT) {
        parse_number(field, k, n);
    } else if (nothing) {
        if (!k->default_text)
            wrong(k, n);
        value_free(holder, k);
        value_default(holder, k);
    } else if (value_is_list(type)) {
        value_free(holder, k);
        parse_paths((char ***)field, (int *)(field + sizeof(char **)), k, n);
    } else if (type == DATASETS) {
        value_free(holder, k);
        parse_datasets((NamedPaths **)field, (int *)(field + sizeof(NamedPaths *)), k, n);
    } else if (type == LAYER_TYPES) {
        value_free(holder, k);
        parse_layer_types((LayerTypes *)field, k, n);
    } else if (type == BETAS) {
        parse_betas((double *)field, k, n);
    } else {
        if (n->kind != YAML_SCALAR)
            wrong(k, n);
        parse_word(field, k, n);
    }
}

void value_parse_text(void *holder, const ConfigKey *k, const char *text, const char *file)
{
    YamlNode *n = yaml_new(YAML_SCALAR, NULL, text, file, 0);
    value_parse(holder, k, n);
    yaml_free(n);
}

void value_default(void *holder, const ConfigKey *k)
{
    int type = k->type & TYPE_MASK;
    if (type == BETAS) {
        double *betas = (double *)((char *)holder + k->offset);
        if (sscanf(k->default_text, "[%lf, %lf]", &betas[0], &betas[1]) != 2)
            die("model/keys/config_keys.c: the default of %s is not a list of two", k->name);
    } else if (type == CHOICE && k->default_text && strcmp(k->default_text, "null") == 0) {
        *(int *)((char *)holder + k->offset) = (int)k->none;
    } else if (type != FIXED && k->default_text && strcmp(k->default_text, "[]") != 0) {
        bool null = strcmp(k->default_text, "null") == 0;
        if (null && type > FLOAT)
            return; /* zeroed memory means null already */
        value_parse_text(holder, k, null ? NULL : k->default_text, "model/keys/config_keys.c");
    }
}

void value_free(void *holder, const ConfigKey *k)
{
    char *field = (char *)holder + k->offset;
    int type = k->type & TYPE_MASK;
    if (type == STRING) {
        free(*(char **)field);
        *(char **)field = NULL;
    } else if (type == LAYER_TYPES) {
        *(LayerTypes *)field = (LayerTypes){ 0 };
    } else if (value_is_list(type)) {
        int *count = (int *)(field + sizeof(char **));
        free_paths(*(char ***)field, *count);
        *(char ***)field = NULL;
        *count = 0;
    } else if (type == DATASETS) {
        NamedPaths *sets = *(NamedPaths **)field;
        int *count = (int *)(field + sizeof(NamedPaths *));
        for (int i = 0; i < *count; i++) {
            free(sets[i].name);
            free_paths(sets[i].paths, sets[i].num_paths);
        }
        free(sets);
        *(NamedPaths **)field = NULL;
        *count = 0;
    }
}

double value_number(const void *holder, const ConfigKey *k)
{
    const char *field = (const char *)holder + k->offset;
    const int type = k->type & TYPE_MASK;
    return type == INT      ? *(const int *)field
           : type == LONG   ? *(const long *)field
           : type == FLOAT  ? *(const float *)field
           : type == DOUBLE ? *(const double *)field
                            : NAN;
}
