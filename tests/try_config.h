/* Configurations to try: a small complete file, changed line by line, loaded here or in another
 * process. */
#pragma once
#include "model/config/config_load.h"
#include "model/keys/types.h"

/* a temporary folder; the file x.yaml in it that try_load reads */
extern char try_folder[64], try_path[128];
extern const char try_complete[]; /* a complete file */
/* the spellings of OLMo's published files, shortened */
extern const char try_published[];

int try_make_folder(void **state);
int try_remove_folder(void **state);
void try_write(const char *name, const char *text);
void try_contains(const char *text, const char *part); /* asserts it */

/* Asserts that each of these names, separated by blanks, is a word of the text: keys, values and
 * files that a message must contain. The rest of its wording may change. */
void try_names(const char *text, const char *names);

/* Writes try_complete with the line that starts with `line` (after its indentation) replaced by
 * `with`, or with that added at the end if `line` is NULL. Returns the number of that line. */
int try_write_changed(const char *line, const char *with);

/* config_load of the file at try_path with up to four arguments. */
Config *try_load(int world, const char *a, const char *b, const char *c, const char *d);

/* The output of that on the given stream in another process; returns whether it succeeded. */
bool try_printed(char *out, size_t size, int stream, int world, const char *a, const char *b);

/* Asserts that it succeeds, or fails, on one rank, with these names in what it says; "": nothing. */
void try_accepted(const char *a, const char *b, const char *names);
void try_refused(const char *a, const char *b, const char *names);

/* Writes try_folder/config.json, and at try_path a configuration without a model section. */
void try_write_hf(const char *json);
#define TRY_LLAMA \
    "\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"num_hidden_layers\": 2, " \
    "\"num_attention_heads\": 4, \"intermediate_size\": 96, \"vocab_size\": 90, " \
    "\"max_position_embeddings\": 512, \"torch_dtype\": \"bfloat16\", \"hidden_act\": \"silu\""
