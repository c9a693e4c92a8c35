/* Kinds of inputs: configurations, files of checkpoints, shards, questions, metrics. */
#include "tests/fuzz_kinds.h"

#include "data/hash.h"
#include "data/loader.h"
#include "data/requests.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/weight_files.h"
#include "model/evaluate/evaluate.h"
#include "model/run/log.h"
#include "tests/fuzz_model.h"
#include "tests/try_config.h"

enum { MAX_ARGUMENTS = 16, WORLD = 2, FIRST_STEP = 3, LENGTH = 8 };

Run model;
Kind *now;

static const char *in_folder(const char *name)
{
    return text("%s/%s", now->folder, name);
}

void demand(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "FUZZ: %s\n", what);
    _exit(BROKEN);
}

/* ---- configurations -------------------------------------------------------------------------- */

/* `argv` begins with the program and the file. The message of the second file is removed, so that
 * it is not taken for an error of the first. */
static void read_config(int argc, char **argv)
{
    Config *c = config_load(argc, argv, WORLD, checkpoint_latest);
    char *again[] = { argv[0], xstrdup(in_folder("again.yaml")), NULL };
    demand(c, "an argument prints help");
    const Input written = { c->text, strlen(c->text) };
    input_write(&written, again[1]);
    fprintf(stderr, "FUZZ: is written out\n");
    Config *other = config_load(2, again, WORLD, checkpoint_latest);
    demand(strcmp(c->text, other->text) == 0, "is written out as another configuration");
    fprintf(stderr, "FUZZ: reads again\n");
    config_free(other);
    config_free(c);
}

static void read_yaml(void)
{
    Input in = input_read(in_folder(now->file));
    char *argv[MAX_ARGUMENTS + 3] = { "train", xstrdup(in_folder("x.yaml")) };
    int argc = 2;
    input_replace(&in, in.size, 0, "", 1);
    for (char *part; (part = strstr(in.data, "\n\x1f")) && argc < MAX_ARGUMENTS + 2; argc++) {
        char *last = part;
        for (char *next; (next = strstr(last + 2, "\n\x1f"));)
            last = next;
        argv[argc] = last + 2;
        *last = '\0';
    }
    /* without arguments the file may contain zeros */
    const Input yaml = { in.data, argc > 2 ? strlen(in.data) : in.size - 1 };
    input_write(&yaml, argv[1]);
    for (int i = 2; i < argc; i++)
        if (strncmp(argv[i], "--help", 6) == 0 || strcmp(argv[i], "-h") == 0)
            return;
    read_config(argc, argv);
}

static void read_hf(void)
{
    char *argv[] = { "train", xstrdup(in_folder("x.yaml")),
                     xasprintf("--load_path=%s", now->folder), NULL };
    const Input yaml = {
        "global_train_batch_size: 8\ndevice_train_microbatch_size: 2\ndata: {paths: a.npy}\n", 79
    };
    input_write(&yaml, argv[1]);
    read_config(3, argv);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void read_checkpoint(void)
{
    TrainState s = { 0 };
    char *latest = checkpoint_latest(now->folder);
    demand(latest, "a save_folder with a checkpoint has none");
    checkpoint_load(latest, &model.config, &model.store, &s, true);
    demand(s.step >= 0 && s.tokens >= 0 && model.store.counts.updates >= 0, "a state is negative");
}

static void read_weights(void)
{
    TrainState s;
    checkpoint_load(in_folder("step1"), &model.config, &model.store, &s, false);
}

/* Reads all tensors of adapters, after those of all experts of a block were divided. */
static void read_stacked(void)
{
    WeightFiles s = weight_files_open_adapter(now->folder);
    for (int i = 0; i < s.count; i++)
        for (int t = 0; t < s.file[i]->count; t++) {
            const SafeTensor *x = &s.file[i]->tensor[t];
            char *data = xmalloc(x->end - x->begin);
            demand(safetensors_find(s.file[i], x->name), "a tensor is not found by its name");
            safetensors_read(s.file[i], data, x, 0, x->end - x->begin);
            free(data);
        }
    weight_files_close(&s);
}

/* The manifest gets the actual size of the file, so that loading opens the file. */
static void read_states(void)
{
    struct stat status;
    char *path = xstrdup(in_folder("step1/trainer.json"));
    stat(in_folder(now->file), &status);
    json_t *manifest = json_load_file(path, 0, NULL);
    json_object_set_new(json_object_get(manifest, "files"), "optimizer-00001.states",
                        json_integer(status.st_size));
    json_dump_file(manifest, path, 0);
    read_checkpoint();
}

static uint64_t hash_tensor(uint64_t hash, Tensor t)
{
    /* on the CPU device memory is host memory */
    return t.data ? hash_bytes(hash, t.data, tensor_bytes(t)) : hash;
}

static uint64_t hash_model(void)
{
    uint64_t hash = HASH_OF_NOTHING;
    for (int u = 0; u < model.store.num_units; u++) {
        const Shard *s = &model.store.shard[u];
        hash = hash_tensor(hash, s->slice[TRAINED].stored);
        for (int i = 0; i < model.store.optimizer->num_states; i++)
            hash = hash_tensor(hash, s->state[i]);
    }
    return hash;
}

/* ---- data, metrics --------------------------------------------------------------------------- */

/* Returns a hash of the training data. */
static uint64_t read_tokens(int itemsize, const char *mask, bool metadata)
{
    char *paths[] = { xstrdup(in_folder("a.npy")) }, *masks[] = { xstrdup(in_folder("mask.npy")) };
    const DataSpec spec = { .paths = paths,
                            .num_paths = 1,
                            .label_mask_paths = masks,
                            .num_label_mask_paths = mask != NULL,
                            .itemsize = itemsize,
                            .sequence_length = LENGTH,
                            .vocab_size = VOCAB,
                            .eos_token_id = 1,
                            .pad_token_id = 2,
                            .shuffle = true,
                            .drop_last = true,
                            .max_period = 3,
                            .min_period = 1,
                            .max_count = 2,
                            .best_fit = metadata,
                            .split = metadata,
                            .metadata = metadata };
    Loader *l = loader_open(&spec, 4, 0, 2);
    Batch b;
    uint64_t hash = HASH_OF_NOTHING;
    for (int i = 0; i < 8; i++) {
        demand(loader_next(l, &b) && b.sequences == 2, "a step is missing");
        for (int t = 0; t < 16; t++)
            demand(b.tokens[t] >= 0 && b.tokens[t] < VOCAB && b.targets[t] >= -1 &&
                       b.targets[t] < VOCAB,
                   "a token is outside the vocabulary");
        hash =
            hash_bytes(hash_bytes(hash, b.tokens, sizeof(int) * 16), b.targets, sizeof(int) * 16);
        hash = hash_bytes(hash, b.begins, 16);
    }
    loader_close(l);
    return hash;
}

static void read_shard2(void)
{
    read_tokens(2, NULL, false);
}
static void read_shard4(void)
{
    read_tokens(4, NULL, false);
}
static void read_mask(void)
{
    read_tokens(2, now->file, false);
}
static void read_metadata(void)
{
    read_tokens(2, NULL, true);
}

/* Returns a hash of the questions. */
static uint64_t hash_questions(void)
{
    Requests r = requests_read("questions", in_folder(now->file),
                               &(TokenLimits){ .vocab = VOCAB, .most = LENGTH });
    demand(r.questions > 0, "no questions");
    for (int q = 0, next = 0; q < r.questions; next += r.question[q++].count)
        demand(r.question[q].first == next && r.question[q].gold < r.question[q].count,
               "a question is none");
    uint64_t hash = hash_bytes(HASH_OF_NOTHING, &r.metric, sizeof r.metric);
    for (int q = 0; q < r.questions; q++)
        hash = hash_bytes(hash, &r.question[q], sizeof r.question[q]);
    for (int i = 0; i < r.choices; i++) {
        const Choice *c = &r.choice[i];
        hash = hash_bytes(hash_bytes(hash, &c->length, 4 * sizeof(int)), r.token + c->first,
                          sizeof(int) * (size_t)c->length);
        demand(c->scored > 0 && c->scored < c->length && c->length <= LENGTH + 1 && c->same <= i,
               "a choice is invalid");
        for (int t = 0; t < c->length; t++)
            demand(r.token[c->first + (size_t)t] >= 0 && r.token[c->first + (size_t)t] < VOCAB,
                   "a token is outside the vocabulary");
    }
    requests_free(&r);
    return hash;
}

static void read_questions(void)
{
    hash_questions();
}

/* A resume after FIRST_STEP steps keeps only whole lines of these steps, from the start of the
 * file. */
static void read_metrics(void)
{
    const Input before = input_read(in_folder(now->file));
    Config c = model.config;
    EvalSet set = { .label = "a" };
    c.save_folder = now->folder;
    c.eval = &set;
    c.num_eval = 1;
    Log *l = log_open(&c, NULL, (RunLength){ .steps = 10 }, 10, FIRST_STEP, true, 1);
    log_close(l);
    Input after = input_read(in_folder(now->file));
    const bool kept_it = after.size <= before.size &&
                         (!after.size || memcmp(after.data, before.data, after.size) == 0);
    demand(kept_it, "a log is no longer what it was");
    demand(after.size == 0 || after.data[after.size - 1] == '\n', "a log ends in a line");
}

/* `latest` is a file here, not a link. */
static void read_latest(void)
{
    char *latest = checkpoint_latest(now->folder);
    demand(latest, "a save_folder with a checkpoint has none");
    free(latest);
}

/* A line is an entry of a folder: a letter for its type, and its name. With `make`, makes the entry
 * in `folder`, unless a checkpoint may have its name. Otherwise returns whether the entry still
 * exists unchanged. */
static bool entry(const char *folder, const char *line, bool make)
{
    const char *name = line + 1, *path = text("%s/%s", folder, name);
    const char *digits = strncmp(name, "step", 4) == 0 ? name + 4 : "x";
    char said[8] = "";
    if (!line[0] || !folder_holds(name) || *name == '.' || strcmp(name, "latest") == 0 ||
        !digits[strspn(digits, "0123456789")])
        return false;
    if (line[0] == 'l')
        return make ? symlink("mine", path) == 0 : readlink(path, said, sizeof said) == 4;
    if (line[0] == 'd' && make && mkdir(path, 0777) != 0)
        return false;
    FILE *f = fopen(line[0] == 'd' ? text("%s/trainer.json", path) : path, make ? "wx" : "r");
    if (!f)
        return false;
    const bool done = make ? fputs("mine", f) >= 0 : fread(said, 1, sizeof said, f) == 4;
    fclose(f);
    return done;
}

/* A run does not change entries of its save_folder that others made. */
static void read_names(void)
{
    enum { MOST = 64 };
    char *folder = xstrdup(in_folder("run")), *line[MOST], *rest;
    Input in = input_read(in_folder(now->file));
    int count = 0;
    input_replace(&in, in.size, 0, "", 1);
    shell(text("rm -rf %s && mkdir %s", folder, folder));
    for (char *l = strtok_r(in.data, "\n", &rest); l && count < MOST;
         l = strtok_r(NULL, "\n", &rest))
        if (entry(folder, l, true))
            line[count++] = l;
    Run r = model;
    r.config.save_folder = folder;
    r.config.save_num_checkpoints_to_keep = 1;
    folder_try(folder);
    for (long step = 1; step <= 3; step++)
        save(&r, step);
    TrainState s = state_of(2);
    free(checkpoint_set_aside(&r.config, &r.store, &s, r.file_limit));
    folder_clear(folder);
    for (int i = 0; i < count; i++)
        demand(entry(folder, line[i], false), "what somebody else made is not there any more");
}

/* ---- other files of another rank ------------------------------------------------------------- */

static uint64_t agreed; /* a hash of the values that this rank has compared with other ranks */

void __wrap_comm_agree(const char *what, uint64_t hash);
char *__wrap_comm_disagreement(const char *what, uint64_t hash);

char *__wrap_comm_disagreement(const char *what, uint64_t hash)
{
    (void)what;
    agreed = hash_bytes(agreed, &hash, sizeof hash);
    return NULL;
}

void __wrap_comm_agree(const char *what, uint64_t hash)
{
    __wrap_comm_disagreement(what, hash);
}

/* Reads as two ranks: one has this input, the other has the first valid input. Either both read the
 * same, or the comparison of their hashes detects the difference. The files are so small that the
 * samples cover them. `rank` reads, and returns a hash of what it has read. */
static void read_by_two(uint64_t (*rank)(void))
{
    uint64_t read[2], shown[2];
    for (int i = 0; i < 2; i++) {
        agreed = HASH_OF_NOTHING;
        read[i] = rank();
        shown[i] = agreed;
        input_write(&now->seed[0], in_folder(now->file));
    }
    demand(read[0] == read[1] || shown[0] != shown[1],
           "ranks do not learn that their files are others");
}

static uint64_t rank_weights(void)
{
    read_weights();
    return hash_model();
}

static uint64_t rank_states(void)
{
    read_states();
    return hash_model();
}

/* Opens a run with one evaluator, which reads this file. */
static uint64_t rank_validation(const char *name, const char *mask, bool downstream)
{
    char *path = xstrdup(in_folder(name)), *mask_path = xstrdup(in_folder("mask.npy"));
    const bool metadata = strcmp(now->file, "a.csv.gz") == 0;
    EvalSet set = { .label = "a",
                    .where = "data.paths",
                    .downstream = downstream,
                    .files = { .paths = &path,
                               .num_paths = 1,
                               .itemsize = 2,
                               .label_mask_paths = &mask_path,
                               .num_label_mask_paths = mask != NULL,
                               .packing = metadata ? PACK_BEST_FIT : PACK_CONCAT,
                               .boundaries = metadata ? BOUNDARIES_METADATA : BOUNDARIES_EOS } };
    Config c = model.config;
    c.model.max_sequence_length = LENGTH, c.model.vocab_size = VOCAB, c.model.eos_token_id = 1,
    c.model.pad_token_id = 2;
    c.data.long_documents = LONG_SPLIT;
    c.eval = &set;
    c.num_eval = 1;
    c.eval_only = true;
    c.device_eval_batch_size = 2;
    free(evaluate_check(&c));
    return downstream ? hash_questions() : read_tokens(2, mask, metadata);
}

static uint64_t rank_tokens(void)
{
    return rank_validation("a.npy", NULL, false);
}
static uint64_t rank_mask(void)
{
    return rank_validation("a.npy", now->file, false);
}
static uint64_t rank_questions(void)
{
    return rank_validation(now->file, NULL, true);
}

static void read_other_weights(void)
{
    read_by_two(rank_weights);
}
static void read_other_states(void)
{
    read_by_two(rank_states);
}
static void read_other_tokens(void)
{
    read_by_two(rank_tokens);
}
static void read_other_mask(void)
{
    read_by_two(rank_mask);
}
static void read_other_questions(void)
{
    read_by_two(rank_questions);
}

/* ---- kinds ----------------------------------------------------------------------------------- */

// clang-format off
Kind kinds[] = {
    { "yaml",
      "input",
      read_yaml,
      true,
      { "\n",     ": ",  "- ",
        "  ",     "${",  "}",
        "null",   "[",   "]",
        "{",      "}",   "\"",
        "'",      "#",   "\n\x1f--",
        "&a ",    "*a",  "<<: ",
        "!!map ", "|\n", "evaluators:\n- label: a\n  data: {paths: b}\n",
        "\n---\n" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "hf",
      "config.json",
      read_hf,
      true,
      { "\"rope_theta\": -1,", "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2},",
        "\"layer_types\": [\"full_attention\"],",
        "\"rope_parameters\": {\"full_attention\": {}, \"sliding_attention\": {}},",
        "\"head_dim\": 0,", "\"eos_token_id\": [1, 2],", "\"sliding_window\": 3,",
        "\"use_sliding_window\": true,", "\"max_window_layers\": 1,",
        "\"quantization_config\": {\"quant_method\": \"gptq\"},", "\"sym\": true,", "\"bits\": 4,",
        "\"config_groups\": {\"a\": {\"weights\": []}},", "null", "\"", "{", "}", "[", "]" } },
    { "adapter",
      "adapter_config.json",
      read_hf,
      true,
      { "\"r\": 3,",
        "\"r\": 1e9,",
        "\"lora_alpha\": -1,",
        "\"use_rslora\": true,",
        "\"use_dora\": true,",
        "\"bias\": \"all\",",
        "\"target_modules\": \"all-linear\",",
        "\"layers.0.mlp.up_proj\",",
        "model.",
        "9",
        ".",
        "\"lora_dropout\": 0.1,",
        "null",
        "\"base_model_name_or_path\": \"..\",",
        "\"rank_pattern\": {\"q\": 1},",
        "\"",
        "{",
        "}",
        "[",
        "]" } },
    { "stacked",
      "adapter_model.safetensors",
      read_stacked,
      false,
      { "\"F32\"", "\"BF16\"", "\"F64\"", "[0,0]", "[1,4]", "[12]", "[]", "{", "}", ".experts.lora_A.weight",
        ".experts.lora_B.weight", ".experts.base_layer.lora_A.weight", ".experts.base_layer.lora_B.weight", ".0.gate_proj" } },
    { "stacked-joined",
      "adapter_model.safetensors",
      read_stacked,
      false,
      { "\"F32\"", "\"BF16\"", "\"F64\"", "[0,0]", "[1,4]", "[12]", "[]", "{", "}", ".experts.lora_A.weight",
        ".experts.lora_B.weight", ".experts.base_layer.lora_A.weight", ".experts.base_layer.lora_B.weight", ".0.gate_proj" } },
    { "trainer",
      "step1/trainer.json",
      read_checkpoint,
      false,
      { "\"files\": {},", "\"step\": -6,", "\"../../../etc/passwd\": 3,",
        "\"optimizer-/../../a\": 0,", "null", "{", "}", "[", "]", "\"" } },
    { "index",
      "step1/model.safetensors.index.json",
      read_weights,
      false,
      { "\"../weights/step1/model.safetensors\"", "\"/dev/null\"", "\".\"", "\"..\"", "null", "{",
        "}", "\"weight_map\": " } },
    { "weights",
      "step1/model.safetensors",
      read_weights,
      false,
      { "\"F32\"", "\"BF16\"", "\"F16\"", "\"F64\"", "\"U8\"", "[0,0]", "[]", "{", "}",
        "\"__metadata__\": {},", " " } },
    { "codes",
      "step1/model.safetensors",
      read_weights,
      false,
      { "\"F32\"",
        "\"BF16\"",
        "\"F8_E4M3\"",
        "\"I8\"",
        "\"I32\"",
        "\"U8\"",
        "[0,0]",
        "[1]",
        "[]",
        ".weight_scale",
        ".weight_scale_inv",
        ".SCB",
        ".weight_packed",
        ".weight_shape",
        ".qweight",
        ".scales",
        ".qzeros",
        ".g_idx",
        "\"nested_offset\": 1e99",
        "nf4" } },
    { "states",
      "step1/optimizer-00001.states",
      read_states,
      false,
      { "\"F32\"", "\"BF16\"", "\"F8_E4M3\"", "\"U8\"", "[0,0]", "[]", "{", "}", "exp_avg",
        ".scale", " " } },
    { "shard2", "a.npy", read_shard2, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "shard4", "a.npy", read_shard4, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "mask", "mask.npy", read_mask, false, { "\x01" } },
    { "questions",
      "q.jsonl",
      read_questions,
      false,
      { "{\"tokens\": [1, 2], \"continuation\": 1, \"characters\": 1, \"bytes\": 1}", "\"gold\": 1",
        "-1", "1e9", "4294967297", "null", "[]", "{", "}", "\"bpb\"", "\n" } },
    { "metadata",
      "a.csv.gz",
      read_metadata,
      false,
      { ",", "\n", "\r\n", "-1", "512", "0,512\n", "99999999999999999999", "\x1f\x8b\x08" } },
    { "latest",
      "latest",
      read_latest,
      true,
      { "step1", "step1\n", "\n", "/", "..", "step9", "." } },
    { "names",
      "input",
      read_names,
      false,
      { "\nd", "\nf", "\nl", "step", ".tmp", ".old", "-aborted", "1", "2", "3", "0", "latest",
        "config.yaml", "metrics.jsonl" } },
    { "metrics",
      "metrics.jsonl",
      read_metrics,
      false,
      { "{\"step\": 3, \"eval/a/CrossEntropyLoss\": 1}\n", "{\"step\": ", "eval/", "\n", "{", "}",
        "\"" } },
    { "other-weights", "step1/model.safetensors", read_other_weights, false, { "\x01" } },
    { "other-states", "step1/optimizer-00001.states", read_other_states, false, { "\x01" } },
    { "other-tokens", "a.npy", read_other_tokens, false, { "\x01" } },
    { "other-mask", "mask.npy", read_other_mask, false, { "\x01" } },
    { "other-metadata", "a.csv.gz", read_other_tokens, false, { ",", "\n", "512" } },
    { "other-questions",
      "q.jsonl",
      read_other_questions,
      false,
      { "\"gold\": 0", "\"gold\": 1", "\"bpb\"", "7", "\n" } },
};
// clang-format on
const int num_kinds = sizeof kinds / sizeof kinds[0];
