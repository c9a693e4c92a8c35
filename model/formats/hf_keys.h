/* The keys of a Hugging Face config.json and how each is handled. */
#pragma once
#include "model/shape/architecture.h"

/* VALUE, TOKEN, ROTATION, BLOCKS: all values are supported. ONLY, REFUSED: they change the model,
 * and only one value is supported. WRITTEN, LITERAL, IGNORED: they do not change the model, any
 * value is accepted. A key without a row is not read by transformers either; a warning names it. */
typedef enum {
    HF_VALUE, /* a number or a truth value of the ModelConfig */
    /* the same for a token id: the first of a list; -1 if it is not in the vocabulary */
    HF_TOKEN,
    HF_ROTATION, /* read_rope */
    HF_BLOCKS,   /* read_windows */
    HF_ONLY,     /* `what`; any other value is refused */
    HF_REFUSED,  /* as ONLY, but not written */
    HF_WRITTEN,  /* a number of the ModelConfig, not read */
    HF_LITERAL,  /* `what`, not read */
    HF_IGNORED,  /* neither read nor written */
    HF_KIND_MASK = 15,
    HF_LISTED = 16,  /* flag: for classes that list the key */
    HF_UNLISTED = 32 /* flag: for all other classes */
} HfKind;

typedef struct {
    const char *key;
    int kind; /* HfKind, perhaps with a flag */
    /* a key of config_keys, or JSON. ONLY and REFUSED: a value or a list of them; a list in the
     * file is accepted if all its elements are */
    const char *what;
    double otherwise; /* default of all classes; NAN: the file must have a value */
    const char *why;  /* REFUSED and ONLY: what to do, or NULL */
} HfKey;

extern const HfKey hf_keys[]; /* in the order of writing; ends with key NULL */

/* Keys of rope_scaling and rope_parameters; types: bits 1 << RopeType of the types that have them.
 * Ends with key NULL. */
typedef struct {
    HfKey key;
    unsigned types;
} HfRopeKey;
extern const HfRopeKey hf_rope_keys[];

/* Whether the row applies to that class, by its flags. */
bool hf_key_is_of(const HfKey *k, const Architecture *a);

/* The row of a key of that class's config.json, or of that RopeType; NULL: there is none. */
const HfKey *hf_key(const Architecture *a, const char *key);
const HfKey *hf_rope_key(const char *key, RopeType type);
