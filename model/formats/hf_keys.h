/* The keys of a Hugging Face config.json and how each is handled. */
#pragma once
#include "model/shape/architecture.h"

/* VALUE, TOKEN, ROTATION, BLOCKS: all values are supported. ONLY, REFUSED: they change the model,
 * and only one value is supported. WRITTEN, LITERAL, IGNORED: they do not change the model, and any
 * value is accepted. transformers, too, ignores keys that have no row in this table. A warning
 * names them. */
typedef enum {
    HF_VALUE, /* a number or a truth value in the ModelConfig */
    /* as HF_VALUE, for a token id. List: the first id. An id that is not in the vocabulary: -1 */
    HF_TOKEN,
    HF_ROTATION, /* read by read_rope */
    HF_BLOCKS,   /* read by read_windows */
    HF_ROUTER,   /* read by read_router */
    HF_ONLY,     /* the value must be `what`; any other value is refused */
    HF_REFUSED,  /* as HF_ONLY, but the key is not written */
    HF_WRITTEN,  /* a number of the ModelConfig; written, not read */
    HF_LITERAL,  /* the text `what` is written; the key is not read */
    HF_IGNORED,  /* neither read nor written */
    HF_KIND_MASK = 15,
    HF_LISTED = 16,  /* flag: only for classes that list the key */
    HF_UNLISTED = 32 /* flag: only classes that do not list the key have it */
} HfKind;

typedef struct {
    const char *key;
    int kind; /* HfKind, perhaps with a flag */
    /* a key of config_keys, or JSON. HF_ONLY and HF_REFUSED: a value or a list of values; a list in
     * the file is accepted if each of its elements is accepted */
    const char *what;
    double otherwise; /* default of all classes; NAN: the file must give a value */
    const char *why;  /* HF_REFUSED and HF_ONLY: what to do; NULL: no advice */
} HfKey;

extern const HfKey hf_keys[]; /* in the order of writing; ends with key NULL */

/* A key of rope_scaling and rope_parameters. */
typedef struct {
    HfKey key;
    unsigned types; /* bit 1 << RopeType for each type that has the key */
} HfRopeKey;
/* ends with key NULL */
extern const HfRopeKey hf_rope_keys[];

/* Whether the row's flags HF_LISTED and HF_UNLISTED allow this class. */
bool hf_key_is_of(const HfKey *k, const Architecture *a);

/* The row of a key in the config.json of this class; NULL: there is none. */
const HfKey *hf_key(const Architecture *a, const char *key);
/* The row of a key of this RopeType; NULL: there is none. */
const HfKey *hf_rope_key(const char *key, RopeType type);
