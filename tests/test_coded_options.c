/* Exports as codes and scales: compares trained matrices with the trainer's operands. Also refused
 * options and shapes. */
#include "model/store/fsdp.h"
#include "model/run/export_run.h"
#include "tests/test.h"
#include "tests/coded.h"

/* ---- trained matrices ------------------------------------------------------------------------ */

static void open_trained(Run *r, const char *recipe, SmallModel a)
{
    const ModelConfig m = wide(a);
    *r = (Run){ 0 };
    model_config(&r->config, &m, recipe, 1);
    place(r);
    store_init(&r->store, &r->config.model, 5);
    for (size_t row = 0; row < 3 && r->config.recipe.master.dtype == F32; row++)
        put_middles(r, row, 1.7f / 448, true);
    store_loaded(&r->store);
    save(r, 1);
}

/* Compares a tensor's codes and scale with rows of a parameter's operand, from `first` on. */
static size_t check_operand(const SafeFile *f, const char *layer, const uint8_t *codes, float scale,
                            size_t first, size_t cols)
{
    const SafeTensor *t = safetensors_find(f, text("%s.weight", layer));
    const float *found = bytes_in(f, text("%s.weight_scale", layer), "F32");
    assert_true(t->shape[1] == cols && found[0] == scale);
    assert_memory_equal(bytes_in(f, t->name, "F8_E4M3"), codes + first * cols, t->shape[0] * cols);
    return first + t->shape[0];
}

/* Codes and scales equal those of the run's operands in the forward pass. */
TEST(test_trained)
{
    static const struct {
        const char *param, *part[3];
    } rows[] = {
        { "qkv", { "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj" } },
        { "out", { "self_attn.o_proj" } },
        { "gate_up", { "mlp.gate_proj", "mlp.up_proj" } },
        { "down", { "mlp.down_proj" } },
    };
    /* stored weights in F32 and in BF16 */
    static const char *const recipes[] = { "fp8", "coat" };
    for (int i = 0; i < 2; i++) {
        Run r;
        open_trained(&r, recipes[i], OLMO2);
        const char *target = lasting(text("%s/%s", root, recipes[i]));
        ExportOptions o = export_options_of(step_folder(&r, 1), NULL, target, "fp8");
        o.scales = SCALES_TRAINED;
        export_to(&o, CHECKPOINT_FILE_BYTES);
        SafeFile *f = open_folder(target);
        int checked = 0;
        fsdp_gather(&r.store, 1, FOR_FORWARD);
        const UnitTensors *u = fsdp_acquire(&r.store, 1);
        for (int k = 0; k < r.store.shape[1].num_params; k++) {
            const Param *p = &r.store.shape[1].param[k];
            const Tensor w = u->tensor[p->id];
            const size_t n = (size_t)p->rows * (size_t)p->cols;
            float scale;
            for (int j = 0; j < 4; j++) {
                if (strcmp(p->name, rows[j].param) != 0)
                    continue;
                uint8_t *codes = keep(n);
                size_t at = 0;
                device_get(codes, w.data, n);
                device_get(&scale, w.scale, sizeof scale);
                for (int part = 0; part < 3 && rows[j].part[part]; part++, checked++)
                    at = check_operand(f, lasting(text("model.layers.0.%s", rows[j].part[part])),
                                       codes, scale, at, (size_t)p->cols);
                assert_int_equal(at, p->rows);
            }
        }
        assert_int_equal(checked, 7);
        fsdp_release(&r.store, 1);
        safetensors_close(f);
        close_run(&r);
        release();
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void run_with(const char *options)
{
    char *argv[8] = { "train", "--export=/nowhere", "x" }, *rest = strdup(options);
    int argc = 3;
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    export_run(argc, argv);
}

TEST(test_options)
{
    needs_fork();
    static const char *const wrong[] = {
        "--dtype=bf16 --block=128",
        "--dtype=fp8 --group=32",
        "--dtype=fp8 --layout=bitsandbytes",
        "--dtype=int8 --layout=fp8",
        "--dtype=int8 --scales=trained",
        "--dtype=int4 --block=128",
        "--dtype=int4 --layout=bitsandbytes",
        "--dtype=nf4 --group=64",
        "--dtype=nf4 --layout=compressed-tensors",
        "--dtype=fp8 --scales=trained --block=128",
        "--dtype=f32 --layout=fp8",
        "--dtype=fp8 --scales=trained --layout=fp8",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        DIES("cannot be combined; expected --dtype=fp8", run_with(wrong[i]));
    DIES("--block=64: block: expected 128, found '64'", run_with("--dtype=fp8 --block=64"));
    DIES("--group=16: group: expected 32|64|128, found '16'", run_with("--dtype=int4 --group=16"));
    DIES("/nowhere: there is no such folder",
         run_with("--dtype=int4 --group=64 --layout=compressed-tensors"));
}

/* These options are refused before any weight is read; the message says what is allowed. */
TEST(test_shapes)
{
    needs_fork();
    static const struct {
        int width;
        const char *options, *message;
    } odd[] = {
        { 192, "int4",
          "down_proj.weight of 128 x 192 cannot be divided: a group is part of a row; use "
          "--group=64" },
        { 160, "int4",
          "down_proj.weight of 128 x 160 cannot be divided: a group is part of a row; use "
          "--group=32" },
        { 144, "int4",
          "down_proj.weight of 128 x 144 cannot be divided: a group is part of a row; use "
          "--dtype=int8" },
        { 192, "blocks",
          "gate_proj.weight of 192 x 128 cannot be divided: blocks are 128 x 128; use --dtype=fp8 "
          "without --b" },
        { 192, "inverse",
          "gate_proj.weight of 192 x 128 cannot be divided: blocks are 128 x 128; use --dtype=fp8 "
          "without -" },
    };
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        Run r;
        ModelConfig m = wide(LLAMA);
        m.mlp_width = odd[i].width;
        open_run(&r, &m, (Format){ F32, 0 }, (Format){ F32, 0 }, (Format){ F32, 0 });
        store_init(&r.store, &r.config.model, 3);
        save(&r, 1);
        ExportOptions o = export_options_of(step_folder(&r, 1), NULL, lasting(text("%s/odd", root)),
                                            strcmp(odd[i].options, "int4") == 0 ? "int4" : "fp8");
        o.block = strcmp(odd[i].options, "blocks") == 0 ? 128 : NOT_GIVEN;
        o.layout = strcmp(odd[i].options, "inverse") == 0 ? AS_FP8 : NOT_GIVEN;
        DIES(odd[i].message, export_to(&o, CHECKPOINT_FILE_BYTES));
        assert_false(exists(text("%s/odd.tmp", root)));
        close_run(&r);
        release();
    }
}

TEST(test_untrained)
{
    needs_fork();
    Run r;
    open_trained(&r, "bf16", LLAMA);
    ExportOptions o =
        export_options_of(step_folder(&r, 1), NULL, lasting(text("%s/untrained", root)), "fp8");
    o.scales = SCALES_TRAINED;
    DIES("needs a checkpoint of a run with E4M3 operands, but the run of this checkpoint "
         "multiplied in bf16",
         export_to(&o, CHECKPOINT_FILE_BYTES));
    shell(text("cd %s && rm trainer.json optimizer-*", o.source));
    DIES("needs a checkpoint of a run with E4M3 operands, but this folder is not a checkpoint of a "
         "run",
         export_to(&o, CHECKPOINT_FILE_BYTES));
    const float big = 65520;
    put_in_q(&r, 5, &big, 1);
    save(&r, 2);
    o = export_options_of(lasting(step_folder(&r, 2)), NULL, o.target, "int8");
    o.layout = AS_BITSANDBYTES;
    DIES("holds 65520, more than LLM.int8() can store: use --dtype=int8 without --layout",
         export_to(&o, CHECKPOINT_FILE_BYTES));
    assert_false(exists(o.target));
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
