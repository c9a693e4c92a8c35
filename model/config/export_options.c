#include "model/config/export_options.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

#define OTHER(name, fallback, field, help)      { name, STRING, fallback, NAN, 0, 0, NULL, offsetof(ExportOptions, field), help }
#define NUMBER(name, type, fallback, none, min, max, field, help) \
    { name, type, fallback, none, min, max, NULL, offsetof(ExportOptions, field), help }
#define WORD(name, fallback, field, help, ...) \
    { name, CHOICE, fallback, NOT_GIVEN, 0, 0, NULL, offsetof(ExportOptions, field), help, \
      (const Word[]){ __VA_ARGS__, { NULL, 0 } } }

const ConfigKey export_keys[] = {
    OTHER("export", NULL, source,
          "a checkpoint, the save_folder of a run, whose latest one is taken, or a folder that save_pretrained wrote"),
    OTHER("lora.base_path", "null", base_path,
          "the folder of the model that adapters stand next to and are merged into; default: where they say"),
    WORD ("dtype", "bf16", dtype,
          "what weights are stored as. fp8, int8, int4 and nf4: the matrices of the blocks as codes and scales, all else in bf16. "
          "int4 without --calibration rounds them, with the scales that give the least error of the weights",
          { "bf16", EXPORT_BF16 }, { "f16", EXPORT_F16 }, { "f32", EXPORT_F32 }, { "fp8", EXPORT_FP8 }, { "int8", EXPORT_INT8 },
          { "int4", EXPORT_INT4 }, { "nf4", EXPORT_NF4 }),
    WORD ("layout", "null", layout,
          "whose names and tensors codes and scales have; default: bitsandbytes for nf4, else compressed-tensors. fp8: DeepSeek's "
          "folder, for dtype fp8; bitsandbytes: LLM.int8(), for dtype int8",
          { "compressed-tensors", AS_COMPRESSED_TENSORS }, { "fp8", AS_FP8 }, { "bitsandbytes", AS_BITSANDBYTES }),
    WORD ("block", "null", block, "dtype fp8: a scale for each 128 x 128 elements; default: for each row", { "128", 128 }),
    WORD ("group", "null", group, "dtype int4: elements of a row that share a scale; default: 128",
          { "32", 32 }, { "64", 64 }, { "128", 128 }),
    WORD ("scales", "computed", scales,
          "dtype fp8: trained takes the operands that the run multiplies with, bit for bit: one scale for q, k and v, one for gate "
          "and up",
          { "computed", SCALES_COMPUTED }, { "trained", SCALES_TRAINED }),
    NUMBER("calibration", PATHS, "[]", NAN, 0, 0, calibration,
           "dtype int4: files of tokens, as data.paths; codes are those that change the layers' outputs on them least (GPTQ)"),
    WORD ("data.memmap_dtype", "null", token_bytes, "of those files; default: as the run that is exported had it, else uint16",
          { "uint16", UINT16 }, { "uint32", UINT32 }),
    NUMBER("calibration_sequences", INT, "128", NAN, 1, 1e6, sequences,
           "sequences that are calibrated with; a sixteenth more are held out"),
    NUMBER("calibration_length", INT, "null", 0, 2, 1e6, length, "their tokens; default: as many as the model takes, up to 2048"),
    NUMBER("damping", DOUBLE, "0.01", NAN, 1e-9, 1, damping,
           "what is added to the diagonal of a layer's Hessian, of its mean; ten times as much where that is not enough"),
    NUMBER("order", BOOL, "true", NAN, 0, 0, ordered,
           "columns are taken by the size of their inputs, the largest first; it does not show in the folder"),
    { .name = NULL }
};

static const char usage[] = "expected ./train --export=CHECKPOINT [--dtype=TYPE] FOLDER; ./train --help=export lists all options";

bool export_is_asked(int argc, char **argv)
{
    bool asked = false;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--help", 6) == 0 || strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--version") == 0)
            return false;
        asked |= strcmp(argv[i], "--export") == 0 || strncmp(argv[i], "--export=", 9) == 0;
    }
    return asked;
}

/* The row of --key=value or --key; NULL: there is none. */
static const ConfigKey *key_of(const char *argument)
{
    const size_t length = strcspn(argument, "=");
    for (const ConfigKey *k = export_keys; k->name; k++)
        if (strncmp(argument, "--", 2) == 0 && strlen(k->name) == length - 2 && strncmp(k->name, argument + 2, length - 2) == 0)
            return k;
    return NULL;
}

static_assert(offsetof(ExportOptions, num_calibration) == offsetof(ExportOptions, calibration) + sizeof(char **), "PATHS");

/* What says how to calibrate goes with files, and these with what is calibrated. */
static void check_calibration(const ExportOptions *o, const YamlNode *root)
{
    static const char *const how[] = { "data.memmap_dtype", "calibration_sequences", "calibration_length", "damping", "order" };
    if (yaml_find(root, "calibration") && o->num_calibration == 0)
        die("--calibration names no file of tokens; expected --calibration='[FILE, ...]'");
    if (o->num_calibration > 0 && o->dtype != EXPORT_INT4)
        die("--calibration is for --dtype=int4: the codes of %s follow from the weights only", export_word("dtype", (int)o->dtype));
    for (size_t i = 0; i < sizeof how / sizeof how[0]; i++)
        if (yaml_find(root, how[i]) && o->num_calibration == 0)
            die("--%s says how to calibrate, and there is nothing to do it with; expected --calibration='[FILE, ...]', too",
                how[i]);
}

static void read_argument(ExportOptions *o, YamlNode *root, const char *argument)
{
    const ConfigKey *k = key_of(argument);
    if (!k)
        die("--export: '%s' means nothing here; %s", argument, usage);
    if (yaml_find(root, k->name))
        die("--export: '%s' is one too many; %s", argument, usage);
    const char *value = argument + strcspn(argument, "=");
    if ((k->type & TYPE_MASK) == STRING && (!*value || !value[1]))
        die("'%s' names no folder; %s", argument, usage);
    yaml_override(root, argument);
    YamlNode *n = yaml_find(root, k->name);
    yaml_resolve(root, n, config_default);
    value_parse(o, k, n);
    if ((k->type & TYPE_MASK) == STRING && !*(char **)((char *)o + k->place))
        die("'%s' names no folder; %s", argument, usage);
}

void export_options_read(ExportOptions *o, int argc, char **argv)
{
    YamlNode *root = yaml_new(YAML_MAP, NULL, NULL, "the command line", 0);
    *o = (ExportOptions){ 0 };
    for (const ConfigKey *k = export_keys; k->name; k++)
        value_default(o, k);
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (text_ends_with(a, ".yaml") || text_ends_with(a, ".yml"))
            die("--export takes no configuration such as %s: the checkpoint says all; %s", a, usage);
        if (*a == '-' || !*a)
            read_argument(o, root, a);
        else if (o->target)
            die("--export: '%s' is one too many; %s", a, usage);
        else
            o->target = xstrdup(a);
    }
    if (!o->target)
        die("--export: the folder to write is missing; %s", usage);
    check_calibration(o, root);
    for (size_t n = strlen(o->target); n > 1 && o->target[n - 1] == '/'; n--)
        o->target[n - 1] = '\0';
    yaml_free(root);
}

void export_options_free(ExportOptions *o)
{
    free(o->source);
    free(o->target);
    free(o->base_path);
    for (int i = 0; i < o->num_calibration; i++)
        free(o->calibration[i]);
    free(o->calibration);
}

const char *export_word(const char *key, int value)
{
    for (const ConfigKey *k = export_keys; k->name; k++)
        for (const Word *w = k->words; strcmp(k->name, key) == 0 && w && w->word; w++)
            if (w->value == value)
                return w->word;
    CHECK(false, "--%s has no value %d", key, value);
    return NULL;
}
