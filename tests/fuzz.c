/* Damaged and odd inputs, made from good ones: each is read, or ends the program with a message that names where it stands.
 * No crash, no report of the sanitizers, no hang, nothing written (of a checkpoint: nor read) outside of its folder; and a
 * configuration that is read is written out as one that reads as the same.
 *
 *     fuzz COUNT FIRST        the kept inputs of tests/fuzz, then those numbered FIRST .. FIRST + COUNT - 1: each is a function
 *                             of its number, of the kept ones and of configs/
 *     fuzz KIND FILE          one input that was kept; what it says is printed
 *
 * scripts/fuzz builds it with the sanitizers and runs it in the top folder. What fails is kept in build/fuzz. Each input has a
 * process of its own. An input of the configuration is a file and, each behind a line that begins with \x1f, arguments. */
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "data/loader.h"
#include "model/checkpoint/layout.h"
#include "model/config/hf.h"
#include "model/run/log.h"
#include "tests/mutate.h"
#include "tests/saved.h"
#include "tests/try_config.h"

enum { CPU_SECONDS = 5, SECONDS = 120, BATCH = 64, BROKEN = 3, MAX_SEEDS = 256, MAX_ARGUMENTS = 16, WORLD = 2, FIRST_STEP = 3, VOCAB = 100 };

typedef struct {
    const char *name;               /* of kept inputs: tests/fuzz/<name>-<anything> */
    const char *file;               /* what an input is written to, in a folder of the kind's own */
    void      (*read)(void);        /* reads it there */
    bool        roams;              /* it may name files elsewhere that are read */
    const char *words[24];          /* put into inputs */
    Input       seed[MAX_SEEDS];
    int         num_seeds;
    char        folder[128];
} Kind;

static Run model;                   /* what checkpoints are loaded into */
static Kind *now;                   /* of the input that this process reads; NULL: it reads none */

static const char *in_folder(const char *name)
{
    return text("%s/%s", now->folder, name);
}

static void demand(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "FUZZ: %s\n", what);
    _exit(BROKEN);
}

/* ---- where files may be ------------------------------------------------------------------------------------ */

FILE *__real_fopen(const char *path, const char *mode);
int   __real_open(const char *path, int flags, ...);
int   __real_truncate(const char *path, off_t size);
FILE *__wrap_fopen(const char *path, const char *mode);
int   __wrap_open(const char *path, int flags, ...);
int   __wrap_truncate(const char *path, off_t size);

static void check_inside(const char *path, bool writes)
{
    if (now && (writes || !now->roams))
        demand(strncmp(path, now->folder, strlen(now->folder)) == 0 && !strstr(path, "/../"), "a file elsewhere is opened");
}

FILE *__wrap_fopen(const char *path, const char *mode)
{
    check_inside(path, strpbrk(mode, "wa+"));
    return __real_fopen(path, mode);
}

int __wrap_open(const char *path, int flags, ...)
{
    check_inside(path, flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC));
    return __real_open(path, flags, 0666);
}

int __wrap_truncate(const char *path, off_t size)
{
    check_inside(path, true);
    return __real_truncate(path, size);
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

static void read_tokens(int itemsize, const char *mask)
{
    char *paths[] = { xstrdup(in_folder("a.npy")) }, *masks[] = { xstrdup(in_folder("mask.npy")) };
    const DataSpec spec = { .paths = paths, .num_paths = 1, .label_mask_paths = masks, .num_label_mask_paths = mask != NULL,
                            .itemsize = itemsize, .sequence_length = 8, .vocab_size = VOCAB, .eos_token_id = 1, .pad_token_id = 2,
                            .shuffle = true, .drop_last = true, .max_period = 3, .min_period = 1, .max_count = 2 };
    Loader *l = loader_open(&spec, 4, 0, 2);
    Batch b;
    for (int i = 0; i < 8; i++) {
        demand(loader_next(l, &b) && b.sequences == 2, "a step is missing");
        for (int t = 0; t < 16; t++)
            demand(b.tokens[t] >= 0 && b.tokens[t] < VOCAB && b.targets[t] >= -1 && b.targets[t] < VOCAB, "a token is no token");
    }
    loader_close(l);
}

static void read_shard2(void) { read_tokens(2, NULL); }
static void read_shard4(void) { read_tokens(4, NULL); }
static void read_mask(void)   { read_tokens(2, now->file); }

/* What a resume after FIRST_STEP steps leaves: whole lines from the beginning, of these steps. */
static void read_metrics(void)
{
    const Input before = input_read(in_folder(now->file));
    Config c = model.config;
    EvalSet set = { .label = "a" };
    c.save_folder = now->folder;
    c.eval = &set;
    c.num_eval = 1;
    Log *l = log_open(&c, (RunLength){ .steps = 10 }, 10, FIRST_STEP, 1);
    demand(log_evaluated(l) <= 1, "more evaluations than there are evaluators");
    log_close(l);
    Input after = input_read(in_folder(now->file));
    demand(after.size <= before.size && (!after.size || memcmp(after.data, before.data, after.size) == 0), "a log is no longer what it was");
    demand(after.size == 0 || after.data[after.size - 1] == '\n', "a log ends in a line");
}

/* ---- kinds -------------------------------------------------------------------------------------------------- */

static Kind kinds[] = {
    { "yaml", "input", read_yaml, true,
      { "\n", ": ", "- ", "  ", "${", "}", "null", "[", "]", "{", "}", "\"", "'", "#", "\n\x1f--", "&a ", "*a", "<<: ", "!!map ", "|\n",
        "evaluators:\n- label: a\n  data: {paths: b}\n", "\n---\n" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "yaml", "input", read_yaml, true, { "\n\x1f--" } },
    { "hf", "config.json", read_hf, true,
      { "\"rope_theta\": -1,", "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2},", "\"layer_types\": [\"full_attention\"],",
        "\"rope_parameters\": {\"full_attention\": {}, \"sliding_attention\": {}},", "\"head_dim\": 0,", "\"eos_token_id\": [1, 2],",
        "\"sliding_window\": 3,", "\"use_sliding_window\": true,", "\"max_window_layers\": 1,", "null", "\"", "{", "}", "[", "]" } },
    { "trainer", "step1/trainer.json", read_checkpoint, false,
      { "\"files\": {},", "\"step\": -6,", "\"../../../etc/passwd\": 3,", "\"optimizer-/../../a\": 0,", "null", "{", "}", "[", "]", "\"" } },
    { "index", "step1/model.safetensors.index.json", read_weights, false,
      { "\"../weights/step1/model.safetensors\"", "\"/dev/null\"", "\".\"", "\"..\"", "null", "{", "}", "\"weight_map\": " } },
    { "weights", "step1/model.safetensors", read_weights, false,
      { "\"F32\"", "\"BF16\"", "\"F16\"", "\"F64\"", "\"U8\"", "[0,0]", "[]", "{", "}", "\"__metadata__\": {},", " " } },
    { "states", "step1/optimizer-00001.safetensors", read_states, false,
      { "\"F32\"", "\"BF16\"", "\"F8_E4M3\"", "\"U8\"", "[0,0]", "[]", "{", "}", "exp_avg", ".scale", " " } },
    { "shard2", "a.npy", read_shard2, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "shard4", "a.npy", read_shard4, false, { "\x93NUMPY", "BIN.TOK\n", "\x01" } },
    { "mask", "mask.npy", read_mask, false, { "\x01" } },
    { "metrics", "metrics.jsonl", read_metrics, false,
      { "{\"step\": 3, \"eval/a/CrossEntropyLoss\": 1}\n", "{\"step\": ", "eval/", "\n", "{", "}", "\"" } },
};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

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
    if (k->read == read_mask) {
        input_write(&fixed, text("%s/a.npy", k->folder));
        memset(two, 1, 512);
        add_seed(k, input_copy(two, 512));
    }
}

static void seed_metrics(Kind *k)
{
    add_text(k, "{\"step\": 1, \"train/CrossEntropyLoss\": 2.5}\n{\"step\": 2, \"train/CrossEntropyLoss\": 2.4}\n"
                "{\"step\": 3, \"train/CrossEntropyLoss\": null}\n{\"step\": 3, \"eval/a/CrossEntropyLoss\": 2.5}\n"
                "{\"step\": 4, \"train/CrossEntropyLoss\": 2.3}\n");
}

static void make_kinds(void)
{
    ModelConfig m = architecture(LLAMA);
    m.d_model = 16, m.n_layers = 1, m.n_heads = m.n_kv_heads = 2, m.head_dim = 8, m.mlp_width = 16, m.vocab_size = 20;
    open_run(&model, &m, (Format){ F32, 0 }, (Format){ E4M3, 128, true }, (Format){ F32, 0 });
    fsdp_init(&model.fsdp, &m, 3);
    for (int i = 0; i < NUM_KINDS; i++) {
        Kind *k = &kinds[i];
        snprintf(k->folder, sizeof k->folder, "%s/%d-%s", root, i, k->name);
        mkdir(k->folder, 0777);
        k->read == read_yaml ? seed_yaml(k) : k->read == read_hf ? seed_hf(k) : k->read == read_metrics ? seed_metrics(k)
            : k->read == read_shard2 || k->read == read_shard4 || k->read == read_mask ? seed_tokens(k) : seed_checkpoint(k);
        add_files(k, text("tests/fuzz/%s-*", k->name));
    }
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
                                         "[{label: a, data: {paths: [\"%s\"]}}]", "[{label: \"%s\", data: {datasets: {\"b%s\": b}}}]" };
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

static Input make_input(const Kind *k, uint64_t number)
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

/* ---- inputs in processes ------------------------------------------------------------------------------------ */

static jmp_buf ended;
static volatile uint64_t *reached;      /* by the process of a batch; shared */

_Noreturn void __real_exit(int status);
_Noreturn void __wrap_exit(int status);

/* die() ends an input, not its process. */
_Noreturn void __wrap_exit(int status)
{
    if (now)
        longjmp(ended, 1 + status);
    __real_exit(status);
}

/* In a process of its own, where stderr is the file `said` from now on, unless that is NULL. */
static void enter_process(const char *said)
{
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
    if (said)
        dup2(open(said, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666), STDERR_FILENO);
    setrlimit(RLIMIT_CPU, &(struct rlimit){ CPU_SECONDS, CPU_SECONDS });
}

/* Its exit status. */
static int read_input(Kind *k, const Input *in)
{
    input_write(in, text("%s/%s", k->folder, k->file));
    alarm(SECONDS);
    now = k;
    const int jumped = setjmp(ended);
    if (!jumped)
        k->read();
    now = NULL;
    fflush(NULL);
    return jumped ? jumped - 1 : 0;
}

static int wait_for(pid_t child)
{
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        die("fuzz: no process for an input: %m");
    return status;
}

static int read_alone(Kind *k, const Input *in, const char *said)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        enter_process(said);
        _exit(read_input(k, in));
    }
    return wait_for(child);
}

/* Why what a process said before it ended with that status of wait() is a failure; NULL: it is none. */
static const char *judge(const Kind *k, int status, const char *said)
{
    const char *error = strstr(said, "error: ");
    if (WIFSIGNALED(status))
        return WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGALRM ? "a hang" : "a crash";
    if (strstr(said, "Sanitizer") || strstr(said, "runtime error"))
        return "a report of the sanitizers";
    if (WEXITSTATUS(status) == BROKEN)
        return "a promise is broken";
    if (strstr(said, "check failed"))
        return "what the program guarantees does not hold";
    if (WEXITSTATUS(status) == 0)
        return NULL;
    if (strstr(said, "FUZZ: is written out") && !strstr(said, "FUZZ: reads again"))
        return "what is written out does not read again";
    if (WEXITSTATUS(status) != 1 || !error)
        return "an end without a message";
    if (!strstr(error, k->folder) && !(k->roams && strstr(error, "--")))
        return "a message without a place";
    return NULL;
}

/* The verdict over an input that ended with that status; `said` is the file that holds what it said. */
static const char *judge_file(const Kind *k, int status, const char *said, Input *message)
{
    *message = input_read(said);
    input_replace(message, message->size, 0, "", 1);
    return judge(k, status, message->data);
}

/* Returns 1 if it fails. name: of the kept file. */
static int try_input(Kind *k, const Input *in, const char *name)
{
    char said[256], kept[256];
    Input message;
    snprintf(said, sizeof said, "%s/said", root);
    const char *why = judge_file(k, read_alone(k, in, said), said, &message);
    if (why) {
        snprintf(kept, sizeof kept, "build/fuzz/%s-%s", k->name, name);
        shell("mkdir -p build/fuzz");
        input_write(in, kept);
        printf("%s: %s; to see it: scripts/fuzz %s %s\n%.1500s\n", kept, why, k->name, kept, message.data);
        fflush(stdout);
    }
    input_free(&message);
    return why != NULL;
}

/* Many in one process, which is quicker, up to the first that may fail. */
static void read_batch(uint64_t first, uint64_t end)
{
    char said[256];
    snprintf(said, sizeof said, "%s/said", root);
    enter_process(said);
    for (*reached = first; *reached < end; ++*reached) {
        Kind *k = &kinds[*reached % NUM_KINDS];
        Input in = make_input(k, *reached), message;
        if (ftruncate(STDERR_FILENO, 0) != 0)
            _exit(BROKEN);
        if (judge_file(k, read_input(k, &in) << 8, said, &message))
            _exit(BROKEN);
        input_free(&message);
        input_free(&in);
    }
    _exit(0);
}

static int try_kept(void)
{
    int failed = 0;
    glob_t found;
    if (glob("tests/fuzz/*-*", 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; i < found.gl_pathc; i++)
        for (int k = 0; k < NUM_KINDS; k++) {
            const char *name = strrchr(found.gl_pathv[i], '/') + 1;
            const size_t n = strlen(kinds[k].name);
            if (strncmp(name, kinds[k].name, n) != 0 || name[n] != '-')
                continue;
            Input in = input_read(found.gl_pathv[i]);
            failed += try_input(&kinds[k], &in, name + n + 1);
            input_free(&in);
            break;
        }
    globfree(&found);
    return failed;
}

static int try_numbers(uint64_t count, uint64_t first)
{
    int failed = 0;
    const uint64_t end = first + count;
    reached = mmap(NULL, sizeof *reached, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(reached != MAP_FAILED, "no shared memory");
    while (first < end) {
        fflush(NULL);
        const pid_t child = fork();
        if (child == 0)
            read_batch(first, first + BATCH < end ? first + BATCH : end);
        const int status = wait_for(child);
        first = *reached;
        if (status == 0)
            continue;
        Kind *k = &kinds[first % NUM_KINDS];
        Input in = make_input(k, first);
        failed += try_input(k, &in, text("%llu", (unsigned long long)first++));
        input_free(&in);
    }
    return failed;
}

static int try_file(const char *kind, const char *path)
{
    for (int i = 0; i < NUM_KINDS; i++)
        if (strcmp(kinds[i].name, kind) == 0) {
            const Input in = input_read(path);
            const int status = read_alone(&kinds[i], &in, NULL);
            printf("%s %d\n", WIFSIGNALED(status) ? "signal" : "exit status", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            return 0;
        }
    die("fuzz: there is no kind '%s'", kind);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        die("fuzz: expected COUNT FIRST, or KIND FILE");
    device_init(0);
    make_root(NULL);
    make_kinds();
    char *end;
    const uint64_t count = strtoull(argv[1], &end, 10);
    int failed = 0;
    if (*end)
        try_file(argv[1], argv[2]);
    else
        failed = try_kept() + try_numbers(count, strtoull(argv[2], NULL, 10));
    if (!*end)
        printf("fuzz: %llu inputs, %d failed\n", (unsigned long long)count, failed);
    return remove_root(NULL) != 0 || failed > 0;
}
