#include "model/evaluate/reference.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/hash.h"
#include "data/map.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/base_fingerprint.h"
#include "model/formats/adapter.h"

/* ---- names ----------------------------------------------------------------------------------- */

static uint64_t fingerprint_of(WeightFiles files)
{
    const uint64_t sum = base_fingerprint(&files);
    weight_files_close(&files);
    return sum;
}

/* The hash is computed once, because a run may delete the folder from which it started. */
static uint64_t model_hash(const Config *c)
{
    static uint64_t hash;
    if (hash)
        return hash;
    const char *folder = c->load_path;
    if (!folder)
        hash = hash_bytes(HASH_OF_NOTHING, &c->seed, sizeof c->seed);
    else if (adapter_is(folder))
        hash = fingerprint_of(weight_files_open_adapter(folder)) +
               fingerprint_of(weight_files_open(c->model.lora.base_path));
    else
        hash = fingerprint_of(weight_files_open(folder));
    return hash;
}

static uint64_t recipe_hash(const Config *c)
{
    const Recipe *r = &c->recipe;
    const Format format[] = { r->residual,        r->saved_norm_input, r->saved_qkv,
                              r->saved_attention, r->saved_mlp,        r->operand };
    const int words[] = { (int)r->forward, (int)r->fast, (int)r->scales, (int)r->down_scales,
                          (int)c->model.lora.base };
    uint64_t hash = hash_bytes(HASH_OF_NOTHING, words, sizeof words);
    hash = hash_bytes(hash, &c->loss_temperature, sizeof c->loss_temperature);
    for (size_t i = 0; i < sizeof format / sizeof format[0]; i++) {
        const char *name = format_name(format[i]);
        hash = hash_bytes(hash, name, strlen(name) + 1);
    }
    return hash;
}

static uint64_t data_hash(const Loader *l)
{
    const DataHashes content = loader_content(l);
    return hash_bytes(loader_fingerprint(l), &content, sizeof content);
}

/* model: 16 hexadecimal digits, or * for any model. */
static char *file_name(const Loader *l, const Config *c, const char *folder, const char *model)
{
    return xasprintf("%s/logps-%s-%016llx-%016llx.f32", folder, model,
                     (unsigned long long)recipe_hash(c), (unsigned long long)data_hash(l));
}

char *reference_folder(const Config *c)
{
    const char *given = c->score ? c->score : c->preference.reference;
    return given ? xstrdup(given) : xasprintf("%s/reference", c->save_folder);
}

char *reference_path(const Loader *l, const Config *c, const char *folder)
{
    char model[17];
    snprintf(model, sizeof model, "%016llx", (unsigned long long)model_hash(c));
    return file_name(l, c, folder, model);
}

/* Returns the only file of any model, malloc'ed; NULL: there is none, or there are several. */
static char *only_name(const Loader *l, const Config *c, const char *folder)
{
    char *pattern = file_name(l, c, folder, "*");
    glob_t found;
    const int status = glob(pattern, 0, NULL, &found);
    char *name = status == 0 && found.gl_pathc == 1 ? xstrdup(found.gl_pathv[0]) : NULL;
    if (status == 0)
        globfree(&found);
    free(pattern);
    return name;
}

/* ---- use ------------------------------------------------------------------------------------- */

/* Returns the path of the file to use; malloc'ed, or NULL. */
static char *find(const Loader *l, const Config *c, const char *folder, bool exact)
{
    const bool knows_model =
        exact || (!c->eval_only && (!c->load_path || access(c->load_path, R_OK) == 0));
    char *path = knows_model ? reference_path(l, c, folder) : NULL;
    if (path && access(path, R_OK) == 0)
        return path;
    free(path);
    return exact ? NULL : only_name(l, c, folder);
}

bool reference_use(Loader *l, const Config *c, const char *folder, bool exact)
{
    size_t bytes;
    char *path = find(l, c, folder, exact);
    double missing = !path;
    comm_max(&missing, 1);
    if (missing > 0) {
        free(path);
        return false;
    }
    const float *logps = map_file(&bytes, "preference.reference", path);
    if (bytes != loader_tokens(l) * sizeof *logps)
        die("%s has %zu bytes; expected %llu, four for each token of the data: delete it, and make "
            "it again with --score",
            path, bytes, (unsigned long long)(loader_tokens(l) * sizeof *logps));
    loader_use_scores(l, logps);
    free(path);
    return true;
}

void reference_missing(const Loader *l, const Config *c, const char *folder)
{
    char *path = reference_path(l, c, folder), *pattern = xasprintf("%s/logps-*.f32", folder),
         *there;
    glob_t found;
    FILE *f = xtext(&there);
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++)
            fprintf(f, "%s %s", i ? "," : ", but", strrchr(found.gl_pathv[i], '/') + 1);
    fclose(f);
    die("no log-probabilities of the reference model for these weights (first hash), this recipe "
        "(second) and these data (third): expected %s%s. Make them with the same configuration "
        "and --score=%s",
        path, there, folder);
}
