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
    FILE *notes;      /* settings without effect: become one warning */
    char *notes_text; /* text of that stream, valid after fflush */
    int num_notes;
} Reader;

bool reader_given(const Reader *r, const char *name); /* present and not null */
/* file:line of the key, or the file if it is not given */
const char *reader_where(const Reader *r, const char *name);
void reader_note(Reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Whether a key names data that this run does not read. A dry run reads the configuration of
 * evaluators, but no data; eval_only reads only the data of evaluators; generate reads none. */
bool reader_is_unread(const Config *c, const char *name);

/* Dies if a text of key `name`, at or below n, cannot be written unchanged to config.yaml and
 * metrics.jsonl: if it is not UTF-8, or begins with ~/; or if it has OmegaConf's ${...}. */
void reader_check_texts(const YamlNode *n, const char *name);
/* Dies at a dot between keys, or a [ before an element, which are only allowed on the command line
 * and in the table. */
void reader_check_key(const YamlNode *n);
/* a value or a section */
void reader_apply(Reader *r, YamlNode *n, const char *name, void *holder);

/* Elements of a list. apply: reads the element's section n. defaults: sets all keys with that
 * prefix; "": of the Settings. */
void reader_apply_element(Reader *r, YamlNode *n, const char *prefix, void *holder);
void reader_defaults(void *holder, const char *prefix);
void reader_free_element(void *holder, const char *prefix);
