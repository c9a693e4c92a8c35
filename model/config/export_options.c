#include "model/config/export_options.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/keys/value.h"

#define OTHER(name, default_text, field, help) \
    { name, STRING, default_text, NAN, 0, 0, NULL, offsetof(ExportOptions, field), help }
#define NUMBER(name, type, default_text, none, min, max, field, help) \
    { name, type, default_text, none, min, max, NULL, offsetof(ExportOptions, field), help }
#define WORD(name, default_text, field, help, ...) \
    { \
        name, CHOICE, default_text, NOT_GIVEN, 0, 0, NULL, offsetof(ExportOptions, field), help, \
            (const Word[]) \
        { \
            __VA_ARGS__, { NULL, 0 } \
        } \
    }

const ConfigKey export_options_keys[] = {
    OTHER("export", NULL, source,
          "checkpoint to export, or save_folder of a run (its latest checkpoint), or a folder "
          "written by save_pretrained"),
    OTHER("average", NULL, average,
          "instead of --export: A,B,C, at least two folders as for --export. The result is the "
          "mean of their "
          "weights, computed in f64. "
          "A,B,C:0.5,0.3,0.2 gives each folder a weight, divided by the sum of the weights; "
          "default: equal weights. "
          "The tokenizer of A is copied"),
    OTHER("lora.base_path", "null", base_path,
          "folder of the base model into which adapters are merged; default: the folder that the "
          "adapters "
          "name"),
    WORD("dtype", "bf16", dtype,
         "format of the weights. fp8, int8, int4 and nf4: codes and scales for the matrices of the "
         "blocks, bf16 for all else. "
         "int4 without --calibration rounds weights, with the scales that give the least error",
         { "bf16", EXPORT_BF16 }, { "f16", EXPORT_F16 }, { "f32", EXPORT_F32 },
         { "fp8", EXPORT_FP8 }, { "int8", EXPORT_INT8 }, { "int4", EXPORT_INT4 },
         { "nf4", EXPORT_NF4 }),
    WORD("layout", "null", layout,
         "naming and layout of codes and scales; default: bitsandbytes for nf4, else "
         "compressed-tensors. fp8: DeepSeek's layout, "
         "for dtype fp8; bitsandbytes: LLM.int8(), for dtype int8",
         { "compressed-tensors", AS_COMPRESSED_TENSORS }, { "fp8", AS_FP8 },
         { "bitsandbytes", AS_BITSANDBYTES }),
    WORD("block", "null", block,
         "dtype fp8: one scale per 128 x 128 elements; default: one per row", { "128", 128 }),
    WORD("group", "null", group, "dtype int4: elements of a row that share a scale; default: 128",
         { "32", 32 }, { "64", 64 }, { "128", 128 }),
    WORD("scales", "computed", scales,
         "dtype fp8: trained exports the run's GEMM operands bit for bit, with one scale for q, k "
         "and v and one for gate and up",
         { "computed", SCALES_COMPUTED }, { "trained", SCALES_TRAINED }),
    NUMBER("calibration", PATHS, "[]", NAN, 0, 0, calibration,
           "dtype int4: files of tokens, as data.paths; GPTQ chooses the codes that change the "
           "layers' outputs for these tokens least"),
    WORD("data.memmap_dtype", "null", token_bytes,
         "token type of --calibration; default: as in the exported run, else uint16",
         { "uint16", UINT16 }, { "uint32", UINT32 }),
    NUMBER("calibration_sequences", INT, "128", NAN, 1, 1e6, sequences,
           "sequences used for calibration; 1/16 more are held out"),
    NUMBER("calibration_length", INT, "null", 0, 2, 1e6, length,
           "tokens per sequence of --calibration; default: the model's length, up to 2048"),
    NUMBER("damping", DOUBLE, "0.01", NAN, 1e-9, 1, damping,
           "fraction of the Hessian's mean diagonal that is added to the diagonal; ten times as "
           "much if that is not enough"),
    NUMBER("order", BOOL, "true", NAN, 0, 0, ordered,
           "quantize columns in the order of the size of their inputs, largest first; the exported "
           "layout is the same"),
    { .name = NULL }
};

static const char usage[] = "expected ./train --export=CHECKPOINT [--dtype=TYPE] FOLDER, or "
                            "--average=A,B,C in place of --export; "
                            "./train --help=export lists all options";

/* Whether the argument is --average=A,B,C. A run has a section `average`, so --average={last: 5,
 * every: 200} and --average=null are settings of a run. */
static bool names_folders(const char *argument)
{
    static const char option[] = "--average=";
    const size_t n = strlen(option);
    return strncmp(argument, option, n) == 0 && argument[n] != '{' &&
           strcmp(argument + n, "null") != 0;
}

bool export_options_asked(int argc, char **argv)
{
    bool asked = false;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--help", 6) == 0 || strcmp(argv[i], "-h") == 0 ||
            strcmp(argv[i], "--version") == 0)
            return false;
        const size_t length = strcspn(argv[i], "=");
        asked |= (length == 8 && strncmp(argv[i], "--export", 8) == 0) || names_folders(argv[i]);
    }
    return asked;
}

/* The table row of --key=value or --key; NULL: there is none. */
static const ConfigKey *key_of(const char *argument)
{
    const size_t length = strcspn(argument, "=");
    for (const ConfigKey *k = export_options_keys; k->name; k++)
        if (strncmp(argument, "--", 2) == 0 && strlen(k->name) == length - 2 &&
            strncmp(k->name, argument + 2, length - 2) == 0)
            return k;
    return NULL;
}

static_assert(offsetof(ExportOptions, num_calibration) ==
                  offsetof(ExportOptions, calibration) + sizeof(char **),
              "PATHS");

/* Options of calibration need --calibration, and --calibration needs dtype int4. */
static void check_calibration(const ExportOptions *o, const YamlNode *root)
{
    static const char *const how[] = { "data.memmap_dtype", "calibration_sequences",
                                       "calibration_length", "damping", "order" };
    if (yaml_find(root, "calibration") && o->num_calibration == 0)
        die("--calibration names no file of tokens; expected --calibration='[FILE, ...]'");
    if (o->num_calibration > 0 && o->dtype != EXPORT_INT4)
        die("--calibration is for --dtype=int4: the codes of %s depend only on the weights",
            export_options_word("dtype", (int)o->dtype));
    for (size_t i = 0; i < sizeof how / sizeof how[0]; i++)
        if (yaml_find(root, how[i]) && o->num_calibration == 0)
            die("--%s is an option of calibration; expected --calibration='[FILE, ...]', too",
                how[i]);
}

/* Takes the text up to the next comma off the list. The caller owns it. */
static char *next_of(const char **list)
{
    const size_t length = strcspn(*list, ",");
    char *one = strndup(*list, length);
    *list += length + ((*list)[length] == ',');
    return one;
}

/* Parses A,B,C:1,2,3. */
static void read_average(ExportOptions *o)
{
    const char *colon = strrchr(o->average, ':'), *weights = colon ? colon + 1 : "";
    const bool weighted = colon && strspn(weights, "0123456789+-.eE,") == strlen(weights);
    char *list = strndup(o->average, weighted ? (size_t)(colon - o->average) : strlen(o->average));
    double sum = 0;
    for (const char *rest = list; *rest; o->num_sources++) {
        o->sources = xrealloc(o->sources, (size_t)(o->num_sources + 1) * sizeof *o->sources);
        o->weights = xrealloc(o->weights, (size_t)(o->num_sources + 1) * sizeof *o->weights);
        char *end, *source = next_of(&rest), *weight = weighted ? next_of(&weights) : xstrdup("1");
        const double w = strtod(weight, &end);
        if (!*source)
            die("--average=%s: the name of folder %d is empty; %s", o->average, o->num_sources + 1,
                usage);
        if (!*weight || *end || !isfinite(w) || !(w > 0))
            die("--average=%s: expected one weight > 0 for each folder, as in A,B,C:0.5,0.3,0.2; "
                "found '%s' for %s",
                o->average, weight, source);
        o->sources[o->num_sources] = source;
        sum += o->weights[o->num_sources] = w;
        free(weight);
    }
    if (*weights && weighted)
        die("--average=%s: there are more weights than the %d folders", o->average, o->num_sources);
    if (o->num_sources < 2)
        die("--average=%s: expected at least two folders, separated by commas; --export copies one",
            o->average);
    if (o->scales == SCALES_TRAINED)
        die("--scales=trained exports the FP8 operands of a run, but the mean of several models "
            "has none; leave --scales out");
    for (int i = 0; i < o->num_sources; i++)
        o->weights[i] /= sum;
    free(list);
}

static void read_argument(ExportOptions *o, YamlNode *root, const char *argument)
{
    const ConfigKey *k = key_of(argument);
    if (!k)
        die("--export: '%s' is not an option of an export; %s", argument, usage);
    if (yaml_find(root, k->name))
        die("--export: '%s' is given twice; %s", argument, usage);
    const char *value = argument + strcspn(argument, "=");
    if ((k->type & TYPE_MASK) == STRING && (!*value || !value[1]))
        die("'%s' names no folder; %s", argument, usage);
    yaml_override(root, argument);
    YamlNode *n = yaml_find(root, k->name);
    yaml_expand_home(n);
    value_parse(o, k, n);
    if ((k->type & TYPE_MASK) == STRING && !*(char **)((char *)o + k->offset))
        die("'%s' names no folder; %s", argument, usage);
}

void export_options_read(ExportOptions *o, int argc, char **argv)
{
    YamlNode *root = yaml_new(YAML_MAP, NULL, NULL, "the command line", 0);
    *o = (ExportOptions){ 0 };
    for (const ConfigKey *k = export_options_keys; k->name; k++)
        value_default(o, k);
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (text_ends_with(a, ".yaml") || text_ends_with(a, ".yml"))
            die("--export takes no configuration file such as %s: an export uses the checkpoint's "
                "configuration; %s",
                a, usage);
        if (*a == '-' || !*a)
            read_argument(o, root, a);
        else if (o->target)
            die("--export: unexpected argument '%s'; %s", a, usage);
        else
            o->target = xstrdup(a);
    }
    if (!o->target)
        die("--export: the folder to write is missing; %s", usage);
    if (o->source && o->average)
        die("--export=%s and --average=%s exclude each other; %s", o->source, o->average, usage);
    if (o->average)
        read_average(o);
    check_calibration(o, root);
    for (size_t n = strlen(o->target); n > 1 && o->target[n - 1] == '/'; n--)
        o->target[n - 1] = '\0';
    yaml_free(root);
}

void export_options_free(ExportOptions *o)
{
    free(o->source);
    free(o->average);
    for (int i = 0; i < o->num_sources; i++)
        free(o->sources[i]);
    free(o->sources);
    free(o->weights);
    free(o->target);
    free(o->base_path);
    for (int i = 0; i < o->num_calibration; i++)
        free(o->calibration[i]);
    free(o->calibration);
}

const char *export_options_word(const char *key, int value)
{
    for (const ConfigKey *k = export_options_keys; k->name; k++)
        for (const Word *w = k->words; strcmp(k->name, key) == 0 && w && w->word; w++)
            if (w->value == value)
                return w->word;
    CHECK(false, "--%s has no value %d", key, value);
    return NULL;
}
