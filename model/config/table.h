/* The configuration's keys as data: one row per key. Parsing, range checks, --help, the table in configs/README.md and the
 * resolved configuration all come from these rows, so they cannot disagree. */
#pragma once
#include "model/config.h"
#include "model/config/yaml.h"

#include <stdio.h>

/* The type of a value, that is of the C object it is stored in. */
typedef enum {
    INT, LONG, U64, DOUBLE, FLOAT, BOOL,
    CHOICE,          /* int: which of the |-separated `choices`                                         */
    STRING,          /* char *                                                                          */
    PATHS,           /* char **paths, int count: a list or a single path                                */
    PATTERNS,        /* the same of patterns, char **patterns, int count                                */
    DATASETS,        /* NamedPaths *sets, int count: name: [paths]                                      */
    BETAS,           /* double[2]                                                                       */
    DURATION,        /* Duration                                                                        */
    FORMAT,          /* Format                                                                          */
    LAYER_TYPES,     /* LayerTypes: a list                                                              */
    FIXED,           /* nothing: only the `choices` are accepted, `help` says why                       */
    UNUSED,          /* nothing: any value; named in the one warning unless null or one of `choices`    */
    TYPE_MASK = 31,
    SPENT = 32,      /* flag: its effect is in other keys by the time the configuration is written      */
    FOLLOWS = 64     /* flag: null means that the value follows from another key, as a column from the recipe */
} Type;

typedef struct {
    const char *name;          /* "optimizer.learning_rate"; "wandb.*": the whole section; "evaluators[].label" */
    int         type;          /* Type, perhaps with SPENT or FOLLOWS                                    */
    const char *fallback;      /* default as YAML; NULL: the key must be given                           */
    double      none;          /* numbers and choices: what null is stored as; NAN: null is an error     */
    double      min, max;      /* numbers: the range, both ends included                                 */
    const char *choices;       /* "a|b|c"                                                                */
    size_t      place;         /* of the value in Settings (in Evaluator for evaluators[])               */
    const char *help;
} ConfigKey;

typedef struct { char *name, **paths; int num_paths; } NamedPaths;

/* In the order of the choices of fsdp.sharding_strategy and distributed_strategy. */
enum { FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 };
enum { FSDP, DDP, SINGLE };

/* What the rows fill: the Config, which must come first, and what only helps to compute it. */
typedef struct {
    Config  c;
    char   *recipe;
    int     precision;                     /* amp_bf16, fp32; -1: not given */
    int     activation_checkpointing;      /* whole_layer, true, fine_grained, false; -1: not given */
    long    mlp_hidden_size;               /* both halves of SwiGLU; 0: from mlp_ratio */
    double  mlp_ratio;
    bool    multi_query_attention;
    char   *architecture;                  /* of model.architecture */
    bool    attention_layer_norm_with_affine;
    int     layer_norm_type;               /* rms, default, low_precision, amd_compatible */
    int     rope_type;                     /* default, llama3, yarn; -1: not given */
    int     memmap_dtype;                  /* uint16, uint32 */
    struct {
        int distributed;                   /* FSDP, DDP, SINGLE; -1: not given */
        int strategy;                      /* FULL_SHARD, ... */
        int replicas;                      /* 0: one per host */
        int precision;                     /* pure, mixed; -1: not given */
        int grad_sync_mode;                /* micro_batch, batch; -1: not given */
    } fsdp;
    int     scheduler_units;               /* steps, tokens */
    bool    softmax_auxiliary_loss;
    double  auxiliary_loss_multiplier;
    NamedPaths *datasets; int num_datasets;
    struct {
        int method;                        /* coat_real, fp8linear, none; -1: not given */
        int forward[3], backward[3];       /* E4M3, E5M2; -1: not given. a, w, o */
        int group_size;
    } quantize_model;
    struct {
        int method;                        /* coat_fp8_adamw, none; -1: not given */
        int bit[2], expansion[2];          /* E4M3, E5M2; expansion, expand, true, none, false; -1: not given */
        int group_size;
    } quantize_optimizer;
} Settings;

typedef struct {
    char *label;
    int   type;                            /* lm, downstream */
    int   memmap_dtype;                    /* -1: not given */
    char **paths; int num_paths;
    NamedPaths *datasets; int num_datasets;
} Evaluator;

#define EVALUATOR_PREFIX "evaluators[]."

extern const ConfigKey config_keys[];      /* ends with name == NULL; keys of a section stand together */

const ConfigKey *config_key(const char *name);              /* the row of that name or of its section.*; NULL */
const char *config_default(const char *name);               /* a YamlDefault */
const char *config_suggest(const char *name);               /* the key or section spelled most like it, or NULL */
bool        config_is_evaluator(const char *name);          /* a key of an evaluator: evaluators[].* */
bool        key_listed(const char *choices, const char *text);   /* is text (NULL: null) one of the choices? */
void        config_print_help(FILE *f);                     /* ./train --help */
void        config_print_markdown(FILE *f);                 /* ./train --help=markdown: the table in configs/README.md */

/* One value. `base`: the Settings or Evaluator that holds it. */
void value_parse(void *base, const ConfigKey *k, const YamlNode *n);    /* dies: place, expected, found */
void value_default(void *base, const ConfigKey *k);
void value_print(FILE *f, const void *base, const ConfigKey *k, int indent);   /* " 3\n": what follows `key:` */
void value_free(void *base, const ConfigKey *k);
void value_expected(char *out, size_t size, const ConfigKey *k);        /* "an integer from 1 to 8" */
void value_print_text(FILE *f, const char *text);                       /* a YAML scalar, quoted where it must be */

/* A configuration being read. */
typedef struct {
    Settings   *s;
    YamlNode   *root;                /* the file with its overrides */
    const char *file;
    int         world;
    FILE       *notes;               /* what has no effect here: becomes the one warning */
    char       *notes_text;          /* of that stream, after fflush */
    int         num_notes;
} Reader;

bool        config_given(const Reader *r, const char *name);            /* not absent, not null */
const char *config_where(const Reader *r, const char *name);            /* its place, else the file */
const YamlNode *config_find_path(const YamlNode *n, const char *path);  /* its place at n or below; NULL: not there */
void        config_note (Reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
void        config_apply(Reader *r, YamlNode *n, const char *name, void *base);   /* a value or a section */

/* The steps that follow the reading of the values; each derives what was left open and dies on what cannot work. */
void config_choose_save_folder(Config *c);           /* runs/<run_name>, if none is given */
void config_check_model (Reader *r, bool from_hf);
void config_check_rope  (const ModelConfig *m, const char *place);         /* of config.json, too, as the next */
void config_settle_windows(ModelConfig *m, const char *place);             /* equal windows become equal LayerTypes */
void config_check_optimizer(Reader *r);
void config_check_recipe(Reader *r);             /* with an optimizer that was checked */
void config_check_trainable(Reader *r);
void config_check_data  (Reader *r);
void config_check_run   (Reader *r);
void config_read_evaluators(Reader *r);
void config_write_text(Settings *s);                 /* fills Config.text */
