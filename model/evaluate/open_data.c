#include "model/evaluate/open_data.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/tower.h"
#include "model/formats/adapter.h"

/* true while files are opened, in the calling thread. The loader's own thread reads them later and
 * shows no progress. */
static _Thread_local bool opening;

static void beat(Worker w, const char *doing)
{
    watchdog_beat(w, doing);
    if (opening && doing)
        progress_show(-1, doing);
}

static void beat_data(const char *doing)
{
    beat(WORKER_DATA, doing);
}

static void beat_validation(const char *doing)
{
    beat(WORKER_VALIDATION, doing);
}

ImageRows batch_images(const Batch *b, int first, int T)
{
    return (ImageRows){ b->images ? b->images + (size_t)first * (size_t)T : NULL,
                        b->images_f32 ? F32 : BF16 };
}

_Static_assert((int)MOST_SOURCES == (int)MIXTURE_MOST && (int)SOURCE_NAME == (int)MIXTURE_NAME,
               "limits of data.mix");

/* Fills a DataSpec with the sources of data.mix. */
static int copy_mix(MixtureSource out[MIXTURE_MOST], const Config *c)
{
    for (int i = 0; i < c->data.num_mix; i++) {
        const DataSource *s = &c->data.mix[i];
        out[i] = (MixtureSource){
            .name = s->name,
            .paths = s->files.paths,
            .num_paths = s->files.num_paths,
            .label_mask_paths = s->files.label_mask_paths,
            .num_label_mask_paths = s->files.num_label_mask_paths,
            .image_paths = s->files.image_paths,
            .num_image_paths = s->files.num_image_paths,
            .image_features = s->files.image_features,
            .ratio = s->ratio,
            .max_repetition = s->max_repetition,
            .tokens = s->tokens,
        };
    }
    return c->data.num_mix;
}

const char *tower_folder(const Config *c)
{
    return c->load_folder && adapter_is(c->load_folder) ? c->model.lora.base_path : c->load_folder;
}

uint64_t tower_of(const Config *c)
{
    static uint64_t fingerprint;
    static char *of;
    const char *folder = tower_folder(c);
    if (c->model.image.feature_size == 0 || !folder)
        return 0;
    if (of && strcmp(of, folder) == 0)
        return fingerprint;
    WeightFiles s = weight_files_open(folder);
    fingerprint = tower_fingerprint(&s);
    weight_files_close(&s);
    free(of);
    of = xstrdup(folder);
    return fingerprint;
}

/* The size of a stored value: a log-probability, a word of soft labels, or numbers of a policy. */
static int value_bytes(const Config *c, const EvalSet *set)
{
    if (set ? set->pairs : c->preference.kind != PREFERENCE_NONE)
        return sizeof(float);
    if (!set && c->policy.kind != POLICY_NONE)
        return POLICY_VALUES * sizeof(float);
    return !set && c->distill.kind != DISTILL_NONE ? sizeof(uint64_t) : 0;
}

Loader *open_data(char **problem, const Config *c, const EvalSet *set)
{
    const TokenFiles *f = set ? &set->files : &c->data.files;
    const int rank = comm_group_rank(RANKS_DATA), ranks = comm_group_size(RANKS_DATA);
    const int batch = set ? c->device_eval_batch_size * ranks : c->global_train_batch_size;
    DataSpec spec = {
        .key = set ? set->where : NULL,
        .paths = f->paths,
        .num_paths = f->num_paths,
        .label_mask_paths = f->label_mask_paths,
        .num_label_mask_paths = f->num_label_mask_paths,
        .image_paths = f->image_paths,
        .num_image_paths = f->num_image_paths,
        .image_features = f->image_features,
        .image_rows = c->model.image.feature_size > 0 ? c->model.image.rows : 0,
        .image_cols = c->model.image.feature_size,
        .image_token_id = c->model.image.token_id,
        .image_tower = tower_of(c),
        .image_model = tower_folder(c),
        .itemsize = f->itemsize,
        .best_fit = f->packing == PACK_BEST_FIT,
        .pairs = set ? set->pairs : c->preference.kind != PREFERENCE_NONE,
        .value_bytes = value_bytes(c, set),
        .value_suffix = !set && c->policy.kind != POLICY_NONE ? "policy.f32" : NULL,
        .metadata = f->boundaries == BOUNDARIES_METADATA,
        .split = c->data.long_documents == LONG_SPLIT,
        .sequence_length = c->model.max_sequence_length,
        .vocab_size = c->model.vocab_size,
        .eos_token_id = c->model.eos_token_id,
        .pad_token_id = c->model.pad_token_id,
        .mask_padding = c->data.mask_padding,
        .reopened = problem != NULL,
        .beat = set ? beat_validation : beat_data,
    };
    MixtureSource mix[MIXTURE_MOST];
    if (!set) {
        spec.num_mix = copy_mix(mix, c);
        spec.mix = spec.num_mix > 0 ? mix : NULL;
        spec.shuffle = true;
        spec.seed = c->data.seed;
        spec.drop_last = f->packing == PACK_CONCAT;
        spec.max_period = c->data.instance_filter.max_period;
        spec.min_period = c->data.instance_filter.min_period;
        spec.max_count = c->data.instance_filter.max_count;
    }
    watchdog_wait_for(set ? WORKER_VALIDATION : WORKER_DATA);
    progress_begin("data");
    opening = true;
    Loader *l = problem ? loader_try_open(problem, &spec, batch, rank, ranks)
                        : loader_open(&spec, batch, rank, ranks);
    opening = false;
    progress_end();
    watchdog_wait_for(NO_WORKER);
    return l;
}
