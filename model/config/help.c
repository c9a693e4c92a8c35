/* Texts made from the table of keys: usage, --help, completion, and the table in
 * configs/README.md. */
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

/* Headings of --help, each printed above the key that it names. */
static const struct {
    const char *first, *text;
} sections[] = {
    { "run_name", "The run, and its mode if it does not train" },
    { "max_new_tokens", "With --generate" },
    { "ranks", "With --dry_run" },
    { "device_memory", "Memory" },
    { "recipe", "Storage formats and FP8" },
    { "trainable", "Frozen weights and adapters" },
    { "model.architecture", "Model" },
    { "data.paths", "Data" },
    { "global_train_batch_size", "Batch and duration" },
    { "optimizer.name", "Optimizer" },
    { "scheduler.name", "LR schedule" },
    { "average.last", "Training step" },
    { "preference.loss", "Preference pairs" },
    { "distill.loss", "Distillation" },
    { "policy.loss", "Policy gradients" },
    { "save_folder", "Checkpoints" },
    { "eval_interval", "Evaluation" },
    { "fsdp.sharding_strategy", "Parallelism" },
    { "offload.activations", "CPU offload" },
    { "profile", "Log" },
};
enum { NUM_SECTIONS = sizeof sections / sizeof sections[0] };

static void print_heading(FILE *f, const char *key)
{
    for (int i = 0; i < NUM_SECTIONS; i++)
        if (strcmp(sections[i].first, key) == 0)
            fprintf(f, "\n%s:\n", sections[i].text);
}

static void print_all(FILE *f)
{
    fputs("usage: [mpirun -n RANKS] ./train [CONFIG.yaml] [--key=value ...]\n\n"
          "  CONFIG.yaml                                  train the model that the file describes\n"
          "  --load_path=FOLDER --data.paths=FILES        fine-tune a model without a file\n"
          "  CONFIG.yaml --dry_run                        plan memory and time\n"
          "  CONFIG.yaml --load_path=FOLDER --eval_only   evaluate a checkpoint\n"
          "  --load_path=FOLDER --generate=PROMPTS        continue prompts\n"
          "  CONFIG.yaml --load_path=MODEL --score=FOLDER write log-probabilities of labels\n"
          "  runs/x/config.yaml --extend=runs/x           train longer, or decay\n"
          "  --export=CHECKPOINT [...] FOLDER             write a checkpoint for other programs\n"
          "  --average=A,B,C [...] FOLDER                 write the mean of several models\n"
          "  --help=KEY, --help=SECTION, --help=export    explain a key, a section, exports\n"
          "  --completion                                 print the completion for bash\n"
          "  --version                                    print the version and the back end\n\n"
          "--key=value replaces a setting of the file, as in --max_duration=100, "
          "--data.paths=[a.npy,b.npy],\n"
          "--save_overwrite. Keys have OLMo's names.\n",
          f);
    for (const ConfigKey *k = config_keys; k->name; k++) {
        print_heading(f, k->name);
        if ((k->type & TYPE_MASK) < FIXED)
            print_key(f, k);
    }
    fputs("\nAccepted with one value only:\n", f);
    for (const ConfigKey *k = config_keys; k->name; k++)
        if ((k->type & TYPE_MASK) == FIXED)
            fprintf(f, "  %s: %s (%s)\n", k->name, k->choices, k->help);
    fputs("\nWith --export or --average, which take no CONFIG.yaml:\n", f);
    for (const ConfigKey *k = export_options_keys; k->name; k++)
        print_key(f, k);
}

/* Suggests the most similar key or export option, or all keys that contain `name`, for example
 * `warmup`. */
static _Noreturn void unknown_key(const char *name)
{
    const ConfigKey *const tables[] = { config_keys, export_options_keys };
    char near[512] = "";
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

/* Prints the keys called `name`, or of the section `name`, below the heading. Returns whether there
 * are any. */
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

/* Explains an alias (an earlier name, or another program's name) or a key that was removed. */
static bool print_other(FILE *f, const char *name)
{
    const char *own = names_current(name), *now = names_replacement(name);
    if (own != name) {
        fprintf(f, "%s is read as:\n", name);
        if (!print_keys(f, "", config_keys, own))
            print_key(f, key_find(own));
    } else if (now)
        fprintf(f, "%s was removed; what replaces it: %s\n", name, now);
    return own != name || now;
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
    const bool found = print_keys(f, "", config_keys, name);
    const ConfigKey *k = found ? NULL : key_find(name);
    if (k)
        print_key(f, k);
    if (!print_keys(f, "with --export:\n", export_options_keys, name) && !found && !k &&
        !print_other(f, name))
        unknown_key(name);
}

/* Escapes |, which ends a cell of a markdown table. */
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

/* ---- bash ------------------------------------------------------------------------------------ */

/* Prints the names of all keys, each after `dashes`. */
static void print_names(FILE *f, const char *dashes)
{
    const ConfigKey *const tables[] = { config_keys, export_options_keys };
    for (int i = 0; i < 2; i++)
        for (const ConfigKey *k = tables[i]; k->name; k++)
            if (!key_element_prefix(k->name) && (k->type & TYPE_MASK) != FIXED)
                fprintf(f, "%s%s ", dashes, k->name);
}

/* Prints the possible words of a key as a case of bash. */
static void print_words(FILE *f, const ConfigKey *k)
{
    const int type = k->type & TYPE_MASK;
    if (key_element_prefix(k->name) || (type != BOOL && type != CHOICE))
        return;
    fprintf(f, "    --%s) words=\"%s", k->name, type == BOOL ? "true false" : "");
    for (const Word *w = k->words; type == CHOICE && w->word; w++)
        fprintf(f, "%s ", w->word);
    fputs("\" ;;\n", f);
}

void help_completion(FILE *f)
{
    fputs(
        "# completion of ./train in bash: source <(./train --completion)\n"
        "_coat_train()\n{\n"
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} key= words=\n"
        "    [ \"$word\" = = ] && key=$before word=\n"
        "    [ \"$before\" = = ] && key=${COMP_WORDS[COMP_CWORD-2]}\n"
        "    case $key in\n    --help) words=\"",
        f);
    print_names(f, "");
    fputs("export\" ;;\n", f);
    for (const ConfigKey *k = config_keys; k->name; k++)
        print_words(f, k);
    for (const ConfigKey *k = export_options_keys; k->name; k++)
        print_words(f, k);
    fputs("    '') [[ $word != -* ]] || { compopt -o nospace; words=\"--help --version ", f);
    print_names(f, "--");
    fputs("\"; } ;;\n    esac\n"
          "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\n"
          "complete -o default -F _coat_train train\n",
          f);
}
