/* The keys of a Hugging Face config.json: what each is here. */
#pragma once
#include "model/architecture.h"

/* Honoured: VALUE, TOKEN, ROTATION, BLOCKS. They change the model, and only one value is: ONLY, REFUSED. They do not change it, and
 * any is taken: WRITTEN, LITERAL, IGNORED. What is in no row, transformers does not read either: it is named in a warning. */
typedef enum {
    HF_VALUE,           /* a number or a truth value of the ModelConfig                                     */
    HF_TOKEN,           /* the same, a token id: of a list the first; -1 if it is not in the vocabulary     */
    HF_ROTATION,        /* read_rope                                                                        */
    HF_BLOCKS,          /* read_windows                                                                     */
    HF_ONLY,            /* `what`; any other value is refused                                               */
    HF_REFUSED,         /* the same, not written                                                            */
    HF_WRITTEN,         /* a number of the ModelConfig, not read                                            */
    HF_LITERAL,         /* `what`, not read                                                                 */
    HF_IGNORED,         /* neither read nor written                                                         */
    HF_KIND_MASK = 15,
    HF_LISTED = 16,     /* flag: only classes that list the key have it                                     */
    HF_UNLISTED = 32    /* flag: all but those                                                              */
} HfKind;

typedef struct {
    const char *key;
    int         kind;           /* HfKind, perhaps with a flag                                              */
    const char *what;           /* the key of config_keys; JSON, of ONLY and REFUSED a value or a list of them,
                                   where a list in the file is accepted if all its elements are             */
    double      otherwise;      /* if neither file nor class has one; NAN: the file must                    */
    const char *why;            /* REFUSED and ONLY: what to do, or NULL                                    */
} HfKey;

extern const HfKey hf_keys[];               /* in the order in which they are written; ends with key NULL */

/* Keys of rope_scaling and rope_parameters, and the types that have them: bit 1 << RopeType. Ends with key NULL. */
typedef struct { HfKey key; unsigned types; } HfRopeKey;
extern const HfRopeKey hf_rope_keys[];

/* Whether a class has that row: by its flags. */
bool hf_key_is_of(const HfKey *k, const Architecture *a);

/* The row of a key in config.json of that class, or of the rotation of that type; NULL: there is none. */
const HfKey *hf_key(const Architecture *a, const char *key);
const HfKey *hf_rope_key(const char *key, RopeType type);
