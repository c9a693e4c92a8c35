/* Checks of models with images and of their data. */
#include "model/config/check_images.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/check_local.h"
#include "model/shape/architecture.h"

/* Kernels read rows of features 16 bytes at a time. */
static void check_features(Reader *r)
{
    enum { MULTIPLE = 8 };
    const ImageConfig *i = &r->s->c.model.image;
    const char *where = reader_where(r, "model.image_feature_size");
    if (i->feature_size % MULTIPLE != 0)
        die("%s: model.image_feature_size %d is not a multiple of %d; pad the rows of features",
            where, i->feature_size, MULTIPLE);
    if (i->rows == 0)
        die("%s: model.image_feature_size needs model.image_tokens, the number of feature rows of "
            "an image",
            where);
    if (i->token_id < 0)
        die("%s: model.image_feature_size needs model.image_token_id, the token that stands for a "
            "feature row",
            where);
    if (i->token_id >= r->s->c.model.vocab_size)
        die("%s: model.image_token_id %d is beyond the vocabulary: model.vocab_size is %d",
            reader_where(r, "model.image_token_id"), i->token_id, r->s->c.model.vocab_size);
}

void check_images(Reader *r)
{
    const Config *c = &r->s->c;
    const ImageConfig *i = &c->model.image;
    if (i->feature_size == 0) {
        if (i->rows > 0 || i->token_id >= 0)
            reader_note(r, "model.image_tokens and model.image_token_id "
                           "(model.image_feature_size is not given)");
        return;
    }
    check_features(r);
    if (!c->model.architecture->images)
        die("%s: the text model of a model with images must be a Llama, Mistral or Qwen3, not %s",
            reader_where(r, "model.image_feature_size"), c->model.architecture->class);
    if (c->optimizer.projector_lr > 0 && c->optimizer.lr == 0)
        die("%s: optimizer.projector_learning_rate needs an optimizer.learning_rate above 0; to "
            "train only the projector give "
            "--trainable='[multi_modal_projector.*]'",
            reader_where(r, "optimizer.projector_learning_rate"));
}

/* where, prefix: position and prefix of the keys of `f`. questions: `f` is a downstream task, whose
 * file says which images its questions show. */
void check_images_files(const Config *c, const TokenFiles *f, const char *where, const char *prefix,
                        bool questions)
{
    const bool paths = f->num_image_paths > 0, features = f->image_features != NULL;
    if ((paths || features) && c->model.image.feature_size == 0)
        die("%s: %s.%s names images, but the model reads only text: load_path must be a LLaVA "
            "folder, or give model.image_feature_size",
            where, prefix, paths ? "image_paths" : "image_features");
    if (questions && paths)
        die("%s: %s.image_paths are for token shards, but the questions of a downstream task name "
            "their images themselves: leave image_paths out",
            where, prefix);
    if (paths != features && !questions)
        die("%s: %s.%s needs %s.%s, too: the indexes say which images the tokens show, the folder "
            "has their features",
            where, prefix, paths ? "image_paths" : "image_features", prefix,
            paths ? "image_features" : "image_paths");
}

/* Checks the sources of data.mix; returns how many of them have images. */
static int check_sources(Reader *r)
{
    const Config *c = &r->s->c;
    int count = 0;
    for (const DataSource *s = c->data.mix; s < c->data.mix + c->data.num_mix; s++) {
        char *where = xasprintf("%s: data.mix: source '%s'", reader_where(r, "data.mix"), s->name);
        check_images_files(c, &s->files, where, "data.mix[]", false);
        check_local(r, "data.mix", s->files.image_paths, s->files.num_image_paths);
        count += s->files.num_image_paths > 0;
        free(where);
    }
    return count;
}

void check_images_data(Reader *r)
{
    const Config *c = &r->s->c;
    const TokenFiles *f = &c->data.files;
    const char *where =
        reader_where(r, f->num_image_paths > 0 ? "data.image_paths" : "data.image_features");
    check_images_files(c, f, where, "data", false);
    check_local(r, "data.image_paths", f->image_paths, f->num_image_paths);
    if (f->num_image_paths > 0 && c->data.num_mix > 0)
        die("%s: data.image_paths belong to data.paths; with data.mix each source has its own: "
            "[{name: chat, paths: [a.npy], "
            "image_paths: [a.images], image_features: features, ratio: 1}]",
            where);
    if (check_sources(r) + f->num_image_paths > 0 && c->data.instance_filter.max_count > 0)
        die("%s: data.instance_filter would mask every sequence with an image, whose tokens are "
            "all the same: leave the filter out",
            reader_where(r, "data.instance_filter"));
}
