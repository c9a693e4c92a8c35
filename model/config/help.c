/* Texts made from the table of keys: usage, --help, and the table in configs/README.md. */
#include "model/config/help.h"

#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/version.h"
#include "model/config/export_options.h"
#include "model/config/names.h"
#include "model/config/suggest.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value.h"

void help_usage(FILE *f)
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

void help_version(FILE *f)
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
    const ConfigKey *const tables[] = { config_keys, export_options_keys };
    char near[512] = "";
    names_refuse_foreign("--help", name);
    int count = 0;
    const char *best = suggest_key(tables, 2, name);
    for (int i = 0; i < 2; i++)
        for (const ConfigKey *k = tables[i]; k->name; k++)
            if ((best && strcmp(k->name, best) == 0) || (strcasestr(k->name, name) && count < 8))
                snprintf(near + strlen(near), sizeof near - strlen(near), "%s%s",
                         count++ ? ", " : "; did you mean ", k->name);
    if (best && count == 0)
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

void help_print(FILE *f, const char *name)
{
    if (!name) {
        print_all(f);
        return;
    }
    if (strcmp(name, "export") == 0) {
        for (const ConfigKey *k = export_options_keys; k->name; k++)
            print_key(f, k);
        return;
    }
    const char *own = name;
    bool found = print_keys(f, "", config_keys, own);
    if (!found && !key_find(own)) {
        own = names_current(name);
        found = print_keys(f, "", config_keys, own);
    }
    const ConfigKey *k = found ? NULL : key_find(own);
    if (k)
        print_key(f, k);
    if (!print_keys(f, "with --export:\n", export_options_keys, name) && !found && !k)
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

void help_markdown(FILE *f)
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
