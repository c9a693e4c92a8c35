/* Types of the table of keys: one row per key. Parsing, range checks, --help, the table in
 * configs/README.md and the resolved configuration all come from these rows, so they cannot
 * disagree. */
#pragma once
#include "model/shape/config.h"

/* A word and its value; several words may have the same value. */
typedef struct {
    const char *word;
    int value;
} Word;

/* The type of a value, and of the C object that stores it. */
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
    PATTERNS,    /* as PATHS, with char **patterns, int count */
    NAMES,       /* as PATHS, with char **names, int count */
    DATASETS,    /* NamedPaths *sets, int count: a map of name: [paths] */
    BETAS,       /* double[2] */
    DURATION,    /* Duration */
    FORMAT,      /* Format */
    LAYER_TYPES, /* LayerTypes: a list of two `words`; the second word marks a block */
    SECTIONS,    /* a list of sections, whose keys are the rows name[].key (data_mixture.c) */
    FIXED,       /* no value is stored: only the `choices` are accepted; `help` says why */
    TYPE_MASK = 31,
    /* flag: the key only sets other keys, so the written configuration lacks it */
    SPENT = 32,
    /* flag: if the value is null, another key decides, for example `recipe` for a key of fp8.* */
    FOLLOWS = 64
} Type;

typedef struct {
    const char *name;         /* "optimizer.learning_rate", "evaluators[].label" */
    int type;                 /* Type, perhaps with SPENT or FOLLOWS */
    const char *default_text; /* default as YAML; NULL: the key must be given */
    /* numbers and choices: the value that is stored for null; NAN: null is an error */
    double none;
    double min, max;     /* numbers: the range, both ends included */
    const char *choices; /* FIXED: "a|b|c"; FORMAT: description of the allowed formats */
    size_t offset;       /* offset of the value in Settings (of name[].key in an element) */
    const char *help;
    const Word *words; /* CHOICE, LAYER_TYPES; ends with word == NULL */
} ConfigKey;

#define LONGS 9e18 /* maximum of a LONG, a U64 or a Duration */
#define TINY 1e-30 /* minimum of a number that must be above 0 */

typedef struct {
    char *name, **paths;
    int num_paths;
} NamedPaths;

/* Words in the table whose values have no enum in Config. A field that may be NOT_GIVEN is an
 * int. */
enum { NOT_GIVEN = -1 };
typedef enum { NORM_RMS, NORM_DEFAULT, NORM_LOW_PRECISION, NORM_AMD_COMPATIBLE } LayerNormType;
typedef enum { UINT16 = 2, UINT32 = 4 } TokenType; /* values are bytes of a token */
typedef enum { UNITS_STEPS, UNITS_TOKENS } SchedulerUnits;
typedef enum {
    FULL_SHARD,
    SHARD_GRAD_OP,
    NO_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2
} ShardingStrategy;
typedef enum { FSDP_PURE, FSDP_MIXED } FsdpPrecision;
typedef enum { EVALUATOR_LM, EVALUATOR_DOWNSTREAM, EVALUATOR_PREFERENCE } EvaluatorType;

/* The object that the rows fill: the Config, which must come first, and values that only help to
 * compute the Config. */
typedef struct {
    Config c;
    char *recipe;
    long mlp_hidden_size;  /* counts both halves of SwiGLU; 0: computed from mlp_ratio */
    int intermediate_size; /* 0: not given */
    double mlp_ratio;
    bool multi_query_attention;
    char *architecture; /* model.architecture */
    bool attention_layer_norm_with_affine;
    LayerNormType layer_norm_type;
    int rope_type; /* RopeType or NOT_GIVEN */
    TokenType memmap_dtype;
    struct {
        ShardingStrategy strategy;
        int replicas;         /* 0: one replica per host */
        int replicate, shard; /* parallelism.replicate and .shard; 0: not given */
        int precision;        /* FsdpPrecision or NOT_GIVEN */
        int grad_sync_mode;   /* GradSum or NOT_GIVEN */
        int grad_wire;        /* Wire or NOT_GIVEN */
    } fsdp;
    SchedulerUnits scheduler_units;
    char **batch_warmup;
    int num_batch_warmup;
    char *extend;                        /* a folder to continue; NULL: none */
    long extended_step, extended_tokens; /* step and number of tokens of the checkpoint to extend */
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

/* Rows for the elements of lists: Evaluator and DataSource. */
#define EVALUATOR_PREFIX "evaluators[]."
#define SOURCE_PREFIX "data.mix[]."
