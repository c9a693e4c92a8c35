/* Kinds of inputs: configurations, files of checkpoints, shards, questions, metrics. */
#include "tests/fuzz_kinds.h"

#include <glob.h>

#include "data/loader.h"
#include "data/requests.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/layout.h"
#include "model/config/hf.h"
#include "model/run/log.h"
#include "tests/saved.h"
#include "tests/try_config.h"

enum { MAX_ARGUMENTS = 16, WORLD = 2, FIRST_STEP = 3, VOCAB = 100 };

static Run model;                   /* what checkpoints are loaded into */
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

/* ---- configurations ----------------------------------------------------------------------------------------- */

/* `argv` begins with the program and the file. Without the second file's message no error of the first is taken for its own. */
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
        for (char *next; (next = strstr(last + 2, "\n\x1f")); )
            last = next;
        argv[argc] = last + 2;
        *last = '\0';
    }
    const Input yaml = { in.data, argc > 2 ? strlen(in.data) : in.size - 1 };       /* without arguments it may hold zeros */
    input_write(&yaml, argv[1]);
    for (int i = 2; i < argc; i++)
        if (strncmp(argv[i], "--help", 6) == 0 || strcmp(argv[i], "-h") == 0)
            return;
    setenv("ODD", "${seed}", 1);
    read_config(argc, argv);
}

static void read_hf(void)
{
    char *argv[] = { "train", xstrdup(in_folder("x.yaml")), xasprintf("--load_path=%s", now->folder), NULL };
    const Input yaml = { "global_train_batch_size: 8\ndevice_train_microbatch_size: 2\ndata: {paths: a.npy}\n", 79 };
    input_write(&yaml, argv[1]);
    read_config(3, argv);
}

/* ---- checkpoints -------------------------------------------------------------------------------------------- */

static void read_checkpoint(void)
{
    TrainState s = { 0 };
    char *latest = checkpoint_latest(now->folder);
    demand(latest, "a save_folder with a checkpoint has none");
    checkpoint_load(latest, &model.config, &model.fsdp, &s, true);
    demand(s.step >= 0 && s.tokens >= 0 && s.updates >= 0, "a state is negative");
}

static void read_weights(void)
{
    TrainState s;
    checkpoint_load(in_folder("step1"), &model.config, &model.fsdp, &s, false);
}

/* Its size is what the manifest says, so that it is opened. */
static void read_states(void)
{
    struct stat status;
    char *path = xstrdup(in_folder("step1/trainer.json"));
    stat(in_folder(now->file), &status);
    json_t *manifest = json_load_file(path, 0, NULL);
    json_object_set_new(json_object_get(manifest, "files"), "optimizer-00001.safetensors", json_integer(status.st_size));
    json_dump_file(manifest, path, 0);
    read_checkpoint();
}

/* ---- data, metrics ------------------------------------------------------------------------------------------ */

static void read_tokens(int itemsize, const char *mask, bool metadata)
{
    char *paths[] = { xstrdup(in_folder("a.npy")) }, *masks[] = { xstrdup(in_folder("mask.npy")) };
    const DataSpec spec = { .paths = paths, .num_paths = 1, .label_mask_paths = masks, .num_label_mask_paths = mask != NULL,
                            .itemsize = itemsize, .sequence_length = 8, .vocab_size = VOCAB, .eos_token_id = 1, .pad_token_id = 2,
                            .shuffle = true, .drop_last = true, .max_period = 3, .min_period = 1, .max_count = 2,
                            .best_fit = metadata, .split = metadata, .metadata = metadata };
    Loader *l = loader_open(&spec, 4, 0, 2);
    Batch b;
    for (int i = 0; i < 8; i++) {
        demand(loader_next(l, &b) && b.sequences == 2, "a step is missing");
        for (int t = 0; t < 16; t++)
            demand(b.tokens[t] >= 0 && b.tokens[t] < VOCAB && b.targets[t] >= -1 && b.targets[t] < VOCAB, "a token is no token");
    }
    loader_close(l);
}

static void read_shard2(void)   { read_tokens(2, NULL, false); }
static void read_shard4(void)   { read_tokens(4, NULL, false); }
static void read_mask(void)     { read_tokens(2, now->file, false); }
static void read_metadata(void) { read_tokens(2, NULL, true); }

static void read_questions(void)
{
    enum { LENGTH = 8 };
    Requests r = requests_read("questions", in_folder(now->file), LENGTH, VOCAB);
    demand(r.questions > 0, "no questions");
    for (int q = 0, next = 0; q < r.questions; next += r.question[q++].count)
        demand(r.question[q].first == next && r.question[q].gold < r.question[q].count, "a question is none");
    for (int i = 0; i < r.choices; i++) {
        const Choice *c = &r.choice[i];
        demand(c->scored > 0 && c->scored < c->length && c->length <= LENGTH + 1 && c->same <= i, "a choice is none");
        for (int t = 0; t < c->length; t++)
            demand(r.token[c->first + (size_t)t] >= 0 && r.token[c->first + (size_t)t] < VOCAB, "a token is no token");
    }
    requests_free(&r);
}

/* What a resume after FIRST_STEP steps leaves: whole lines from the beginning, of these steps. */
static void read_metrics(void)
{
    const Input before = input_read(in_folder(now->file));
    Config c = model.config;
    EvalSet set = { .label = "a" };
    c.save_folder = now->folder;
    c.eval = &set;
    c.num_eval = 1;
    Log *l = log_open(&c, (RunLength){ .steps = 10 }, 10, FIRST_STEP, true, 1);
    log_close(l);
    Input after = input_read(in_folder(now->file));
    const bool kept_it = after.size <= before.size && (!after.size || memcmp(after.data, before.data, after.size) == 0);
    demand(kept_it, "a log is no longer what it was");
    demand(after.size == 0 || after.data[after.size - 1] == '\n', "a log ends in a line");
}

/* A file in the place of the link. */
static void read_latest(void)
{
    char *latest = checkpoint_latest(now->folder);
    demand(latest, "a save_folder with a checkpoint has none");
    free(latest);
}

/* A line each: a letter for what it is, and its name. Makes it in `folder`, unless a checkpoint may have that name; true: it is
 * there as it was made. */
static bool entry(const char *folder, const char *line, bool make)
{
    const char *name = line + 1, *path = text("%s/%s", folder, name);
    const char *digits = strncmp(name, "step", 4) == 0 ? name + 4 : "x";
    char said[8] = "";
    if (!line[0] || !folder_holds(name) || *name == '.' || strcmp(name, "latest") == 0 || !digits[strspn(digits, "0123456789")])
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

/* Entries of others in a save_folder: whatever a run does there, they stay. */
static void read_names(void)
{
    enum { MOST = 64 };
    char *folder = xstrdup(in_folder("run")), *line[MOST], *rest;
    Input in = input_read(in_folder(now->file));
    int count = 0;
    input_replace(&in, in.size, 0, "", 1);
    shell(text("rm -rf %s && mkdir %s", folder, folder));
    for (char *l = strtok_r(in.data, "\n", &rest); l && count < MOST; l = strtok_r(NULL, "\n", &rest))
        if (entry(folder, l, true))
            line[count++] = l;
    Run r = model;
    r.config.save_folder = folder;
    r.config.save_num_checkpoints_to_keep = 1;
    folder_try(folder);
    for (long step = 1; step <= 3; step++)
        save(&r, step);
    TrainState s = state_of(2);
    free(checkpoint_set_aside(&r.config, &r.fsdp, &s, r.file_limit));
    folder_clear(folder);
    for (int i = 0; i < count; i++)
        demand(entry(folder, line[i], false), "what somebody else made is not there any more");
}

/* ---- kinds -------------------------------------------------------------------------------------------------- */

Kind kinds[] = {
    { "yaml", "input", read_yaml, true,
      { "\n", ": ", "- ", "  ", "${", "}", "null", "[", "]", "{", "}", "\"", "'", "#", "\n\x1f--", "&a ", "*a", "<<: ", "!!map ",
        "|\n", "evaluators:\n- label: a\n  data: {paths: b}\n", "\n---\n" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "hf", "config.json", read_hf, true,
      { "\"rope_theta\": -1,", "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2},",
        "\"layer_types\": [\"full_attention\"],", "\"rope_parameters\": {\"full_attention\": {}, \"sliding_attention\": {}},",
        "\"head_dim\": 0,", "\"eos_token_id\": [1, 2],", "\"sliding_window\": 3,", "\"use_sliding_window\": true,",
        "\"max_window_layers\": 1,", "null", "\"", "{", "}", "[", "]" } },
    { "adapter", "adapter_config.json", read_hf, true,
      { "\"r\": 3,", "\"r\": 1e9,", "\"lora_alpha\": -1,", "\"use_rslora\": true,", "\"use_dora\": true,", "\"bias\": \"all\",",
        "\"target_modules\": \"all-linear\",", "\"layers.0.mlp.up_proj\",", "model.", "9", ".", "\"lora_dropout\": 0.1,", "null",
        "\"base_model_name_or_path\": \"..\",", "\"rank_pattern\": {\"q\": 1},", "\"", "{", "}", "[", "]" } },
    { "trainer", "step1/trainer.json", read_checkpoint, false,
      { "\"files\": {},", "\"step\": -6,", "\"../../../etc/passwd\": 3,", "\"optimizer-/../../a\": 0,", "null", "{", "}", "[",
        "]", "\"" } },
    { "index", "step1/model.safetensors.index.json", read_weights, false,
      { "\"../weights/step1/model.safetensors\"", "\"/dev/null\"", "\".\"", "\"..\"", "null", "{", "}", "\"weight_map\": " } },
    { "weights", "step1/model.safetensors", read_weights, false,
      { "\"F32\"", "\"BF16\"", "\"F16\"", "\"F64\"", "\"U8\"", "[0,0]", "[]", "{", "}", "\"__metadata__\": {},", " " } },
    { "states", "step1/optimizer-00001.safetensors", read_states, false,
      { "\"F32\"", "\"BF16\"", "\"F8_E4M3\"", "\"U8\"", "[0,0]", "[]", "{", "}", "exp_avg", ".scale", " " } },
    { "shard2", "a.npy", read_shard2, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "shard4", "a.npy", read_shard4, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "mask", "mask.npy", read_mask, false, { "\x01" } },
    { "questions", "q.jsonl", read_questions, false,
      { "{\"tokens\": [1, 2], \"continuation\": 1, \"characters\": 1, \"bytes\": 1}", "\"gold\": 1", "-1", "1e9", "4294967297",
        "null", "[]", "{", "}", "\"bpb\"", "\n" } },
    { "metadata", "a.csv.gz", read_metadata, false,
      { ",", "\n", "\r\n", "-1", "512", "0,512\n", "99999999999999999999", "\x1f\x8b\x08" } },
    { "latest", "latest", read_latest, true, { "step1", "step1\n", "\n", "/", "..", "step9", "." } },
    { "names", "input", read_names, false,
      { "\nd", "\nf", "\nl", "step", ".tmp", ".old", "-aborted", "1", "2", "3", "0", "latest", "config.yaml", "metrics.jsonl" } },
    { "metrics", "metrics.jsonl", read_metrics, false,
      { "{\"step\": 3, \"eval/a/CrossEntropyLoss\": 1}\n", "{\"step\": ", "eval/", "\n", "{", "}", "\"" } },
};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };
const int num_kinds = NUM_KINDS;

static void add_seed(Kind *k, Input in)
{
    if (k->num_seeds == MAX_SEEDS)
        die("tests/fuzz: more than %d inputs of %s", MAX_SEEDS, k->name);
    k->seed[k->num_seeds++] = in;
}

static void add_text(Kind *k, const char *data)
{
    add_seed(k, input_copy(data, strlen(data)));
}

static void add_files(Kind *k, const char *pattern)
{
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++)
            add_seed(k, input_read(found.gl_pathv[i]));
    globfree(&found);
}

static void seed_yaml(Kind *k)
{
    add_text(k, try_base);
    add_text(k, try_published);
    add_text(k, "data: {paths: [a]}\nglobal_train_batch_size: 8\ndevice_train_microbatch_size: 2\n"
                "model: {d_model: 64, n_layers: 2, n_heads: 4, vocab_size: 100, layer_norm_type: rms}\n"
                "evaluators: [{label: a, data: {paths: b}}, {label: c, data: {datasets: {d: e, f: [g, h]}}}]\n");
    add_files(k, "configs/*.yaml");
}

static void seed_hf(Kind *k)
{
    add_text(k, "{" TRY_LLAMA "}");
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        ModelConfig m = architecture(a);
        json_t *config = hf_config(&m, BF16);
        char *written = json_dumps(config, JSON_INDENT(2));
        add_text(k, written);
        free(written);
        json_decref(config);
    }
}

/* Beside the model in the folder `base`. */
static void seed_adapter(Kind *k)
{
    const Input none = { "", 0 }, base = { "{" TRY_LLAMA "}", strlen("{" TRY_LLAMA "}") };
    mkdir(text("%s/base", k->folder), 0777);
    input_write(&base, text("%s/base/config.json", k->folder));
    input_write(&none, text("%s/base/model.safetensors", k->folder));
    input_write(&none, text("%s/adapter_model.safetensors", k->folder));
    add_text(k, "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": \"base\", \"r\": 4, \"lora_alpha\": 8, \"bias\": \"none\", "
                "\"lora_dropout\": 0.0, \"target_modules\": [\"q_proj\", \"v_proj\"], \"use_dora\": false, \"rank_pattern\": {}}");
    add_text(k, "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": \"base\", \"r\": 2, \"lora_alpha\": 2, "
                "\"init_lora_weights\": true, \"target_modules\": [\"model.layers.0.mlp.up_proj\", \"1.mlp.up_proj\"]}");
}

/* Each kind has a checkpoint of its own, of which one file is the input. */
static void seed_checkpoint(Kind *k)
{
    model.config.save_folder = k->folder;
    save(&model, 1);
    if (k->read == read_weights)
        shell(text("cd %s/step1 && rm trainer.json optimizer*", k->folder));
    if (strcmp(k->name, "index") == 0) {
        shell(text("cd %s/step1 && mv model.safetensors model-00001-of-00001.safetensors", k->folder));
        SafeFile *f = safetensors_open(text("%s/step1/model-00001-of-00001.safetensors", k->folder));
        json_t *map = json_object();
        for (int i = 0; i < f->count; i++)
            json_object_set_new(map, f->tensor[i].name, json_string("model-00001-of-00001.safetensors"));
        json_t *index = json_pack("{s:o}", "weight_map", map);
        json_dump_file(index, text("%s/%s", k->folder, k->file), 0);
        json_decref(index);
        safetensors_close(f);
    }
    add_seed(k, input_read(text("%s/%s", k->folder, k->file)));
}

static void seed_tokens(Kind *k)
{
    uint16_t two[2048] = { 0 };
    uint32_t four[1024] = { 20240801, 7, 768 };
    for (int i = 0; i < 512; i++)
        two[i] = (uint16_t)draw(&(Draws){ 7, (uint64_t)i }, VOCAB);
    for (int i = 256; i < 1024; i++)
        four[i] = (uint32_t)draw(&(Draws){ 9, (uint64_t)i }, VOCAB);
    add_seed(k, input_copy(two, 1024));
    add_seed(k, input_copy(four, sizeof four));
    add_seed(k, input_copy(four + 256, 1024));
    const Input fixed = { (char *)two, 1024 };
    if (k->read == read_mask || k->read == read_metadata)
        input_write(&fixed, text("%s/a.npy", k->folder));
    memset(two, 1, 512);
    if (k->read == read_mask)
        add_seed(k, input_copy(two, 512));
    if (k->read == read_metadata)
        add_text(k, "0,100\n100,112,an id,a/file.jsonl.gz,3\n112,113\n120,500\n500,512\n");
}

/* Next to a checkpoint. */
static void seed_latest(Kind *k)
{
    model.config.save_folder = k->folder;
    save(&model, 1);
    shell(text("rm %s/latest", k->folder));
    add_text(k, "step1\n");
    add_text(k, text("%s/step1\n", k->folder));
    add_text(k, "step9\n");
}

static void seed_names(Kind *k)
{
    add_text(k, "dstep1.tmp\ndstep2.tmp\ndstep3.tmp2\ndstep1.old\nfstep2.old\nlstep3.old\ndstep2-aborted\nflatest.tmp\n");
    add_text(k, "dstep1x\ndstep01\nfstep\nlstep2.tmp\nfconfig.yaml.tmp\ndmine\nfstep3-aborted\nllatest.tmp\n");
}

static void seed_metrics(Kind *k)
{
    add_text(k, "{\"step\": 1, \"train/CrossEntropyLoss\": 2.5}\n{\"step\": 2, \"train/CrossEntropyLoss\": 2.4}\n"
                "{\"step\": 3, \"train/CrossEntropyLoss\": null}\n{\"step\": 3, \"eval/a/CrossEntropyLoss\": 2.5}\n"
                "{\"step\": 4, \"train/CrossEntropyLoss\": 2.3}\n");
}

static void seed_questions(Kind *k)
{
    static const char choice[] = "{\"tokens\": [5, 6, 7], \"continuation\": 1, \"characters\": 3, \"bytes\": 3}",
                      longer[] = "{\"tokens\": [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], \"continuation\": 2, \"characters\": 3, "
                               "\"bytes\": 4}";
    add_text(k, text("{\"task\": \"a\", \"metric\": \"acc\", \"questions\": 2}\n{\"gold\": 1, \"choices\": [%s, %s]}\n"
                     "{\"gold\": 0, \"choices\": [%s, %s, %s]}\n", choice, longer, longer, choice, longer));
    add_text(k, text("{\"task\": \"b\", \"metric\": \"bpb\", \"questions\": 1}\n{\"gold\": 0, \"choices\": [%s]}\n", longer));
}

const char *kinds_make(void)
{
    make_root(NULL);
    ModelConfig m = architecture(LLAMA);
    m.d_model = 16, m.n_layers = 1, m.n_heads = m.n_kv_heads = 2, m.head_dim = 8, m.mlp_width = 16, m.vocab_size = 20;
    open_run(&model, &m, (Format){ F32, 0 }, (Format){ E4M3, 128, true }, (Format){ F32, 0 });
    fsdp_init(&model.fsdp, &m, 3);
    for (int i = 0; i < NUM_KINDS; i++) {
        Kind *k = &kinds[i];
        snprintf(k->folder, sizeof k->folder, "%s/%d-%s", root, i, k->name);
        mkdir(k->folder, 0777);
        k->read == read_yaml ? seed_yaml(k) : strcmp(k->name, "adapter") == 0 ? seed_adapter(k)
            : k->read == read_hf ? seed_hf(k) : k->read == read_metrics ? seed_metrics(k)
            : k->read == read_questions ? seed_questions(k) : k->read == read_latest ? seed_latest(k)
            : k->read == read_names ? seed_names(k)
            : k->read == read_shard2 || k->read == read_shard4 || k->read == read_mask || k->read == read_metadata
            ? seed_tokens(k) : seed_checkpoint(k);
        add_files(k, text("tests/fuzz/%s-*", k->name));
    }
    return root;
}

void kinds_remove(void)
{
    remove_root(NULL);
}

/* ---- inputs ------------------------------------------------------------------------------------------------- */

/* Most of the time one that has a value. */
static const ConfigKey *draw_key(Draws *d)
{
    int keys = 0;
    while (config_keys[keys].name)
        keys++;
    const ConfigKey *k = &config_keys[draw(d, (uint64_t)keys)];
    for (int again = 0; again < 3 && (k->type & TYPE_MASK) >= FIXED; again++)
        k = &config_keys[draw(d, (uint64_t)keys)];
    return k;
}

/* --key=value: a key of the table or a section, sometimes misspelled, and a value that is odd, or the default. */
static void add_argument(Input *in, Draws *d)
{
    static const char *const forms[] = { "a%s", "%sb", "a%sb", "\"%s\"", "['%s', b]", "{a: %s}",
                                         "[{label: a, data: {paths: [\"%s\"]}}]",
                                         "[{label: \"%s\", data: {datasets: {\"b%s\": b}}}]" };
    enum { FORMS = sizeof forms / sizeof forms[0] };
    const ConfigKey *k = draw_key(d);
    const char *odd = odd_value(d), *form = draw(d, 3) ? "%s" : forms[draw(d, FORMS)];
    const bool evaluators = form == forms[FORMS - 1] || form == forms[FORMS - 2];
    char name[128];
    snprintf(name, sizeof name, "%s", evaluators ? "evaluators" : k->name);
    if (draw(d, 16) == 0)
        name[draw(d, strlen(name) + 1)] = '\0';
    char value[1024], *argument;
    snprintf(value, sizeof value, form, draw(d, 4) || !k->fallback ? odd : k->fallback, odd_value(d));
    argument = xasprintf(draw(d, 24) ? "\n\x1f--%s=%s" : "\n\x1f--%s.%s=1", name, value);
    input_replace(in, in->size, 0, argument, strlen(argument));
    free(argument);
}

Input make_input(const Kind *k, uint64_t number)
{
    Draws d = { number, 0 };
    const Input *from = &k->seed[draw(&d, (uint64_t)k->num_seeds)], *other = &k->seed[draw(&d, (uint64_t)k->num_seeds)];
    Input in = input_copy(from->data, from->size);
    const bool arguments = k->read == read_yaml && draw(&d, 4);
    if (!arguments || draw(&d, 4) == 0)
        input_mutate(&in, &d, other, k->words);
    for (uint64_t n = arguments ? 1 + draw(&d, 3) : 0; n > 0; n--)
        add_argument(&in, &d);
    return in;
}
