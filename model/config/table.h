/* The configuration's keys as data: one row per key. Parsing, range checks, --help, the table in
 * configs/README.md and the resolved configuration all come from these rows, so they cannot
 * disagree. */
#pragma once
#include "model/shape/config.h"
#include "model/config/yaml.h"

#include <stdio.h>

/* A word and its value; several words may have the same value. */
typedef struct {
    const char *word;
    int value;
} Word;

/* The type of a value: that of the C object in which it is stored. */
typedef enum {
    INT,
    LONG,
    U64,
    DOUBLE,
    FLOAT,
    BOOL,
    CHOICE,      /* int or an enum: the value of one of the `words` */
    STRING,      /* char * */
    PATHS,       /* char **paths, int count: a list or a single path */
    PATTERNS,    /* the same of patterns, char **patterns, int count */
    NAMES,       /* the same of names, char **names, int count */
    DATASETS,    /* NamedPaths *sets, int count: name: [paths] */
    BETAS,       /* double[2] */
    DURATION,    /* Duration */
    FORMAT,      /* Format */
    LAYER_TYPES, /* LayerTypes: a list */
    SECTIONS,    /* a list of sections, whose keys are the rows name[].key (mix.c) */
    FIXED,       /* nothing: only the `choices` are accepted, `help` says why */
    TYPE_MASK = 31,
    SPENT = 32, /* flag: not in the written configuration, which has the keys that it sets */
    /* flag: null means that another key decides, as the recipe does for its columns */
    FOLLOWS = 64
} Type;

typedef struct {
    const char *name;         /* "optimizer.learning_rate", "evaluators[].label" */
    int type;                 /* Type, perhaps with SPENT or FOLLOWS */
    const char *default_text; /* default as YAML; NULL: the key must be given */
    /* numbers and choices: the value stored for null; NAN: null is an error */
    double none;
    double min, max;     /* numbers: the range, both ends included */
    const char *choices; /* FIXED: "a|b|c"; FORMAT: description of the allowed formats */
    size_t offset;       /* offset of the value in Settings (of name[].key in an element) */
    const char *help;
    const Word *words; /* CHOICE; ends with word == NULL */
} ConfigKey;

#define LONGS 9e18 /* maximum of a LONG, a U64 or a Duration */
#define TINY 1e-30 /* minimum of a number that must be above 0 */

typedef struct {
    char *name, **paths;
    int num_paths;
} NamedPaths;

/* Values of the table's words that are no enum of Config. Fields that are null unless given are
 * int. */
enum { NOT_GIVEN = -1 };
typedef enum { NORM_RMS, NORM_DEFAULT, NORM_LOW_PRECISION, NORM_AMD_COMPATIBLE } LayerNormType;
typedef enum { UINT16 = 2, UINT32 = 4 } TokenType; /* bytes of a token */
typedef enum { UNITS_STEPS, UNITS_TOKENS } SchedulerUnits;
typedef enum {
    FULL_SHARD,
    SHARD_GRAD_OP,
    NO_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2
} ShardingStrategy;
typedef enum { FSDP_PURE, FSDP_MIXED } FsdpPrecision;
typedef enum { EVALUATOR_LM, EVALUATOR_DOWNSTREAM } EvaluatorType;

/* What the rows fill: the Config, which must come first, and values that only help to compute
 * it. */
typedef struct {
    Config c;
    char *recipe;
    long mlp_hidden_size; /* both halves of SwiGLU; 0: from mlp_ratio */
    double mlp_ratio;
    bool multi_query_attention;
    char *architecture; /* of model.architecture */
    bool attention_layer_norm_with_affine;
    LayerNormType layer_norm_type;
    int rope_type; /* RopeType or NOT_GIVEN */
    TokenType memmap_dtype;
    struct {
        ShardingStrategy strategy;
        int replicas;         /* 0: one per host */
        int replicate, shard; /* of parallelism.*; 0: not given */
        int precision;        /* FsdpPrecision or NOT_GIVEN */
        int grad_sync_mode;   /* GradSum or NOT_GIVEN */
    } fsdp;
    SchedulerUnits scheduler_units;
    char **batch_warmup;
    int num_batch_warmup;
    char *extend;                        /* a folder; NULL: none */
    long extended_step, extended_tokens; /* of its checkpoint, Config.load_path */
    bool softmax_auxiliary_loss;
    double auxiliary_loss_multiplier;
    NamedPaths *datasets;
    int num_datasets;
    char **lora_modules;
    int num_lora_modules;
    int lora_base; /* BaseFormat or NOT_GIVEN */
} Settings;

typedef struct {
    char *label;
    EvaluatorType type;
    TokenFiles files; /* itemsize, packing, boundaries may be NOT_GIVEN */
    NamedPaths *datasets;
    int num_datasets;
} Evaluator;

/* Keys of elements of a list: of an Evaluator, and of a DataSource. */
#define EVALUATOR_PREFIX "evaluators[]."
#define SOURCE_PREFIX "data.mix[]."

/* ends with name == NULL; keys of a section are adjacent */
extern const ConfigKey config_keys[];

const ConfigKey *config_key(const char *name); /* the row of that name, or NULL */
/* the key or section with the most similar name, or NULL */
const char *config_suggest(const char *name);
/* name of the recipe's column, without `format.`, or NULL */
const char *config_column(const ConfigKey *k);
/* bytes of its prefix if it is a key of elements, else 0 */
size_t config_element(const char *name);
/* is text (NULL: null) one of the choices? */
bool key_listed(const char *choices, const char *text);
void config_print_usage(FILE *f);   /* ./train */
void config_print_version(FILE *f); /* ./train --version */
/* --help=name: a key or a section; NULL: all. Dies if there is none */
void config_print_help(FILE *f, const char *name);
/* ./train --help=markdown: the table in configs/README.md */
void config_print_markdown(FILE *f);

struct json_t;

/* One value. `holder`: the Settings, Evaluator or DataSource that holds it. */
/* dies naming where, expected, found */
void value_parse(void *holder, const ConfigKey *k, const YamlNode *n);
/* a scalar; NULL: null */
void value_parse_text(void *holder, const ConfigKey *k, const char *text, const char *file);
void value_default(void *holder, const ConfigKey *k);
/* 1: true, 0: false, as YAML 1.1 spells them; -1: neither */
int value_truth(const char *text);
void value_print(FILE *f, const void *holder, const ConfigKey *k,
                 int indent); /* " 3\n": the text after `key:` */
char *value_text(const void *holder,
                 const ConfigKey *k); /* "3": its first line; the caller owns it (text.c) */
void value_free(void *holder, const ConfigKey *k);
/* PATHS, PATTERNS or NAMES */
bool value_is_list(int type);
void value_expected(char *out, size_t size, const ConfigKey *k); /* "an integer from 1 to 8" */
/* of an INT, LONG, FLOAT or DOUBLE, else NAN */
double value_number(const void *holder, const ConfigKey *k);
/* a YAML scalar, quoted where it must be */
void value_print_text(FILE *f, const char *text);
void value_parse_json(void *holder, const ConfigKey *k, const struct json_t *value,
                      const char *path, const char *key);
/* of a file; dies naming
 * path, key, expected,
 * found */
/* a number or a truth value, unchecked */
void value_set(void *holder, const ConfigKey *k, double x);
bool value_is_nothing(const struct json_t *value); /* null, false or empty */
_Noreturn void value_wrong_json(const char *path, const char *key, const char *expected,
                                const struct json_t *found);

/* A configuration being read. */
typedef struct {
    Settings *s;
    YamlNode *root; /* the file with its overrides */
    const char *file;
    int world;
    FILE *notes;      /* settings without effect: become one warning */
    char *notes_text; /* of that stream, after fflush */
    int num_notes;
} Reader;

bool config_given(const Reader *r, const char *name); /* present and not null */
/* its file:line, or the file */
const char *config_where(const Reader *r, const char *name);
void config_note(Reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Dies if a text of key `name`, at or below n, cannot be written unchanged to config.yaml and
 * metrics.jsonl: if it is not UTF-8, or begins with ~/; or if it has OmegaConf's ${...}. */
void config_check_texts(const YamlNode *n, const char *name);
/* Dies at a dot between keys, or a [ before an element, which are only allowed on the command line
 * and in the table. */
void config_check_key(const YamlNode *n);
/* a value or a section */
void config_apply(Reader *r, YamlNode *n, const char *name, void *holder);

/* Other names of keys (names.c). check_names: warns at each name of earlier versions in the tree,
 * which keeps it, unless the file is that of a run, and dies if a key has two. rename: gives all
 * keys the table's names. refuse_foreign: dies if the key is one of OLMo or COAT that only
 * scripts/convert_config.py reads. */
/* the table's name of this key; `name` itself if it is none's other name */
const char *config_name(const char *name);
/* the first other name of the table's key, or NULL */
const char *config_other_name(const char *name);
void config_check_names(const YamlNode *root);
void config_rename(YamlNode *root);
void config_refuse_foreign(const char *where, const char *name);

/* Elements of a list. apply: reads the element's section n. defaults: sets all keys with that
 * prefix; "": of the Settings. */
void config_apply_element(Reader *r, YamlNode *n, const char *prefix, void *holder);
void config_defaults(void *holder, const char *prefix);
void config_free_element(void *holder, const char *prefix);

/* data.mix (mix.c). */
void config_read_mix(Reader *r);
void config_free_mix(Config *c);
void config_print_mix(FILE *f, const Config *c); /* the text after `mix:` */

/* Reads the words of batch_size_warmup into s->c.batch_warmup. Dies, naming `where`, unless they
 * are ascending numbers of steps. */
void config_read_batch_warmup(Settings *s, const char *where);
void config_check_batch_warmup(Reader *r);

/* `extend` (extend.c). find: replaces load_path by the checkpoint. check: dies if it is in the
 * decay of the schedule. */
void config_find_extended(Reader *r);
void config_check_extended(const Reader *r);

/* Whether a key names data that a dry run, eval_only or generate does not read. */
bool config_is_unread(const Config *c, const char *name);
/* Sets the world to the ranks that a dry run plans for. */
void config_choose_ranks(Reader *r);

/* Settings of a run without a file, but with load_path: full fine-tuning of that model. The caller
 * owns it. */
YamlNode *config_without_file(void);

/* The steps after values are read; config_complete_* derive missing values, and all die on
 * combinations that cannot work. */
/* runs/<run_name>, if none is given and one is needed */
void config_choose_save_folder(Config *c);
/* that it is no URL and not empty (load_folder.c, as the next three) */
void config_check_load_path(const Reader *r);
/* generate and eval_only need a load_path */
void config_check_has_model(const Reader *r, const char *where);
/* of a run without a file; `first`: its first argument */
void config_check_command_line(const Reader *r, const char *first);
/* settings that follow from the model of Config.load_folder */
void config_complete_from_folder(Reader *r);
/* of the run that saved this checkpoint; NULL: no checkpoint. The caller owns it */
YamlNode *config_of_run(const char *folder);
char *config_trained_with(const char *folder, const char *key); /* see load_folder.c */
/* that it can be the base of adapters (load_folder.c) */
void config_check_base(const char *where, const char *base_path);

/* Adapters (lora.c). find_base: if Config.load_folder holds adapters, fills lora.base_path and dies
 * if that is no model. complete_lora: fills ModelConfig.lora; model and recipe must be checked
 * already. */
void config_find_base(Reader *r);
void config_choose_adapter_rate(Reader *r); /* of a run without a file */
void config_complete_lora(Reader *r);

/* after model, adapters and optimizer (check_images.c, as the next two) */
void config_check_images(Reader *r);
void config_check_image_data(Reader *r);
void config_check_image_files(const Config *c, const TokenFiles *f, const char *where,
                              const char *prefix, bool questions);
void config_complete_model(Reader *r, bool from_hf);
/* of config.json, too; so the next two */
void config_check_rope(const ModelConfig *m, const char *where);
/* r NULL: errors name path and its keys */
void config_complete_heads(ModelConfig *m, const Reader *r, const char *path);
/* equal windows become equal LayerTypes */
void config_complete_windows(ModelConfig *m, const char *where);
void config_check_optimizer(Reader *r);
void config_complete_recipe(Reader *r); /* the optimizer must be checked already */
void config_check_trainable(Reader *r);
void config_complete_data(Reader *r);
/* that paths of the key are no URLs */
void config_check_local(Reader *r, const char *key, char **paths, int count);
/* data must be checked already */
void config_check_eval_documents(const Config *c, const EvalSet *set);
void config_complete_generation(Reader *r); /* settings of `generate` (dry_run.c) */
void config_complete_run(Reader *r);
void config_complete_ranks(Reader *r);
/* ranks with different sequences, or groups that share some */
int check_ranks_groups(const Reader *r);
const char *check_ranks_group_name(const Reader *r);
void config_read_evaluators(Reader *r);
void config_check_tensor(Reader *r);
/* fills Config.text (text.c, as the next two) */
void config_write_text(Settings *s);
/* s with FOLLOWS keys set to their values for null */
Settings config_followed(const Settings *s);
/* name: value of each column of the run; the caller owns it */
struct json_t *config_columns(const Config *c);
/* that of the key, or NULL; borrowed */
const char *config_column_in(const struct json_t *columns, const ConfigKey *k);
/* its value is; false if that follows from others */
bool config_is_default(const Reader *r, const ConfigKey *k);
/* Config.changes; the caller owns it. Call before write_text */
char *config_changes(const Reader *r, bool from_hf);
