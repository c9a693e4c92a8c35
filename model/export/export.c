/* Exports tensor by tensor. Memory only holds a piece of one tensor and the adapter of one matrix,
 * whatever the size of the model. */
#include "model/export/export.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/base_fingerprint.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/coded_source.h"
#include "model/checkpoint/convert.h"
#include "model/export/export_files.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/target.h"
#include "model/checkpoint/tokenizer_files.h"
#include "model/checkpoint/tower.h"
#include "model/config/export_options.h"
#include "model/formats/adapter.h"
#include "model/formats/file.h"
#include "model/formats/hf.h"
#include "model/formats/hf_keys.h"
#include "model/formats/pointer.h"
#include "model/shape/units.h"

/* ---- the source ------------------------------------------------------------------------------ */

/* Returns `source`, or its latest checkpoint if `source` is the folder of a run. */
static char *choose(const char *option, const char *source)
{
    struct stat status;
    char *named = pointer_follow(source);
    if (named)
        return named;
    if (stat(source, &status) != 0 || !S_ISDIR(status.st_mode))
        die("%s: %s: there is no such folder; expected a checkpoint, the save_folder of a run, or "
            "a folder written by "
            "save_pretrained",
            option, source);
    if (target_is_unfinished(source))
        die("%s: %s: this is the output of an interrupted export; give the checkpoint that it "
            "exported",
            option, source);
    if (file_is_in(source, "config.json") || adapter_is(source))
        return xstrdup(source);
    char *latest = checkpoint_latest(source);
    if (!latest)
        die("%s: %s: no config.json and no checkpoint in it; expected a checkpoint or the "
            "save_folder of a run",
            option, source);
    return latest;
}

/* Returns the folder of the adapters' base: `given`, or the folder that adapter_config.json names.
 * The caller owns the text. */
static char *find_base(const char *option, const char *folder, const char *given)
{
    char *base = given ? xstrdup(given) : adapter_base(folder);
    if (!base || !file_is_in(base, "config.json"))
        die("%s: %s: these adapters are merged into the weights of their base model, but %s %s%s; "
            "give the base model's folder: --lora.base_path=FOLDER",
            option, folder,
            given ? "--lora.base_path" : "base_model_name_or_path of adapter_config.json",
            base ? "is not a folder with a config.json: " : "names no folder", base ? base : "");
    return base;
}

/* Files that include the padding rows of the vocabulary are accepted, too. */
static void check(const Entry *e)
{
    const HfTensor *t = &e->tensor;
    const SafeTensor *s = e->source;
    const bool fits = t->vector ? s->dims == 1 && s->shape[0] == t->cols
                                : s->dims == 2 && s->shape[1] == t->cols &&
                                      (s->shape[0] == t->rows || s->shape[0] == t->max_rows);
    if (!convert_knows(s->dtype))
        die("%s: tensor %s is stored as %s; expected F32, BF16 or F16", e->from->path, s->name,
            s->dtype);
    if (!fits)
        die("%s: tensor %s has %d dimension%s of %zu and %zu; according to %s it needs %zu rows of "
            "%zu",
            e->from->path, s->name, s->dims, s->dims == 1 ? "" : "s", s->shape[0], s->shape[1],
            t->adapter ? "adapter_config.json" : "config.json", t->rows, t->cols);
}

/* Sets the file in which the export stores the tensor. */
static void find(const Export *x, Entry *e)
{
    const bool is_adapter = e->tensor.adapter || e->tensor.with_adapter;
    char name[HF_NAME];
    strcpy(name, e->tensor.name);
    if (e->tensor.with_adapter)
        hf_adapter_name(name, e->tensor.name, NULL);
    e->from = is_adapter ? NULL : coded_source_find(x->source.file, x->source.count, name);
    if (e->from)
        return;
    const WeightFiles *s = is_adapter ? &x->adapter : &x->source;
    const Found found = safetensors_find_in(s->file, s->count, name);
    e->source = found.tensor;
    e->from = found.file;
    if (!e->source)
        die("%s: there is no tensor %s, which the %s needs", is_adapter ? x->folder : x->base, name,
            is_adapter ? "adapters of its adapter_config.json" : "model of its config.json");
    check(e);
}

static size_t common_divisor(size_t a, size_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

/* Dies if the shape of a matrix does not allow the requested codes. */
static void check_shapes(const Export *x)
{
    size_t cols = 0;
    for (int i = 0; i < x->num_entries; i++)
        cols = x->entry[i].is_coded ? common_divisor(x->entry[i].tensor.cols, cols) : cols;
    for (int i = 0; i < x->num_entries; i++) {
        const HfTensor *t = &x->entry[i].tensor;
        if (x->entry[i].is_coded && coded_refuses(x->coded, t->rows, t->cols))
            die("%s: matrix %s of %zu x %zu cannot be divided: %s; use %s", x->base, t->name,
                t->rows, t->cols,
                x->coded.kind == CODED_INT4 ? "a group is part of a row" : "blocks are 128 x 128",
                coded_instead(x->coded, cols));
    }
}

static void add_names(Export *x, const Entry *e)
{
    char name[HF_NAME];
    if (e->tensor.adapter)
        name_index_add(&x->adapter_names, e->tensor.name, x->num_adapter_entries - 1);
    else
        name_index_add(&x->names, e->tensor.name, x->num_entries - 1);
    if (!e->tensor.with_adapter)
        return;
    hf_adapter_name(name, e->tensor.name, NULL);
    name_index_add(&x->adapter_names, name, x->num_entries - 1);
}

/* Lists all tensors, in the order of the model's units. */
static void list_tensors(Export *x, const ModelConfig *m)
{
    int count;
    HfTensor *tensor = hf_tensors_of(m, &count);
    x->entry = xcalloc((size_t)count + 1, sizeof *x->entry);
    x->adapter_entry = xcalloc((size_t)count + 1, sizeof *x->adapter_entry);
    for (int i = 0; i < count; i++) {
        Entry *e = tensor[i].adapter ? &x->adapter_entry[x->num_adapter_entries++]
                                     : &x->entry[x->num_entries++];
        *e = (Entry){ .tensor = tensor[i], .is_coded = x->is_coded && tensor[i].operand };
        find(x, e);
        add_names(x, e);
    }
    name_index_sort(&x->names);
    name_index_sort(&x->adapter_names);
    free(tensor);
}

/* Returns the matrix `matrix` (lora_A or lora_B) of e's adapter; NULL: there is none. */
static const Entry *find_adapter_entry(const Export *x, const Entry *e, const char *matrix)
{
    char name[HF_NAME];
    if (e->tensor.vector)
        return NULL;
    hf_adapter_name(name, e->tensor.name, matrix);
    const int i = name_index_find(&x->adapter_names, name);
    return i < 0 ? NULL : &x->adapter_entry[i];
}

static void join(Export *x)
{
    int joined = 0;
    for (int i = 0; i < x->num_entries; i++) {
        Entry *e = &x->entry[i];
        e->a = find_adapter_entry(x, e, "lora_A");
        e->b = find_adapter_entry(x, e, "lora_B");
        joined += (e->a != NULL) + (e->b != NULL);
    }
    CHECK(joined == x->num_adapter_entries, "only %d of %d tensors of adapters belong to a matrix",
          joined, x->num_adapter_entries);
}

static void check_left_over(const Export *x, const ModelConfig *m)
{
    for (int i = 0; i < x->source.count + x->adapter.count; i++) {
        const bool is_adapter = i >= x->source.count;
        const SafeFile *f = is_adapter ? x->adapter.file[i - x->source.count] : x->source.file[i];
        for (int t = 0; t < f->count; t++) {
            const char *name = f->tensor[t].name;
            char *matrix =
                is_adapter ? NULL : coded_source_matrix(x->source.file, x->source.count, name);
            const bool placed = name_index_find(is_adapter ? &x->adapter_names : &x->names,
                                                matrix ? matrix : name) >= 0;
            free(matrix);
            if (placed || (!is_adapter && m->image.feature_size > 0 && tower_owns(name)))
                continue;
            if (!is_adapter && weight_files_may_have(&x->source, name, x->base, m))
                continue;
            if (is_adapter)
                weight_files_refuse_adapter(x->folder, name);
            die("%s: tensor %s has no place in the %s", f->path, name,
                is_adapter ? "adapters of adapter_config.json" : "model of config.json");
        }
    }
}

/* ---- descriptions ---------------------------------------------------------------------------- */

/* Returns the JSON text. Numbers have 15 digits, such as 1e-05, if this is exact for all numbers of
 * the file; otherwise 17 digits. */
static char *json_text(const json_t *value)
{
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *read_back = json_loads(text, 0, NULL);
    if (!json_equal(value, read_back)) {
        free(text);
        text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(read_back);
    return text;
}

static void write_json(const Export *x, const char *name, json_t *value)
{
    char *path = xasprintf("%s/%s", x->temporary, name), *text = json_text(value);
    folder_write(path, text, strlen(text));
    json_decref(value);
    free(path);
    free(text);
}

/* NOTE: all versions of transformers read torch_dtype; version 5 writes dtype, which takes
 * precedence. */
static void set_type(json_t *config, const char *dtype)
{
    json_t *name = json_string(strcmp(dtype, "F32") == 0   ? "float32"
                               : strcmp(dtype, "F16") == 0 ? "float16"
                                                           : "bfloat16");
    json_object_set(config, "torch_dtype", name);
    if (json_object_get(config, "dtype"))
        json_object_set(config, "dtype", name);
    json_decref(name);
}

/* The modules of the blocks' matrices that have no codes: the routers of experts. */
static json_t *plain_modules(const Export *x, const ModelConfig *m)
{
    json_t *names = json_array();
    for (int i = 0; i < x->num_entries; i++) {
        const HfTensor *t = &x->entry[i].tensor;
        if (unit_kind(m, t->unit)->is_layer && !t->vector && !t->operand)
            json_array_append_new(names,
                                  json_stringn(t->name, strlen(t->name) - strlen(".weight")));
    }
    return names;
}

/* The folder's config.json with the new type, and with the class under which it was read. In a
 * model with images, text_config has this class. */
static json_t *config(const Export *x, const ModelConfig *m)
{
    char *path = xasprintf("%s/config.json", x->base);
    json_t *j = json_load_file(path, 0, NULL), *plain = plain_modules(x, m);
    CHECK(j, "%s was read before", path);
    json_t *text = json_object_get(j, "text_config");
    set_type(j, x->dtype);
    json_object_del(j, "quantization_config");
    json_object_del(j, "compression_config");
    if (x->is_coded)
        json_object_set_new(j, "quantization_config", coded_config(x->coded, text != NULL, plain));
    set_type(text, x->dtype);
    if (!text) {
        json_object_set_new(j, "architectures", json_pack("[s]", m->architecture->class));
        json_object_set_new(j, "model_type", json_string(m->architecture->model_type));
    }
    json_decref(plain);
    free(path);
    return j;
}

/* --scales=trained needs a checkpoint of a run with E4M3 operands, without adapters. */
static void check_trained(const Export *x)
{
    if (!x->is_coded || x->coded.kind != CODED_FP8_TENSOR)
        return;
    json_t *manifest = weight_files_manifest(x->folder);
    const char *operand =
        json_string_value(json_object_get(json_object_get(manifest, "format"), "operand"));
    const char *why = x->lora.rank > 0 ? "this folder has adapters"
                      : !manifest      ? "this folder is not a checkpoint of a run"
                      : !operand || strcmp(operand, "e4m3") != 0
                          ? xasprintf("the run of this checkpoint multiplied in %s",
                                      operand ? operand : "an unknown format")
                          : NULL;
    if (why)
        die("%s: --scales=trained needs a checkpoint of a run with E4M3 operands, but %s. Without "
            "--scales=trained, each row gets one scale",
            x->folder, why);
    json_decref(manifest);
}

/* Opens the model of x->folder and lists its tensors. base: folder of the adapters' base; NULL: no
 * adapters. */
static ModelConfig open_model(Export *x, const char *base)
{
    const bool adapter = adapter_is(x->folder);
    ModelConfig m = { 0 };
    double dropout;
    if (base && !adapter)
        die("--lora.base_path=%s: %s is a whole model without adapters, so it has no base; leave "
            "--lora.base_path out",
            base, x->folder);
    x->base = adapter ? find_base(x->option, x->folder, base) : x->folder;
    x->source = weight_files_open(x->base);
    hf_read(&m, x->base);
    weight_files_refuse_quantized(&x->source, x->base);
    if (adapter) {
        base_fingerprint_check(x->folder, x->base, base_fingerprint(&x->source), false);
        x->adapter = weight_files_open_adapter(x->folder);
        adapter_read(&m.lora, &dropout, x->folder, &m);
        x->lora = m.lora;
    }
    check_trained(x);
    list_tensors(x, &m);
    check_shapes(x);
    join(x);
    check_left_over(x, &m);
    return m;
}

static void close_export(Export *x)
{
    for (int i = 0; i < x->num_other; i++)
        close_export(&x->other[i]);
    free(x->other);
    for (int i = 0; i < x->num_files; i++)
        safetensors_close(x->file[i]);
    weight_files_close(&x->source);
    weight_files_close(&x->adapter);
    if (x->base != x->folder)
        free(x->base);
    free(x->folder);
    free(x->target);
    free(x->temporary);
    free(x->file);
    free(x->entry);
    free(x->adapter_entry);
    name_index_free(&x->names);
    name_index_free(&x->adapter_names);
}

/* ---- averages -------------------------------------------------------------------------------- */

/* Dies if the config.json of the two models differ in a key that changes what the model computes. A
 * missing key has the default of the class. */
static void check_same(const Export *a, const ModelConfig *first, const Export *b,
                       const ModelConfig *other)
{
    json_t *x = hf_config(first, F32), *y = hf_config(other, F32), *value;
    const char *key;
    json_object_foreach(x, key, value)
    {
        const HfKey *row = hf_key(first->architecture, key);
        const json_t *found = json_object_get(y, key);
        if ((row && (row->kind & HF_KIND_MASK) == HF_TOKEN) || json_equal(value, found))
            continue;
        die("%s/config.json: %s is %.64s, but in %s/config.json it is %.64s; only models of "
            "one architecture can be averaged",
            b->base, key,
            found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15))
                  : "missing",
            a->base, json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15)));
    }
    json_decref(x);
    json_decref(y);
}

/* Opens all models of an average except the first. */
static void open_others(Export *x, const ModelConfig *m, const ExportOptions *o)
{
    x->num_other = o->num_sources - 1;
    x->other = xcalloc((size_t)x->num_other, sizeof *x->other);
    for (int i = 0; i < x->num_other; i++) {
        Export *other = &x->other[i];
        *other = (Export){ .option = x->option,
                           .weight = o->weights[i + 1],
                           .dtype = x->dtype,
                           .folder = choose(x->option, o->sources[i + 1]) };
        const ModelConfig found = open_model(other, o->base_path);
        check_same(x, m, other, &found);
        CHECK(other->num_entries == x->num_entries, "%s: %d tensors, expected %d", other->folder,
              other->num_entries, x->num_entries);
    }
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* A bias of routers (Experts.bias_gamma) is in trainer.json alone. */
static void refuse_router_bias(const Export *x, const Architecture *a)
{
    json_t *manifest = weight_files_manifest(x->folder);
    if (json_object_get(manifest, "router_bias"))
        die("%s: %s was trained with model.bias_gamma, but %s has no place for the bias of its "
            "routers, so other programs would choose other experts. Train some more steps with "
            "--model.bias_gamma=null, and export these",
            x->option, x->folder, a->class);
    json_decref(manifest);
}

Export export_open(const ExportOptions *o)
{
    static const char *const dtypes[] = {
        [EXPORT_BF16] = "BF16", [EXPORT_F16] = "F16", [EXPORT_F32] = "F32"
    };
    Export x = { .start = clock_seconds(),
                 .is_coded = coded_knows(o->dtype),
                 .coded = coded_find(o),
                 .weight = 1 };
    const bool average = o->num_sources > 0;
    x.option = average ? "--average" : "--export";
    x.dtype = x.is_coded ? "BF16" : dtypes[o->dtype];
    x.target = xstrdup(o->target);
    x.temporary = xasprintf("%s.tmp", x.target);
    x.folder = choose(x.option, average ? o->sources[0] : o->source);
    const ModelConfig m = open_model(&x, o->base_path);
    if (average) {
        x.weight = o->weights[0];
        open_others(&x, &m, o);
    }
    refuse_router_bias(&x, m.architecture);
    tokenizer_files_read(x.folder, x.base);
    tower_read(&x.source);
    if (m.experts.count > 0 && o->num_calibration > 0)
        die("--calibration: %s is a model with experts, whose matrices see different tokens; "
            "calibration supports only one MLP per block: leave --calibration out",
            x.folder);
    if (m.image.feature_size > 0 && o->num_calibration > 0)
        die("--calibration: %s is a model with images, and calibration does not read images; leave "
            "--calibration out",
            x.folder);
    /* files are opened now: a run may delete this checkpoint, but open files stay readable */
    x.description = config(&x, &m);
    return x;
}

void export_begin(Export *x, size_t file_limit)
{
    export_divide(x, file_limit);
    x->begun = target_begin(x->target);
    export_create_files(x);
}

static void print_result(const Export *x)
{
    if (x->lora.rank > 0)
        printf("base %s (unchanged) merged with the adapters of %s:\n", x->base, x->folder);
    if (x->is_coded && x->coded.kind == CODED_INT4 && !x->is_calibrated)
        printf("int4 without --calibration: weights are rounded, with the scales that give the "
               "least error\n");
    if (x->num_other > 0)
        printf("averaged %s (weight %.4g, with its tokenizer)", x->folder, x->weight);
    for (int i = 0; i < x->num_other; i++)
        printf(", %s (%.4g)%s", x->other[i].folder, x->other[i].weight,
               i + 1 == x->num_other ? "\n" : "");
    printf("exported %s to %s: %.3g GiB in %d file%s, %s, in %.1f s\n",
           x->num_other > 0 ? "the average" : x->folder, x->target,
           (double)export_bytes(x) / 0x1p30, x->num_files, x->num_files > 1 ? "s" : "",
           x->is_coded ? coded_name(x->coded) : x->dtype, clock_seconds() - x->start);
}

void export_complete(Export *x)
{
    export_write(x);
    json_t *map = json_object();
    const size_t tower = tower_write(x->temporary, map, NULL, NULL);
    if (x->num_files > 1 || tower > 0)
        write_json(x, "model.safetensors.index.json", export_index(x, json_incref(map), tower));
    json_decref(map);
    write_json(x, "config.json", x->description);
    tokenizer_files_write(x->temporary);
    target_complete(x->target, x->begun);
    print_result(x);
    close_export(x);
}

void export_to(const ExportOptions *o, size_t file_limit)
{
    Export x = export_open(o);
    export_begin(&x, file_limit);
    export_complete(&x);
}
