/* Rank 0 keeps these small files in memory from loading to saving. */
#include "model/checkpoint/tokenizer_files.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/checkpoint/folder.h"
#include "model/formats/file.h"

static const char *const model_files[] = {
    "config.json", /* merged by tokenizer_files_complete_config, not written as a file */
    "generation_config.json", "preprocessor_config.json",
    "processor_config.json", /* files of models with images */
};

/* The files that transformers saves for the tokenizers of all supported classes, and the file of
 * Mistral's own format. */
static const char *const tokenizer_files[] = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
};
static const char templates[] = "additional_chat_templates"; /* a folder of *.jinja */

/* Files with the vocabulary: a folder has a tokenizer if it has one of these files. */
static const char *const vocabularies[] = { "tokenizer.json", "tokenizer.model", "vocab.json",
                                            "vocab.txt", "tekken.json" };

#define COUNT(list) (int)(sizeof list / sizeof list[0])

typedef struct {
    char *name, *data;
    size_t bytes;
    bool tokenizer;
} Held;
static Held *held;
static int num_held;
static bool taken; /* the tokenizer comes from the configuration's tokenizer path */

static Held *find(const char *name)
{
    for (int i = 0; i < num_held; i++)
        if (strcmp(held[i].name, name) == 0)
            return &held[i];
    return NULL;
}

static void forget(bool tokenizer)
{
    int kept = 0;
    for (int i = 0; i < num_held; i++) {
        if (held[i].tokenizer != tokenizer) {
            held[kept++] = held[i];
            continue;
        }
        free(held[i].name);
        free(held[i].data);
    }
    num_held = kept;
}

/* Takes ownership of `data`. */
static void hold(const char *name, char *data, size_t bytes, bool tokenizer)
{
    held = xrealloc(held, (size_t)(num_held + 1) * sizeof *held);
    held[num_held++] = (Held){ xstrdup(name), data, bytes, tokenizer };
}

/* Reads the file, if it exists, and stores it under `name`. */
static void read_file(const char *path, const char *name, bool tokenizer)
{
    check_regular(path);
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    long bytes = -1;
    if (!file && errno == ENOENT)
        return;
    if (file && fseek(file, 0, SEEK_END) == 0)
        bytes = ftell(file);
    if (bytes >= 0) {
        rewind(file);
        data = xmalloc((size_t)bytes + 1);
    }
    if (bytes < 0 || fread(data, 1, (size_t)bytes, file) != (size_t)bytes)
        die("%s: cannot read: %s", path, strerror(errno));
    fclose(file);
    hold(name, data, (size_t)bytes, tokenizer);
}

static void read_name(const char *folder, const char *name, bool tokenizer)
{
    char *path = xasprintf("%s/%s", folder, name);
    read_file(path, name, tokenizer);
    free(path);
}

static void read_tokenizer(const char *folder)
{
    char *path = xasprintf("%s/%s", folder, templates);
    DIR *dir = opendir(path);
    if (!dir && errno != ENOENT && errno != ENOTDIR)
        die("%s: cannot read: %s", path, strerror(errno));
    for (int i = 0; i < COUNT(tokenizer_files); i++)
        read_name(folder, tokenizer_files[i], true);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char *name = xasprintf("%s/%s", templates, entry->d_name);
        if (text_ends_with(name, ".jinja"))
            read_name(folder, name, true);
        free(name);
    }
    if (dir)
        closedir(dir);
    free(path);
}

static bool has_vocabulary(void)
{
    bool found = false;
    for (int i = 0; i < COUNT(vocabularies); i++)
        found |= find(vocabularies[i]) != NULL;
    return found;
}

void tokenizer_files_read(const char *folder, const char *base)
{
    if (comm_rank() != 0)
        return;
    forget(false);
    for (int i = 0; i < COUNT(model_files); i++) {
        read_name(folder, model_files[i], false);
        if (!find(model_files[i]))
            read_name(base, model_files[i], false);
    }
    if (taken)
        return;
    forget(true);
    read_tokenizer(folder);
    if (has_vocabulary())
        return;
    forget(true);
    read_tokenizer(base);
}

/* ---- the configuration's tokenizer ----------------------------------------------------------- */

static json_int_t greater(json_int_t a, json_int_t b)
{
    return a > b ? a : b;
}

/* Returns the highest id of a tokenizer.json; -1: the file has no ids. The vocabulary of Unigram is
 * a list. */
static json_int_t highest_id(json_t *tokenizer)
{
    json_t *vocab = json_object_get(json_object_get(tokenizer, "model"), "vocab"), *value;
    json_int_t highest = (json_int_t)json_array_size(vocab) - 1;
    const char *key;
    size_t i;
    json_object_foreach(vocab, key, value) highest = greater(highest, json_integer_value(value));
    json_array_foreach(json_object_get(tokenizer, "added_tokens"), i, value) highest =
        greater(highest, json_integer_value(json_object_get(value, "id")));
    return highest;
}

/* Without a tokenizer.json the ids cannot be checked. */
static void check_vocabulary(const char *path, int vocab_size)
{
    const Held *h = find("tokenizer.json");
    json_error_t error;
    if (!h)
        return;
    json_t *tokenizer = json_loadb(h->data, h->bytes, JSON_ALLOW_NUL, &error);
    if (!tokenizer)
        die("tokenizer %s: tokenizer.json:%d: not JSON: %s", path, error.line, error.text);
    const json_int_t highest = highest_id(tokenizer);
    json_decref(tokenizer);
    if (highest < 0)
        die("tokenizer %s: tokenizer.json has no model.vocab: expected a file of the library "
            "tokenizers",
            path);
    if (highest >= vocab_size)
        die("tokenizer %s: its ids go up to %lld, but model.vocab_size is %d: increase it to at "
            "least %lld, or give the tokenizer "
            "with which the data were made",
            path, (long long)highest, vocab_size, (long long)highest + 1);
    if (highest < vocab_size / 2)
        warn("tokenizer %s: its ids go up to %lld, but model.vocab_size is %d: were the data made "
             "with this tokenizer?",
             path, (long long)highest, vocab_size);
}

void tokenizer_files_replace(const char *path, int vocab_size)
{
    struct stat status;
    if (comm_rank() != 0)
        return;
    if (stat(path, &status) != 0)
        die("tokenizer %s: %s; expected a tokenizer.json, or a folder with one", path,
            strerror(errno));
    forget(true);
    if (S_ISDIR(status.st_mode))
        read_tokenizer(path);
    else if (text_ends_with(path, ".json"))
        read_file(path, "tokenizer.json", true);
    else if (text_ends_with(path, ".model"))
        read_file(path, "tokenizer.model", true);
    if (!has_vocabulary())
        die("tokenizer %s: there is no tokenizer; expected a tokenizer.json or tokenizer.model, or "
            "a folder with one",
            path);
    check_vocabulary(path, vocab_size);
    taken = true;
}

/* ---- saving ---------------------------------------------------------------------------------- */

static bool names(const json_t *eos, const json_t *token)
{
    const json_t *one;
    size_t i;
    bool found = json_equal(eos, token);
    json_array_foreach(eos, i, one) found |= json_equal(one, token);
    return found;
}

/* Returns [token, eos], or [token, eos[0], eos[1], ...] if eos is a list. */
static json_t *before(json_t *token, json_t *eos)
{
    json_t *all = json_pack("[O]", token);
    if (json_is_array(eos))
        json_array_extend(all, eos);
    else
        json_array_append(all, eos);
    return all;
}

/* Reads the text of a file; the caller owns it. */
static char *text_of(const json_t *file)
{
    char *text = json_dumps(file, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    if (!text)
        die("out of host memory");
    return text;
}

/* Programs stop at the eos of generation_config.json, which takes precedence over the eos of
 * config.json. If generation_config.json names only other tokens than this run's eos, as for a base
 * model, the eos is added. A file that names this eos, or no eos, does not change. */
static void complete_generation(json_t *token)
{
    Held *h = find("generation_config.json");
    json_t *file = h ? json_loadb(h->data, h->bytes, 0, NULL) : NULL,
           *eos = json_object_get(file, "eos_token_id");
    if (json_is_integer(token) && eos && !json_is_null(eos) && !names(eos, token)) {
        json_object_set_new(file, "eos_token_id", before(token, eos));
        free(h->data);
        h->data = text_of(file);
        h->bytes = strlen(h->data);
    }
    json_decref(file);
}

/* Adds keys from the text model's loaded config.json. */
static void complete_text(json_t *config, const json_t *loaded)
{
    json_t *bos = json_object_get(loaded, "bos_token_id"),
           *eos = json_object_get(loaded, "eos_token_id");
    json_t *length = json_object_get(loaded, "max_position_embeddings");
    if (bos)
        json_object_set(config, "bos_token_id", bos);
    if (json_is_array(eos) &&
        json_equal(json_array_get(eos, 0), json_object_get(config, "eos_token_id")))
        json_object_set(config, "eos_token_id", eos);
    if (json_integer_value(length) >
        json_integer_value(json_object_get(config, "max_position_embeddings")))
        json_object_set(config, "max_position_embeddings", length);
}

/* For a model with images, also adds all keys that describe its vision tower and its images, such
 * as vision_config. */
void tokenizer_files_complete_config(json_t *config)
{
    const Held *h = find("config.json");
    json_t *loaded = h ? json_loadb(h->data, h->bytes, 0, NULL) : NULL,
           *text = json_object_get(config, "text_config");
    complete_text(text ? text : config, text ? json_object_get(loaded, "text_config") : loaded);
    if (text && loaded) {
        /* these keys describe the loaded weights */
        json_object_del(loaded, "dtype");
        json_object_del(loaded, "quantization_config");
        /* this run writes it as image_token_index */
        json_object_del(loaded, "image_token_id");
        json_object_update_missing(config, loaded);
    }
    json_decref(loaded);
    complete_generation(json_object_get(text ? text : config, "eos_token_id"));
}

void tokenizer_files_keep_eos(const json_t *config)
{
    const Held *h = find("config.json");
    json_t *base = h ? json_loadb(h->data, h->bytes, 0, NULL) : NULL,
           *text = json_object_get(config, "text_config");
    json_t *theirs =
        json_object_get(text ? json_object_get(base, "text_config") : base, "eos_token_id");
    json_t *token = json_object_get(text ? text : config, "eos_token_id");
    if (!find("generation_config.json") && json_is_integer(token) && theirs &&
        !json_is_null(theirs) && !names(theirs, token)) {
        json_t *file = json_pack("{s:o}", "eos_token_id", before(token, theirs));
        char *text = text_of(file);
        hold("generation_config.json", text, strlen(text), false);
        json_decref(file);
    }
    json_decref(base);
}

void tokenizer_files_write(const char *folder)
{
    char *below = xasprintf("%s/%s", folder, templates);
    for (int i = 0; i < num_held; i++) {
        if (strcmp(held[i].name, "config.json") == 0)
            continue;
        if (strchr(held[i].name, '/') && mkdir(below, 0777) != 0 && errno != EEXIST)
            die("%s: cannot create: %s", below, strerror(errno));
        char *path = xasprintf("%s/%s", folder, held[i].name);
        folder_write(path, held[i].data, held[i].bytes);
        free(path);
    }
    if (file_exists(below))
        folder_sync(below);
    free(below);
}
