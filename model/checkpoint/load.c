/* Loads a run, and finds checkpoints; save.c writes them.
 *
 * A checkpoint is complete if it has its manifest, trainer.json, and every file that the manifest
 * lists has the listed size. Incomplete checkpoints are never loaded. */
#include "model/checkpoint/load.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/config/load_folder.h"
#include "model/formats/adapter.h"
#include "model/formats/file.h"
#include "model/formats/hf.h"
#include "model/store/quantized_weights.h"
#include "model/checkpoint/base_fingerprint.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/layout_finite.h"
#include "model/checkpoint/manifest.h"
#include "model/checkpoint/saved_as.h"
#include "model/checkpoint/weight_files.h"
#include "model/checkpoint/load_quantized.h"
#include "model/checkpoint/stored_states.h"
#include "model/checkpoint/tokenizer_files.h"
#include "model/checkpoint/tower.h"
#include "model/shape/rope_table.h"

/* ---- loading --------------------------------------------------------------------------------- */

static const char OPENING[] = "opening the files to load";

static bool has_entry(const Layout *l, const char *name)
{
    return name_index_find(&l->names, name) >= 0;
}

/* Returns the first tensor that is no entry of the layout and cannot be ignored, with its file in
 * *path; NULL: there is none. */
static const char *left_over(const Layout *l, const WeightFiles *s, const char *folder,
                             const ModelConfig *c, const char **path)
{
    for (int i = 0; i < s->count; i++)
        for (int t = 0; t < s->file[i]->count; t++) {
            const char *name = s->file[i]->tensor[t].name;
            char *matrix = coded_source_matrix(s->file, s->count, name);
            const bool placed = has_entry(l, matrix ? matrix : name) ||
                                (c->image.feature_size > 0 && tower_owns(name));
            *path = s->file[i]->path;
            free(matrix);
            if (!placed && !weight_files_may_have(s, name, folder, c))
                return name;
        }
    return NULL;
}

static void check_finite(const char *folder, const Layout *l, const ParamStore *store)
{
    const char *name = layout_not_finite(l, store);
    if (name)
        die("%s: tensor %s holds a value that is not finite (or, in exp_avg_sq, is negative), so "
            "this model is unusable. %s",
            folder, name, folder_say_others(folder));
}

/* Loads the weights of the model or of adapters. If the folder has a tensor that the model does not
 * have, the folder has another model. A base may have such a tensor if the folder of the adapters
 * replaces it. */
static void load_weights(const char *folder, WeightFiles s, LayoutKind kind, const Config *c,
                         ParamStore *store)
{
    weight_files_refuse_quantized(&s, folder);
    Layout l = layout_make(NULL, kind, store, 0),
           known = layout_make(NULL, kind == LAYOUT_BASE ? LAYOUT_MODEL : kind, store, 0);
    const char *path, *name = left_over(&known, &s, folder, &c->model, &path);
    if (name && kind == LAYOUT_ADAPTER)
        weight_files_refuse_adapter(folder, name);
    if (name)
        die("%s: tensor %s has no place in the configured model; the configuration must describe "
            "the model in that folder",
            path, name);
    if (kind != LAYOUT_ADAPTER && c->model.lora.base != BASE_AS_FROZEN)
        load_quantized(&l, store, s.file, s.count);
    layout_read(&l, store, s.file, s.count);
    check_finite(folder, &l, store);
    layout_free(&known);
    layout_free(&l);
    weight_files_close(&s);
}

/* Dies because states do not fit. The message names the optimizer of the run that saved the
 * checkpoint, by its config.yaml. Old runs without this key used adamw. */
static _Noreturn void die_of_states(const char *folder, const char *problem)
{
    const char *said = load_folder_trained_with(folder, "optimizer.name"),
               *saved = said ? said : "adamw";
    die("%s: %s; the checkpoint was saved with optimizer %s. Use --optimizer.name=%s, or start "
        "with new states: --load_path of "
        "this folder, --reset_optimizer_state and another --save_folder",
        folder, problem, saved, saved);
}

/* Dies unless exactly the trained weights have states in the files. `state`: the name of a state
 * that every trained weight has. */
static void check_trained(const char *folder, const Layout *l, const WeightFiles *s,
                          const char *state)
{
    static const char remedy[] =
        "Use the `trainable` of the checkpoint's config.yaml, or start with new "
        "states: --load_path of this folder, "
        "--reset_optimizer_state and another --save_folder";
    char suffix[64];
    snprintf(suffix, sizeof suffix, ".%s", state);
    for (int i = 0; i < l->num_entries; i++)
        if (text_ends_with(l->entry[i].name, suffix) &&
            !safetensors_find_in(s->file, s->count, l->entry[i].name).tensor)
            die("%s: the checkpoint has no %s: this run trains the weight, but the checkpoint's "
                "run did not. "
                "%s",
                folder, l->entry[i].name, remedy);
    for (int i = 0; i < s->count; i++)
        for (int t = 0; t < s->file[i]->count; t++) {
            const char *name = s->file[i]->tensor[t].name;
            if (text_ends_with(name, suffix) && !has_entry(l, name))
                die("%s: the checkpoint has %s: this run freezes the weight, but the checkpoint's "
                    "run trained "
                    "it. %s",
                    folder, name, remedy);
        }
}

/* Returns the first state in the files that the run does not have; NULL: there is none. Ignores an
 * average that the run does not continue. */
static const char *left_state(const Layout *l, const WeightFiles *s)
{
    for (int i = 0; i < s->count; i++)
        for (int t = 0; t < s->file[i]->count; t++) {
            const char *name = s->file[i]->tensor[t].name;
            if (!has_entry(l, name) && !text_ends_with(name, "." AVERAGE_STATE))
                return name;
        }
    return NULL;
}

/* Returns a tensor of the files that is a state of another optimizer but not of this one; NULL:
 * there is none. */
static const char *foreign_state(const Optimizer *o, const WeightFiles *s)
{
    const Optimizer *other;
    for (int i = 0; (other = optimizer_at(i)); i++)
        for (int k = 0; k < other->num_states; k++) {
            bool own = false;
            char suffix[64];
            for (int j = 0; j < o->num_states; j++)
                own |= strcmp(o->state[j].name, other->state[k].name) == 0;
            snprintf(suffix, sizeof suffix, ".%s", other->state[k].name);
            const SafeTensor *t =
                own ? NULL : safetensors_find_ending(s->file, s->count, suffix).tensor;
            if (t)
                return t->name;
        }
    return NULL;
}

static bool has_entries_ending(const Layout *l, const char *suffix)
{
    for (int i = 0; i < l->num_entries; i++)
        if (text_ends_with(l->entry[i].name, suffix))
            return true;
    return false;
}

/* Loads the optimizer's states after the weights. So if states do not fit, the run had another
 * optimizer, or trained other weights. If the files have no average, neither the average nor its
 * count is read. */
static void load_optimizer(const char *folder, WeightFiles s, const json_t *manifest,
                           const Config *c, ParamStore *store)
{
    StateCounts counts = manifest_counts(manifest, folder);
    const bool averages =
        c->average.last > 0 && safetensors_find_ending(s.file, s.count, "." AVERAGE_STATE).tensor;
    ParamStore read = *store;
    const Optimizer *o = read.optimizer =
        averages ? store->optimizer : optimizer_find(c->optimizer.name);
    const char *foreign = foreign_state(o, &s);
    Layout l = layout_make(NULL, LAYOUT_OPTIMIZER, &read, 0);
    for (int i = 0; i < o->num_states; i++) {
        const char *name = o->state[i].name;
        char suffix[64];
        snprintf(suffix, sizeof suffix, ".%s", name);
        if (has_entries_ending(&l, suffix) &&
            !safetensors_find_ending(s.file, s.count, suffix).tensor)
            die_of_states(folder,
                          xasprintf("there is no %s, which optimizer %s keeps for every %s", name,
                                    o->name,
                                    o->state[i].of == STATE_OF_MATRICES ? "matrix" : "weight"));
    }
    if (foreign)
        die_of_states(folder, xasprintf("%s is not a state of optimizer %s", foreign, o->name));
    for (int i = 0; i < o->num_states; i++)
        if (i == 0 || o->state[i].of == STATE_OF_OTHERS)
            check_trained(folder, &l, &s, o->state[i].name);
    StoredStates stored = stored_states(&read, s.file, s.count);
    store_zero_states(store); /* files contain no padding */
    stored_states_read(&stored, &read, s.file, s.count);
    if (!averages)
        counts.average.count = 0;
    store->counts = counts;
    const char *name = left_state(&stored.layout, &s);
    if (name)
        die_of_states(folder, xasprintf("%s is not a state of optimizer %s", name, o->name));
    check_finite(folder, &l, &read);
    layout_free(&l);
    stored_states_free(&stored);
    weight_files_close(&s);
}

/* Warns if layers use a sliding window in the folder but not in the configuration, or the reverse,
 * provided both have windows. Warns if the types of RoPE scaling differ. */
static void compare_blocks(const char *folder, const ModelConfig *t, const ModelConfig *c)
{
    static const char *const rope[] = { "default", "llama3", "yarn" };
    int l = 0;
    while (l < c->n_layers && l < t->n_layers && layer_slides(t, l) == layer_slides(c, l))
        l++;
    if (l < c->n_layers && l < t->n_layers && t->sliding_window > 0 && c->sliding_window > 0)
        warn("%s/config.json: layer %d has %s sliding window, but in the configuration it has %s; "
             "the run uses the configuration",
             folder, l, layer_slides(t, l) ? "a" : "no", layer_slides(c, l) ? "one" : "none");
    if (t->rope_scaling.type != c->rope_scaling.type &&
        t->rope_scaling.factor == c->rope_scaling.factor)
        warn("%s/config.json: the rope_type is %s, but %s in the configuration; the run uses the "
             "configuration",
             folder, rope[t->rope_scaling.type], rope[c->rope_scaling.type]);
}

/* Returns the id of the image token; -1: the model reads only text. */
static double image_token(const ModelConfig *m)
{
    return m->image.feature_size > 0 ? m->image.token_id : -1;
}

/* Checks settings that shapes do not show. Dies on an unsupported class or activation, which
 * hf_read refuses, and on other numbers of heads, because the same matrices would then compute
 * another function. Only warns about RoPE, windows, eps and clip_qkv: a user may change these on
 * purpose, for example for longer texts. */
static void check_description(const char *folder, const ModelConfig *c)
{
    ModelConfig t = *c;
    if (!file_is_in(folder, "config.json"))
        return;
    hf_read(&t, folder);
    const struct {
        const char *theirs, *ours;
        double x, y;
        bool refuse;
    } keys[] = {
        { "num_attention_heads", "model.n_heads", t.n_heads, c->n_heads, true },
        { "num_key_value_heads", "model.n_kv_heads", t.n_kv_heads, c->n_kv_heads, true },
        { "head_dim", "model.head_dim", t.head_dim, c->head_dim, true },
        { "number of tokens of an image", "model.image_tokens", t.image.rows, c->image.rows, true },
        { "image_token_index", "model.image_token_id", image_token(&t), image_token(c), true },
        { "rope_theta", "model.rope_theta", t.rope_theta, c->rope_theta, false },
        { "rope_scaling.factor", "model.rope_scaling.factor", t.rope_scaling.factor,
          c->rope_scaling.factor, false },
        { "its low_freq_factor", "model.rope_scaling.low_freq_factor",
          t.rope_scaling.low_freq_factor, c->rope_scaling.low_freq_factor, false },
        { "its high_freq_factor", "model.rope_scaling.high_freq_factor",
          t.rope_scaling.high_freq_factor, c->rope_scaling.high_freq_factor, false },
        { "its original_max_position_embeddings",
          "model.rope_scaling.original_max_position_embeddings", t.rope_scaling.original_length,
          c->rope_scaling.original_length, false },
        { "its beta_fast", "model.rope_scaling.beta_fast", t.rope_scaling.beta_fast,
          c->rope_scaling.beta_fast, false },
        { "its beta_slow", "model.rope_scaling.beta_slow", t.rope_scaling.beta_slow,
          c->rope_scaling.beta_slow, false },
        { "its attention_factor", "model.rope_scaling.attention_factor", rope_attention_factor(&t),
          rope_attention_factor(c), false },
        { "no_rope_layer_interval", "model.no_rope_layer_interval", t.no_rope_interval,
          c->no_rope_interval, false },
        { "sliding_window", "model.sliding_window", t.sliding_window, c->sliding_window, false },
        { "the norms' eps", "model.layer_norm_eps", (double)t.norm.eps, (double)c->norm.eps,
          false },
        { "clip_qkv", "model.clip_qkv", (double)t.clip_qkv, (double)c->clip_qkv, false },
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (fabs(keys[i].x - keys[i].y) <= 1e-6 * fabs(keys[i].x))
            continue;
        if (keys[i].refuse)
            die("%s/config.json: %s is %g, but %s is %g: this is another model, whose matrices "
                "have the same shapes",
                folder, keys[i].theirs, keys[i].x, keys[i].ours, keys[i].y);
        warn("%s/config.json: %s is %g, but the configuration's %s is %g; the run uses the "
             "configuration",
             folder, keys[i].theirs, keys[i].x, keys[i].ours, keys[i].y);
    }
    compare_blocks(folder, &t, c);
    if (c->max_sequence_length > t.max_sequence_length && c->rope_scaling.type == ROPE_DEFAULT)
        warn("%s/config.json: max_position_embeddings is %d, but the configuration's "
             "model.max_sequence_length is %d: sequences are longer than in the training of this "
             "model, and model.rope_scaling is not set",
             folder, t.max_sequence_length, c->max_sequence_length);
}

/* Files may lack the padding rows of the vocabulary. */
static void zero_weights(ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++)
        for (Region r = TRAINED; r <= FROZEN; r++)
            if (store->shard[u].slice[r].count)
                device_zero(store->shard[u].slice[r].stored.data,
                            tensor_bytes(store->shard[u].slice[r].stored));
}

/* Returns the folder of the base model of the adapters in `folder`. Dies if this folder is unknown
 * or does not exist. */
static const char *base_of(const char *folder, const Lora *l)
{
    if (!l->base_path || !file_exists(l->base_path))
        die("%s: the base model of these adapters is missing%s%s; give the base model's folder: "
            "--lora.base_path=FOLDER",
            folder, l->base_path ? ": " : "", l->base_path ? l->base_path : "");
    return l->base_path;
}

static void agree(const char *kind, const char *folder, uint64_t hash)
{
    char *what = xasprintf("%s in %s", kind, folder);
    comm_agree(what, hash);
    free(what);
    watchdog_mark(OPENING, -1);
}

/* Dies if ranks see different copies of the folder. Compares trainer.json, which has the checksums
 * of all tensors. */
static void agree_on_manifest(const char *folder, bool adapter, json_t *manifest)
{
    char *text =
        manifest ? json_dumps(manifest, JSON_SORT_KEYS) : xstrdup(adapter ? "adapters" : "a model");
    agree("trainer.json", folder, crc32c(0, text, strlen(text)));
    free(text);
}

/* Ranks read different parts of the files and might not notice that they have different copies. So
 * checks that three pages of each tensor are equal on all ranks. */
static WeightFiles agreed(WeightFiles s, const char *folder)
{
    agree("weights or moments", folder, base_fingerprint(&s));
    return s;
}

bool checkpoint_load(const char *folder, const Config *c, ParamStore *store, TrainState *s,
                     bool with_optimizer)
{
    const Lora *lora = &c->model.lora;
    watchdog_mark(OPENING, -1);
    const bool adapter = adapter_is(folder);
    if (adapter && lora->rank == 0)
        die("%s holds adapters, but the configuration has no lora.rank", folder);
    const char *weights = adapter ? base_of(folder, lora) : folder;
    /* new adapters have no states to continue */
    json_t *manifest = lora->rank > 0 && !adapter ? NULL : weight_files_manifest(folder);
    agree_on_manifest(folder, adapter, manifest);
    WeightFiles model = agreed(weight_files_open(weights), weights);
    const uint64_t base = lora->rank > 0 ? base_fingerprint(&model) : 0;
    if (adapter)
        base_fingerprint_check(folder, weights, base, with_optimizer);
    check_description(weights, &c->model);
    tower_read(&model);
    tokenizer_files_read(folder, weights);
    zero_weights(store);
    if (lora->rank > 0 && !adapter)
        store_init_adapters(store, &c->model, c->seed);
    if (adapter)
        load_weights(folder, agreed(weight_files_open_adapter(folder), folder), LAYOUT_ADAPTER, c,
                     store);
    load_weights(weights, model, adapter ? LAYOUT_BASE : LAYOUT_MODEL, c, store);
    if (lora->rounds_base)
        frozen_round(store);
    bool ours = manifest != NULL;
    if (ours)
        manifest_state(s, manifest, folder);
    if (ours && with_optimizer)
        load_optimizer(folder, agreed(weight_files_open_optimizer(folder, manifest), folder),
                       manifest, c, store);
    if (s)
        s->base_fingerprint = base;
    json_decref(manifest);
    store_loaded(store);
    return ours;
}

/* ---- finding checkpoints --------------------------------------------------------------------- */

/* As weight_files_manifest, but does not die on an incomplete checkpoint, because there may be
 * another checkpoint. `problem`: what is missing. */
static bool is_checkpoint(const char *folder, char *problem, size_t size)
{
    char *path = xasprintf("%s/trainer.json", folder);
    json_error_t error;
    check_regular(path);
    json_t *manifest = json_load_file(path, 0, &error);
    bool complete = manifest && manifest_is_complete(folder, manifest, problem, size);
    if (!manifest)
        snprintf(problem, size, "%s: %s", path, error.text);
    if (complete && !file_is_in(folder, "config.json") && !adapter_is(folder)) {
        snprintf(problem, size, "%s has neither config.json nor adapter_config.json", folder);
        complete = false;
    }
    json_decref(manifest);
    free(path);
    return complete;
}

/* Returns the complete step<N><suffix> with the highest N; NULL: there is none. `problem`: what is
 * missing in an incomplete checkpoint. */
static char *highest(const char *save_folder, const char *suffix, char *problem, size_t size)
{
    long *steps;
    char *found = NULL;
    for (int i = file_steps(&steps, save_folder, suffix) - 1; i >= 0 && !found; i--) {
        found = xasprintf("%s/step%ld%s", save_folder, steps[i], suffix);
        if ((!*suffix || saved_as_ours(found)) && is_checkpoint(found, problem, size))
            break;
        free(found);
        found = NULL;
    }
    free(steps);
    return found;
}

/* NOTE: a run that asks for the latest checkpoint must not start anew because a disk or a file
 * server does not answer. */
char *checkpoint_latest(const char *save_folder)
{
    enum { MOST_OLD = 9 }; /* number of names stepN.old, stepN.old2, ... that are tried */
    char problem[4096] = "", other[4096] = "", *name = folder_latest(save_folder), *found = NULL;
    if (name && !text_ends_with(name, ".tmp")) {
        found = folder_latest_path(save_folder);
        if (is_checkpoint(found, problem, sizeof problem)) {
            free(name);
            return found;
        }
        free(found);
    }
    found = highest(save_folder, "", other, sizeof other);
    for (int k = 1; k <= MOST_OLD && !found; k++) {
        char suffix[16] = ".old";
        if (k > 1)
            snprintf(suffix, sizeof suffix, ".old%d", k);
        found = highest(save_folder, suffix, other, sizeof other);
    }
    if (!found && *other)
        die("save_folder %s has no complete checkpoint (%s); repair it, or start a new run: in "
            "another --save_folder, or in this "
            "one with --save_overwrite and without --try_load_latest_save",
            save_folder, other);
    if (name)
        warn("%s/latest points to %s, which is not a complete checkpoint%s%s; %s%s", save_folder,
             name, *problem ? ": " : "", problem, found ? "using " : "there is no other",
             found ? found : "");
    free(name);
    return found;
}

/* Whether rotation may delete the checkpoint: it must not be a link, and its config.yaml must say
 * that it was saved in this save_folder, not copied into it. */
static bool may_go(const Config *c, const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0 && S_ISDIR(status.st_mode) &&
           saved_as_in(path, c->save_folder) != 0;
}

/* Checkpoints later than `latest` remain from before a run was resumed from an earlier step; they
 * stay until this run reaches them. The SavedAs of a checkpoint decides; the current settings can
 * only keep more checkpoints. */
void checkpoint_prune(const Config *c)
{
    char *latest = folder_latest(c->save_folder);
    long last, *steps, keep = c->save_num_checkpoints_to_keep, kept = 0;
    bool ephemeral_kept = false;
    if (comm_rank() != 0 || !latest || sscanf(latest, "step%ld", &last) != 1) {
        free(latest);
        return;
    }
    for (int i = file_steps(&steps, c->save_folder, "") - 1; i >= 0; i--) {
        const long step = steps[i];
        if (step > last || is_due(step, c->save_interval_unsharded))
            continue;
        char *path = xasprintf("%s/step%ld", c->save_folder, step);
        const SavedAs as = saved_as_read(path);
        const bool ephemeral = as == SAVED_EPHEMERAL, rotates = ephemeral || as == SAVED_INTERVAL;
        const bool wanted = ephemeral ? !ephemeral_kept : keep < 0 || kept < keep,
                   own = step == last || may_go(c, path);
        ephemeral_kept |= own && ephemeral;
        kept += own && as == SAVED_INTERVAL;
        if (rotates && !wanted && step != last && own) {
            watchdog_mark("deleting old checkpoints", -1);
            folder_remove_step(c->save_folder, step);
        }
        free(path);
    }
    free(steps);
    free(latest);
}
