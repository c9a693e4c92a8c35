/* Texts made from the table of keys: usage, --help, the table in configs/README.md, and suggestions
 * for misspelled keys. */
#include "model/config/table.h"

#include <limits.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/config/export_options.h"
#include "kernels/runtime/version.h"

const ConfigKey *config_key(const char *name)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (strcmp(k->name, name) == 0)
            return k;
    return NULL;
}

const char *config_column(const ConfigKey *k)
{
    static const char section[] = "format.";
    const size_t first = offsetof(Config, recipe);
    if (config_element(k->name) || k->offset < first || k->offset >= first + sizeof(Recipe))
        return NULL;
    return strncmp(k->name, section, strlen(section)) == 0 ? k->name + strlen(section) : k->name;
}

size_t config_element(const char *name)
{
    const char *brackets = strstr(name, "[].");
    return brackets ? (size_t)(brackets + 3 - name) : 0;
}

/* ---- the nearest key ------------------------------------------------------------------------- */

/* Number of insertions, deletions, replacements and swaps of two neighbours that make a equal to
 * b. */
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

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* `lr` matches learning_rate. */
static bool are_initials(const char *letters, const char *words)
{
    const char *end = strchr(words, '_');
    return *letters == *words && (end ? are_initials(letters + 1, end + 1) : !letters[1]);
}

/* The distance of the whole names, or that of the last parts if only the section is wrong, which
 * costs one more. */
static int name_distance(const char *name, const char *candidate)
{
    if (strlen(last_part(name)) > 1 && are_initials(last_part(name), last_part(candidate)))
        return 0;
    int whole = edit_distance(name, candidate),
        part = 1 + edit_distance(last_part(name), last_part(candidate));
    return part <= 1 + (int)strlen(last_part(name)) / 3 && part < whole ? part : whole;
}

/* Replaces `best`, of distance *best_distance, by the most similar key or section of the table if
 * that is nearer. */
static void suggest(char best[128], int *best_distance, const ConfigKey *keys, const char *name)
{
    const size_t first = config_element(name);
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

static int largest_distance(const char *name)
{
    return 1 + (int)strlen(name) / 3;
}

const char *config_suggest(const char *name)
{
    static char best[128];
    int distance = largest_distance(name);
    best[0] = '\0';
    suggest(best, &distance, config_keys, name);
    return best[0] ? best : NULL;
}

/* ---- help ------------------------------------------------------------------------------------ */

void config_print_usage(FILE *f)
{
    fputs("usage: ./train CONFIG.yaml [--key=value ...]                  on one GPU\n"
          "       mpirun -n RANKS ./train CONFIG.yaml [--key=value ...]  a rank per GPU\n\n"
          "  ./train --load_path=FOLDER --data.paths='[shards/*.npy]'        fine-tune a model "
          "that save_pretrained wrote\n"
          "  ./train configs/OLMo-1B.yaml --data.paths='[shards/*.npy]' --max_duration=1000\n"
          "  ./train configs/OLMo-1B.yaml --dry_run --ranks=8 --device_memory=80    whether it "
          "fits 8 GPUs of 80 GiB\n"
          "  ./train --export=runs/x/latest --dtype=bf16 FOLDER    a checkpoint for transformers, "
          "vLLM, llama.cpp; fp8, int4\n\n"
          "--help lists all keys, --help=data those of a section, --help=data.paths explains one;\n"
          "--version prints the version and the back end.\n",
          f);
}

void config_print_version(FILE *f)
{
    fprintf(f, "coat.c %s, built for %s\n", COAT_VERSION, device_build());
}

static void print_key(FILE *f, const ConfigKey *k)
{
    char expected[256];
    if ((k->type & TYPE_MASK) == FIXED) {
        fprintf(f, "  %s: only %s: %s\n", k->name, k->choices, k->help);
        return;
    }
    value_expected(expected, sizeof expected, k);
    fprintf(f, "  %s: %s", k->name, expected);
    if (!k->default_text)
        fputs(" (required)", f);
    else if (strcmp(k->default_text, "null") != 0 && strcmp(k->default_text, "[]") != 0)
        fprintf(f, " (default %s)", k->default_text);
    fprintf(f, "\n      %s\n", k->help);
}

static void print_all(FILE *f)
{
    fputs("usage: mpirun -n <ranks> ./train config.yaml [--key=value ...]\n"
          "       ./train --export=<checkpoint> [--dtype=bf16|f16|f32|fp8|int8|int4|nf4] [...] "
          "<folder>\n"
          "       ./train --average=<a>,<b>,<c>[:<weights>] [--dtype=...] [...] <folder>\n"
          "       ./train --help | --help=<key or section> | --help=markdown | --version\n\n"
          "Trains a Llama, Mistral, OLMo, Qwen, SmolLM3 or LLaVA model as described by the file; "
          "--key=value changes a\n"
          "setting, as in --max_duration=100, --data.paths=[a.npy,b.npy], --save_overwrite. "
          "--export writes a checkpoint (stepN, or the\n"
          "latest of a save_folder) as a folder for other programs: weights in one type with "
          "adapters merged, config.json\n"
          "and tokenizer, without states of the training; --average writes the mean of several; "
          "--help=export lists the\n"
          "options of both. Keys have OLMo's names:\n\n",
          f);
    for (const ConfigKey *k = config_keys; k->name; k++)
        if ((k->type & TYPE_MASK) < FIXED)
            print_key(f, k);
    fputs("\nAccepted with one value only:\n", f);
    for (const ConfigKey *k = config_keys; k->name; k++)
        if ((k->type & TYPE_MASK) == FIXED)
            fprintf(f, "  %s: %s (%s)\n", k->name, k->choices, k->help);
}

/* Suggests the most similar key or option of an export, or those that contain the word, such as
 * `warmup`. */
static _Noreturn void unknown_key(const char *name)
{
    const ConfigKey *const tables[] = { config_keys, export_keys };
    char near[512] = "", best[128] = "";
    config_refuse_foreign("--help", name);
    int count = 0, distance = largest_distance(name);
    for (int i = 0; i < 2; i++)
        suggest(best, &distance, tables[i], name);
    for (int i = 0; i < 2; i++)
        for (const ConfigKey *k = tables[i]; k->name; k++)
            if (strcmp(k->name, best) == 0 || (strcasestr(k->name, name) && count < 8))
                snprintf(near + strlen(near), sizeof near - strlen(near), "%s%s",
                         count++ ? ", " : "; did you mean ", k->name);
    if (*best && count == 0)
        snprintf(near, sizeof near, "; did you mean %s", best);
    die("--help=%s: there is no such key%s%s", name, near,
        *near ? "?" : "; ./train --help lists all");
}

/* The keys called `name` or in that section, below the heading; returns whether there are any. */
static bool print_keys(FILE *f, const char *heading, const ConfigKey *keys, const char *name)
{
    const size_t length = strlen(name);
    bool found = false;
    /* strchr also finds the final zero */
    for (const ConfigKey *k = keys; k->name; k++)
        if (strncmp(k->name, name, length) == 0 && strchr(".[", k->name[length])) {
            fputs(found ? "" : heading, f);
            print_key(f, k);
            found = true;
        }
    return found;
}

void config_print_help(FILE *f, const char *name)
{
    if (!name) {
        print_all(f);
        return;
    }
    if (strcmp(name, "export") == 0) {
        for (const ConfigKey *k = export_keys; k->name; k++)
            print_key(f, k);
        return;
    }
    const char *own = config_name(name);
    const bool found = print_keys(f, "", config_keys, own);
    const ConfigKey *k = found ? NULL : config_key(own);
    if (k)
        print_key(f, k);
    if (!print_keys(f, "with --export:\n", export_keys, name) && !found && !k)
        unknown_key(own);
}

/* | ends a cell of a markdown table. */
static void print_cell(FILE *f, const char *text)
{
    for (; *text; text++) {
        if (*text == '|')
            fputc('\\', f);
        fputc(*text, f);
    }
}

void config_print_markdown(FILE *f)
{
    fputs("| key | value | default | meaning |\n|---|---|---|---|\n", f);
    for (const ConfigKey *k = config_keys; k->name; k++) {
        char expected[256];
        value_expected(expected, sizeof expected, k);
        fprintf(f, "| `%s` | ", k->name);
        print_cell(f, expected);
        bool fixed = (k->type & TYPE_MASK) == FIXED;
        fprintf(f, "%s | %s | ", fixed ? " only" : "",
                !k->default_text ? "required"
                : fixed          ? ""
                                 : k->default_text);
        print_cell(f, k->help);
        fputs(" |\n", f);
    }
}
