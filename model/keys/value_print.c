/* Prints values of the table's types as YAML text. value_parse (value.c) reads the text of
 * value_print back to the same bits. */
#include "model/keys/value_print.h"

#include "kernels/runtime/error.h"
#include "model/keys/value.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Prints the fewest digits that read back to the same value. */
static void print_double(FILE *f, double x, bool single)
{
    char text[64];
    if (x == floor(x) && fabs(x) < 1e15) {
        fprintf(f, "%.0f", x);
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (single ? strtof(text, NULL) == (float)x : strtod(text, NULL) == x)
            break;
    }
    fputs(text, f);
}

void value_print_text(FILE *f, const char *text)
{
    if (!text) {
        fputs("null", f);
        return;
    }
    if (*text &&
        strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-") ==
            strlen(text) &&
        (isalnum((unsigned char)*text) || *text == '/') && strcasecmp(text, "null") != 0 &&
        value_truth(text) < 0) {
        fputs(text, f);
        return;
    }
    fputc('"', f);
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if ((unsigned char)*c < ' ')
            fprintf(f, "\\x%02x", (unsigned char)*c);
        else
            fputc(*c, f);
    }
    fputc('"', f);
}

static void print_paths(FILE *f, char *const *paths, int count, int indent)
{
    if (count == 0)
        fputs(" []", f);
    for (int i = 0; i < count; i++) {
        fprintf(f, "\n%*s- ", indent, "");
        value_print_text(f, paths[i]);
    }
}

static void print_choice(FILE *f, const Word *words, int value)
{
    while (words->word && words->value != value)
        words++;
    fputs(words->word ? words->word : "null", f);
}

static void print_layer_types(FILE *f, const LayerTypes *types, const Word *words)
{
    if (types->count == 0)
        fputs("null", f);
    for (int l = 0; l < types->count; l++)
        fprintf(f, "%s%s", l ? ", " : "[", words[types->marked[l]].word);
    if (types->count > 0)
        fputc(']', f);
}

static void print_duration(FILE *f, const Duration *d)
{
    if (d->tokens)
        fprintf(f, "%ldT", d->tokens);
    else if (d->epochs > 0) {
        print_double(f, d->epochs, false);
        fputs("ep", f);
    } else if (d->steps)
        fprintf(f, "%ld", d->steps);
    else
        fputs("null", f);
}

void value_print(FILE *f, const void *holder, const ConfigKey *k, int indent)
{
    const char *field = (const char *)holder + k->offset;
    int type = k->type & TYPE_MASK;
    double x = value_number(holder, k);
    if (!value_is_list(type))
        fputc(' ', f);
    if (x == k->none) {
        fputs("null\n", f);
        return;
    }
    switch (type) {
    case INT: fprintf(f, "%d", *(const int *)field); break;
    case LONG: fprintf(f, "%ld", *(const long *)field); break;
    case U64: fprintf(f, "%lu", *(const unsigned long *)field); break;
    case FLOAT: print_double(f, x, true); break;
    case DOUBLE: print_double(f, x, false); break;
    case BOOL: fputs(*(const bool *)field ? "true" : "false", f); break;
    case CHOICE: print_choice(f, k->words, *(const int *)field); break;
    case STRING: value_print_text(f, *(char *const *)field); break;
    case PATHS:
    case PATTERNS:
    case NAMES:
        print_paths(f, *(char ***)field, *(const int *)(field + sizeof(char **)), indent);
        break;
    case FORMAT: fputs(format_name(*(const Format *)field), f); break;
    case DURATION: print_duration(f, (const Duration *)field); break;
    case LAYER_TYPES: print_layer_types(f, (const LayerTypes *)field, k->words); break;
    case BETAS:
        fputc('[', f);
        print_double(f, ((const double *)field)[0], false);
        fputs(", ", f);
        print_double(f, ((const double *)field)[1], false);
        fputc(']', f);
        break;
    default: die("model/keys/value_print.c: a value of type %d cannot be written", type);
    }
    fputc('\n', f);
}

char *value_printed(const void *holder, const ConfigKey *k)
{
    char *printed;
    FILE *f = xtext(&printed);
    value_print(f, holder, k, 0);
    fclose(f);
    printed[strcspn(printed, "\n")] = '\0';
    char *text = xasprintf("%s", printed + 1);
    free(printed);
    return text;
}
