/* The valid inputs of tests/fuzz.c, in folders with the files that belong to them. */
#include "model/formats/hf.h"
#include "tests/fuzz_kinds.h"

#include <glob.h>

#include "model/checkpoint/layout.h"
#include "tests/fuzz_codes.h"
#include "tests/fuzz_model.h"
#include "tests/stacked_file.h"
#include "tests/try_config.h"

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
    add_text(k, try_complete);
    add_text(k, try_published);
    add_text(
        k, "data: {paths: [a]}\nglobal_train_batch_size: 8\ndevice_train_microbatch_size: 2\n"
           "model: {d_model: 64, n_layers: 2, n_heads: 4, vocab_size: 100, layer_norm_type: rms}\n"
           "evaluators: [{label: a, data: {paths: b}}, {label: c, data: {datasets: {d: e, f: [g, "
           "h]}}}]\n");
    add_text(
        k,
        "data:\n  mix:\n  - {name: a, paths: [a, b], ratio: 0.7, max_repetition: 2}\n"
        "  - {name: b, paths: c, label_mask_paths: d, ratio: 3, tokens: 1e6}\n"
        "model: {d_model: 64, n_layers: 2, n_heads: 4, vocab_size: 100, layer_norm_type: rms}\n");
    add_files(k, "configs/*.yaml");
}

static const char *const quantized[] = {
    "{\"quant_method\": \"gptq\", \"bits\": 4, \"sym\": true, \"checkpoint_format\": \"gptq\"}",
    "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"weight_block_size\": [128, 128]}",
    "{\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true, \"bnb_4bit_quant_type\": "
    "\"nf4\"}",
    ("{\"quant_method\": \"compressed-tensors\", \"format\": \"pack-quantized\", "
     "\"config_groups\": {\"group_0\": {\"weights\": "
     "{\"num_bits\": 4, \"type\": \"int\", \"symmetric\": true, \"strategy\": \"group\"}}}}"),
};

static void seed_hf(Kind *k)
{
    add_text(k, "{" TRY_LLAMA "}");
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        ModelConfig m = architecture(a);
        json_t *config = hf_config(&m, BF16);
        if (a < sizeof quantized / sizeof quantized[0])
            json_object_set_new(config, "quantization_config", json_loads(quantized[a], 0, NULL));
        char *written = json_dumps(config, JSON_INDENT(2));
        add_text(k, written);
        free(written);
        json_decref(config);
    }
}

/* Writes adapters of the model in the folder `base`. */
static void seed_adapter(Kind *k)
{
    const Input none = { "", 0 }, base = { "{" TRY_LLAMA "}", strlen("{" TRY_LLAMA "}") };
    mkdir(text("%s/base", k->folder), 0777);
    input_write(&base, text("%s/base/config.json", k->folder));
    input_write(&none, text("%s/base/model.safetensors", k->folder));
    input_write(&none, text("%s/adapter_model.safetensors", k->folder));
    add_text(k, "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": \"base\", \"r\": 4, "
                "\"lora_alpha\": 8, \"bias\": \"none\", "
                "\"lora_dropout\": 0.0, \"target_modules\": [\"q_proj\", \"v_proj\"], "
                "\"use_dora\": false, \"rank_pattern\": {}}");
    add_text(k, "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": \"base\", \"r\": 2, "
                "\"lora_alpha\": 2, "
                "\"init_lora_weights\": true, \"target_modules\": [\"model.layers.0.mlp.up_proj\", "
                "\"1.mlp.up_proj\"]}");
}

/* Adapters of all experts of a block in one tensor; those of gate and up are joined, or share A. */
static void seed_stacked(Kind *k)
{
    const bool joined = strcmp(k->name, "stacked-joined") == 0;
    const char *config =
        joined ? "{\"r\": 2, \"rank_pattern\": {\"gate_up_proj\": 4}}" : "{\"r\": 2}";
    const Input in = { (char *)config, strlen(config) };
    input_write(&in, text("%s/adapter_config.json", k->folder));
    SafeFile *f = write_stacked(text("%s/%s", k->folder, k->file), joined ? 2 * R : R,
                                joined ? off_block : NULL);
    add_seed(k, input_read(f->path));
    safetensors_close(f);
}

/* Each kind has its own checkpoint; one file of it is the input. */
static void seed_checkpoint(Kind *k)
{
    model.config.save_folder = k->folder;
    save(&model, 1);
    if (strcmp(k->file, "step1/trainer.json") != 0 &&
        strcmp(k->file, "step1/optimizer-00001.states") != 0)
        shell(text("cd %s/step1 && rm trainer.json optimizer*", k->folder));
    if (strcmp(k->name, "index") == 0) {
        shell(text("cd %s/step1 && mv model.safetensors model-00001-of-00001.safetensors",
                   k->folder));
        SafeFile *f =
            safetensors_open(text("%s/step1/model-00001-of-00001.safetensors", k->folder));
        json_t *map = json_object();
        for (int i = 0; i < f->count; i++)
            json_object_set_new(map, f->tensor[i].name,
                                json_string("model-00001-of-00001.safetensors"));
        json_t *index = json_pack("{s:o}", "weight_map", map);
        json_dump_file(index, text("%s/%s", k->folder, k->file), 0);
        json_decref(index);
        safetensors_close(f);
    }
    add_seed(k, input_read(text("%s/%s", k->folder, k->file)));
}

/* The weights of the checkpoint as codes and scales. */
static void seed_codes(Kind *k)
{
    Input seed[FUZZ_CODES];
    model.config.save_folder = k->folder;
    save(&model, 1);
    fuzz_codes(seed, k->folder);
    for (int i = 0; i < FUZZ_CODES; i++)
        add_seed(k, seed[i]);
    shell(text("cd %s/step1 && rm trainer.json optimizer*", k->folder));
}

static void seed_tokens(Kind *k)
{
    uint16_t two[512];
    uint32_t four[1024] = { 20240801, 7, 768 };
    uint8_t mask[512];
    for (int i = 0; i < 512; i++)
        two[i] = (uint16_t)draw(&(Draws){ 7, (uint64_t)i }, VOCAB);
    for (int i = 256; i < 1024; i++)
        four[i] = (uint32_t)draw(&(Draws){ 9, (uint64_t)i }, VOCAB);
    memset(mask, 1, sizeof mask);
    const Input fixed = { (char *)two, sizeof two };
    if (strcmp(k->file, "a.npy") != 0)
        input_write(&fixed, text("%s/a.npy", k->folder));
    if (strcmp(k->file, "mask.npy") == 0)
        add_seed(k, input_copy(mask, sizeof mask));
    if (strcmp(k->file, "a.csv.gz") == 0)
        add_text(k, "0,100\n100,112,an id,a/file.jsonl.gz,3\n112,113\n120,500\n500,512\n");
    add_seed(k, input_copy(two, sizeof two));
    add_seed(k, input_copy(four, sizeof four));
    add_seed(k, input_copy(four + 256, 1024));
}

/* Makes other entries next to a checkpoint. */
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
    add_text(k, "dstep1.tmp\ndstep2.tmp\ndstep3.tmp2\ndstep1.old\nfstep2.old\nlstep3.old\ndstep2-"
                "aborted\nflatest.tmp\n");
    add_text(k, "dstep1x\ndstep01\nfstep\nlstep2.tmp\nfconfig.yaml.tmp\ndmine\nfstep3-"
                "aborted\nllatest.tmp\n");
}

static void seed_metrics(Kind *k)
{
    add_text(k, "{\"step\": 1, \"train/CrossEntropyLoss\": 2.5}\n{\"step\": 2, "
                "\"train/CrossEntropyLoss\": 2.4}\n"
                "{\"step\": 3, \"train/CrossEntropyLoss\": null}\n{\"step\": 3, "
                "\"eval/a/CrossEntropyLoss\": 2.5}\n"
                "{\"step\": 4, \"train/CrossEntropyLoss\": 2.3}\n");
}

static void seed_questions(Kind *k)
{
    static const char
        choice[] = "{\"tokens\": [5, 6, 7], \"continuation\": 1, \"characters\": 3, \"bytes\": 3}",
        longer[] =
            "{\"tokens\": [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], \"continuation\": 2, \"characters\": 3, "
            "\"bytes\": 4}";
    add_text(k, text("{\"task\": \"a\", \"metric\": \"acc\", \"questions\": 2}\n{\"gold\": 1, "
                     "\"choices\": [%s, %s]}\n"
                     "{\"gold\": 0, \"choices\": [%s, %s, %s]}\n",
                     choice, longer, longer, choice, longer));
    add_text(k, text("{\"task\": \"b\", \"metric\": \"bpb\", \"questions\": 1}\n{\"gold\": 0, "
                     "\"choices\": [%s]}\n",
                     longer));
}

static void seed_kind(Kind *k)
{
    static const struct {
        const char *name;
        void (*seed)(Kind *k);
    } how[] = {
        { "yaml", seed_yaml },
        { "hf", seed_hf },
        { "adapter", seed_adapter },
        { "stacked", seed_stacked },
        { "stacked-joined", seed_stacked },
        { "shard2", seed_tokens },
        { "shard4", seed_tokens },
        { "mask", seed_tokens },
        { "metadata", seed_tokens },
        { "questions", seed_questions },
        { "metrics", seed_metrics },
        { "latest", seed_latest },
        { "names", seed_names },
        { "codes", seed_codes },
        { "other-tokens", seed_tokens },
        { "other-mask", seed_tokens },
        { "other-metadata", seed_tokens },
        { "other-questions", seed_questions },
    };
    for (size_t i = 0; i < sizeof how / sizeof how[0]; i++)
        if (strcmp(k->name, how[i].name) == 0) {
            how[i].seed(k);
            return;
        }
    seed_checkpoint(k);
}

const char *kinds_make(void)
{
    make_root(NULL);
    ModelConfig m = architecture(LLAMA);
    m.d_model = 16, m.n_layers = 1, m.n_heads = m.n_kv_heads = 2, m.head_dim = 8, m.mlp_width = 16,
    m.vocab_size = 20;
    open_run(&model, &m, (Format){ F32, 0 }, (Format){ E4M3, 128, true }, (Format){ F32, 0 });
    store_init(&model.store, &m, 3);
    for (int i = 0; i < num_kinds; i++) {
        Kind *k = &kinds[i];
        snprintf(k->folder, sizeof k->folder, "%s/%d-%s", root, i, k->name);
        mkdir(k->folder, 0777);
        seed_kind(k);
        add_files(k, text("tests/fuzz/%s-*", k->name));
    }
    return root;
}

void kinds_remove(void)
{
    remove_root(NULL);
}
