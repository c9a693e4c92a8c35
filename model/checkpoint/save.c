/* Saves a run while it continues.
 *
 *   IDLE -checkpoint_begin-> WRITING -checkpoint_poll or checkpoint_finish-> IDLE
 *
 * checkpoint_begin copies this rank's slices to host memory. Training continues while a thread per
 * rank writes them to disk. The first save allocates the host memory, and later saves reuse it.
 * Every rank knows without communication whether a save is in progress. The thread calls neither
 * MPI nor the device and never dies: it stores its error, which the main thread reports. When all
 * ranks have written, rank 0 publishes.
 *
 * The manifest is the last file written into stepN.tmp; stepN.tmp becomes stepN when all its files
 * are on disk. So a crash at any moment leaves the last complete checkpoint. A state with
 * non-finite values is never saved, and a save can be dropped until it is published. */
#include "model/checkpoint/save.h"

#include <inttypes.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/layout_ranges.h"
#include "model/checkpoint/layout_finite.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/saved_as.h"
#include "model/checkpoint/tokenizer_files.h"
#include "model/checkpoint/tower.h"
#include "model/config/resolved.h"
#include "model/formats/adapter.h"
#include "model/formats/hf.h"

/* kind of save: step<N>, step<N>-aborted, step<N>-average */
typedef enum { SAVE_STEP, SAVE_ASIDE, SAVE_AVERAGE } SaveKind;

static struct {
    const Config *config; /* NULL: no save in progress */
    TrainState state;
    StateCounts counts; /* counts of the optimizer's states */
    char *folder;       /* path of stepN.tmp */
    Layout model;       /* the whole model; if there are adapters, only the adapters */
    Layout optimizer;
    Range *own;
    char *snapshot;  /* this rank's slices of `model`, then of `optimizer` */
    size_t capacity; /* size of snapshot in bytes */
    pthread_t writer;
    atomic_bool written; /* the writer has ended and set problem and seconds */
    SaveKind kind;
    const char *problem; /* error of the writer; NULL: everything is on disk */
    double seconds;      /* seconds that the writer took */
    double paused;       /* seconds that training waited */
} save;

/* ---- descriptions ---------------------------------------------------------------------------- */

static const char *base_name(const char *path)
{
    return strrchr(path, '/') + 1;
}

static void write_text(const char *name, const char *text)
{
    char *path = xasprintf("%s/%s", save.folder, name);
    folder_write(path, text, strlen(text));
    free(path);
}

static void write_json(const char *name, json_t *value)
{
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    CHECK(text, "%s cannot be written as JSON", name);
    write_text(name, text);
    json_decref(value);
    free(text);
}

/* Returns the index. map, bytes: the vision tower's tensors with their file, and their size. */
static json_t *index_of(const Layout *l, json_t *map, json_int_t bytes)
{
    for (int i = 0; i < l->num_entries; i++) {
        const LayoutEntry *p = &l->entry[i];
        json_object_set_new(map, p->name, json_string(base_name(l->file[p->file]->path)));
        bytes += (json_int_t)(p->count * p->bytes);
    }
    return json_pack("{s:{s:I}, s:o}", "metadata", "total_size", bytes, "weight_map", map);
}

/* Adds the sizes of the files to the manifest's list. Returns their sum. */
static size_t list_files(json_t *files, const Layout *l)
{
    size_t sum = 0;
    for (int i = 0; i < l->num_files; i++) {
        size_t bytes = l->file[i]->data + l->file[i]->bytes;
        json_object_set_new(files, base_name(l->file[i]->path), json_integer((json_int_t)bytes));
        sum += bytes;
    }
    return sum;
}

static json_t *spikes(const SpikeWindow *w)
{
    char *loss = spikes_print(w->loss, w->count), *grad_norm = spikes_print(w->grad_norm, w->count);
    json_t *o = json_pack("{s:s, s:s}", "loss", loss, "grad_norm", grad_norm);
    free(loss);
    free(grad_norm);
    return o;
}

static void list_sums(json_t *sums, const Layout *l)
{
    for (int i = 0; i < l->num_entries; i++)
        json_object_set_new(sums, l->entry[i].name, json_sprintf("%08" PRIx32, l->sum[i]));
}

static json_t *hexadecimal(uint64_t x)
{
    return json_sprintf("%016" PRIx64, x);
}

/* Returns the weight and the position of each source, by its name. */
static json_t *mixed_sources(const TrainState *s)
{
    json_t *all = json_object();
    for (int i = 0; i < s->num_mix; i++) {
        const MixtureSourceState *m = &s->mix[i];
        const SourcePosition *p = &s->loader.source[i];
        json_object_set_new(
            all, m->name,
            json_pack("{s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "weight", (json_int_t)m->weight,
                      "epoch", (json_int_t)p->epoch, "instance", (json_int_t)p->instance, "mixed",
                      (json_int_t)p->mixed, "fingerprint", hexadecimal(m->fingerprint), "paths",
                      hexadecimal(m->content.tokens), "label_mask_paths",
                      hexadecimal(m->content.masks)));
    }
    return all;
}

static json_t *router_bias(const TrainState *s)
{
    json_t *bias = json_array();
    for (int i = 0; i < s->router_biases; i++)
        json_array_append_new(bias, json_real((double)s->router_bias[i]));
    return bias;
}

/* sums: checksums of the vision tower's tensors. */
static json_t *manifest(json_t *files, json_t *sums)
{
    const TrainState *s = &save.state;
    const StateCounts *n = &save.counts;
    list_sums(sums, &save.model);
    list_sums(sums, &save.optimizer);
    json_t *o = json_pack(
        "{s:i, s:I, s:I, s:I, s:{s:I, s:I}, s:o, s:{s:o, s:o}, s:o, s:o, s:i, s:o, s:o}",
        "format_version", CHECKPOINT_VERSION, "step", (json_int_t)s->step, "tokens",
        (json_int_t)s->tokens, "updates", (json_int_t)n->updates, "loader", "epoch",
        (json_int_t)s->loader.epoch, "instance", (json_int_t)s->loader.instance, "data_fingerprint",
        hexadecimal(s->fingerprint), "data_sample", "paths", hexadecimal(s->content.tokens),
        "label_mask_paths", hexadecimal(s->content.masks), "spikes", spikes(&s->spikes), "format",
        resolved_columns(save.config), "world_size", comm_size(), "files", files, "crc32c", sums);
    const SavedAs as = save.kind == SAVE_ASIDE ? SAVED_ABORTED : saved_as_of(save.config, s->step);
    json_object_set_new(o, "saved_as", json_string(saved_as_name(as)));
    if (n->raised > 0)
        json_object_set_new(o, "grad_wire_raised", json_integer((json_int_t)n->raised));
    if (s->num_mix > 0)
        json_object_set_new(o, "mix", mixed_sources(s));
    if (n->average.count > 0)
        json_object_set_new(o, "average",
                            json_pack("{s:I, s:I, s:I}", "last", (json_int_t)n->average.last,
                                      "every", (json_int_t)n->average.every, "count",
                                      (json_int_t)n->average.count));
    if (s->base_fingerprint)
        json_object_set_new(o, "base_sample", hexadecimal(s->base_fingerprint));
    if (s->router_bias && save.config->model.experts.bias_gamma > 0)
        json_object_set_new(o, "router_bias", router_bias(s));
    return o;
}

/* Writes adapter_config.json with an absolute path of the base, which is valid in any current
 * directory. */
static void write_adapter_config(const Config *c)
{
    Config absolute = *c;
    char *base = c->model.lora.base_path ? realpath(c->model.lora.base_path, NULL) : NULL;
    if (base)
        absolute.model.lora.base_path = base;
    char *text = adapter_config_text(&absolute);
    write_text("adapter_config.json", text);
    free(text);
    free(base);
}

/* Writes all files except the tensors. Returns the size of the tensors in bytes. */
static size_t write_descriptions(void)
{
    const Config *c = save.config;
    json_t *files = json_object(), *map = json_object(), *sums = json_object();
    size_t bytes = list_files(files, &save.model) + list_files(files, &save.optimizer);
    /* if there are adapters, the tower is in the folder of the base */
    const size_t tower = c->model.lora.rank > 0 ? 0 : tower_write(save.folder, map, files, sums);
    json_t *config = hf_config(&c->model, c->recipe.master.dtype);
    tokenizer_files_complete_config(config);
    if (c->model.lora.rank > 0) { /* a config.json would make the folder a whole model */
        tokenizer_files_keep_eos(config);
        json_decref(config);
        write_adapter_config(c);
    } else
        write_json("config.json", config);
    if (save.model.num_files > 1 || tower > 0)
        write_json("model.safetensors.index.json",
                   index_of(&save.model, json_incref(map), (json_int_t)tower));
    json_decref(map);
    tokenizer_files_write(save.folder);
    if (save.kind == SAVE_AVERAGE) {
        const TrainState *s = &save.state;
        write_json("average.json",
                   json_pack("{s:I, s:I, s:I, s:I}", "step", (json_int_t)s->step, "tokens",
                             (json_int_t)s->tokens, "last", (json_int_t)c->average.last, "every",
                             (json_int_t)c->average.every));
        json_decref(files);
        json_decref(sums);
        return bytes + tower;
    }
    write_text("config.yaml", c->text ? c->text : "");
    write_json("trainer.json", manifest(files, sums));
    return bytes + tower;
}

/* ---- the writer ------------------------------------------------------------------------------ */

static void *write_snapshot(void *unused)
{
    double start = clock_seconds();
    save.problem = layout_write(&save.model, save.own, save.snapshot);
    if (!save.problem)
        save.problem = layout_write(&save.optimizer, save.own,
                                    save.snapshot + layout_bytes(&save.model, save.own));
    save.seconds = clock_seconds() - start;
    atomic_store(&save.written, true);
    watchdog_beat(WORKER_SAVE, NULL);
    return unused;
}

static void start_writer(void)
{
    atomic_store(&save.written, false);
    watchdog_beat(WORKER_SAVE, "writing a checkpoint");
    int error = pthread_create(&save.writer, NULL, write_snapshot, NULL);
    if (error)
        die("%s: cannot start a thread to write it: %s", save.folder, strerror(error));
}

/* Whether all ranks have written their slices. Dies if a rank had an error. */
static bool all_written(void)
{
    bool written = atomic_load(&save.written), failed = written && save.problem;
    double x[3] = { !written, failed, written ? save.seconds : 0 };
    comm_max(x, 3);
    if (failed) {
        pthread_join(save.writer, NULL);
        die("%s; the checkpoint of step %ld is lost, earlier ones are unchanged. Free space or "
            "choose another "
            "save_folder, and continue with --try_load_latest_save",
            save.problem, save.state.step);
    }
    if (x[1] > 0)
        comm_barrier(); /* the rank with the error reports it, then ends all ranks */
    if (x[0] > 0)
        return false;
    save.seconds = x[2];
    return true;
}

/* ---- saving ---------------------------------------------------------------------------------- */

static void open_files(void)
{
    if (comm_rank() == 0) {
        folder_prepare(save.folder);
        for (int i = 0; i < save.model.num_files; i++)
            safetensors_create(save.model.file[i]);
        for (int i = 0; i < save.optimizer.num_files; i++)
            safetensors_create(save.optimizer.file[i]);
    }
    comm_barrier();
}

static void take_snapshot(const ParamStore *store)
{
    size_t model = layout_bytes(&save.model, save.own),
           bytes = model + layout_bytes(&save.optimizer, save.own);
    if (bytes > save.capacity) {
        device_host_free(save.snapshot);
        save.snapshot = device_host_alloc(bytes, NULL);
        save.capacity = bytes;
    }
    layout_snapshot(save.snapshot, &save.model, save.own, store);
    layout_snapshot(save.snapshot + model, &save.optimizer, save.own, store);
}

static void die_if_not_finite(const ParamStore *store)
{
    const char *name = layout_not_finite(&save.model, store);
    if (!name)
        name = layout_not_finite(&save.optimizer, store);
    if (name)
        die("step %ld: %s holds a value that is not finite (or, in exp_avg_sq, is negative), so "
            "the model is not saved; %s. Lower "
            "optimizer.learning_rate, clip gradients (max_grad_norm) or look at the data of the "
            "last steps",
            save.state.step, name, folder_say_latest(save.config->save_folder));
}

/* Returns the path of the folder to write, on all ranks. Rank 0 chooses a free name. */
static char *choose_folder(const char *save_folder, long step)
{
    char name[64] = "", *path = comm_rank() == 0 ? folder_choose(save_folder, step) : NULL;
    if (path)
        snprintf(name, sizeof name, "%s", base_name(path));
    free(path);
    comm_broadcast(name, sizeof name, 0);
    return xasprintf("%s/%s", save_folder, name);
}

/* SAVE_ASIDE: also saves values that are not finite. SAVE_AVERAGE: saves no optimizer states. */
static void begin(const Config *c, const ParamStore *store, const TrainState *s, size_t file_limit,
                  SaveKind kind)
{
    double start = clock_seconds();
    checkpoint_finish();
    save.config = c;
    save.state = *s;
    if (s->router_bias) { /* later steps change it */
        const size_t bytes = sizeof *s->router_bias * (size_t)s->router_biases;
        save.state.router_bias = memcpy(xmalloc(bytes), s->router_bias, bytes);
    }
    save.counts = store->counts;
    save.kind = kind;
    save.folder = choose_folder(c->save_folder, s->step);
    save.model = layout_make(save.folder, c->model.lora.rank > 0 ? LAYOUT_ADAPTER : LAYOUT_MODEL,
                             store, file_limit);
    save.optimizer = kind == SAVE_AVERAGE
                         ? (Layout){ 0 }
                         : layout_make(save.folder, LAYOUT_OPTIMIZER, store, file_limit);
    if (kind != SAVE_ASIDE)
        die_if_not_finite(store);
    save.own = layout_ranges(store);
    open_files();
    take_snapshot(store);
    start_writer();
    save.paused = clock_seconds() - start;
}

void checkpoint_begin(const Config *c, const ParamStore *store, const TrainState *s,
                      size_t file_limit)
{
    begin(c, store, s, file_limit, SAVE_STEP);
}

static void close_save(void)
{
    comm_barrier();
    layout_free(&save.model);
    layout_free(&save.optimizer);
    free(save.own);
    free(save.folder);
    free(save.state.router_bias);
    save.config = NULL;
}

/* Publishes the folder; an aborted state replaces no checkpoint. Returns the final path,
 * malloc'ed. */
static char *publish(void)
{
    const Config *c = save.config;
    static const char *const suffix[] = { "", "-aborted", "-average" };
    char *path = xasprintf("%s/step%ld%s", c->save_folder, save.state.step, suffix[save.kind]);
    layout_sum(&save.model);
    if (save.optimizer.num_entries > 0)
        layout_sum(&save.optimizer);
    if (comm_rank() == 0) {
        watchdog_mark("publishing the checkpoint", -1);
        size_t bytes = write_descriptions();
        if (save.kind == SAVE_STEP)
            folder_publish(c->save_folder, save.state.step);
        else {
            free(path);
            path = (save.kind == SAVE_ASIDE ? folder_set_aside
                                            : folder_put_average)(c->save_folder, save.state.step);
        }
        printf("saved %s: %.3g GiB, training paused %.2f s, written in %.2f s\n", path,
               (double)bytes / 0x1p30, save.paused, save.seconds);
        fflush(stdout);
        if (save.kind == SAVE_STEP)
            checkpoint_prune(c);
    }
    close_save();
    return path;
}

bool checkpoint_poll(void)
{
    if (!save.config || !all_written())
        return false;
    pthread_join(save.writer, NULL);
    free(publish());
    return true;
}

/* Polls instead of blocking in a collective, in which the watchdog could not distinguish a rank
 * that still writes from a rank that hangs. */
static void wait_for_writers(void)
{
    watchdog_wait_for(WORKER_SAVE);
    while (!all_written())
        usleep(20000);
    watchdog_wait_for(NO_WORKER);
    pthread_join(save.writer, NULL);
}

void checkpoint_finish(void)
{
    if (!save.config)
        return;
    wait_for_writers();
    free(publish());
}

void checkpoint_drop(void)
{
    const Config *c = save.config;
    if (!c)
        return;
    wait_for_writers();
    close_save();
    /* NFS renames a deleted file that is still open, and the folder then cannot be removed */
    comm_barrier();
    if (comm_rank() == 0)
        folder_clean(c->save_folder);
}

char *checkpoint_set_aside(const Config *c, const ParamStore *store, const TrainState *s,
                           size_t file_limit)
{
    begin(c, store, s, file_limit, SAVE_ASIDE);
    wait_for_writers();
    return publish();
}

void checkpoint_write_average(const Config *c, const ParamStore *store, const TrainState *s,
                              size_t file_limit)
{
    begin(c, store, s, file_limit, SAVE_AVERAGE);
    wait_for_writers();
    free(publish());
}
