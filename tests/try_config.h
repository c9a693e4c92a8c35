/* Configurations to try: a small complete file, changed line by line, loaded here or in another
 * process. */
#pragma once
#include "model/config/config_load.h"
#include "model/keys/types.h"

/* try_folder: a temporary folder. try_path: the file x.yaml in this folder, which try_load reads */
extern char try_folder[64], try_path[128];
extern const char try_complete[]; /* a complete file */
/* a shortened configuration in the spelling of OLMo's published files */
extern const char try_published[];

int try_make_folder(void **state);
int try_remove_folder(void **state);
void try_write(const char *name, const char *text);
void try_contains(const char *text, const char *part); /* asserts that text contains part */

/* Asserts that each of these names, separated by blanks, is a word of the text: keys, values and
 * files that a message must contain. The rest of its wording may change. */
void try_names(const char *text, const char *names);

/* Writes try_complete, in which `with` replaces the line that starts with `line` (after its
 * indentation). line NULL: `with` is added at the end. Returns the number of the new line. */
int try_write_changed(const char *line, const char *with);

/* Calls config_load for the file at try_path with up to four arguments. */
Config *try_load(int world, const char *a, const char *b, const char *c, const char *d);

/* Calls try_load in another process. Sets `out` to its output on the given stream. Returns true if
 * the call succeeded. */
bool try_printed(char *out, size_t size, int stream, int world, const char *a, const char *b);

/* try_accepted asserts that try_load with these arguments succeeds on one rank, try_refused that it
 * fails. Its output must contain `names`; "": the output must be empty. */
void try_accepted(const char *a, const char *b, const char *names);
void try_refused(const char *a, const char *b, const char *names);

/* Writes try_folder/config.json, and at try_path a configuration without a model section. */
void try_write_hf(const char *json);
#define TRY_LLAMA \
    "\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"num_hidden_layers\": 2, " \
    "\"num_attention_heads\": 4, \"intermediate_size\": 96, \"vocab_size\": 90, " \
    "\"max_position_embeddings\": 512, \"torch_dtype\": \"bfloat16\", \"hidden_act\": \"silu\""
