/* Streams tensor by tensor: memory holds a piece of one, and of a matrix with an adapter that adapter, whatever the size of the
 * model. */
#include "model/checkpoint/export.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/clock.h"
#include "kernels/comm.h"
#include "kernels/error.h"
#include "kernels/text.h"
#include "model/architecture.h"
#include "model/checkpoint/base_sample.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/companions.h"
#include "model/checkpoint/convert.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/merge.h"
#include "model/checkpoint/nf4_source.h"
#include "model/checkpoint/source.h"
#include "model/checkpoint/target.h"
#include "model/config/adapter.h"
#include "model/config/hf.h"
#include "model/config/pointer.h"

enum { CHUNK = 8 << 20 };       /* elements that are in memory at once */

/* A tensor: where it is, the file that it goes to, and the adapter beside it, if there is one. */
typedef struct Entry {
    HfTensor          tensor;
    const SafeFile   *from;
    const SafeTensor *source;
    int               file;
    const struct Entry *a, *b;
} Entry;

typedef struct {
    const char *folder;         /* that is exported: a model or adapters */
    const char *base;           /* where the model is: that folder, or that of the adapters' base */
    char       *temporary;      /* that is written */
    const char *dtype;
    Lora        lora;           /* rank 0: there are no adapters */
    Source      source, adapter;
    Entry      *entry, *low;    /* the model's, and those of adapters */
    int         num_entries, num_low, num_files;
    SafeFile  **file;
} Export;

/* ---- the command line ------------------------------------------------------------------------------------- */

static const char usage[] = "expected ./train --export=CHECKPOINT [--dtype=bf16|f16|f32] [--lora.base_path=BASE] FOLDER";

bool export_is_asked(int argc, char **argv)
{
    bool asked = false;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--help", 6) == 0 || strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--version") == 0)
            return false;
        asked |= strcmp(argv[i], "--export") == 0 || strncmp(argv[i], "--export=", 9) == 0;
    }
    return asked;
}

static const char *dtype_named(const char *name)
{
    static const char *const names[][2] = { { "bf16", "BF16" }, { "f16", "F16" }, { "f32", "F32" } };
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i][0]) == 0)
            return names[i][1];
    die("--dtype=%s: expected bf16, f16 or f32", name);
}

void export_run(int argc, char **argv)
{
    const char *source = NULL, *base = NULL, *dtype = NULL;
    char *target = NULL;
    if (comm_size() > 1)
        die("--export is the work of one process, not of %d: start it without mpirun", comm_size());
    for (int i = 1; i < argc; i++) {
        char *a = argv[i];
        const bool is_source = strncmp(a, "--export=", 9) == 0, is_dtype = strncmp(a, "--dtype=", 8) == 0;
        const bool is_base = strncmp(a, "--lora.base_path=", 17) == 0 && a[17];
        if ((is_source && source) || (is_dtype && dtype) || (is_base && base) || (*a != '-' && target))
            die("--export: '%s' is one too many; %s", a, usage);
        if (text_ends_with(a, ".yaml") || text_ends_with(a, ".yml"))
            die("--export takes no configuration such as %s: the checkpoint says all; %s", a, usage);
        if (is_source ? !a[9] : strcmp(a, "--export") == 0)
            die("'%s' names no checkpoint; %s", a, usage);
        if (is_source)
            source = a + 9;
        else if (is_dtype)
            dtype = dtype_named(a + 8);
        else if (is_base)
            base = a + 17;
        else if (*a == '-' || !*a)
            die("--export: '%s' means nothing here; %s", a, usage);
        else
            target = a;
    }
    if (!target)
        die("--export: the folder to write is missing; %s", usage);
    for (size_t n = strlen(target); n > 1 && target[n - 1] == '/'; n--)
        target[n - 1] = '\0';
    export_folder(source, base, target, dtype ? dtype : "BF16", CHECKPOINT_FILE_BYTES);
}

/* ---- what there is ---------------------------------------------------------------------------------------- */

static bool holds_model(const char *folder)
{
    char *path = xasprintf("%s/config.json", folder);
    const bool found = folder_exists(path);
    free(path);
    return found;
}

/* The latest checkpoint, if `source` is the folder of a run. */
static char *choose(const char *source)
{
    struct stat status;
    char *named = pointer_follow(source);
    if (named)
        return named;
    if (stat(source, &status) != 0 || !S_ISDIR(status.st_mode))
        die("--export=%s: there is no such folder; expected a checkpoint, the save_folder of a run, or a folder that "
            "save_pretrained wrote", source);
    if (target_is_unfinished(source))
        die("--export=%s: an export to there was interrupted; name the checkpoint that it began with", source);
    if (holds_model(source) || adapter_is(source))
        return xstrdup(source);
    char *latest = checkpoint_latest(source);
    if (!latest)
        die("--export=%s: there is neither a config.json, so it is no checkpoint, nor a checkpoint in it", source);
    return latest;
}

/* Where the adapters' base is: as `given`, or as their file says. The caller owns it. */
static char *find_base(const char *folder, const char *given)
{
    char *base = given ? xstrdup(given) : adapter_base(folder);
    if (!base || !holds_model(base))
        die("--export=%s: its adapters are added to the weights of the model they stand beside, and %s %s%s; "
            "--lora.base_path=FOLDER says where that is", folder,
            given ? "--lora.base_path" : "base_model_name_or_path of its adapter_config.json",
            base ? "is no folder with a config.json: " : "names none", base ? base : "");
    return base;
}

/* Also files with the padding rows of the vocabulary are read. */
static void check(const Export *x, const Entry *e)
{
    const HfTensor *t = &e->tensor;
    const SafeTensor *s = e->source;
    const bool fits = t->vector ? s->dims == 1 && s->shape[0] == t->cols
                                : s->dims == 2 && s->shape[1] == t->cols && (s->shape[0] == t->rows || s->shape[0] == t->max_rows);
    if (nf4_source_has(x->source.file, x->source.count, s->name))
        die("%s: tensor %s is stored in 4 bits; an export takes 16-bit weights, so name the folder that this one was quantized "
            "from%s", e->from->path, s->name, x->adapter.count > 0 ? ": --lora.base_path=FOLDER" : "");
    if (!convert_knows(s->dtype))
        die("%s: tensor %s is stored as %s; expected F32, BF16 or F16", e->from->path, s->name, s->dtype);
    if (!fits)
        die("%s: tensor %s has %d dimension%s of %zu and %zu; by %s it needs %zu rows of %zu", e->from->path, s->name,
            s->dims, s->dims == 1 ? "" : "s", s->shape[0], s->shape[1], t->adapter ? "adapter_config.json" : "config.json",
            t->rows, t->cols);
}

/* Fills in where the tensor is. */
static void find(const Export *x, Entry *e)
{
    e->source = source_find(e->tensor.adapter ? &x->adapter : &x->source, e->tensor.name, &e->from);
    if (!e->source)
        die("%s: there is no tensor %s, which the %s needs", e->tensor.adapter ? x->folder : x->base, e->tensor.name,
            e->tensor.adapter ? "adapters of its adapter_config.json" : "model of its config.json");
    check(x, e);
}

/* All tensors, in the order of the model's units. */
static void list_tensors(Export *x, const ModelConfig *m)
{
    int count;
    HfTensor *tensor = hf_tensors_of(m, &count);
    x->entry = xcalloc((size_t)count + 1, sizeof *x->entry);
    x->low = xcalloc((size_t)count + 1, sizeof *x->low);
    for (int i = 0; i < count; i++) {
        Entry *e = tensor[i].adapter ? &x->low[x->num_low++] : &x->entry[x->num_entries++];
        e->tensor = tensor[i];
        find(x, e);
    }
    free(tensor);
}

static const Entry *find_entry(const Entry *list, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (strcmp(list[i].tensor.name, name) == 0)
            return &list[i];
    return NULL;
}

/* That of the adapter beside e, which is called `matrix`; NULL: there is none. */
static const Entry *find_low(const Export *x, const Entry *e, const char *matrix)
{
    const int length = (int)(strlen(e->tensor.name) - strlen("weight"));
    char *name = xasprintf("base_model.model.%.*s%s.weight", length, e->tensor.name, matrix);
    const Entry *low = find_entry(x->low, x->num_low, name);
    free(name);
    return low;
}

static void join(Export *x)
{
    int joined = 0;
    for (int i = 0; i < x->num_entries; i++) {
        Entry *e = &x->entry[i];
        e->a = find_low(x, e, "lora_A");
        e->b = find_low(x, e, "lora_B");
        joined += (e->a != NULL) + (e->b != NULL);
    }
    CHECK(joined == x->num_low, "%d of %d tensors of adapters stand beside a matrix", joined, x->num_low);
}

static void check_left_over(const Export *x, const ModelConfig *m)
{
    for (int i = 0; i < x->source.count + x->adapter.count; i++) {
        const bool low = i >= x->source.count;
        const SafeFile *f = low ? x->adapter.file[i - x->source.count] : x->source.file[i];
        for (int t = 0; t < f->count; t++) {
            const char *name = f->tensor[t].name;
            if (find_entry(low ? x->low : x->entry, low ? x->num_low : x->num_entries, name)
                || (!low && source_may_have(&x->source, name, x->base, m)))
                continue;
            if (low)
                source_refuse_embedding(x->folder, name);
            die("%s: tensor %s has no place in the %s", f->path, name,
                low ? "adapters of adapter_config.json" : "model of config.json");
        }
    }
}

/* ---- the files -------------------------------------------------------------------------------------------- */

static size_t numel(const HfTensor *t)
{
    return t->rows * t->cols;
}

/* Numbers the files: a tensor goes into the next one if it does not fit. */
static void divide(Export *x, size_t file_limit)
{
    const size_t size = safetensors_dtype_size(x->dtype);
    size_t filled = 0;
    for (int i = 0; i < x->num_entries; i++) {
        const size_t bytes = numel(&x->entry[i].tensor) * size;
        if (filled > 0 && filled + bytes > file_limit) {
            x->num_files++;
            filled = 0;
        }
        filled += bytes;
        x->entry[i].file = x->num_files;
    }
    x->num_files++;
}

static void create_files(Export *x)
{
    x->file = xcalloc((size_t)x->num_files, sizeof *x->file);
    for (int i = 0; i < x->num_files; i++) {
        char *path = x->num_files == 1 ? xasprintf("%s/model.safetensors", x->temporary)
                                       : xasprintf("%s/model-%05d-of-%05d.safetensors", x->temporary, i + 1, x->num_files);
        x->file[i] = safetensors_new(path);
        free(path);
    }
    for (int i = 0; i < x->num_entries; i++) {
        const HfTensor *t = &x->entry[i].tensor;
        const size_t shape[2] = { t->vector ? t->cols : t->rows, t->cols };
        safetensors_add(x->file[x->entry[i].file], t->name, x->dtype, t->vector ? 1 : 2, shape);
    }
    for (int i = 0; i < x->num_files; i++) {
        safetensors_lay_out(x->file[i]);
        safetensors_create(x->file[i]);
    }
}

/* value: the first of e's that is not finite in the type asked for. */
static _Noreturn void die_of_value(const Export *x, const Entry *e, float value)
{
    if (!isfinite(value))
        die("%s: tensor %s holds a value that is not finite: this model is ruined. %s", e->from->path, e->source->name,
            folder_say_others(x->folder));
    die("%s: tensor %s holds %g, more than %s can: %s", e->from->path, e->source->name, (double)value, x->dtype,
        strcmp(x->dtype, "F16") == 0 ? "take --dtype=bf16" : "take --dtype=f32");
}

static _Noreturn void die_of_disk(const Export *x, const SafeFile *file)
{
    die("%s; the export is not complete. Make room or name a folder elsewhere; %s can be removed, and the next export to there "
        "replaces it", file->problem, x->temporary);
}

static void check_sum(const Entry *e, uint32_t sum)
{
    const SafeTensor *t = e->source;
    if (t->has_sum && t->sum != sum)
        die("%s: tensor %s has the checksum %08x, and %08x in trainer.json: some of its bytes are not those that were saved. Copy "
            "the file again or export another checkpoint", e->from->path, t->name, sum, t->sum);
}

/* All of an adapter's tensor; the caller frees it. */
static float *read_low(const Export *x, const Entry *e)
{
    const SafeTensor *t = e->source;
    const size_t bytes = t->end - t->begin, n = numel(&e->tensor);
    void *raw = xmalloc(bytes);
    float *values = xmalloc(n * sizeof *values);
    safetensors_read(e->from, raw, t, 0, bytes);
    check_sum(e, crc32c(0, raw, bytes));
    convert_decode(values, t->dtype, raw, n);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            die_of_value(x, e, values[i]);
    free(raw);
    return values;
}

static Merge open_merge(const Export *x, const Entry *e)
{
    float *a = read_low(x, e->a), *b = read_low(x, e->b);
    const Merge m = merge_open(a, b, x->lora.rank, e->tensor.rows, e->tensor.cols, (float)lora_scale(&x->lora));
    free(a);
    free(b);
    return m;
}

static void write_tensor(const Export *x, const Entry *e, void *raw, float *values)
{
    const SafeTensor *from = e->source;
    SafeFile *file = x->file[e->file];
    const SafeTensor *to = safetensors_find(file, from->name);
    const size_t size = safetensors_dtype_size(from->dtype), all = (from->end - from->begin) / size, own = numel(&e->tensor);
    const size_t wide = safetensors_dtype_size(x->dtype);
    Merge m = e->a ? open_merge(x, e) : (Merge){ 0 };
    uint32_t sum = 0;
    for (size_t at = 0, n; at < all; at += n) {
        n = all - at < CHUNK ? all - at : CHUNK;
        safetensors_read(e->from, raw, from, at * size, n * size);
        sum = crc32c(sum, raw, n * size);
        convert_decode(values, from->dtype, raw, n);
        if (e->a)
            merge_add(values, &m, at, n);
        const size_t kept = at >= own ? 0 : own - at < n ? own - at : n, bad = convert_encode(raw, x->dtype, values, kept);
        if (bad < kept)
            die_of_value(x, e, values[bad]);
        if (!safetensors_write(file, to, at * wide, raw, kept * wide))
            die_of_disk(x, file);
    }
    check_sum(e, sum);
    merge_close(&m);
}

static void write_tensors(const Export *x)
{
    void *raw = xmalloc(CHUNK * sizeof(float));
    float *values = xmalloc(CHUNK * sizeof *values);
    for (int i = 0; i < x->num_entries; i++)
        write_tensor(x, &x->entry[i], raw, values);
    for (int i = 0; i < x->num_files; i++)
        if (!safetensors_sync(x->file[i]))
            die_of_disk(x, x->file[i]);
    free(raw);
    free(values);
}

/* ---- descriptions ----------------------------------------------------------------------------------------- */

/* Numbers in the digits somebody wrote, 1e-05, where these are all there are. */
static char *json_text(const json_t *value)
{
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *again = json_loads(text, 0, NULL);
    if (!json_equal(value, again)) {
        free(text);
        text = json_dumps(value, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(again);
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

/* That of the folder, but for the type, and with the class that it was read as. Every transformers reads torch_dtype; 5 writes dtype,
 * which counts if it is there. */
static json_t *config(const Export *x, const Architecture *class)
{
    char *path = xasprintf("%s/config.json", x->base);
    json_t *j = json_load_file(path, 0, NULL), *name;
    CHECK(j, "%s was read before", path);
    name = json_string(strcmp(x->dtype, "F32") == 0 ? "float32" : strcmp(x->dtype, "F16") == 0 ? "float16" : "bfloat16");
    json_object_set(j, "torch_dtype", name);
    if (json_object_get(j, "dtype"))
        json_object_set(j, "dtype", name);
    json_decref(name);
    json_object_set_new(j, "architectures", json_pack("[s]", class->class));
    json_object_set_new(j, "model_type", json_string(class->model_type));
    free(path);
    return j;
}

static size_t bytes_of(const Export *x)
{
    size_t bytes = 0;
    for (int i = 0; i < x->num_files; i++)
        bytes += x->file[i]->bytes;
    return bytes;
}

static json_t *index_of(const Export *x)
{
    json_t *map = json_object();
    for (int i = 0; i < x->num_entries; i++)
        json_object_set_new(map, x->entry[i].tensor.name, json_string(strrchr(x->file[x->entry[i].file]->path, '/') + 1));
    return json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)bytes_of(x), "weight_map", map);
}

/* What there is, and what it is to become. base: NULL, or where that of adapters is. */
static void open_export(Export *x, ModelConfig *m, const char *base)
{
    const bool adapter = adapter_is(x->folder);
    double dropout;
    if (base && !adapter)
        die("--lora.base_path=%s: %s is a whole model, and has no adapters that stand beside another", base, x->folder);
    x->base = adapter ? find_base(x->folder, base) : x->folder;
    x->source = source_open(x->base);
    config_read_hf(m, x->base);
    source_refuse_quantized(&x->source);
    if (adapter) {
        base_check(x->folder, x->base, base_sample(&x->source), false);
        x->adapter = source_open_adapter(x->folder);
        adapter_read(&m->lora, &dropout, x->folder, m);
        x->lora = m->lora;
    }
    list_tensors(x, m);
    join(x);
    check_left_over(x, m);
    companions_read(x->folder, x->base);
}

static void close_export(Export *x)
{
    for (int i = 0; i < x->num_files; i++)
        safetensors_close(x->file[i]);
    source_close(&x->source);
    source_close(&x->adapter);
    if (x->base != x->folder)
        free((char *)x->base);
    free(x->file);
    free(x->entry);
    free(x->low);
    free(x->temporary);
}

void export_folder(const char *source, const char *base, const char *target, const char *dtype, size_t file_limit)
{
    const double start = clock_seconds();
    char *folder = choose(source);
    ModelConfig m = { 0 };
    Export x = { .folder = folder, .dtype = dtype, .temporary = xasprintf("%s.tmp", target) };
    open_export(&x, &m, base);
    /* now: a run may delete its old checkpoints, whose open files can still be read */
    json_t *description = config(&x, m.architecture);
    divide(&x, file_limit);

    const int begun = target_begin(target);
    create_files(&x);
    write_tensors(&x);
    if (x.num_files > 1)
        write_json(&x, "model.safetensors.index.json", index_of(&x));
    write_json(&x, "config.json", description);
    companions_write(x.temporary);
    target_complete(target, begun);
    if (x.lora.rank > 0)
        printf("base %s, which stays as it is, with the adapters of %s merged into it:\n", x.base, folder);
    printf("exported %s to %s: %.3g GiB in %d file%s, %s, in %.1f s\n", folder, target, (double)bytes_of(&x) / 0x1p30, x.num_files,
           x.num_files > 1 ? "s" : "", dtype, clock_seconds() - start);
    close_export(&x);
    free(folder);
}
