/* The program as a user runs it: mpirun ./train configs/tiny.yaml with overrides. Tests training,
 * and refused input. */
#include "tests/test.h"
#include "tests/launch.h"

#include <time.h>

#include "model/run/log.h"

/* ten steps equal five saved steps and five more, bit for bit; also on two ranks with bf16 rounding
 * and moments */
static void check_resume(int ranks, const char *arguments, const char *name)
{
    double whole[MAX_STEPS], parts[MAX_STEPS];
    char run[64];
    snprintf(run, sizeof run, "whole-%s", name);
    expect_status(train(ranks, "%s --max_duration=10 --save_folder=%s/%s", arguments, folder, run),
                  0);
    losses(whole, run, 10);
    snprintf(run, sizeof run, "parts-%s", name);
    expect_status(train(ranks, "%s --max_duration=10 --stop_at=5 --save_folder=%s/%s", arguments,
                        folder, run),
                  0);
    losses(parts, run, 5);
    expect_status(train(ranks, "%s --max_duration=10 --try_load_latest_save --save_folder=%s/%s",
                        arguments, folder, run),
                  0);
    losses(parts, run, 10);
    for (int i = 1; i <= 10; i++)
        if (whole[i] != parts[i])
            fail_msg("%s: step %d: loss %.17g in one run, %.17g after resuming", name, i, whole[i],
                     parts[i]);
}

TEST(test_resume)
{
    check_resume(1, "", "f32");
    check_resume(4, "--recipe=coat-lean", "lean");
    check_resume(2,
                 "--recipe=bf16 --format.master=bf16 --format.moment1=bf16 --format.moment2=bf16",
                 "bf16");
}

/* The same global batch on 1, 2 and 4 ranks. The first losses differ only by the order of
 * summation: u times the number of terms, 256 tokens, is an upper bound. Later losses also differ
 * by its effect on the weights: as much again per step. */
TEST(test_ranks_agree)
{
    double one[MAX_STEPS], more[MAX_STEPS];
    expect_status(train(1, "--max_duration=5 --save_folder=%s/w1", folder), 0);
    losses(one, "w1", 5);
    for (int ranks = 2; ranks <= 4 && ranks <= most_ranks(); ranks *= 2) {
        expect_status(train(ranks, "--max_duration=5 --save_folder=%s/w%d", folder, ranks), 0);
        char run[16];
        snprintf(run, sizeof run, "w%d", ranks);
        losses(more, run, 5);
        for (int i = 1; i <= 5; i++)
            if (!(fabs(more[i] - one[i]) <= i * 256 * 0x1p-24 * one[i]))
                fail_msg("%d ranks, step %d: loss %.9g, on one rank %.9g", ranks, i, more[i],
                         one[i]);
    }
}

static void expect_close(const char *name, double bound)
{
    double one[MAX_STEPS], more[MAX_STEPS];
    const int count = metric(one, "alone", name);
    assert_true(count > 0 && metric(more, "context", name) == count);
    for (int i = 0; i < MAX_STEPS; i++)
        if (!(fabs(more[i] - one[i]) <= bound * fabs(one[i])) && !isnan(one[i]))
            fail_msg("%s, step %d: %.9g, on one rank %.9g", name, i, more[i], one[i]);
}

/* Context ranks train and evaluate as one rank does, and other numbers of context ranks continue
 * the run. Sums over tokens are in another order: roundoffs of F32, which ten steps multiply by
 * less than 100. */
TEST(test_context)
{
    static const char settings[] =
        "--model.n_heads=4 --model.n_kv_heads=4 --model.max_sequence_length=64 "
        "--data.generate_doc_lengths --eval_interval=5 --max_duration=10";
    needs_ranks(2);
    expect_status(train(1, "%s --save_folder=%s/alone", settings, folder), 0);
    expect_status(train(2, "%s --parallelism.context=2 --stop_at=5 --save_folder=%s/context",
                        settings, folder),
                  0);
    expect_output("2 ranks share each sequence");
    expect_status(
        train(4, "%s --parallelism.context=%d --try_load_latest_save --save_folder=%s/context",
              settings, most_ranks() < 4 ? 1 : 4, folder),
        0);
    expect_close("train/CrossEntropyLoss", 1e-5);
    expect_close("optim/total_grad_norm", 1e-4);
    expect_close("train/labels", 0);
    expect_close("eval/sample/CrossEntropyLoss", 1e-5);
}

/* Two steps on 4 ranks; then the state goes through other numbers of ranks and strategies, and
 * back. Every file of weights and moments keeps its bytes. A resume on half of the ranks has the
 * first run's losses, except for the order of summation, which FP8 amplifies to a rounding of
 * E4M3. */
TEST(test_resharding)
{
    static const struct {
        int ranks;
        const char *strategy;
        int needs;
    } way[] = {
        { 4, "FULL_SHARD", 1 },
        { 2, "HYBRID_SHARD", 1 },
        { 4, "FULL_SHARD --parallelism.pipeline=2", 2 },
        { 2, "NO_SHARD --parallelism.context=2", 2 },
        { 1, "NO_SHARD", 1 },
        { 4, "SHARD_GRAD_OP", 1 },
    };
    static const char recipe[] = "--recipe=coat --model.n_kv_heads=2 --model.weight_tying=false";
    double first[MAX_STEPS], second[MAX_STEPS];
    char from[512] = "";
    for (int i = 0; i < (int)(sizeof way / sizeof *way); i++) {
        if (!can_run(way[i].needs, way[i].strategy))
            continue;
        expect_status(train(way[i].ranks,
                            "%s --max_duration=4 --stop_at=2 --fsdp.sharding_strategy=%s "
                            "--save_folder=%s/way%d %s",
                            recipe, way[i].strategy, folder, i, from),
                      0);
        snprintf(from, sizeof from, "--load_path=%s/way%d/step2", folder, i);
        char command[1024];
        snprintf(command, sizeof command,
                 "for f in %s/way0/step2/*.s*; do cmp $f %s/way%d/step2/$(basename $f) || "
                 "exit 1; done",
                 folder, folder, i);
        assert_int_equal(system(command), 0);
    }
    expect_status(train(4, "%s --max_duration=4 --save_folder=%s/on4 %s", recipe, folder, from), 0);
    expect_status(train(2, "%s --max_duration=4 --save_folder=%s/on2 %s", recipe, folder, from), 0);
    losses(first, "on4", 2);
    losses(second, "on2", 2);
    for (int i = 3; i <= 4; i++)
        if (!(fabs(first[i] - second[i]) <= 0x1p-4 * 0x1p-4 * first[i]))
            fail_msg("step %d: loss %.9g on 4 ranks, %.9g on 2", i, first[i], second[i]);
}

TEST(test_loss_falls)
{
    double loss[MAX_STEPS], perplexity[MAX_STEPS];
    ids = ""; /* some ids are frequent, which 30 steps can learn */
    expect_status(train(1,
                        "--max_duration=30 --optimizer.learning_rate=1e-2 --eval_interval=1000 "
                        "--save_folder=%s/falls",
                        folder),
                  0);
    ids = FEW_IDS;
    losses(loss, "falls", 30);
    assert_true(fabs(loss[1] - log(50280)) < 1);
    assert_true(loss[30] < loss[1] - 1.5);
    assert_int_equal(metric(perplexity, "falls", "eval/sample/Perplexity"), 1);
    assert_true(perplexity[30] > 1 && perplexity[30] < 50280 / 4.0);
}

/* A weight decay that multiplies the weights by -99: three steps in a row that are not finite end
 * the run. */
TEST(test_not_finite)
{
    double skipped[MAX_STEPS];
    int status = train(1,
                       "--max_duration=60 --optimizer.learning_rate=1000 "
                       "--optimizer.weight_decay=0.1 --save_folder=%s/nan",
                       folder);
    assert_int_not_equal(status, 0);
    expect_output("third step in a row");
    const int steps = metric(skipped, "nan", "optim/step_skipped");
    assert_in_range(steps, 4, 59);
    char name[64];
    snprintf(name, sizeof name, "nan/step%d-aborted/config.json", steps);
    assert_true(exists(name) && !exists("nan/latest"));
}

TEST(test_plan_without_data)
{
    expect_status(train(4, "--dry_run --data.paths=[] --save_folder=%s/plan", folder), 0);
    expect_output("memory plan of a rank");
    assert_false(exists("plan"));
    assert_int_not_equal(train(1, "--data.paths=[] --save_folder=%s/plan", folder), 0);
    expect_output("no training data");
    assert_int_not_equal(train(1, "--ranks=2 --save_folder=%s/plan", folder), 0);
    expect_output("ranks only sets how many ranks --dry_run plans for");
}

/* A run plans for the given memory, which here is only the allowance for libraries. */
TEST(test_device_memory)
{
    needs_ranks(2);
    expect_status(train(2, "--max_duration=2 --save_folder=%s/ample", folder), 0);
    expect_output("weights gathered once per step,\n  gradients summed once per step\n");
    expect_status(train(2, "--max_duration=2 --device_memory=2.9 --save_folder=%s/scarce", folder),
                  0);
    expect_output("weights gathered for each pass,\n  gradients summed with every micro-batch\n");
}

static int lines_of(const char *text)
{
    int n = 0;
    for (; (text = strchr(text, '\n')); text++)
        n++;
    return n;
}

/* A user's error is one line, without output of MPI or its launcher, whatever started the ranks. */
TEST(test_error_alone)
{
    static const char *const launch[] = { "", "-n 1", "-n 4" }, *const wrong[] = {
        "--data.path=x", "--data.paths=no/such.npy"
    };
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            const int status =
                finish(start_command("%s %s %s/train configs/tiny.yaml %s --save_folder=%s/alone",
                                     *launch[i] ? setting("LAUNCH", "mpirun --oversubscribe") : "",
                                     i == 2 && most_ranks() < 4 ? "-n 1" : launch[i],
                                     setting("BUILD", "build/cpu"), wrong[k], folder));
            expect_status(status, STATUS_INPUT);
            if (strncmp(output, "error", 5) != 0 || lines_of(output) != 1)
                fail_msg("'%s' %s: %s", launch[i], wrong[k], output);
        }
}

/* The order of the output: model, plan, start of a resume, warnings, and then steps of 100
 * columns. */
TEST(test_terminal)
{
    double time_of[MAX_STEPS];
    const time_t start = time(NULL);
    static const char arguments[] =
        "--max_duration=100 --stop_at=%d --scheduler.t_decay=1 --save_folder=%s/terminal %s";
    expect_status(train(2, arguments, 1, folder, ""), 0);
    by = ONE_PIPE;
    expect_status(train(2, arguments, 3, folder, "--try_load_latest_save"), 0);
    by = "";
    static const char *const order[] = { "coat.c ",
                                         "model: ",
                                         "memory: ",
                                         "continuing ",
                                         "/terminal/step1, at step 1 of 3\n",
                                         "warning: ",
                                         "\nstep   2/100  loss " };
    const char *at = output;
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        const char *next = strstr(at, order[i]);
        if (!next)
            fail_msg("'%s' does not follow '%s' in %s", order[i], i ? order[i - 1] : "", output);
        at = next;
    }
    assert_ptr_equal(strchr(strstr(output, "warning: "), '\n'), strstr(output, "\nstep "));
    assert_int_equal(metric(time_of, "terminal", "time"), 3);
    for (int i = 1; i <= 3; i++)
        assert_true(time_of[i] >= (double)start && time_of[i] <= (double)time(NULL));
}

/* Lines with the widest numbers: Llama-2-7B in its first steps, and a skipped step. */
TEST(test_columns)
{
    char line[256];
    StepStats s = { .step = 100000, .labels = 1, .loss = 11.3456, .grad_norm = 1234.5, .lr = 3e-4 };
    const Progress p = {
        .speed = 24050, .light = 0.553, .memory = 76.2 * (1 << 30), .seconds_left = 99 * 86400
    };
    log_line(line, sizeof line, &s, 100000, &p);
    assert_string_equal(
        line,
        "step 100000/100000  loss 11.3456  norm 1.23e+03  lr 3.0e-04  24050 tok/s 55%  76.2 GiB  "
        "eta 99d00h");
    assert_true(strlen(line) <= 100);
    s.loss = s.grad_norm = NAN;
    s.skipped = true;
    log_line(line, sizeof line, &s, 100000, &p);
    assert_true(strlen(line) <= 100);
}

TEST(test_usage)
{
    expect_status(finish(start_command("%s/train", setting("BUILD", "build/cpu"))), 2);
    expect_output("usage: ");
    assert_in_range(lines_of(output), 5, 10);
}

/* The demo's run is in the build folder. */
TEST(test_demo)
{
    expect_status(finish(start_command("make -n BACKEND=cpu run-demo")), 0);
    expect_output("--save_folder=build/cpu");
}

/* Validation data of only padding have no loss. A loss of 0 would look like a good one. */
TEST(test_evaluation_without_labels)
{
    double loss[MAX_STEPS];
    char command[512];
    snprintf(command, sizeof command, "yes | tr 'y\\n' '\\1\\0' | head -c 1000 >%s/padding.npy",
             folder);
    assert_int_equal(system(command), 0);
    expect_status(train(1,
                        "--max_duration=1 --eval_interval=1 --data.generate_attention_mask "
                        "--save_folder=%s/unlabelled "
                        "--evaluators='[{label: val, data: {paths: [%s/padding.npy]}}]'",
                        folder, folder),
                  0);
    expect_output("| 0 labels");
    metric(loss, "unlabelled", "eval/val/CrossEntropyLoss");
    assert_true(isnan(loss[1]));
    assert_null(strstr(output, "nothing is learned"));
}

/* 16 sequences of 32 tokens, one per step; every second sequence has labels. A mean over no labels
 * would be NaN. In a step without labels, AdamW's moments of earlier gradients change the weights,
 * without weight decay. */
TEST(test_steps_without_labels)
{
    double loss[MAX_STEPS], labels[MAX_STEPS], perplexity[MAX_STEPS], norm[MAX_STEPS];
    int without = 0;
    for (int masks = 0; masks < 2; masks++) {
        char path[512];
        snprintf(path, sizeof path, "%s/plain.%s", folder, masks ? "mask" : "npy");
        FILE *f = fopen(path, "wb");
        for (int i = 0; i < 16 * 32; i++)
            masks ? fputc(i / 32 % 2, f) : (fputc(i * i % 251, f), fputc(0, f));
        assert_int_equal(fclose(f), 0);
    }
    expect_status(train(1,
                        "--max_duration=1ep --data.paths='[%s/plain.npy]' "
                        "--data.label_mask_paths='[%s/plain.mask]' "
                        "--global_train_batch_size=1 --device_train_microbatch_size=1 "
                        "--save_interval=1 --optimizer.weight_decay=0 "
                        "--scheduler.t_warmup=0 --scheduler.alpha_f=1 --save_folder=%s/gaps",
                        folder, folder, folder),
                  0);
    losses(loss, "gaps", 16);
    metric(labels, "gaps", "train/labels");
    metric(perplexity, "gaps", "train/Perplexity");
    metric(norm, "gaps", "optim/total_grad_norm");
    for (int i = 1; i <= 16; i++) {
        without += labels[i] == 0;
        assert_true(isnan(loss[i]) == (labels[i] == 0) && isnan(perplexity[i]) == (labels[i] == 0));
        assert_true(labels[i] > 0 ? norm[i] > 0 : norm[i] == 0);
        if (labels[i] == 0 && i > 1)
            shell("cd %s/gaps && ! cmp -s step%d/model.safetensors step%d/model.safetensors",
                  folder, i - 1, i);
    }
    assert_int_equal(without, 8);
    expect_output(": no token of the batch has a label (check data.label_mask_paths): there is no "
                  "loss, and the gradient is 0");
    expect_output("  no labels  norm 0 ");
    assert_null(strstr(output, "nan"));
    char path[512];
    snprintf(path, sizeof path, "%s/gaps/step16/trainer.json", folder);
    json_t *manifest = json_load_file(path, 0, NULL);
    const char *kept =
        json_string_value(json_object_get(json_object_get(manifest, "spikes"), "loss"));
    int count = kept && *kept;
    for (; kept && *kept; kept++)
        count += *kept == ' ';
    assert_int_equal(count, 8);
    json_decref(manifest);
}

/* Processes that srun starts without PMI are separate runs in one folder. mpirun with one rank is
 * allowed. */
TEST(test_slurm)
{
    static const struct {
        const char *environment;
        bool launch;
        const char *says;
        int status;
    } cases[] = {
        { "SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4", false,
          "srun started 4 tasks (SLURM_STEP_NUM_TASKS), and MPI sees one rank", STATUS_INPUT },
        { "SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4", false, NULL, 0 },
        { "SLURM_NTASKS=4", false,
          "warning: Slurm has 4 tasks for this job (SLURM_NTASKS), and this run has one rank", 0 },
        { "SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2", true, NULL, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int status = finish(start_command(
            "env -u OMPI_COMM_WORLD_SIZE -u PMI_SIZE %s %s %s %s/train configs/tiny.yaml "
            "%s %s --max_duration=1 --save_folder=%s/slurm%zu",
            cases[i].environment,
            cases[i].launch ? setting("LAUNCH", "mpirun --oversubscribe") : "",
            cases[i].launch ? "-n 1" : "", setting("BUILD", "build/cpu"), SMALL, ids, folder, i));
        expect_status(status, cases[i].status);
        if (cases[i].says)
            expect_output(cases[i].says);
        else
            assert_null(strstr(output, "Slurm"));
    }
}

enum { BIAS_LAYERS = 2, BIAS_EXPERTS = 4, BIASES = BIAS_LAYERS * BIAS_EXPERTS };

/* bias += 0.01 sign(mean load - load) for the loads of each step of metrics.jsonl. Returns the
 * number of steps. */
static int expected_bias(float bias[BIASES], const char *run)
{
    char *path = NULL, line[1 << 12];
    int steps = 0;
    assert_true(asprintf(&path, "%s/%s/metrics.jsonl", folder, run) > 0);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    for (; fgets(line, sizeof line, f); steps++) {
        json_t *o = json_loads(line, 0, NULL),
               *all = json_object_get(o, "router/tokens_per_expert");
        for (int i = 0; i < BIASES; i++) {
            const json_t *loads = json_array_get(all, (size_t)(i / BIAS_EXPERTS));
            double mean = 0, load;
            for (int e = 0; e < BIAS_EXPERTS; e++)
                mean += json_number_value(json_array_get(loads, (size_t)e)) / BIAS_EXPERTS;
            load = json_number_value(json_array_get(loads, (size_t)(i % BIAS_EXPERTS)));
            bias[i] += load < mean ? 0.01f : load > mean ? -0.01f : 0;
        }
        json_decref(o);
    }
    fclose(f);
    free(path);
    return steps;
}

/* The bias of routers follows its formula, also in a run that other ranks continue, and is not
 * exported. */
TEST(test_router_bias)
{
    static const char settings[] =
        "--model.attention_layer_norm --model.num_experts=4 --model.num_experts_per_tok=2 "
        "--model.bias_gamma=0.01 --console_log_interval=1 --max_duration=4";
    float bias[BIASES] = { 0 };
    char *path = NULL;
    expect_status(train(1, "%s --stop_at=2 --save_folder=%s/bias", settings, folder), 0);
    expect_status(train(4, "%s --try_load_latest_save --save_folder=%s/bias", settings, folder), 0);
    assert_int_equal(expected_bias(bias, "bias"), 4);
    assert_true(asprintf(&path, "%s/bias/latest/trainer.json", folder) > 0);
    json_t *manifest = json_load_file(path, 0, NULL),
           *found = json_object_get(manifest, "router_bias");
    assert_int_equal(json_array_size(found), BIASES);
    for (int i = 0; i < BIASES; i++)
        if (json_number_value(json_array_get(found, (size_t)i)) != (double)bias[i])
            fail_msg("bias %d is %g, expected %g", i,
                     json_number_value(json_array_get(found, (size_t)i)), (double)bias[i]);
    json_decref(manifest);
    free(path);
    expect_status(finish(start_command("%s/train --export=%s/bias/latest %s/exported",
                                       setting("BUILD", "build/cpu"), folder, folder)),
                  STATUS_INPUT);
    expect_output("OlmoeForCausalLM has no place for the bias");
}

TEST(test_bad_arguments)
{
    static const struct {
        const char *arguments, *message;
    } bad[] = {
        { "--optimizer.learning_rat=1", "learning_rate" },
        { "--global_train_batch_size=7", "7" },
        { "--data.paths=[data/no-such-file.npy]", "data/no-such-file.npy" },
        { "--data.paths=[data/sample-train.npy]", "data/sample-train.npy" },
        { "--load_path=no/such/folder", "no/such/folder" },
        { "--recipe=fp9", "fp9" },
        { "--max_duration=0.00001ep", "max_duration is less than one step" },
        { "--stop_at=0.00001ep", "stop_at is less than one step" },
        { "--recipe=coat --format.gradient=f32", "format.gradient" },
        { "--optimizer.eps=0", "optimizer.eps" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int status =
            train(2, "--max_duration=2 --save_folder=%s/bad%zu %s", folder, i, bad[i].arguments);
        if (status == 0)
            fail_msg("accepted: %s", bad[i].arguments);
        expect_output(bad[i].message);
        char *first = strstr(output, "\nerror");
        if (first && strstr(first + 1, "\nerror"))
            fail_msg("said twice: %s\n%s", bad[i].arguments, output);
    }
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
