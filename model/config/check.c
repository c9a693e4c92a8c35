/* What the table cannot say about one key alone: values that follow from others, and combinations that cannot work.
 * Every message names the place of a key that takes part and says which values would do. */
#include "model/config/table.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/error.h"
#include "model/architecture.h"
#include "model/schedule.h"
#include "model/trainable.h"

/* ---- model ------------------------------------------------------------------------------------------------ */

static void check_heads(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    if (m->head_dim == 0 && m->d_model % m->n_heads != 0)
        die("%s: model.d_model %d is not a multiple of model.n_heads %d; take d_model %d or %ld, or give "
            "model.head_dim", config_where(r, "model.n_heads"), m->d_model, m->n_heads,
            m->d_model / m->n_heads * m->n_heads, (m->d_model / m->n_heads + 1L) * m->n_heads);
    if (m->head_dim == 0)
        m->head_dim = m->d_model / m->n_heads;
    if (m->head_dim % 2 != 0)
        die("%s: heads are %d wide; rotary positions turn pairs, so that must be even", config_where(r,
            config_given(r, "model.head_dim") ? "model.head_dim" : "model.n_heads"), m->head_dim);
    if (config_given(r, "model.multi_query_attention")) {
        int heads = r->s->multi_query_attention ? 1 : m->n_heads;
        if (m->n_kv_heads != 0 && m->n_kv_heads != heads)
            die("%s: model.multi_query_attention %s means n_kv_heads %d, but model.n_kv_heads is %d; give only "
                "n_kv_heads", config_where(r, "model.multi_query_attention"), heads == 1 ? "true" : "false", heads,
                    m->n_kv_heads);
        m->n_kv_heads = heads;
    }
    if (m->n_kv_heads == 0)
        m->n_kv_heads = m->n_heads;
    if (m->n_heads % m->n_kv_heads != 0)
        die("%s: model.n_heads %d is not a multiple of model.n_kv_heads %d; a divisor of n_heads is needed",
            config_where(r, "model.n_kv_heads"), m->n_heads, m->n_kv_heads);
}

static void check_mlp(Reader *r, bool from_hf)
{
    ModelConfig *m = &r->s->c.model;
    if (config_given(r, "model.mlp_hidden_size")) {
        if (r->s->mlp_hidden_size % 2 != 0)
            die("%s: model.mlp_hidden_size %ld counts both halves of SwiGLU, so it must be even",
                config_where(r, "model.mlp_hidden_size"), r->s->mlp_hidden_size);
        m->mlp_width = (int)(r->s->mlp_hidden_size / 2);
    } else if (config_given(r, "model.mlp_ratio") || !from_hf) {
        double width = r->s->mlp_ratio * m->d_model / 2;
        if (width < 1 || width > 2147483647 || width != floor(width))
            die("%s: model.mlp_ratio %g makes both halves of the MLP %g wide; give model.mlp_hidden_size, an even "
                "number", config_where(r, "model.mlp_ratio"), r->s->mlp_ratio, 2 * width);
        m->mlp_width = (int)width;
    }
    r->s->mlp_hidden_size = 2L * m->mlp_width;
}

static void check_vocabulary(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    int rounded = (m->vocab_size + 127) / 128 * 128;
    if (m->embedding_size == 0)
        m->embedding_size = rounded;
    if (m->vocab_size > m->embedding_size)
        die("%s: model.vocab_size %d does not fit model.embedding_size %d; take %d (a multiple of 128) or "
            "leave it out",
            config_where(r, "model.embedding_size"), m->vocab_size, m->embedding_size, rounded);
    const struct { const char *name; int id; } token[] = {
        { "model.eos_token_id", m->eos_token_id }, { "model.pad_token_id", m->pad_token_id }
    };
    for (int i = 0; i < 2; i++)
        if (token[i].id >= m->vocab_size)
            die("%s: %s %d is beyond the vocabulary: model.vocab_size is %d", config_where(r, token[i].name),
                token[i].name, token[i].id, m->vocab_size);
}

void config_check_rope(const ModelConfig *m, const char *place)
{
    if (m->rope_scaling.type == ROPE_LLAMA3 && m->rope_scaling.high_freq_factor <= m->rope_scaling.low_freq_factor)
        die("%s: rope_scaling.high_freq_factor %g must be above low_freq_factor %g", place, m->rope_scaling.high_freq_factor,
            m->rope_scaling.low_freq_factor);
    if (m->rope_scaling.type == ROPE_YARN && m->rope_scaling.beta_fast <= m->rope_scaling.beta_slow)
        die("%s: rope_scaling.beta_fast %g must be above beta_slow %g", place, m->rope_scaling.beta_fast,
            m->rope_scaling.beta_slow);
    if (m->rope_scaling.type == ROPE_YARN && m->rope_theta <= 1)
        die("%s: rope_theta %g: YaRN needs frequencies that differ, so a rope_theta above 1", place, m->rope_theta);
}

/* Which keys of rope_scaling count follows from its type, and that from a factor alone: Llama 3.1's was the first. */
static void check_rope_scaling(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const int type = r->s->rope_type != NOT_GIVEN ? r->s->rope_type : m->rope_scaling.factor > 0 ? ROPE_LLAMA3 : ROPE_DEFAULT;
    if (type != ROPE_DEFAULT && m->rope_scaling.factor == 0)
        die("%s: rope_type %s needs model.rope_scaling.factor; Llama 3.1 has 8, Llama 3.2 32, OLMo-3 8 (yarn)",
            config_where(r, "model.rope_scaling.rope_type"), type == ROPE_LLAMA3 ? "llama3" : "yarn");
    if (type == ROPE_DEFAULT && config_given(r, "model.rope_scaling.factor"))
        config_note(r, "model.rope_scaling.factor (rope_type default has none)");
    m->rope_scaling.type = type;
    r->s->rope_type = type == ROPE_DEFAULT ? NOT_GIVEN : type;
    if (type == ROPE_DEFAULT)
        m->rope_scaling.factor = 0;
    config_check_rope(m, config_where(r, "model.rope_scaling"));
}

/* ---- windows: which blocks have one ---- */

/* The shortest list that, repeated, is the blocks' types; empty if that follows from sliding_window. */
static void shorten(LayerTypes *types, int n_layers)
{
    LayerTypes all = { .count = n_layers };
    int period = 1, sliding = 0;
    for (int l = 0; l < n_layers; l++) {
        all.slides[l] = types->slides[l % types->count];
        sliding += all.slides[l];
    }
    for (int l = period; l < n_layers; l++)
        if (all.slides[l] != all.slides[l % period]) {
            period++;
            l = period - 1;
        }
    *types = (LayerTypes){ 0 };
    if (sliding == 0 || sliding == n_layers)
        return;
    types->count = period;
    memcpy(types->slides, all.slides, (size_t)period * sizeof all.slides[0]);
}

void config_settle_windows(ModelConfig *m, const char *place)
{
    bool any = m->layer_types.count == 0;
    for (int l = 0; l < m->n_layers && !any; l++)
        any = m->layer_types.slides[l % m->layer_types.count];
    if (any && m->layer_types.count > 0 && m->sliding_window == 0)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give one, or only full_attention", place);
    if (!any)
        m->sliding_window = 0;
    if (m->layer_types.count > 0)
        shorten(&m->layer_types, m->n_layers);
    if (m->rope_scaling.type == ROPE_DEFAULT || m->sliding_window == 0)
        m->rope_scaling.full_attn_layers_only = false;
}

static void check_windows(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const int window = m->sliding_window;
    config_settle_windows(m, config_where(r, "model.layer_types"));
    if (window > 0 && m->sliding_window == 0)
        config_note(r, "model.sliding_window (model.layer_types has no sliding_attention)");
}

/* Its class must be one that computes the model; without a name any that does. */
static void check_architecture(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const char *class = r->s->architecture;
    const Architecture *named = class ? architecture_find(class) : NULL;
    if (class && !named)
        die("%s: model.architecture '%s' is not known, only %s", config_where(r, "model.architecture"), class,
            architecture_names());
    char *differences = named ? architecture_differences(named, m) : strdup("");
    if (*differences && config_given(r, "model.architecture"))
        die("%s: a %s does not compute this model; it would with %s", config_where(r, "model.architecture"), class, differences);
    if (*differences) {                          /* a loaded model that was changed */
        free(r->s->architecture);
        r->s->architecture = NULL;
        named = NULL;
    }
    free(differences);
    m->architecture = named;
    m->architecture = architecture_choose(m, config_where(r, "model"));
}

/* Values that follow from others keep to the ranges of the table, too: the resolved configuration gives them. */
static void check_ranges(Reader *r)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const double x = value_number(r->s, k);
        char expected[256];
        if (strncmp(k->name, "model.", strlen("model.")) != 0 || isnan(x) || x == k->none || (x >= k->min && x <= k->max))
            continue;
        value_expected(expected, sizeof expected, k);
        die("%s: %s would be %.10g, by the keys that it follows from; expected %s", config_where(r, "model"), k->name, x, expected);
    }
}

void config_check_model(Reader *r, bool from_hf)
{
    ModelConfig *m = &r->s->c.model;
    m->norm.kind = r->s->layer_norm_type == NORM_RMS ? RMS_NORM : LAYER_NORM;
    if (m->qk_norm != QK_NORM_NONE && (m->norm.kind != RMS_NORM || !r->s->attention_layer_norm_with_affine))
        die("%s: model.attention_layer_norm is an RMSNorm with weights here: set model.layer_norm_type: rms and "
            "model.attention_layer_norm_with_affine: true, or attention_layer_norm: false",
            config_where(r, "model.attention_layer_norm"));
    check_heads(r);
    check_mlp(r, from_hf);
    check_vocabulary(r);
    check_ranges(r);
    check_rope_scaling(r);
    check_windows(r);
    check_architecture(r);
}

/* Every pattern names a tensor, and something is trained. */
void config_check_trainable(Reader *r)
{
    const Config *c = &r->s->c;
    int count;
    HfTensor *tensor = c->num_trainable > 0 ? hf_tensors_of(&c->model, &count) : NULL;
    const char *place = config_where(r, "trainable"), *unknown = tensor ? trainable_unknown(c, tensor, count) : NULL;
    const char *split = tensor ? trainable_split(c, tensor, count) : NULL;
    if (unknown && c->model.weight_tying && strncmp(unknown, "lm_head", strlen("lm_head")) == 0)
        die("%s: trainable: the head is the embedding here (model.weight_tying): train model.embed_tokens.weight%s", place,
            c->load_path ? "" : ", or untie them with --model.weight_tying=false");     /* what is loaded has no other head */
    if (unknown)
        die("%s: trainable: '%s' names no tensor of this model; names are those of a checkpoint, as "
            "model.layers.0.self_attn.q_proj.weight, and * stands for any characters", place, unknown);
    if (split)
        die("%s: trainable: %s, but they are one matrix here; train both or none", place, split);
    free(tensor);
}

/* ---- data ------------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const NamedPaths *)a)->name, ((const NamedPaths *)b)->name);
}

static void use_datasets(Settings *s)
{
    TokenFiles *f = &s->c.data.files;
    if (s->num_datasets > 0)
        qsort(s->datasets, s->num_datasets, sizeof *s->datasets, compare_names);
    for (int i = 0; i < s->num_datasets; i++) {
        NamedPaths *set = &s->datasets[i];
        f->paths = xrealloc(f->paths, (f->num_paths + set->num_paths + 1) * sizeof *f->paths);
        for (int k = 0; k < set->num_paths; k++)
            f->paths[f->num_paths++] = set->paths[k];
        set->num_paths = 0;                                /* the texts belong to data.paths now */
    }
}

const YamlNode *config_find_path(const YamlNode *n, const char *path)
{
    if (n && n->text && strcmp(n->text, path) == 0)
        return n;
    for (int i = 0; n && i < n->num_children; i++) {
        const YamlNode *found = config_find_path(n->child[i], path);
        if (found)
            return found;
    }
    return NULL;
}

/* `command`, the path behind the scheme, `to`: fetches a file. The last row is any other store. */
static const struct { const char *scheme, *command, *to; } stores[] = {
    { "s3://",    "aws s3 cp s3://", " ." },
    { "r2://",    "aws s3 cp --endpoint-url https://ACCOUNT.r2.cloudflarestorage.com s3://", " ." },
    { "weka://",  "aws s3 cp --endpoint-url YOUR_WEKA_URL s3://", " ." },
    { "gs://",    "gcloud storage cp gs://", " ." },
    { "http://",  "wget -x http://", "" },
    { "https://", "wget -x https://", "" },
    { "",         "with the tool of that store: ", "" },
};

static void refuse_remote(Reader *r, const char *key, char **paths, int count)
{
    int remote = 0, first = 0;
    for (int i = count - 1; i >= 0; i--)
        if (strstr(paths[i], "://")) {
            remote++;
            first = i;
        }
    if (!remote)
        return;
    int store = 0;
    while (strncmp(paths[first], stores[store].scheme, strlen(stores[store].scheme)) != 0)
        store++;
    const YamlNode *n = config_find_path(yaml_find(r->root, key), paths[first]);
    die("%s: %s: '%s'%s remote, and only local files are read. Fetch what you want to train on, for example\n"
        "  %s%s%s\nthen give the files you have: --%s='folder/*.npy'", n ? yaml_place(n) : config_where(r, key), key,
        paths[first], remote > 1 ? " and others are" : " is", stores[store].command,
        paths[first] + strlen(stores[store].scheme), stores[store].to, key);
}

void config_check_data(Reader *r)
{
    Config *c = &r->s->c;
    bool both = c->data.files.num_paths > 0 && r->s->num_datasets > 0;
    if (both)
        die("%s: give data.paths or data.datasets, not both (--data.datasets=null drops those)", config_where(r,
            "data.datasets"));
    const char *key = r->s->num_datasets > 0 ? "data.datasets" : "data.paths";
    use_datasets(r->s);
    if (c->data.files.num_paths == 0 && !c->dry_run && !config_forward_only(c))      /* these need none */
        die("%s: no training data: give data.paths, a list of token shards, as in --data.paths='[shards/*.npy]'",
            config_where(r, "data.paths"));
    refuse_remote(r, key, c->data.files.paths, c->data.files.num_paths);
    refuse_remote(r, "data.label_mask_paths", c->data.files.label_mask_paths, c->data.files.num_label_mask_paths);
    c->data.files.itemsize = r->s->memmap_dtype;
    if (!config_given(r, "data.seed"))
        c->data.seed = c->seed;
    config_check_documents(r);

    const YamlNode *filter = yaml_find(r->root, "data.instance_filter");
    if (filter && filter->kind == YAML_MAP && !yaml_find(filter, "repetition_max_count"))
        c->data.instance_filter.max_count = 32;
    if (c->data.instance_filter.min_period > c->data.instance_filter.max_period)
        die("%s: repetition_min_period %d is above repetition_max_period %d", config_where(r, "data.instance_filter"),
            c->data.instance_filter.min_period, c->data.instance_filter.max_period);
}

/* ---- the run ---------------------------------------------------------------------------------------------- */

static void check_batch(Reader *r)
{
    Config *c = &r->s->c;
    int world = r->world, micro = c->device_train_microbatch_size, batch = c->global_train_batch_size;
    long unit = (long)world * micro;
    if (batch % unit == 0)
        return;
    const char *place = config_where(r, "global_train_batch_size");
    char batches[96];
    if (batch > unit)
        snprintf(batches, sizeof batches, "%ld or %ld", batch / unit * unit, (batch / unit + 1) * unit);
    else
        snprintf(batches, sizeof batches, "%ld", unit);
    if (batch % world != 0)
        die("%s: global_train_batch_size %d is not a multiple of %d ranks x device_train_microbatch_size %d; "
            "--global_train_batch_size=%s would do", place, batch, world, micro, batches);
    int share = batch / world, smaller = micro < share ? micro : share;
    while (share % smaller != 0)
        smaller--;
    die("%s: global_train_batch_size %d gives each of %d rank%s %d sequences, not a multiple of "
        "device_train_microbatch_size %d; --device_train_microbatch_size=%d or --global_train_batch_size=%s would do",
        place, batch, world, world == 1 ? "" : "s", share, micro, smaller, batches);
}

/* Gradients are summed in F32 where OLMo's precision says so, and where a sum has many terms: in BF16 it loses those below 2^-9
 * of it: of the worst tensor's gradient from 512 micro-batches 5 %, from 2048 half. There are two sums, one over the micro-batches
 * of a rank and one over ranks, which rounds with every rank. Each loses for itself: 16 times 32 terms a third of what 512 lose. */
static void choose_grads(Reader *r)
{
    enum { MOST = 128 };
    const Config *c = &r->s->c;
    Format *grads = &r->s->c.recipe.grads;
    const int own = c->global_train_batch_size / c->device_train_microbatch_size / r->world, n = own > r->world ? own : r->world;
    const bool mixed = r->s->fsdp.precision == FSDP_MIXED && r->world > 1;
    if (!config_given(r, "format.grads")) {
        if (mixed || n > MOST)
            *grads = (Format){ F32, 0, false };
    } else if (grads->dtype == BF16 && n > MOST)
        warn("%s: gradients of %d %s are summed in bf16, which loses part of them beyond %d", config_where(r, "format.grads"), n,
             own < n ? "ranks" : "micro-batches a step", MOST);
}

/* The length of training in the scheduler's units; 0: epochs, whose length only the data know. */
static double duration_in_units(const Config *c)
{
    double tokens_per_step = (double)c->global_train_batch_size * c->model.max_sequence_length;
    if (c->max_duration.tokens)
        return c->scheduler.in_tokens ? c->max_duration.tokens : ceil(c->max_duration.tokens / tokens_per_step);
    return c->max_duration.steps * (c->scheduler.in_tokens ? tokens_per_step : 1);
}

/* Tokens of a micro-batch are counted by int, with room to round them up, and so are sequences of all ranks. */
static void check_micro_batch(Reader *r)
{
    const Config *c = &r->s->c;
    const int T = c->model.max_sequence_length;
    if ((double)c->device_train_microbatch_size * T > INT_MAX / 2)
        die("%s: %d sequences of %d tokens exceed the 2^30 - 1 tokens that a micro-batch can have",
            config_where(r, "device_train_microbatch_size"), c->device_train_microbatch_size, T);
    if ((double)c->device_eval_batch_size * r->world > INT_MAX)
        die("%s: %d sequences on each of %d ranks exceed the 2^31 - 1 that a batch can have",
            config_where(r, "device_eval_batch_size"), c->device_eval_batch_size, r->world);
}

static void check_schedule(Reader *r)
{
    Config *c = &r->s->c;
    c->scheduler.in_tokens = r->s->scheduler_units == UNITS_TOKENS;
    const bool share = c->scheduler.warmup_fraction > 0;
    if (share && config_given(r, "scheduler.t_warmup") && c->scheduler.t_warmup > 0)
        die("%s: scheduler.t_warmup and scheduler.warmup_fraction both say how long the warmup is; take one of them back: "
            "--scheduler.t_warmup=0 or --scheduler.warmup_fraction=null", config_where(r, "scheduler.warmup_fraction"));
    if (share)
        c->scheduler.t_warmup = 0;
    const long warmup = c->scheduler.t_warmup, end = c->scheduler.t_max;
    if (end > 0 && warmup > end)
        die("%s: scheduler.t_warmup %ld is longer than scheduler.t_max %ld; shorten the warmup or lengthen t_max",
            config_where(r, "scheduler.t_warmup"), warmup, end);
    if (c->scheduler.name == INVERSE_SQRT_WITH_WARMUP && warmup == 0 && !share)
        die("%s: inverse_sqrt_with_warmup needs scheduler.t_warmup > 0", config_where(r, "scheduler.t_warmup"));
    if (c->scheduler.name == WSD && c->scheduler.t_decay == 0)
        die("%s: wsd needs scheduler.t_decay, the length of the final decay", config_where(r, "scheduler.name"));
    char *place = xasprintf("%s: ", config_where(r, c->scheduler.name == WSD ? "scheduler.t_decay" : "scheduler.t_warmup"));
    schedule_check(c, duration_in_units(c), place);
    free(place);
    if (c->scheduler.name != WSD && c->scheduler.t_decay > 0)
        config_note(r, "scheduler.t_decay (only wsd has it)");
    if (c->scheduler.warmup_min_lr > c->optimizer.lr)
        die("%s: scheduler.warmup_min_lr %g is above optimizer.learning_rate %g",
            config_where(r, "scheduler.warmup_min_lr"), c->scheduler.warmup_min_lr, c->optimizer.lr);
}

void config_choose_save_folder(Config *c)
{
    if (!c->save_folder && (!config_forward_only(c) || c->try_load_latest_save))
        c->save_folder = xasprintf("runs/%s", c->run_name);
}

static void check_folders(Reader *r)
{
    Config *c = &r->s->c;
    config_choose_save_folder(c);
    if (c->save_folder && c->save_folder[0] == '\0')
        die("%s: save_folder is empty; give a folder, '.' for the current one", config_where(r, "save_folder"));
    if (c->save_folder && strstr(c->save_folder, "://"))
        die("%s: save_folder '%s' is remote; save to a local folder and copy it from there",
            config_where(r, "save_folder"), c->save_folder);
    config_check_load_path(r);
}

/* Ranks that share one copy of the model. */
static int shard_ranks(Reader *r)
{
    const ShardingStrategy strategy = r->s->fsdp.strategy;
    const bool hybrid = strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2;
    const int world = r->world;
    const int hosts = world / comm_local_size(), replicas = r->s->fsdp.replicas ? r->s->fsdp.replicas : hosts;
    if (r->s->fsdp.replicas && !hybrid)
        config_note(r, "fsdp.hybrid_sharding_num_model_replicas (only HYBRID_SHARD has it)");
    if (strategy == NO_SHARD)
        return 1;
    if (!hybrid)
        return world;
    if (replicas < 1 || world % replicas != 0)
        die("%s: %d ranks cannot form %d groups of equal size; fsdp.hybrid_sharding_num_model_replicas must divide the "
            "number of ranks, null makes one group per host",
            config_where(r, "fsdp.hybrid_sharding_num_model_replicas"), world, replicas);
    return world / replicas;
}

static void check_strategy(Reader *r)
{
    if (r->s->fsdp.distributed == DDP || r->s->fsdp.distributed == SINGLE)
        r->s->fsdp.strategy = NO_SHARD;
    const ShardingStrategy strategy = r->s->fsdp.strategy;
    const bool keeps = strategy == SHARD_GRAD_OP || strategy == HYBRID_SHARD_ZERO2;
    const int mode = r->s->fsdp.grad_sync_mode;
    r->s->c.strategy = (Strategy){ .shard_ranks = shard_ranks(r),
                                   .gathering = keeps ? GATHER_ONCE : GATHER_ONCE_IF_FITS,
                                   .grad_sum = mode == NOT_GIVEN ? SUM_ONCE_IF_FITS : (GradSum)mode };
}

/* The name of a folder in runs/. */
static void check_run_name(const Reader *r)
{
    const char *name = r->s->c.run_name;
    if (!name || !*name)
        die("%s: run_name is empty", config_where(r, "run_name"));
    char *path = xasprintf("/%s/", name);
    if (strstr(path, "/../"))
        die("%s: run_name %s leads out of the folder runs; take --save_folder", config_where(r, "run_name"), name);
    free(path);
}

void config_check_run(Reader *r)
{
    Config *c = &r->s->c;
    check_run_name(r);
    check_strategy(r);
    config_check_generation(r);
    if (!config_forward_only(c))
        check_batch(r);
    check_micro_batch(r);
    choose_grads(r);
    check_schedule(r);
    check_folders(r);
    c->z_loss = r->s->softmax_auxiliary_loss ? r->s->auxiliary_loss_multiplier : 0;
    if (c->eval_subset_num_batches == 0)
        die("%s: eval_subset_num_batches 0 evaluates nothing: take -1 for all batches, or eval_interval null",
            config_where(r, "eval_subset_num_batches"));
    if (c->device_eval_batch_size == 0)
        c->device_eval_batch_size = c->device_train_microbatch_size;
}
