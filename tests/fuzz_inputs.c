/* Makes inputs of tests/fuzz.c: a changed valid input, and arguments of the command line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/keys/config_keys.h"
#include "tests/fuzz_kinds.h"

/* Returns a key; most of them have a value. */
static const ConfigKey *draw_key(Draws *d)
{
    int keys = 0;
    while (config_keys[keys].name)
        keys++;
    const ConfigKey *k = &config_keys[draw(d, (uint64_t)keys)];
    for (int again = 0; again < 3 && (k->type & TYPE_MASK) >= FIXED; again++)
        k = &config_keys[draw(d, (uint64_t)keys)];
    return k;
}

/* Makes --key=value. The key is a key of the table or a section, sometimes misspelled. The value is
 * odd, or the default. */
static void add_argument(Input *in, Draws *d)
{
    static const char *const forms[] = { "a%s",
                                         "%sb",
                                         "a%sb",
                                         "\"%s\"",
                                         "['%s', b]",
                                         "{a: %s}",
                                         "[{label: a, data: {paths: [\"%s\"]}}]",
                                         "[{label: \"%s\", data: {datasets: {\"b%s\": b}}}]" };
    enum { FORMS = sizeof forms / sizeof forms[0] };
    const ConfigKey *k = draw_key(d);
    const char *odd = odd_value(d), *form = draw(d, 3) ? "%s" : forms[draw(d, FORMS)];
    const bool evaluators = form == forms[FORMS - 1] || form == forms[FORMS - 2];
    char name[128];
    snprintf(name, sizeof name, "%s", evaluators ? "evaluators" : k->name);
    if (draw(d, 16) == 0)
        name[draw(d, strlen(name) + 1)] = '\0';
    char value[1024], *argument;
    snprintf(value, sizeof value, form, draw(d, 4) || !k->default_text ? odd : k->default_text,
             odd_value(d));
    argument = xasprintf(draw(d, 24) ? "\n\x1f--%s=%s" : "\n\x1f--%s.%s=1", name, value);
    input_replace(in, in->size, 0, argument, strlen(argument));
    free(argument);
}

Input make_input(const Kind *k, uint64_t number)
{
    Draws d = { number, 0 };
    const Input *from = &k->seed[draw(&d, (uint64_t)k->num_seeds)],
                *other = &k->seed[draw(&d, (uint64_t)k->num_seeds)];
    Input in = input_copy(from->data, from->size);
    const bool arguments = strcmp(k->file, "input") == 0 && draw(&d, 4);
    if (!arguments || draw(&d, 4) == 0)
        input_mutate(&in, &d, other, k->words);
    for (uint64_t n = arguments ? 1 + draw(&d, 3) : 0; n > 0; n--)
        add_argument(&in, &d);
    return in;
}
