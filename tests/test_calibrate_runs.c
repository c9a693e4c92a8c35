/* ./train --export --calibration of a model that has learned something. The loss is lowest for
 * weights in BF16, higher for GPTQ's codes, and highest for codes rounded to nearest, with either
 * kind of scales. NOTE: the order of the two kinds of scales depends on the seed. */
#include "kernels/fp8.h"
#include "kernels/random.h"
#include "model/checkpoint/weight_codes.h"
#include "tests/test.h"
#include "tests/exported.h"
#include "tests/launch.h"

enum { VOCABULARY = 64, GROUP = 64 };

/* A table gives nine of ten tokens from the token four positions before; the others are random. So
 * the model needs attention and the MLP to learn them. */
static void make_tokens(const char *name, int count, uint64_t seed)
{
    char path[256];
    uint16_t table[VOCABULARY], *ids = calloc((size_t)count, sizeof *ids);
    for (int i = 0; i < VOCABULARY; i++)
        table[i] = (uint16_t)((i * 37 + 11) % VOCABULARY);
    for (int i = 0; i < count; i++) {
        const uint64_t bits = random_bits(seed, (uint64_t)i);
        ids[i] = i >= 4 && bits % 10 ? table[ids[i - 4]] : (uint16_t)((bits >> 32) % VOCABULARY);
    }
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(ids, sizeof *ids, (size_t)count, f) == (size_t)count && fclose(f) == 0);
    free(ids);
}

static void run(const char *format, const char *name)
{
    char arguments[1024];
    snprintf(arguments, sizeof arguments, format, folder, folder, name);
    expect_status(
        finish(start_command("%s -n 1 %s/train %s", setting("LAUNCH", "mpirun --oversubscribe"),
                             setting("BUILD", "build/cpu"), arguments)),
        0);
}

/* Rounds all weights to the nearest code, with the scale of the largest weight. */
static void export_rounded(void)
{
    char source[256], target[256];
    snprintf(source, sizeof source, "%s/run/latest", folder);
    snprintf(target, sizeof target, "%s/rounded", folder);
    ExportOptions o = export_options_of(source, NULL, target, "int4");
    o.group = GROUP;
    Export x = export_open(&o);
    export_begin(&x, (size_t)1 << 30);
    for (int i = 0; i < x.num_entries; i++) {
        const HfTensor *t = &x.entry[i].tensor;
        const size_t n = t->rows * t->cols;
        float *w = calloc(n, sizeof *w), *scale = calloc(n, sizeof *scale);
        int8_t *codes = calloc(n, 1);
        export_read(&x, t->name, w);
        for (size_t k = 0; k < n; k++)
            scale[k / GROUP] = fmaxf(scale[k / GROUP], fabsf(w[k]) / 7.5f);
        for (size_t k = 0; k < n / GROUP; k++)
            scale[k] = bf16_decode(bf16_encode(scale[k]));
        if (x.entry[i].is_coded) {
            codes_int4(codes, scale, w, t->rows, t->cols, GROUP);
            export_write_int4(&x, t->name, codes, scale);
        }
        free(w), free(scale), free(codes);
    }
    export_complete(&x);
}

static double loss_of(const char *name)
{
    double of_step[MAX_STEPS];
    expect_status(train(1,
                        "--eval_only --recipe=bf16 --load_path=%s/%s --device_eval_batch_size=32 "
                        "--save_folder=%s/eval-%s "
                        "--evaluators='[{label: val, data: {paths: [%s/val.npy]}}]'",
                        folder, name, folder, name, folder),
                  0);
    shell("cp %s/eval-%s/eval.jsonl %s/metrics.jsonl", folder, name, folder);
    assert_true(metric(of_step, ".", "eval/val/CrossEntropyLoss") == 1);
    return of_step[0];
}

TEST(test_order)
{
    make_tokens("train", 200000, 1);
    make_tokens("val", 60000, 2);
    ids = "--model.vocab_size=64 --model.embedding_size=64 --model.d_model=64 "
          "--model.mlp_hidden_size=256 --model.n_heads=4 "
          "--model.eos_token_id=0 --model.weight_tying=false";
    expect_status(train(1,
                        "--data.paths=[%s/train.npy] --global_train_batch_size=32 "
                        "--device_train_microbatch_size=32 "
                        "--optimizer.learning_rate=1e-2 --max_duration=120 --evaluators=[] "
                        "--save_folder=%s/run",
                        folder, folder),
                  0);
    run("--export=%s/run/latest --dtype=bf16 %s/%s", "exact");
    run("--export=%s/run/latest --dtype=int4 --group=64 %s/%s", "grid");
    expect_output("int4 without --calibration");
    export_rounded();
    char calibrated[512];
    snprintf(calibrated, sizeof calibrated,
             "--export=%%s/run/latest --dtype=int4 --group=64 --calibration='[%s/tra*.npy]' "
             "--calibration_sequences=256 %%s/%%s",
             folder);
    run(calibrated, "gptq");
    const double exact = loss_of("exact"), gptq = loss_of("gptq"), grid = loss_of("grid"),
                 rounded = loss_of("rounded");
    printf("losses: %.6f, gptq %.6f, grid %.6f, rounded %.6f\n", exact, gptq, grid, rounded);
    assert_true(exact < 3 && exact <= gptq && gptq < grid && gptq < rounded);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
