/* A GPU without FP8 GEMMs, which device_has_fp8 of this file simulates. Runs that multiply in FP8
 * end before memory is allocated, with a message that names the recipe and the device. Other runs
 * and all memory plans continue. */
#include "model/checkpoint/load.h"
#include "model/config/config_load.h"
#include "tests/test.h"
#include "tests/kit.h"

#include "kernels/runtime/error.h"
#include "model/run/run.h"

static char folder[] = "/tmp/coat-no-fp8-XXXXXX";

bool __wrap_device_has_fp8(void);
bool __wrap_device_has_fp8(void)
{
    return false;
}

/* The run is refused here. */
void __wrap_model_alloc(Model *m, ParamStore *store, const Config *c);
void __wrap_model_alloc(Model *m, ParamStore *store, const Config *c)
{
    (void)m, (void)store;
    die("placed %s", c->recipe.name);
}

static Config *load(const char *recipe, const char *more)
{
    char name[64], save[128];
    snprintf(name, sizeof name, "--recipe=%s", recipe);
    snprintf(save, sizeof save, "--save_folder=%s/%s", folder, recipe);
    char *argv[] = { "train", "configs/tiny.yaml", name, save, (char *)more, NULL };
    return config_load(more ? 5 : 4, argv, 1, checkpoint_latest);
}

/* Suppresses the hundred lines that the call prints. */
static void open_quietly(Run *r, const Config *c)
{
    if (freopen("/dev/null", "w", stdout))
        run_open(r, c);
}

TEST(test_recipes)
{
    static const char operand[] = "e4m3 (format.operand)";
    static const struct {
        const char *recipe, *more, *fp8;
    } runs[] = {
        { "f32", NULL, NULL },
        { "bf16", NULL, NULL },
        { "coat-opt", NULL, NULL },
        { "fp8", NULL, operand },
        { "fp8-lm", NULL, operand },
        { "coat-act", NULL, operand },
        { "coat", NULL, operand },
        { "coat-lean", NULL, operand },
        { "bf16", "--format.saved_mlp=e4m3/16", NULL },
        { "bf16", "--format.head=e5m2", "e5m2 (format.head)" },
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        Run r;
        char message[128];
        if (runs[i].fp8)
            snprintf(message, sizeof message, "recipe %s multiplies in %s, which this cpu cannot",
                     runs[i].recipe, runs[i].fp8);
        else
            snprintf(message, sizeof message, "placed %s", runs[i].recipe);
        Config *c = load(runs[i].recipe, runs[i].more);
        DIES(message, open_quietly(&r, c));
        config_free(c);
    }
}

/* Without backward, the format of the head's gradient does not count. */
TEST(test_forward_only)
{
    Config *c = load("bf16", "--format.head=e5m2"), *coat = load("coat", NULL);
    c->eval_only = coat->eval_only = true;
    run_check_device(c);
    DIES("multiplies in e4m3 (format.operand)", run_check_device(coat));
    c->eval_only = false;
    DIES("multiplies in e5m2 (format.head)", run_check_device(c));
    config_free(c);
    config_free(coat);
}

/* FP8 that is only saved, and not multiplied, except in the head of the recipe. */
TEST(test_head_alone)
{
    Config *c = load("coat", "--format={operand: bf16, gradient: bf16}");
    DIES("recipe coat multiplies in e5m2 (format.head), ", run_check_device(c));
    DIES(" --format.head=bf16 runs here", run_check_device(c));
    config_free(c);
    c = load("coat", "--format={operand: bf16, gradient: bf16, head: bf16}");
    run_check_device(c);
    config_free(c);
}

TEST(test_plan)
{
    Config *c = load("coat", "--dry_run");
    run_plan(c);
    config_free(c);
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_folder, remove_folder);
}
