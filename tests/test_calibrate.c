/* Calibrated exports: the codes are those of GPTQ, for the inputs that each layer has in the
 * trainer's own forward pass after the exported blocks. The losses are those of the folders.
 * Impossible requests are refused. */
#include "kernels/gptq_layer.h"
#include "kernels/values.h"
#include "model/block/block.h"
#include "model/checkpoint/weight_codes.h"
#include "model/calibrate/calibrate.h"
#include "model/run/export_run.h"
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/exported.h"
#include "tests/saved.h"

enum { SEQUENCES = 32, HELD = 2, B = 2, T = 16, GROUP = 32, FILE_TOKENS = 40 * T };

/* Tokens whose transitions are uneven, so that inputs are correlated. */
static char *write_tokens(int below)
{
    char *path = keep(256);
    uint16_t ids[FILE_TOKENS];
    for (int i = 0; i < FILE_TOKENS; i++)
        ids[i] = (uint16_t)(i % 3 == 2 ? (ids[i - 1] * 7 + ids[i - 2]) % below
                                       : test_token(3, (uint64_t)i, i % 2 ? below / 4 : below));
    snprintf(path, 256, "%s/tokens%d.npy", root, below);
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(ids, sizeof ids, 1, f) == 1 && fclose(f) == 0);
    return path;
}

static const char *save_model(SmallModel a)
{
    Run r;
    const ModelConfig m = architecture(a);
    const Format f32 = { F32, 0 };
    open_run(&r, &m, f32, f32, f32);
    store_init(&r.store, &r.config.model, 3);
    save(&r, 1);
    char *folder = keep(256);
    snprintf(folder, 256, "%s/step1", r.config.save_folder);
    close_run(&r);
    return folder;
}

static ExportOptions calibrated(const char *source, const char *target, char **tokens)
{
    ExportOptions o = export_options_of(source, NULL, target, "int4");
    o.group = GROUP, o.calibration = tokens, o.num_calibration = 1, o.token_bytes = NOT_GIVEN,
    o.sequences = SEQUENCES;
    o.damping = 0.01, o.ordered = true;
    return o;
}

/* Makes a model with the weights of a folder, and separate activations for each block. */
typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Loaded;

static void load_model(Loaded *l, const ModelConfig *m, const char *folder)
{
    TrainState unread;
    *l = (Loaded){ 0 };
    model_config(&l->config, m, "bf16", B);
    model_create_apart(&l->model, &l->store, &l->config);
    checkpoint_load(folder, &l->config, &l->store, &unread, false);
}

static double loss_of(Loaded *l, const CalibrationData *d, int first, int count)
{
    take_losses(&l->model);
    for (int i = first; i < first + count; i += B)
        model_micro_batch(&l->model, &l->store, d->tokens + i * T, d->targets + i * T, NULL, 0, 0,
                          PASS_FORWARD);
    return take_losses(&l->model).loss / (count * (T - 1));
}

static Tensor stored(const Loaded *l, int unit)
{
    return l->store.shard[unit].slice[TRAINED].stored;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Inputs of the layers of a block. */
typedef struct {
    Loaded *of;
    int block;
    Tensor h[NUM_LINEARS];
} Observer;

static void observe(void *observer, int unit, const UnitTensors *w)
{
    (void)w;
    const Observer *o = observer;
    const Acts *a = &o->of->model.acts[o->block];
    const Tensor input[NUM_LINEARS] = { a->attn_h, a->attn_operand, a->mlp_h, a->swiglu_operand };
    for (Linear l = 0; l < NUM_LINEARS && unit == o->block + 1; l++)
        matmul_dw(o->h[l], input[l], input[l]);
}

static int packed_code(const uint32_t *packed, size_t i)
{
    return (int)(packed[i / 8] >> 4 * (i % 8) & 15) - 8;
}

static void check_matrix(const SafeFile *f, const HfTensor *t, const int8_t *codes,
                         const float *scale)
{
    const int length = (int)(strlen(t->name) - strlen(".weight"));
    const SafeTensor *packed = safetensors_find(f, text("%.*s.weight_packed", length, t->name));
    const SafeTensor *scales = safetensors_find(f, text("%.*s.weight_scale", length, t->name));
    assert_non_null(packed);
    const size_t n = t->rows * t->cols;
    uint32_t *words = keep(n / 2);
    uint16_t *found = keep(n / GROUP * 2);
    safetensors_read(f, words, packed, 0, n / 2);
    safetensors_read(f, found, scales, 0, n / GROUP * 2);
    for (size_t i = 0; i < n; i++)
        if (packed_code(words, i) != codes[i])
            fail_msg("%s: code %zu is %d, expected %d", t->name, i, packed_code(words, i),
                     codes[i]);
    for (size_t i = 0; i < n / GROUP; i++)
        assert_true(float_from_bits((uint32_t)found[i] << 16) == scale[i]);
}

static char printed[1 << 16]; /* by calibrate() */

static CalibrationLosses calibrate_printing(Export *x, const ExportOptions *o,
                                            const CalibrationData *d)
{
    FILE *f = tmpfile();
    assert_non_null(f);
    fflush(stdout);
    const int saved = dup(STDOUT_FILENO);
    dup2(fileno(f), STDOUT_FILENO);
    const CalibrationLosses losses = calibrate(x, o, d);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    rewind(f);
    printed[fread(printed, 1, sizeof printed - 1, f)] = '\0';
    fclose(f);
    return losses;
}

/* The printed line of a block has the mean squared error of the matrix's outputs, and the error of
 * rounding to nearest. */
static void check_printed(int block, const Param *p, const GptqResult *r)
{
    const double outputs = (double)SEQUENCES * T * p->rows;
    const char *line = strstr(printed, text("block %d:", block));
    assert_non_null(line);
    assert_non_null(
        strstr(line, text(" %s %.3g | %.3g", p->name, r->error / outputs, r->rounded / outputs)));
}

/* Checks a matrix of the original model. h: its inputs. */
static void check_layer(const SafeFile *f, const Loaded *was, int block, const Param *p, Tensor h)
{
    const Tensor flat = shard_weights(&was->store.shard[block + 1], p, 0, p->stored);
    const Tensor w = tensor_at(flat.data, flat.format, p->rows, p->cols),
                 values = make((Format){ BF16, 0 }, p->rows, p->cols);
    const size_t n = param_numel(p);
    float *host = keep(n * sizeof *host), *scale = keep(n / GROUP * sizeof *scale);
    float *device_scale = guarded(n / GROUP * sizeof *scale);
    int8_t *codes = keep(n), *device_codes = guarded(n);
    device_get(host, w.data, n * sizeof *host);
    codes_int4_scales(scale, host, (size_t)p->rows, (size_t)p->cols, GROUP);
    device_put(device_scale, scale, n / GROUP * sizeof *scale);
    const GptqResult r = gptq(device_codes, values, w, device_scale, GROUP, h, 0.01, true);
    check_printed(block, p, &r);
    device_get(codes, device_codes, n);
    int count;
    const UnitLayout *u = &was->store.shape[block + 1];
    HfTensor *tensor = hf_tensors(&was->config.model, u, block + 1, &count);
    for (int i = 0; i < count; i++)
        if (&u->param[tensor[i].param] == p)
            check_matrix(f, &tensor[i], codes + tensor[i].first, scale + tensor[i].first / GROUP);
    free(tensor);
}

/* The block has its original weights; earlier blocks have the weights of the folder. */
static void check_block(const SafeFile *f, Loaded *is, const Loaded *was, int block,
                        const CalibrationData *d)
{
    Observer o = { .of = is, .block = block };
    const UnitLayout *u = &was->store.shape[block + 1];
    const Param *matrix[NUM_LINEARS] = { NULL };
    for (int i = 0; i < u->num_params; i++)
        if (u->param[i].is_operand) {
            matrix[u->param[i].linear] = &u->param[i];
            o.h[u->param[i].linear] = make((Format){ F32, 0 }, u->param[i].cols, u->param[i].cols);
        }
    for (Linear l = 0; l < NUM_LINEARS; l++)
        fill_bytes(o.h[l], 0);
    const Tensor here = stored(is, block + 1);
    void *coded = keep(tensor_bytes(here));
    device_get(coded, here.data, tensor_bytes(here));
    device_copy(here.data, stored(was, block + 1).data, tensor_bytes(here));
    store_loaded(&is->store);
    is->model.observe = observe;
    is->model.observer = &o;
    loss_of(is, d, 0, SEQUENCES);
    is->model.observe = NULL;
    device_put(here.data, coded, tensor_bytes(here));
    store_loaded(&is->store);
    for (Linear l = 0; l < NUM_LINEARS; l++)
        check_layer(f, was, block, matrix[l], o.h[l]);
}

/* Codes agree bit for bit, because the micro-batches are the same; test_gptq tests GPTQ itself.
 * Losses are summed in another order. */
TEST(test_codes)
{
    for (SmallModel a = 0; a < OLMOE; a++) { /* experts cannot be calibrated */
        const ModelConfig m = architecture(a);
        const char *source = save_model(a);
        char *target = keep(256), *tokens = write_tokens(90);
        snprintf(target, 256, "%s/coded%d", root, (int)a);
        const ExportOptions o = calibrated(source, target, &tokens);
        Export x = export_open(&o);
        CalibrationData d = calibration_read(&o, &x);
        assert_true(d.sequences == SEQUENCES && d.held == HELD && d.length == T);
        export_begin(&x, CHECKPOINT_FILE_BYTES);
        const CalibrationLosses losses = calibrate_printing(&x, &o, &d);
        export_complete(&x);
        Loaded was, is;
        load_model(&was, &m, source);
        load_model(&is, &m, target);
        SafeFile *f = safetensors_open(text("%s/model.safetensors", target));
        assert_int_equal(losses.labels, HELD * (T - 1));
        assert_true(fabs(losses.before / loss_of(&was, &d, SEQUENCES, HELD) - 1) <= 64 * U24);
        assert_true(fabs(losses.after / loss_of(&is, &d, SEQUENCES, HELD) - 1) <= 64 * U24);
        assert_true(losses.before != losses.after);
        for (int block = 0; block < m.n_layers; block++)
            check_block(f, &is, &was, block, &d);
        safetensors_close(f);
        model_free(&was.model, &was.store);
        model_free(&is.model, &is.store);
        calibration_free(&d);
        release();
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void run_with(const char *source, const char *options)
{
    char words[512], *rest = words;
    char *argv[12] = { "train", (char *)text("--export=%s", source),
                       (char *)text("%s/refused", root) };
    int argc = 3;
    snprintf(words, sizeof words, "%s", options);
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    export_run(argc, argv);
}

TEST(test_refusals)
{
    needs_fork();
    const char *source = save_model(LLAMA), *tokens = write_tokens(90), *others = write_tokens(300);
    static const struct {
        const char *options, *message;
    } wrong[] = {
        { "--calibration=%s", "--calibration is for --dtype=int4: the codes of bf16" },
        { "--dtype=fp8 --calibration=%s", "--calibration is for --dtype=int4: the codes of fp8" },
        { "--dtype=int4 --calibration=[]", "--calibration names no file of tokens" },
        { "--dtype=int4 --damping=0.1", "--damping is an option of calibration; expected" },
        { "--dtype=int4 --order=false", "--order is an option of calibration; expected" },
        { "--dtype=int4 --data.memmap_dtype=uint32",
          "--data.memmap_dtype is an option of calibration" },
        { "--dtype=int4 --group=32 --calibration=%s --damping=0",
          "--damping=0: damping: expected a number from 1e-09 to 1" },
        { "--dtype=int4 --group=32 --calibration=%s --calibration_length=17",
          "expected at most 16, the length of the model's sequences" },
        { "--dtype=int4 --group=32 --calibration=%s",
          "the files have 40 sequences of 16 tokens, but 128 for calibration and 8 held out are "
          "needed" },
        { "--dtype=int4 --group=32 --calibration=/nowhere.npy",
          "--calibration: cannot open /nowhere.npy" },
        { "--dtype=int4 --calibration=%s", "cannot be divided: a group is part of a row" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        DIES(wrong[i].message, run_with(source, text(wrong[i].options, tokens)));
    DIES("but the vocabulary has 90 ids",
         run_with(source, text("--dtype=int4 --group=32 --calibration=%s", others)));
    assert_false(exists(text("%s/refused", root)) || exists(text("%s/refused.tmp", root)));
    const char *most = "--dtype=int4 --group=32 --calibration=%s --calibration_sequences=%d";
    DIES("the files have 40 sequences of 16 tokens, but 39 for calibration",
         run_with(source, text(most, tokens, 39)));
    run_with(source, text(most, tokens, 38));
    assert_true(exists(text("%s/refused/config.json", root)));
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
