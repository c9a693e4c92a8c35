/* The files of a folder, and the checksums in its manifest. */
#include "model/checkpoint/weight_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/formats/file.h"
#include "model/formats/quantized.h"
#include "model/keys/value_json.h"
#include "model/shape/architecture.h"
#include "model/checkpoint/coded_check.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/manifest.h"
#include "model/checkpoint/saved_as.h"
#include "model/checkpoint/stacked.h"
#include "model/checkpoint/stacked_adapters.h"

json_t *weight_files_manifest(const char *folder)
{
    json_t *manifest = file_json(folder, "trainer.json", JSON_REJECT_DUPLICATES);
    char problem[4096];
    if (!manifest && saved_as_with_states(folder))
        die("%s: the checkpoint is incomplete: trainer.json, which is written last, is missing; "
            "load another checkpoint",
            folder);
    if (!manifest)
        return NULL;
    if (!manifest_is_complete(folder, manifest, problem, sizeof problem))
        die("the checkpoint is incomplete: %s; copy the checkpoint again or load another one",
            problem);
    json_int_t version = json_integer_value(json_object_get(manifest, "format_version"));
    if (version != CHECKPOINT_VERSION)
        die("%s/trainer.json: format_version is %lld, this program reads %d", folder,
            (long long)version, CHECKPOINT_VERSION);
    return manifest;
}

static void add_source(WeightFiles *s, const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    for (int i = 0; i < s->count; i++) {
        if (strcmp(s->file[i]->path, path) != 0)
            continue;
        free(path);
        return;
    }
    s->file = xrealloc(s->file, (size_t)(s->count + 1) * sizeof *s->file);
    s->file[s->count] = safetensors_open(path);
    stacked_split(s->file[s->count++]);
    free(path);
}

void weight_files_close(WeightFiles *s)
{
    for (int i = 0; i < s->count; i++)
        safetensors_close(s->file[i]);
    free(s->file);
}

/* Reads the checksums from a manifest. Folders of other programs and old checkpoints have none. */
static void expect_sums(const WeightFiles *s, const json_t *manifest, const char *folder)
{
    const json_t *sums = json_object_get(manifest, "crc32c");
    for (int i = 0; i < s->count; i++)
        for (int k = 0; k < s->file[i]->count; k++) {
            SafeTensor *t = &s->file[i]->tensor[k];
            const json_t *sum = json_object_get(sums, t->name);
            t->has_sum = sum != NULL;
            if (sum &&
                (!json_is_string(sum) || sscanf(json_string_value(sum), "%8" SCNx32, &t->sum) != 1))
                die("%s/trainer.json: crc32c of %s: expected 8 hexadecimal digits", folder,
                    t->name);
        }
}

/* Dies if a tensor is in two files: the index may name one file, but other programs might read the
 * other file. */
static void refuse_twice(const WeightFiles *s)
{
    for (int i = 1; i < s->count; i++)
        for (int k = 0; k < s->file[i]->count; k++) {
            const Found first = safetensors_find_in(s->file, i, s->file[i]->tensor[k].name);
            if (first.tensor)
                die("%s: tensor %s is also in %s; expected it in only one file. Save the model "
                    "again",
                    s->file[i]->path, first.tensor->name, first.file->path);
        }
}

/* Opens model.safetensors, or the files of model.safetensors.index.json. */
static WeightFiles open_model(const char *folder)
{
    WeightFiles s = { 0 };
    json_t *index = NULL;
    if (!file_exists(folder))
        die("%s: there is no such folder", folder);
    if (file_is_in(folder, "model.safetensors"))
        add_source(&s, folder, "model.safetensors");
    else if ((index = file_json(folder, "model.safetensors.index.json", JSON_REJECT_DUPLICATES))) {
        const char *name;
        json_t *file;
        json_object_foreach(json_object_get(index, "weight_map"), name, file)
        {
            if (!json_is_string(file) || !folder_holds(json_string_value(file)))
                value_json_wrong(xasprintf("%s/model.safetensors.index.json", folder),
                                 xasprintf("weight_map.%s", name),
                                 "the name of a file in that folder", file);
            add_source(&s, folder, json_string_value(file));
        }
    }
    if (s.count == 0 && file_is_in(folder, "latest"))
        die("%s is a run, not a checkpoint; the run's last checkpoint is %s/latest", folder,
            folder);
    if (s.count == 0)
        die("%s: no model.safetensors and no model.safetensors.index.json with a weight_map; "
            "weights in other "
            "formats can be converted with transformers' save_pretrained",
            folder);
    refuse_twice(&s);
    json_decref(index);
    return s;
}

WeightFiles weight_files_open(const char *folder)
{
    json_t *manifest = weight_files_manifest(folder);
    WeightFiles s = open_model(folder);
    expect_sums(&s, manifest, folder);
    json_decref(manifest);
    return s;
}

/* Removes the adapter's name: PEFT's state dictionaries contain it, but its files do not. */
static void drop_adapter_name(char *name)
{
    static const char usual[] = ".default.weight";
    if (text_ends_with(name, usual))
        strcpy(name + strlen(name) - strlen(usual), ".weight");
}

/* Renames tensors of models with images: before transformers 4.52, module paths were equal to the
 * names in files. */
static void use_tree_name(SafeTensor *t)
{
    static const char first[] = "base_model.model.";
    char tree[HF_NAME];
    if (strncmp(t->name, first, sizeof first - 1) != 0)
        return;
    hf_tree_name(tree, t->name + sizeof first - 1);
    if (strcmp(tree, t->name + sizeof first - 1) == 0)
        return;
    free(t->name);
    t->name = xasprintf("%s%s", first, tree);
}

/* If the file of s stores the adapters of all experts as one tensor, adds a file in memory with one
 * adapter per expert. */
static void divide_adapters(WeightFiles *s, const char *folder)
{
    json_t *j = file_json(folder, "adapter_config.json", JSON_REJECT_DUPLICATES);
    const int r = (int)json_integer_value(json_object_get(j, "r"));
    const bool fused = json_object_size(json_object_get(j, "rank_pattern")) > 0;
    SafeFile *experts = r > 0 ? stacked_adapters(s->file[0], r, fused) : NULL;
    json_decref(j);
    if (!experts)
        return;
    s->file = xrealloc(s->file, 2 * sizeof *s->file);
    s->file[s->count++] = experts;
}

WeightFiles weight_files_open_adapter(const char *folder)
{
    json_t *manifest = weight_files_manifest(folder);
    WeightFiles s = { 0 };
    if (!file_is_in(folder, "adapter_model.safetensors"))
        die("%s: no adapter_model.safetensors next to its adapter_config.json; adapters in other "
            "formats can be converted with "
            "PEFT's save_pretrained",
            folder);
    add_source(&s, folder, "adapter_model.safetensors");
    for (int i = 0; i < s.file[0]->count; i++) {
        drop_adapter_name(s.file[0]->tensor[i].name);
        use_tree_name(&s.file[0]->tensor[i]);
    }
    safetensors_renamed(s.file[0]);
    divide_adapters(&s, folder);
    expect_sums(&s, manifest, folder);
    json_decref(manifest);
    return s;
}

WeightFiles weight_files_open_optimizer(const char *folder, json_t *manifest)
{
    WeightFiles s = { 0 };
    const char *name;
    json_t *bytes;
    json_object_foreach(json_object_get(manifest, "files"), name,
                        bytes) if (strncmp(name, "optimizer-", strlen("optimizer-")) == 0)
        add_source(&s, folder, name);
    if (s.count == 0)
        die("%s: trainer.json lists no optimizer files; --load_path of this folder with "
            "--reset_optimizer_state and another "
            "--save_folder starts with new moments",
            folder);
    expect_sums(&s, manifest, folder);
    return s;
}

void weight_files_refuse_quantized(const WeightFiles *s, const char *folder)
{
    int said;
    Coding *coding = quantized_codings(folder, &said);
    for (int i = 0; i < s->count; i++)
        for (int k = 0; k < s->file[i]->count; k++) {
            const SafeTensor *t = &s->file[i]->tensor[k];
            char *matrix = coded_source_matrix(s->file, s->count, t->name);
            if (!matrix && said >= 0)
                coded_source_refuse_single(s->file, s->count, (Found){ s->file[i], t });
            if (!matrix)
                quantized_refuse_tensor(s->file[i]->path, t->name, t->dtype);
            else
                coded_check(s->file, s->count, matrix, coding, said);
            free(matrix);
        }
    free(coding);
}

/* ---- unknown tensors ------------------------------------------------------------------------- */

static bool says_tied(const char *folder)
{
    json_t *config = file_json(folder, "config.json", JSON_REJECT_DUPLICATES);
    const json_t *text = json_object_get(config, "text_config");
    bool tied = json_is_true(json_object_get(text ? text : config, "tie_word_embeddings"));
    json_decref(config);
    return tied;
}

/* Whether two tensors have the same bytes. Each rank compares its share of the chunks; a rank that
 * finds a difference ends all ranks. */
static bool same_bytes(Found a, Found b)
{
    const size_t chunk = safetensors_chunk, bytes = a.tensor->end - a.tensor->begin,
                 step = (size_t)comm_size() * chunk;
    bool same =
        bytes == b.tensor->end - b.tensor->begin && strcmp(a.tensor->dtype, b.tensor->dtype) == 0;
    char *one = xmalloc(2 * chunk), *other = one + chunk;
    for (size_t at = (size_t)comm_rank() * chunk; same && at < bytes; at += step) {
        const size_t n = bytes - at < chunk ? bytes - at : chunk;
        watchdog_mark("comparing the head with the embedding", -1);
        safetensors_read(a.file, one, a.tensor, at, n);
        safetensors_read(b.file, other, b.tensor, at, n);
        same = memcmp(one, other, n) == 0;
    }
    free(one);
    return same;
}

/* Checks the head of a tied model. If it differs from the embedding, transformers 5 computes with
 * this head, and earlier versions with the embedding: two different models. */
static void check_tied_head(const WeightFiles *s, const char *folder, bool images)
{
    const char *const embedding =
        images ? "language_model.model.embed_tokens.weight" : "model.embed_tokens.weight";
    const Found embed = safetensors_find_in(s->file, s->count, embedding);
    const Found head = safetensors_find_in(
        s->file, s->count, images ? "language_model.lm_head.weight" : "lm_head.weight");
    if (embed.tensor && head.tensor && !same_bytes(embed, head))
        die("%s: lm_head.weight differs from model.embed_tokens.weight, although %s/config.json "
            "has tie_word_embeddings true; set "
            "tie_word_embeddings to false to use this head, or remove lm_head.weight from the file "
            "to use the "
            "embedding as the head",
            head.file->path, folder);
}

bool weight_files_may_have(const WeightFiles *s, const char *name, const char *folder,
                           const ModelConfig *c)
{
    if (text_ends_with(name, ".rotary_emb.inv_freq"))
        return true;
    const bool images = c->image.feature_size > 0;
    char *matrix = coded_source_matrix(s->file, s->count, name);
    const bool is_head = strcmp(matrix ? matrix : name,
                                images ? "language_model.lm_head.weight" : "lm_head.weight") == 0;
    if (!c->weight_tying || !is_head || !says_tied(folder))
        return false;
    if (matrix)
        die("%s: %s belongs to a quantized head, but %s/config.json has tie_word_embeddings true; "
            "set tie_word_embeddings to false to use this head, "
            "or remove the tensors of %s from the file to use the embedding as the head",
            coded_source_find(s->file, s->count, matrix)->path, name, folder, matrix);
    check_tied_head(s, folder, images);
    return true;
}

void weight_files_refuse_adapter(const char *folder, const char *name)
{
    if (strstr(name, "vision_tower."))
        die("%s: %s is an adapter of the vision tower, which is frozen here: features are computed "
            "before the training. Train "
            "adapters of the language model only, in PEFT with target_modules as "
            "'.*language_model.*\\.(q_proj|v_proj)'",
            folder, name);
    if (text_ends_with(name, ".embed_tokens.weight") || text_ends_with(name, ".lm_head.weight"))
        die("%s: PEFT saved the embedding or the head with the adapters (%s); only adapters can be "
            "read. Merge them "
            "into the base and use the result:\n  python3 -c \"from peft import "
            "AutoPeftModelForCausalLM as M; "
            "M.from_pretrained('%s').merge_and_unload().save_pretrained('OUTPUT')\"",
            folder, name, folder);
}
