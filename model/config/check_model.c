/* Checks of the model beyond single keys: values that follow from others, and combinations that are
 * not possible. Every message names a key with file and line, and possible values. */
#include "model/config/check_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/keys/config_keys.h"
#include "model/keys/model_rules.h"
#include "model/keys/value.h"
#include "model/shape/architecture.h"
#include "model/shape/trainable.h"

static void complete_heads(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    if (reader_given(r, "model.multi_query_attention")) {
        int heads = r->s->multi_query_attention ? 1 : m->n_heads;
        if (m->n_kv_heads != 0 && m->n_kv_heads != heads)
            die("%s: model.multi_query_attention %s means n_kv_heads %d, but model.n_kv_heads is "
                "%d; give only "
                "n_kv_heads",
                reader_where(r, "model.multi_query_attention"), heads == 1 ? "true" : "false",
                heads, m->n_kv_heads);
        m->n_kv_heads = heads;
    }
    static const char heads[] = "model.n_heads", dim[] = "model.head_dim",
                      kv_heads[] = "model.n_kv_heads";
    const HeadKeys keys = { .width = "model.d_model",
                            .heads = { heads, reader_where(r, heads) },
                            .kv_heads = { kv_heads, reader_where(r, kv_heads) },
                            .head_dim = { dim,
                                          reader_where(r, reader_given(r, dim) ? dim : heads) } };
    model_rules_heads(m, &keys);
}

#define HIDDEN_SIZE "model.mlp_hidden_size"
#define HALF_SIZE "model.intermediate_size"

static void complete_mlp(Reader *r, bool from_hf)
{
    ModelConfig *m = &r->s->c.model;
    const bool both = reader_given(r, HIDDEN_SIZE);
    if (both && r->s->mlp_hidden_size % 2 != 0)
        die("%s: " HIDDEN_SIZE " %ld counts both halves of SwiGLU, so it must be even",
            reader_where(r, HIDDEN_SIZE), r->s->mlp_hidden_size);
    if (both && r->s->intermediate_size)
        die("%s: " HIDDEN_SIZE " is %ld and " HALF_SIZE
            " is %d (%s). Give only one of them: " HALF_SIZE " is half of " HIDDEN_SIZE,
            reader_where(r, HIDDEN_SIZE), r->s->mlp_hidden_size, r->s->intermediate_size,
            reader_where(r, HALF_SIZE));
    if (both)
        m->mlp_width = (int)(r->s->mlp_hidden_size / 2);
    else if (r->s->intermediate_size)
        m->mlp_width = r->s->intermediate_size;
    else if (reader_given(r, "model.mlp_ratio") || !from_hf) {
        double width = r->s->mlp_ratio * m->d_model / 2;
        if (width < 1 || width > 2147483647 || width != floor(width))
            die("%s: model.mlp_ratio %g makes each half of the MLP %g wide; give "
                "model.mlp_hidden_size, an even "
                "number",
                reader_where(r, "model.mlp_ratio"), r->s->mlp_ratio, 2 * width);
        m->mlp_width = (int)width;
    }
    r->s->mlp_hidden_size = 2L * m->mlp_width;
}

/* Rows of tensors are read 16 bytes at a time, and FP8 GEMMs need dimensions that are multiples of
 * 16. */
static void check_widths(const Reader *r)
{
    enum { MULTIPLE = 16 };
    const ModelConfig *m = &r->s->c.model;
    const struct {
        const char *key, *what;
        long width;
    } list[] = {
        { "model.d_model", "the residual stream", m->d_model },
        { reader_given(r, HALF_SIZE) ? HALF_SIZE : HIDDEN_SIZE, "each half of the MLP",
          m->mlp_width },
        { "model.n_heads", "all query heads together", (long)m->n_heads * m->head_dim },
        { "model.n_kv_heads", "q, k and v together",
          (m->n_heads + 2L * m->n_kv_heads) * m->head_dim },
    };
    for (int i = 0; i < 4; i++)
        if (list[i].width % MULTIPLE != 0)
            die("%s: %s makes %s %ld wide; widths must be multiples of %d, as %ld or %ld",
                reader_where(r, list[i].key), list[i].key, list[i].what, list[i].width, MULTIPLE,
                list[i].width / MULTIPLE * MULTIPLE, (list[i].width / MULTIPLE + 1) * MULTIPLE);
}

static void complete_vocabulary(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    int rounded = (m->vocab_size + 127) / 128 * 128;
    if (m->embedding_size == 0)
        m->embedding_size = rounded;
    if (m->vocab_size > m->embedding_size)
        die("%s: model.vocab_size %d does not fit model.embedding_size %d; use %d (a multiple of "
            "128) or "
            "leave model.embedding_size out",
            reader_where(r, "model.embedding_size"), m->vocab_size, m->embedding_size, rounded);
    const struct {
        const char *name;
        int id;
    } token[] = { { "model.eos_token_id", m->eos_token_id },
                  { "model.pad_token_id", m->pad_token_id } };
    for (int i = 0; i < 2; i++)
        if (token[i].id >= m->vocab_size)
            die("%s: %s %d is beyond the vocabulary: model.vocab_size is %d",
                reader_where(r, token[i].name), token[i].name, token[i].id, m->vocab_size);
}

/* rope_type decides which keys of rope_scaling apply. Without rope_type, a factor means llama3,
 * which was the first supported type. */
static void check_rope_scaling(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const int type = r->s->rope_type != NOT_GIVEN ? r->s->rope_type
                     : m->rope_scaling.factor > 0 ? ROPE_LLAMA3
                                                  : ROPE_DEFAULT;
    if (type != ROPE_DEFAULT && m->rope_scaling.factor == 0)
        die("%s: rope_type %s needs model.rope_scaling.factor; Llama 3.1 has 8, Llama 3.2 32, "
            "OLMo-3 8 (yarn)",
            reader_where(r, "model.rope_scaling.rope_type"),
            type == ROPE_LLAMA3 ? "llama3" : "yarn");
    if (type == ROPE_DEFAULT && reader_given(r, "model.rope_scaling.factor"))
        reader_note(r, "model.rope_scaling.factor (rope_type default has none)");
    m->rope_scaling.type = type;
    r->s->rope_type = type == ROPE_DEFAULT ? NOT_GIVEN : type;
    if (type == ROPE_DEFAULT)
        m->rope_scaling.factor = 0;
    model_rules_rope(m, reader_where(r, "model.rope_scaling"));
}

/* ---- windows: which blocks have one ---------------------------------------------------------- */

static void complete_windows(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const int window = m->sliding_window;
    model_rules_windows(m, reader_where(r, "model.layer_types"));
    if (window > 0 && m->sliding_window == 0)
        reader_note(r, "model.sliding_window (model.layer_types has no sliding_attention)");
}

/* A class that the user names must be able to compute this model. Without a name, the first class
 * that can compute this model is chosen. */
static void choose_architecture(Reader *r)
{
    ModelConfig *m = &r->s->c.model;
    const char *class = r->s->architecture;
    const Architecture *named = class ? architecture_find(class) : NULL;
    if (class && !named)
        die("%s: model.architecture '%s' is not known, only %s",
            reader_where(r, "model.architecture"), class, architecture_names());
    char *differences = named ? architecture_differences(named, m) : strdup("");
    if (*differences && reader_given(r, "model.architecture"))
        die("%s: %s cannot compute this model; it could with %s",
            reader_where(r, "model.architecture"), class, differences);
    if (*differences) { /* the user changed a loaded model */
        free(r->s->architecture);
        r->s->architecture = NULL;
        named = NULL;
    }
    free(differences);
    m->architecture = named;
    m->architecture = architecture_choose(m, reader_where(r, "model"));
}

/* Derived values must be in the table's ranges, too, because the resolved configuration contains
 * these values. */
static void check_ranges(Reader *r)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const double x = value_number(r->s, k);
        char expected[256];
        if (strncmp(k->name, "model.", strlen("model.")) != 0 || isnan(x) || x == k->none ||
            (x >= k->min && x <= k->max))
            continue;
        value_expected(expected, sizeof expected, k);
        die("%s: %s would be %.10g, derived from other keys; expected %s", reader_where(r, "model"),
            k->name, x, expected);
    }
}

void check_model(Reader *r, bool from_hf)
{
    ModelConfig *m = &r->s->c.model;
    m->norm.kind = r->s->layer_norm_type == NORM_RMS ? RMS_NORM : LAYER_NORM;
    if (m->qk_norm != QK_NORM_NONE &&
        (m->norm.kind != RMS_NORM || !r->s->attention_layer_norm_with_affine))
        die("%s: model.attention_layer_norm is an RMSNorm with weights here: set "
            "model.layer_norm_type: rms and "
            "model.attention_layer_norm_with_affine: true, or attention_layer_norm: false",
            reader_where(r, "model.attention_layer_norm"));
    complete_heads(r);
    complete_mlp(r, from_hf);
    check_widths(r);
    complete_vocabulary(r);
    check_ranges(r);
    check_rope_scaling(r);
    complete_windows(r);
    choose_architecture(r);
}

/* Checks that every pattern names a tensor and that a parameter is trained. */
void check_model_trainable(Reader *r)
{
    const Config *c = &r->s->c;
    int count;
    HfTensor *tensor = c->num_trainable > 0 ? hf_tensors_of(&c->model, &count) : NULL;
    const char *where = reader_where(r, "trainable"),
               *unknown = tensor ? trainable_unknown(c, tensor, count) : NULL;
    const char *split = tensor ? trainable_split(c, tensor, count) : NULL;
    /* a loaded model cannot get a separate head */
    if (unknown && c->model.weight_tying && strncmp(unknown, "lm_head", strlen("lm_head")) == 0)
        die("%s: trainable: the head is the embedding here (model.weight_tying): train "
            "model.embed_tokens.weight%s",
            where,
            c->load_path ? "" : ", or untie head and embedding with --model.weight_tying=false");
    if (unknown)
        die("%s: trainable: '%s' names no tensor of this model; names are those of a checkpoint, "
            "as "
            "model.layers.0.self_attn.q_proj.weight, and * matches any characters",
            where, unknown);
    if (split)
        die("%s: trainable: %s, but they are one matrix here; train both or none", where, split);
    free(tensor);
}
