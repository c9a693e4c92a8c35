/* Shared by tests of checkpoints: runs with weights and moments but no activations, in separate
 * folders. */
#pragma once
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/safetensors.h"
#include "tests/kit.h"
#include "tests/models.h"

enum { SAVED_UPDATES = 98 }; /* number of updates before each checkpoint */

static char root[] = "/tmp/coat-checkpoint-XXXXXX";
static int num_folders;

/* Returns a path or a text, valid until the end of the test. */
static inline const char *text(const char *format, ...)
{
    static char buffer[8][4096];
    static unsigned next;
    char *s = buffer[next++ % 8];
    va_list args;
    va_start(args, format);
    vsnprintf(s, sizeof buffer[0], format, args);
    va_end(args);
    return s;
}

static inline void shell(const char *command)
{
    if (system(command) != 0)
        fail_msg("%s failed", command);
}

static inline bool exists(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0;
}

/* ---- runs ------------------------------------------------------------------------------------ */

typedef struct {
    Config config;
    ParamStore store;
    void *memory;
    size_t file_limit;
} Run;

/* Allocates memory for the part of the configuration that `choice` selects. */
static inline void place_part(Run *r, ShardChoice choice)
{
    Arena arena = { 0 };
    r->file_limit = CHECKPOINT_FILE_BYTES;
    r->config.save_num_checkpoints_to_keep = -1;
    r->config.text = "run_name: test\n";
    store_plan(&r->store, &arena, &r->config, choice);
    arena.memory = r->memory = device_alloc(arena.used);
    arena.used = 0;
    store_alloc_gathered(&r->store);
    store_plan(&r->store, &arena, &r->config, choice);
}

/* As place_part; also makes a new folder. */
static inline void place_choice(Run *r, ShardChoice choice)
{
    r->config.save_folder = keep(256);
    snprintf(r->config.save_folder, 256, "%s/run%d", root, num_folders++);
    mkdir(r->config.save_folder, 0777);
    place_part(r, choice);
}

static inline void place(Run *r)
{
    place_choice(r, (ShardChoice){ 1, 0, false });
}

/* Sets the configuration of a run. The model gets its memory later, by place_part. */
static inline void configure(Run *r, const ModelConfig *m, const char *optimizer, Format master,
                             Format m1, Format m2)
{
    *r = (Run){ 0 };
    model_config(&r->config, m, "bf16", 1);
    r->config.optimizer.name = (char *)optimizer;
    r->config.recipe.master = master;
    r->config.recipe.moment1 = m1;
    r->config.recipe.moment2 = m2;
}

static inline void open_run_of(Run *r, const ModelConfig *m, const char *optimizer, Format master,
                               Format m1, Format m2)
{
    configure(r, m, optimizer, master, m1, m2);
    place(r);
}

static inline void open_run(Run *r, const ModelConfig *m, Format master, Format m1, Format m2)
{
    open_run_of(r, m, "adamw", master, m1, m2);
}

static inline void open_small(Run *r)
{
    ModelConfig m = architecture(LLAMA);
    open_run(r, &m, (Format){ F32, 0 }, (Format){ F32, 0 }, (Format){ F32, 0 });
    store_init(&r->store, &r->config.model, 3);
}

static inline void close_run(Run *r)
{
    device_free(r->memory);
    store_free(&r->store);
}

static inline TrainState state_of(long step)
{
    return (TrainState){ .step = step,
                         .tokens = 123456789012345,
                         .loader = { 7, 98765 },
                         .fingerprint = 0xfedcba9876543210,
                         .content = { 0x123456789abcdef0, 1 } };
}

static inline void begin(Run *r, long step)
{
    TrainState s = state_of(step);
    r->store.counts.updates = SAVED_UPDATES;
    checkpoint_begin(&r->config, &r->store, &s, r->file_limit);
}

static inline void save(Run *r, long step)
{
    begin(r, step);
    checkpoint_finish();
}

static inline void load(Run *r, const char *folder)
{
    TrainState s;
    checkpoint_load(folder, &r->config, &r->store, &s, true);
}

static inline const char *step_folder(const Run *r, long step)
{
    return text("%s/step%ld", r->config.save_folder, step);
}

/* Returns a copy of a path that is valid until release(). */
static inline char *lasting(const char *path)
{
    return strcpy(keep(strlen(path)), path);
}

/* Skips a test that forks if the device is a GPU, because a forked child cannot use a GPU. Such
 * tests test host code, which is the same with either back end. */
static inline void needs_fork(void)
{
    if (!on_cpu())
        skip();
}

/* Makes the root folder, and sets files to be read in small chunks. */
static inline int make_root(void **state)
{
    (void)state;
    safetensors_chunk = 4096;
    return mkdtemp(root) ? 0 : -1;
}

static inline int remove_root(void **state)
{
    (void)state;
    return system(text("rm -r %s", root));
}
