/* Our models against Hugging Face transformers: the folders of tests/golden, made by
 * scripts/reference.py, are loaded as by --load_path; then logits, loss, every gradient and the
 * losses of 8 AdamW steps must agree in f32. So must adapters on all of them, against PEFT: the
 * folders of tests/golden/lora, their values after the steps, and the result of --export. So must
 * Muon in all models of text, against torch.optim.Muon. Models with images, made from pixels, get
 * the recorded features of their tower. Folders -aux have experts as one tensor
 * per block, and the load-balancing loss of all blocks together.
 *
 * Bounds. Both sides round every operation to u = 2^-24. A logit has some 60 roundings in 2 layers,
 * 120 in 4, of sums over up to 96 products, a random walk of sqrt(120 * 96) u = 6.4e-6 of the
 * largest: 1e-5. A gradient depends on forward and backward, and the smallest tensors' sums cancel:
 * 1e-4 of each tensor's largest element. AdamW divides by the root of v, so a gradient's relative
 * error is passed to the weights; 8 steps stay within 1e-4 of the loss. A single weight's update
 * has a relative error of e/|g| if its gradient g has an error of e, and up to 2 if g is close to
 * 0. Compared with double precision, e is up to 3e-6 of the tensor's largest gradient; of gradients
 *    spread evenly up to that, the root mean square of min(2, e/|g|) is 2 sqrt(3e-6) = 3.5e-3. So
 *    the change by 8 steps may have an error of 4e-3 of its length; without weight decay the error
 *    is at least 1.2e-2. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "model/formats/adapter.h"
#include "model/formats/hf.h"
#include "model/shape/architecture.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/weight_files.h"
#include "model/update/muon_step.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/exported.h"
#include "tests/models.h"
#include "tests/router_loss.h"

enum { B = 2, T = 16, N = B * T, STEPS = 8 };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    SafeFile *golden;
    int tokens[N], targets[N];
    float labels;
    /* the images in the order of their tokens; NULL: a text model */
    float *features;
    const void *rows[N];
    const char *name; /* name of the folder in tests/golden */
    char *optimizer;  /* NULL: adamw */
} Setup;

/* Returns a tensor of the golden file, malloc'ed. */
static void *recorded(const Setup *s, const char *name, const char *dtype, size_t count)
{
    const SafeTensor *t = safetensors_find(s->golden, name);
    if (!t || strcmp(t->dtype, dtype) != 0 || t->end - t->begin != 4 * count)
        fail_msg("%s: no %s of %zu %s", s->golden->path, name, count, dtype);
    void *x = malloc(4 * count);
    safetensors_read(s->golden, x, t, 0, 4 * count);
    return x;
}

static void read_images(Setup *s)
{
    const ImageConfig *i = &s->config.model.image;
    size_t count = 0;
    if (i->feature_size == 0)
        return;
    for (int n = 0; n < N; n++)
        count += s->tokens[n] == i->token_id;
    s->features = recorded(s, "features", "F32", count * (size_t)i->feature_size);
    for (int n = 0, k = 0; n < N; n++)
        s->rows[n] = s->tokens[n] == i->token_id
                         ? s->features + (size_t)k++ * (size_t)i->feature_size
                         : NULL;
}

static void step(Setup *s, float scale, PassKind pass)
{
    if (s->features)
        model_use_images(&s->model, (ImageRows){ s->rows, F32 });
    model_micro_batch(&s->model, &s->store, s->tokens, s->targets, NULL, scale, 0, pass);
}

static void read_batch(Setup *s)
{
    int *tokens = recorded(s, "tokens", "I32", N), *targets = recorded(s, "targets", "I32", N);
    s->labels = 0;
    for (int n = 0; n < N; n++) {
        s->tokens[n] = tokens[n];
        s->targets[n] = targets[n] < 0 ? -1 : targets[n];
        s->labels += targets[n] >= 0;
    }
    read_images(s);
    free(tokens);
    free(targets);
}

/* The configuration of a model, or of adapters and their base. */
static void read_config(ModelConfig *m, const char *folder)
{
    double dropout;
    if (!adapter_is(folder)) {
        hf_read(m, folder);
        return;
    }
    m->lora.base_path = adapter_base(folder);
    hf_read(m, m->lora.base_path);
    adapter_read(&m->lora, &dropout, folder, m);
}

static void open_part(Setup *s, const char *name, char **trainable)
{
    char folder[256], path[300];
    snprintf(folder, sizeof folder, "tests/golden/%s", name);
    snprintf(path, sizeof path, "%s/golden.safetensors", folder);
    ModelConfig m = { .init_std = 0.02 };
    read_config(&m, folder);
    m.max_sequence_length = T;
    model_config(&s->config, &m, "f32", B);
    s->config.loss_chunk = N;
    if (s->optimizer)
        s->config.optimizer.name = s->optimizer;
    s->config.trainable = trainable;
    s->config.num_trainable = trainable != NULL;
    s->name = name;
    s->golden = safetensors_open(path);
    read_batch(s);
    model_create(&s->model, &s->store, &s->config);
    assert_false(checkpoint_load(folder, &s->config, &s->store, NULL, true));
}

static void open_setup(Setup *s, const char *name)
{
    *s = (Setup){ 0 };
    open_part(s, name, NULL);
}

static void close_setup(Setup *s)
{
    model_free(&s->model, &s->store);
    free(s->config.model.lora.base_path);
    free(s->features);
    safetensors_close(s->golden);
}

/* max |found - expected| must be at most `bound` times max |expected|. */
static void check_close(const Setup *s, const char *name, const float *found, const float *expected,
                        size_t n, double bound)
{
    double largest = 0, worst = 0;
    size_t where = 0;
    for (size_t i = 0; i < n; i++) {
        double off = fabs((double)found[i] - expected[i]);
        largest = fmax(largest, fabs(expected[i]));
        if (!(off <= worst)) {
            worst = off;
            where = i;
        }
    }
    if (!(largest > 0) || !(worst <= bound * largest))
        fail_msg("%s, %s[%zu]: %.9g, expected %.9g; off by %.2g of the largest, at most %.0e",
                 s->name, name, where, (double)found[where], (double)expected[where],
                 worst / largest, bound);
}

static void check_forward(Setup *s)
{
    int V = s->config.model.embedding_size, vocab = s->config.model.vocab_size;
    step(s, 1, PASS_FORWARD);
    float loss = (float)(take_losses(&s->model).loss / s->labels + router_loss(&s->model)),
          *expected_loss = recorded(s, "loss", "F32", 1);
    float *expected = recorded(s, "logits", "F32", (size_t)N * vocab);
    float *all = malloc(4 * (size_t)N * V), *found = malloc(4 * (size_t)N * vocab);
    device_get(all, s->model.logits.data, 4 * (size_t)N * V);
    for (int n = 0; n < N; n++)
        memcpy(found + n * vocab, all + n * V, 4 * (size_t)vocab);
    check_close(s, "logits", found, expected, (size_t)N * vocab, 1e-5);
    check_close(s, "loss", &loss, expected_loss, 1, 1e-5);
    free(expected_loss), free(expected), free(all), free(found);
}

/* The losses of the router, as the step reports them. */
static double reported_router_loss(const Setup *s)
{
    const Tensor sums = s->model.text.router.sums;
    if (!sums.data)
        return 0;
    float *x = malloc(tensor_bytes(sums));
    double loss = 0;
    device_get(x, sums.data, tensor_bytes(sums));
    for (int l = 0; l < sums.rows; l++)
        loss += (double)x[(l + 1) * sums.cols - 1];
    free(x);
    return loss;
}

static double mean_loss_and_gradients(Setup *s)
{
    fsdp_empty_grads(&s->store);
    model_begin_step(&s->model, B);
    step(s, 1 / s->labels, PASS_COMPLETE);
    const double router = reported_router_loss(s);
    return take_losses(&s->model).loss / s->labels + router;
}

/* Returns the tensor's name in an adapter's file, if the file has it. */
static const char *stored_name(const HfTensor *t)
{
    static char name[HF_NAME];
    if (!t->with_adapter)
        return t->name;
    hf_adapter_name(name, t->name, NULL);
    return name;
}

/* Compares every gradient by its Hugging Face name; no gradient may be left over. */
static void check_gradients(Setup *s)
{
    int checked = 0, there = 0;
    mean_loss_and_gradients(s);
    for (int u = 0; u < s->store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&s->config.model, &s->store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            char name[128];
            size_t n = tensor[i].rows * tensor[i].cols;
            if (s->store.shape[u].param[tensor[i].param].region != TRAINED)
                continue;
            snprintf(name, sizeof name, "grad.%.111s", stored_name(&tensor[i]));
            float *expected = recorded(s, name, "F32", n), *found = malloc(4 * n);
            device_get(found,
                       (float *)s->store.shard[u].grad.data +
                           hf_first(&s->store.shape[u], &tensor[i]),
                       4 * n);
            check_close(s, name, found, expected, n, 1e-4);
            free(expected), free(found);
            checked++;
        }
        free(tensor);
    }
    for (int i = 0; i < s->golden->count; i++)
        there += strncmp(s->golden->tensor[i].name, "grad.", 5) == 0;
    assert_int_equal(checked, there);
}

static void check_steps(Setup *s, const char *losses, const float *adamw, double bound)
{
    float *expected = recorded(s, losses, "F32", STEPS), found[STEPS];
    s->config.optimizer.beta1 = adamw[1];
    s->config.optimizer.beta2 = adamw[2];
    s->config.optimizer.eps = adamw[3];
    s->config.optimizer.weight_decay = adamw[4];
    for (int step = 1; step <= STEPS; step++) {
        found[step - 1] = (float)mean_loss_and_gradients(s);
        double norm = optimizer_grad_norm(&s->store);
        optimizer_step(&s->store, &s->config, step, adamw[0], fmin(1, 1 / (norm + 1e-6)));
    }
    for (int i = 0; i < STEPS; i++)
        check_close(s, "loss of a step", &found[i], &expected[i], 1, bound);
    free(expected);
}

static void check_training(Setup *s, const char *losses)
{
    float *adamw = recorded(s, "adamw", "F32", 5);
    check_steps(s, losses, adamw, 1e-4);
    free(adamw);
}

/* Returns the error of a trained tensor relative to its change, as root mean squares. */
static double change_error(const Setup *s, const WeightFiles *start, int unit, const HfTensor *t)
{
    char name[128];
    const size_t n = t->rows * t->cols;
    const Found first = safetensors_find_in(start->file, start->count, stored_name(t));
    float *now = malloc(4 * n), *before = malloc(4 * n);
    snprintf(name, sizeof name, "trained.%.111s", stored_name(t));
    float *expected = recorded(s, name, "F32", n);
    assert_true(first.tensor && first.tensor->end - first.tensor->begin == 4 * n);
    safetensors_read(first.file, before, first.tensor, 0, 4 * n);
    device_get(now,
               (float *)s->store.shard[unit].slice[TRAINED].stored.data +
                   hf_first(&s->store.shape[unit], t),
               4 * n);
    double off = 0, change = 0;
    for (size_t i = 0; i < n; i++) {
        off += ((double)now[i] - expected[i]) * ((double)now[i] - expected[i]);
        change += ((double)expected[i] - before[i]) * ((double)expected[i] - before[i]);
    }
    free(expected), free(before), free(now);
    return sqrt(off / change);
}

static void check_adapters(const Setup *s)
{
    char path[300];
    snprintf(path, sizeof path, "tests/golden/%s", s->name);
    WeightFiles start = weight_files_open_adapter(path);
    for (int u = 0; u < s->store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&s->config.model, &s->store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            const double off = tensor[i].adapter || tensor[i].with_adapter
                                   ? change_error(s, &start, u, &tensor[i])
                                   : 0;
            if (!(off <= 4e-3))
                fail_msg("%s, %s after %d steps: off by %.2g of its change", s->name,
                         tensor[i].name, STEPS, off);
        }
        free(tensor);
    }
    weight_files_close(&start);
}

/* Compares --export of base and adapters with merge_and_unload: first and last row of each matrix.
 * An element is a sum of up to 9 terms, with an error of 10 u of the largest. */
static void check_merged(const Setup *s)
{
    char root[] = "/tmp/test_parity_XXXXXX", source[300], target[64], path[128], command[96];
    int checked = 0;
    assert_non_null(mkdtemp(root));
    snprintf(source, sizeof source, "tests/golden/%s", s->name);
    snprintf(target, sizeof target, "%s/merged", root);
    export_folder(source, NULL, target, "F32", CHECKPOINT_FILE_BYTES);
    snprintf(path, sizeof path, "%s/%s", target,
             s->features ? "model-00001-of-00001.safetensors" : "model.safetensors");
    SafeFile *merged = safetensors_open(path);
    for (int i = 0; i < merged->count; i++) {
        const SafeTensor *t = &merged->tensor[i];
        char name[128];
        snprintf(name, sizeof name, "merged.%.111s", t->name);
        if (!safetensors_find(s->golden, name))
            continue;
        const size_t cols = t->shape[1], last = (t->shape[0] - 1) * cols;
        float *expected = recorded(s, name, "F32", 2 * cols), *found = malloc(4 * 2 * cols);
        safetensors_read(merged, found, t, 0, 4 * cols);
        safetensors_read(merged, found + cols, t, 4 * last, 4 * cols);
        check_close(s, name, found, expected, 2 * cols, 10 * 0x1p-24);
        free(expected), free(found);
        checked++;
    }
    for (int i = 0; i < s->golden->count; i++)
        checked -= strncmp(s->golden->tensor[i].name, "merged.", 7) == 0;
    assert_int_equal(checked, 0);
    safetensors_close(merged);
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

static void test_parity(void **state)
{
    Setup s;
    open_setup(&s, *state);
    check_forward(&s);
    check_gradients(&s);
    check_training(&s, "losses");
    if (s.config.model.lora.rank > 0) {
        check_adapters(&s);
        check_merged(&s);
    }
    close_setup(&s);
}

typedef struct {
    int unit;
    HfTensor tensor;
    bool embedding;
    /* elements of a row; number of elements in the golden file: a vector, or two rows */
    size_t cols, count;
    float *start;
} Rows;
enum { MOST_ROWS = 64 };

/* Copies the elements of a tensor that the golden file has. */
static float *fetch_rows(const Setup *s, const Rows *r)
{
    const float *stored = (const float *)s->store.shard[r->unit].slice[TRAINED].stored.data +
                          hf_first(&s->store.shape[r->unit], &r->tensor);
    const size_t first = r->embedding ? (size_t)s->tokens[0] : 0,
                 last = r->embedding ? (size_t)s->tokens[1] : r->tensor.rows - 1;
    float *x = malloc(4 * r->count);
    device_get(x, stored + first * r->cols, 4 * r->cols);
    if (r->count > r->cols)
        device_get(x + r->cols, stored + last * r->cols, 4 * r->cols);
    return x;
}

static int list_rows(const Setup *s, Rows *all)
{
    int count = 0;
    for (int u = 0; u < s->store.num_units; u++) {
        int n;
        HfTensor *tensor = hf_tensors(&s->config.model, &s->store.shape[u], u, &n);
        for (int i = 0; i < n; i++) {
            const HfTensor *t = &tensor[i];
            const bool vector = t->rows == 1 || t->cols == 1;
            const size_t cols = vector ? t->rows * t->cols : t->cols;
            assert_true(count < MOST_ROWS);
            all[count] = (Rows){
                u, *t, strstr(t->name, "embed_tokens"), cols, vector ? cols : 2 * cols, NULL
            };
            all[count].start = fetch_rows(s, &all[count]);
            count++;
        }
        free(tensor);
    }
    return count;
}

/* Adds the squares of the recorded elements' errors and changes. */
static void add_errors(const Setup *s, const Rows *r, double *off, double *change)
{
    char name[128];
    snprintf(name, sizeof name, "rows.%.111s", r->tensor.name);
    float *expected = recorded(s, name, "F32", r->count), *found = fetch_rows(s, r);
    for (size_t i = 0; i < r->count; i++) {
        *off += pow((double)found[i] - expected[i], 2);
        *change += pow((double)expected[i] - r->start[i], 2);
    }
    free(expected), free(found);
}

/* Compares Muon for the matrices of blocks, and AdamW for all other weights, with torch.optim.Muon
 * in transformers' model. The gradient of 30 tokens has a rank of at most 30. The other singular
 * values of u are rounding errors of sums in another order. Newton-Schulz enlarges them up to
 * 3.44^5 times. So matrices differ by up to 0.024 of their change, and all other weights by 0.0019
 * (measured). In every model the differences are at least 0.061 and 0.0062 without Nesterov's
 * momentum, with a momentum of 0.9, with four iterations, with the other scale, without decay, or
 * with per-head updates. */
static void test_muon(void **state)
{
    Setup s = { .optimizer = "muon" };
    Rows rows[MOST_ROWS];
    char path[300];
    double off[2] = { 0 }, change[2] = { 0 }; /* of all other weights; of matrices */
    open_part(&s, *state, NULL);
    float *adamw = recorded(&s, "adamw", "F32", 5);
    const int count = list_rows(&s, rows);
    snprintf(path, sizeof path, "tests/golden/muon/%s.safetensors", s.name);
    safetensors_close(s.golden);
    s.golden = safetensors_open(path);
    assert_int_equal(count + 1, s.golden->count);
    check_steps(&s, "losses", adamw, 4e-3);
    for (int i = 0; i < count; i++) {
        const bool matrix =
            muon_steps(&s.store, &s.store.shape[rows[i].unit].param[rows[i].tensor.param]);
        add_errors(&s, &rows[i], &off[matrix], &change[matrix]);
        free(rows[i].start);
    }
    const double others = sqrt(off[0] / change[0]), matrices = sqrt(off[1] / change[1]);
    if (!(matrices <= 0.04) || !(others <= 3.5e-3))
        fail_msg(
            "%s after %d steps of Muon: matrices are off by %.2g of their change, all else by %.2g",
            s.name, STEPS, matrices, others);
    free(adamw);
    close_setup(&s);
}

/* The first stage of LLaVA's recipe. */
static void test_projector(void **state)
{
    static char *pattern = "multi_modal_projector.*";
    Setup s = { 0 };
    open_part(&s, *state, &pattern);
    check_training(&s, "losses_projector");
    close_setup(&s);
}

#define PARITY(folder) add_test("test_parity: " folder, test_parity, folder);
#define LORA_PARITY(folder) PARITY("lora/" folder)
#define MUON_PARITY(folder) add_test("test_muon: " folder, test_muon, folder);
#define PROJECTOR_PARITY(folder) add_test("test_projector: " folder, test_projector, folder);

#define TEXT_MODELS(row) \
    row("llama") row("llama-gqa-tied") row("llama-head-dim") row("olmo") row("olmo2") \
        row("mistral") row("mistral-full") row("qwen3") row("qwen3-tied") row("olmo3") \
            row("olmo3-default") row("ministral") row("qwen2") row("qwen2-tied") row("smollm3")
#define EXPERT_MODELS(row) row("olmoe") row("qwen3-moe") row("qwen3-moe-dense")
#define IMAGE_MODELS(row) row("llava-llama") row("llava-mistral") row("llava-qwen3-tied")

int main(void)
{
    device_init(0);
    TEXT_MODELS(PARITY)
    TEXT_MODELS(LORA_PARITY)
    EXPERT_MODELS(PARITY)
    EXPERT_MODELS(LORA_PARITY)
    LORA_PARITY("olmoe-experts")
    LORA_PARITY("qwen3-moe-experts")
    PARITY("olmoe-aux")
    PARITY("qwen3-moe-aux")
    PARITY("qwen3-moe-dense-aux")
    IMAGE_MODELS(PARITY)
    IMAGE_MODELS(LORA_PARITY)
    TEXT_MODELS(MUON_PARITY) IMAGE_MODELS(PROJECTOR_PARITY) return run_all_tests(NULL, NULL);
}
