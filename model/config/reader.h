/* A configuration being read. */
#pragma once
#include <stdio.h>

#include "model/keys/types.h"
#include "model/keys/yaml.h"

typedef struct {
    Settings *s;
    YamlNode *root; /* the file with its overrides */
    const char *file;
    int world;
    FILE *notes;      /* settings without effect, which are reported as one warning */
    char *notes_text; /* text of `notes`, valid after fflush */
    int num_notes;
} Reader;

bool reader_given(const Reader *r, const char *name); /* the key is present and not null */
/* file:line of the key, or the file if it is not given */
const char *reader_where(const Reader *r, const char *name);
/* dies if a setting does not work together with `key`, whose value is `value` */
_Noreturn void reader_refuse(const Reader *r, const char *key, const char *value, const char *why);
void reader_note(Reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Whether the run does not read the data that this key names. A dry run reads the configuration of
 * evaluators, but no data; eval_only reads only the data of evaluators; generate reads none. */
bool reader_is_unread(const Config *c, const char *name);

/* Checks the texts of key `name`, at and below n. Dies if a text cannot be written unchanged to
 * config.yaml and metrics.jsonl, because it is not UTF-8 or begins with ~/, or if it contains
 * OmegaConf's ${...}. */
void reader_check_texts(const YamlNode *n, const char *name);
/* Dies at a dot between keys, or a [ before an element: both are only allowed on the command line
 * and in the table. */
void reader_check_key(const YamlNode *n);
/* reads a value or a section */
void reader_apply(Reader *r, YamlNode *n, const char *name, void *holder);

/* The following three functions are for elements of a list. Reads the element's section n. */
void reader_apply_element(Reader *r, YamlNode *n, const char *prefix, void *holder);
/* Sets all keys with this prefix to their defaults. With prefix "", sets all keys of the
 * Settings. */
void reader_defaults(void *holder, const char *prefix);
void reader_free_element(void *holder, const char *prefix);
