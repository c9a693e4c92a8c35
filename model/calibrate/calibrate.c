#include "model/calibrate/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/gptq_layer.h"
#include "kernels/runtime/clock.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "model/block/block.h"
#include "model/checkpoint/convert.h"
#include "model/block/head.h"
#include "model/config/export_options.h"
#include "model/formats/hf.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "model/calibrate/weights_ahead.h"
#include "model/shape/units.h"

enum { TOKENS = 8192 }; /* number of tokens of a micro-batch: enough for efficient GEMMs */

/* A linear layer of the block on the device: its matrix w, its scales (also on the host), and h,
 * the sum of xT x over the layer's inputs. */
typedef struct {
    Tensor w, h;
    float *scale, *host_scale;
    int8_t *codes;
} CalibratedLinear;

/* The residual stream of all micro-batches, (N, C) each. It is in device memory if it takes at most
 * a quarter of the memory. */
typedef struct {
    char *data;
    size_t bytes;
    bool on_device;
} Rows;

typedef struct {
    Export *x;
    const ExportOptions *options;
    const CalibrationData *data;
    ModelConfig model; /* the whole model, with adapters merged */
    Config config;     /* configuration of a model with a single block */
    Model m;
    ParamStore store;
    int batches, held; /* number of micro-batches for calibration, and of held-out micro-batches */
    /* first batches + held micro-batches computed with codes, then the held-out micro-batches
     * again, computed without codes */
    Rows stream;
    Tensor next; /* (N, C): output of the block */
    CalibratedLinear linear[NUM_LINEARS];
    void *layers; /* memory of the layers */
    WeightsAhead ahead;
    CalibrationLosses losses;
} Calibration;

/* ---- a model of one block -------------------------------------------------------------------- */

static int micro_batch(const CalibrationData *d)
{
    int B = TOKENS / d->length;
    while (B > 1 && (d->sequences % B != 0 || d->held % B != 0))
        B--;
    return B < 1 ? 1 : B;
}

/* Sets the window and the rotary embedding of this block. */
static void describe_block(Calibration *c, int block)
{
    ModelConfig *m = &c->config.model;
    *m = c->model;
    m->n_layers = 1;
    m->max_sequence_length = c->data->length;
    m->sliding_window = layer_slides(&c->model, block) ? c->model.sliding_window : 0;
    m->layer_types.count = 0;
    m->no_rope_interval = layer_rotation(&c->model, block) == NO_ROTATION;
}

/* The units of block and head in the model of one block. */
static int block_unit(const Calibration *c)
{
    return unit_of_layer(&c->config.model, 0);
}

static int head_unit(const Calibration *c)
{
    return unit_count(&c->config.model) - 1;
}

/* The matrix of a layer of the block. */
static const Param *matrix_of(const Calibration *c, Linear l)
{
    const UnitLayout *u = &c->store.shape[block_unit(c)];
    for (int i = 0; i < u->num_params; i++)
        if (u->param[i].is_operand && u->param[i].linear == l)
            return &u->param[i];
    CHECK(false, "the block has no layer %d", (int)l);
    return NULL;
}

static void place_layers(Calibration *c, Arena *a)
{
    const Format f32 = { F32, 0 };
    for (Linear l = 0; l < NUM_LINEARS; l++) {
        const Param *p = matrix_of(c, l);
        CalibratedLinear *y = &c->linear[l];
        y->w = tensor_alloc(a, f32, p->rows, p->cols);
        y->h = tensor_alloc(a, f32, p->cols, p->cols);
        y->scale = arena_alloc(a, param_numel(p) / c->x->coded.group * sizeof *y->scale);
        y->codes = arena_alloc(a, param_numel(p));
    }
}

static void open_block(Calibration *c, int block)
{
    Arena arena = { 0 };
    describe_block(c, block);
    model_plan(&c->m, &c->store, &c->config, (ShardChoice){ 1, 0, false, 0 });
    model_alloc(&c->m, &c->store, &c->config);
    place_layers(c, &arena);
    c->layers = device_alloc(arena.used);
    place_layers(c, &(Arena){ .memory = c->layers });
    for (Linear l = 0; l < NUM_LINEARS; l++)
        c->linear[l].host_scale =
            xmalloc(param_numel(matrix_of(c, l)) / c->x->coded.group * sizeof(float));
}

static void close_block(Calibration *c)
{
    device_sync();
    for (Linear l = 0; l < NUM_LINEARS; l++)
        free(c->linear[l].host_scale);
    device_free(c->layers);
    model_free(&c->m, &c->store);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* Copies a tensor to unit `to` of c->m, which is a model with a single block. If GPTQ chooses codes
 * for the tensor, also copies it to its CalibratedLinear. */
static void put_weight(Calibration *c, int to, Weight *w)
{
    const HfTensor *t = &w->tensor;
    const UnitLayout *u = &c->store.shape[to];
    const Param *p = &u->param[t->param];
    const Tensor stored = c->store.shard[to].slice[p->region].stored;
    const size_t n = t->rows * t->cols, group = c->x->coded.group;
    CHECK(stored.format.dtype == BF16, "weights are stored in %s", format_name(stored.format));
    if (w->scale) {
        CalibratedLinear *l = &c->linear[p->linear];
        memcpy(l->host_scale + t->first / group, w->scale, n / group * sizeof *w->scale);
        device_put(l->scale + t->first / group, w->scale, n / group * sizeof *w->scale);
        device_put((float *)l->w.data + t->first, w->values, n * sizeof *w->values);
    }
    convert_encode(w->values, "BF16", w->values, n);
    device_put((uint16_t *)stored.data + hf_first(u, t), w->values, n * sizeof(uint16_t));
}

/* Copies the weights that were read ahead to unit `to`; then starts to read unit `next`, if there
 * is one. */
static void put_unit(Calibration *c, int to, int next)
{
    weights_wait(&c->ahead);
    for (int i = 0; i < c->ahead.count; i++)
        put_weight(c, to, &c->ahead.weight[i]);
    weights_free(&c->ahead);
    store_loaded(&c->store);
    if (next < unit_count(&c->model))
        weights_begin(&c->ahead, next);
}

static const UnitTensors *unit_of(Calibration *c, int unit)
{
    fsdp_gather(&c->store, unit, FOR_FORWARD);
    return fsdp_acquire(&c->store, unit);
}

/* ---- the stream ------------------------------------------------------------------------------ */

static Rows open_stream(const Calibration *c)
{
    const size_t N = (size_t)micro_batch(c->data) * (size_t)c->data->length;
    Rows s = { .bytes = N * (size_t)c->model.d_model * sizeof(uint16_t) };
    const size_t all = s.bytes * (size_t)(c->batches + 2 * c->held);
    s.on_device = all <= device_memory_total() / 4;
    s.data = s.on_device ? device_alloc(all) : xmalloc(all);
    return s;
}

static void close_stream(Rows *s)
{
    if (s->on_device)
        device_free(s->data);
    else
        free(s->data);
}

static void stream_get(Tensor to, const Rows *s, int batch)
{
    (s->on_device ? device_copy : device_put)(to.data, s->data + (size_t)batch * s->bytes,
                                              s->bytes);
}

static void stream_set(const Rows *s, int batch, Tensor from)
{
    (s->on_device ? device_copy : device_get)(s->data + (size_t)batch * s->bytes, from.data,
                                              s->bytes);
}

/* Runs the block on a micro-batch of the stream; the output is in c->next. */
static void forward(Calibration *c, const UnitTensors *w, int batch)
{
    Acts next = { .attn_res = c->next };
    stream_get(c->m.acts[0].attn_res, &c->stream, batch);
    block_forward(&c->m.text, w, &c->m.acts[0], &next);
}

static void forward_all(Calibration *c, const UnitTensors *w, int first, int count)
{
    for (int i = first; i < first + count; i++) {
        forward(c, w, i);
        stream_set(&c->stream, i, c->next);
    }
}

static void embed(Calibration *c)
{
    put_unit(c, 0, unit_of_layer(&c->model, 0));
    const Tensor table = unit_of(c, 0)->embed, y = c->m.acts[0].attn_res;
    for (int i = 0; i < c->batches + c->held; i++) {
        model_put_tokens(&c->m, c->data->tokens + (size_t)i * (size_t)c->m.text.N, c->m.text.N);
        embedding_forward(y, c->m.sorted, table);
        stream_set(&c->stream, i, y);
        if (i >= c->batches)
            stream_set(&c->stream, i + c->held, y);
    }
    fsdp_release(&c->store, 0);
}

/* The mean loss of the held-out micro-batches after the last block. first: number of the first of
 * these micro-batches in c->stream. */
static double cross_entropy_of(Calibration *c, int first, long *labels)
{
    model_zero_losses(&c->m);
    *labels = 0;
    for (int i = 0; i < c->held; i++) {
        const int *targets = c->data->targets + (size_t)(c->batches + i) * (size_t)c->m.text.N;
        for (int n = 0; n < c->m.text.N; n++)
            *labels += targets[n] >= 0;
        device_put(c->m.targets, targets, sizeof *targets * (size_t)c->m.text.N);
        stream_get(c->m.acts[1].attn_res, &c->stream, first + i);
        head_losses(&c->m, &c->store, 0, 0, false);
    }
    return model_losses(&c->m).loss / (double)*labels;
}

/* Computes the losses after the last block. A tied head is the embedding, which is read again. */
static void measure_losses(Calibration *c)
{
    CalibrationLosses *l = &c->losses;
    const int none = unit_count(&c->model);
    put_unit(c, head_unit(c), c->model.weight_tying ? 0 : none);
    if (c->model.weight_tying)
        put_unit(c, 0, none);
    l->after = cross_entropy_of(c, c->batches, &l->labels);
    l->before = cross_entropy_of(c, c->batches + c->held, &l->labels);
}

/* ---- codes ----------------------------------------------------------------------------------- */

static void add_inputs(Calibration *c)
{
    const Acts *a = &c->m.acts[0];
    const Tensor input[NUM_LINEARS] = { a->attn_h, a->attn_operand, a->mlp_h, a->swiglu_operand };
    for (Linear l = 0; l < NUM_LINEARS; l++)
        matmul_dw(c->linear[l].h, input[l], input[l]);
}

/* Writes the exported tensors that make up the matrix p. */
static void write_codes(Calibration *c, int block, const Param *p, const CalibratedLinear *l)
{
    UnitLayout shape;
    int count;
    const size_t n = param_numel(p);
    int8_t *codes = xmalloc(n);
    device_get(codes, l->codes, n);
    const int unit = unit_of_layer(&c->model, block);
    unit_shape(&shape, &c->model, unit, 1);
    HfTensor *tensor = hf_tensors(&c->model, &shape, unit, &count);
    for (int i = 0; i < count; i++)
        if (shape.param[tensor[i].param].id == p->id &&
            shape.param[tensor[i].param].item == p->item)
            export_write_int4(c->x, tensor[i].name, codes + tensor[i].first,
                              l->host_scale + tensor[i].first / c->x->coded.group);
    free(codes);
    free(tensor);
    free(shape.param);
}

/* Prints the mean squared error (with damping) of a layer's output, for GPTQ and for rounding. */
static void print_result(const Calibration *c, int block, const Param *p, const GptqResult *r)
{
    const double outputs = (double)c->data->sequences * (double)c->data->length * (double)p->rows;
    if (r->damping == 0)
        warn("block %d, %s: the Hessian is not positive definite, even with %g of its mean added "
             "to the diagonal; the weights are rounded to nearest",
             block, p->name, 1000 * c->options->damping);
    else if (r->damping > c->options->damping * 1.01)
        printf("  %s %.3g | %.3g with damping %g", p->name, r->error / outputs,
               r->rounded / outputs, r->damping);
    else
        printf("  %s %.3g | %.3g", p->name, r->error / outputs, r->rounded / outputs);
}

/* Chooses the codes. The block's weights then become the values of their codes. */
static void choose_codes(Calibration *c, int block, const UnitTensors *w)
{
    progress_clear();
    printf("block %d:", block);
    for (Linear l = 0; l < NUM_LINEARS; l++) {
        const CalibratedLinear *y = &c->linear[l];
        const Param *p = matrix_of(c, l);
        const GptqResult r =
            gptq(y->codes, param_tensor(w, p), y->w, y->scale, (int)c->x->coded.group, y->h,
                 c->options->damping, c->options->ordered);
        write_codes(c, block, p, y);
        print_result(c, block, p, &r);
    }
    printf("\n");
    fflush(stdout);
}

static void calibrate_block(Calibration *c, int block)
{
    const bool last = block == c->model.n_layers - 1;
    open_block(c, block);
    if (block == 0)
        embed(c);
    put_unit(c, block_unit(c), unit_of_layer(&c->model, block) + 1);
    const UnitTensors *w = unit_of(c, block_unit(c));
    for (int i = 0; i < c->batches; i++) {
        forward(c, w, i);
        add_inputs(c);
    }
    forward_all(c, w, c->batches + c->held, c->held);
    choose_codes(c, block, w);
    forward_all(c, w, last ? c->batches : 0, last ? c->held : c->batches + c->held);
    fsdp_release(&c->store, block_unit(c));
    if (last)
        measure_losses(c);
    close_block(c);
}

/* ---- all blocks ------------------------------------------------------------------------------ */

/* The configuration of calibration: the trainer's forward in BF16. */
static Config configure(const CalibrationData *d)
{
    const int B = micro_batch(d);
    return (Config){ .recipe = *recipe_find("bf16"),
                     .eval_only = true,
                     .observed = true,
                     .global_train_batch_size = B,
                     .device_train_microbatch_size = B,
                     .optimizer = { .name = "adamw" } };
}

CalibrationLosses calibrate(Export *x, const ExportOptions *o, const CalibrationData *d)
{
    const double start = clock_seconds();
    const int B = micro_batch(d);
    Calibration c = { .x = x,
                      .options = o,
                      .data = d,
                      .config = configure(d),
                      .batches = d->sequences / B,
                      .held = d->held / B };
    hf_read(&c.model, x->base);
    c.ahead = (WeightsAhead){ .x = x, .model = &c.model };
    printf("calibrating with %d sequences of %d tokens from %d file%s, %d held out, on %s;\n"
           "mean squared error of each layer's outputs | with codes rounded to nearest:\n",
           d->sequences, d->length, d->files, d->files > 1 ? "s" : "", d->held, device_name());
    fflush(stdout);
    weights_begin(&c.ahead, 0);
    c.stream = open_stream(&c);
    c.next = tensor_at(device_alloc(c.stream.bytes), c.config.recipe.residual, B * d->length,
                       c.model.d_model);
    progress_begin("calibrating");
    for (int block = 0; block < c.model.n_layers; block++) {
        progress_show((double)block / c.model.n_layers, NULL);
        calibrate_block(&c, block);
    }
    progress_end();
    device_free(c.next.data);
    close_stream(&c.stream);
    printf("calibrated %d block%s in %.1f s; cross entropy of %ld tokens that were held out: %.5f, "
           "with codes %.5f\n",
           c.model.n_layers, c.model.n_layers > 1 ? "s" : "", clock_seconds() - start,
           c.losses.labels, c.losses.before, c.losses.after);
    return c.losses;
}
