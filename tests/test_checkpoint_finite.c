/* A state with values that are not finite does not become a checkpoint. It is detected in every
 * format, the message names the tensor, no checkpoint is replaced, and the state is not loaded. */
#include "model/checkpoint/folder.h"
#include "model/checkpoint/layout.h"
#include "model/checkpoint/layout_finite.h"
#include "model/formats/file.h"
#include "tests/test.h"
#include "tests/saved.h"

static const Format f32 = { F32, 0 }, bf16 = { BF16, 0 }, e4m3 = { E4M3, 128, true },
                    e5m2 = { E5M2, 128 };

/* Replaces an element of a piece; returns the element's old value. */
static uint32_t exchange(const Run *r, const LayoutEntry *p, size_t element, uint32_t value)
{
    const Shard *s = &r->store.shard[p->unit];
    const Tensor t = p->kind == ENTRY_WEIGHT ? s->slice[TRAINED].stored : s->state[p->state];
    char *data = p->kind == ENTRY_SCALE ? t.scale : t.data;
    uint32_t old = 0;
    data += (p->first + element) * p->bytes;
    device_get(&old, data, p->bytes);
    device_put(data, &value, p->bytes);
    return old;
}

static uint32_t nan_of(const char *dtype)
{
    return strcmp(dtype, "F32") == 0    ? 0x7fc00000
           : strcmp(dtype, "BF16") == 0 ? 0x7fc0
           : strcmp(dtype, "U32") == 0  ? 0xff8000
                                        : 0x7f;
}

static uint32_t minus_one_of(const char *dtype)
{
    return strcmp(dtype, "F32") == 0       ? 0xbf800000
           : strcmp(dtype, "BF16") == 0    ? 0xbf80
           : strcmp(dtype, "F8_E4M3") == 0 ? 0xb8
                                           : 0xbc;
}

/* The name in the message about a bad element. A scale has the name of its codes. */
static void expect_found(const Run *r, const Layout *l, const LayoutEntry *p, size_t element,
                         uint32_t value, bool bad)
{
    const uint32_t old = exchange(r, p, element, value);
    const char *found = layout_not_finite(l, &r->store);
    exchange(r, p, element, old);
    char name[128];
    strcpy(name, p->name);
    if (p->kind == ENTRY_SCALE)
        name[strlen(name) - strlen(".scale")] = '\0';
    if (!bad ? found != NULL : !found || strcmp(found, name) != 0)
        fail_msg("%s[%zu] = %x: found %s", p->name, element, value, found ? found : "nothing");
}

/* Checks the first and the last number of every tensor of a file. */
static void check_pieces(const Run *r, LayoutKind kind)
{
    Layout l = layout_make(NULL, kind, &r->store, 0);
    assert_null(layout_not_finite(&l, &r->store));
    for (int i = 0; i < l.num_entries; i++) {
        const LayoutEntry *p = &l.entry[i];
        const size_t ends[] = { 0, p->count - 1 };
        for (int k = 0; k < 2; k++) {
            if (strcmp(p->dtype, "U8") != 0)
                expect_found(r, &l, p, ends[k], nan_of(p->dtype), true);
            if (p->kind != ENTRY_SCALE && strcmp(p->dtype, "U8") != 0)
                expect_found(r, &l, p, ends[k], minus_one_of(p->dtype),
                             p->kind == ENTRY_STATE && p->state == 1);
        }
    }
    layout_free(&l);
}

TEST(test_found)
{
    const struct {
        const char *optimizer;
        Format master, m, v;
    } rows[] = {
        { "adamw", f32, f32, f32 },      { "adamw", bf16, bf16, bf16 },
        { "adamw", bf16, e4m3, e4m3 },   { "adamw", bf16, e5m2, e5m2 },
        { "adamw8bit", bf16, f32, f32 },
    };
    ModelConfig m = architecture(LLAMA);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Run r;
        open_run_of(&r, &m, rows[i].optimizer, rows[i].master, rows[i].m, rows[i].v);
        store_init(&r.store, &r.config.model, 3);
        store_zero_states(&r.store);
        check_pieces(&r, LAYOUT_MODEL);
        check_pieces(&r, LAYOUT_OPTIMIZER);
        close_run(&r);
        release();
    }
}

/* ---- what follows ---------------------------------------------------------------------------- */

static void put_float(void *data, float x)
{
    device_put(data, &x, sizeof x);
}

static void expect_latest(const Run *r, long step)
{
    char *found = checkpoint_latest(r->config.save_folder);
    assert_non_null(found);
    assert_string_equal(found, step_folder(r, step));
    free(found);
}

static void set_aside(Run *r, long step)
{
    TrainState s = state_of(step);
    free(checkpoint_set_aside(&r->config, &r->store, &s, r->file_limit));
}

TEST(test_not_saved)
{
    needs_fork();
    static const struct {
        int state;
        float x;
        const char *name;
    } bad[] = {
        { -1, NAN, "step 20: model.layers.0.input_layernorm.weight holds" },
        { 0, INFINITY, "input_layernorm.weight.exp_avg holds" },
        { 1, -1e-30f, "input_layernorm.weight.exp_avg_sq holds" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        Run r;
        open_small(&r);
        r.config.save_num_checkpoints_to_keep = 1;
        save(&r, 10);
        const Shard *s = &r.store.shard[1];
        put_float(bad[i].state < 0 ? s->slice[TRAINED].stored.data : s->state[bad[i].state].data,
                  bad[i].x);
        DIES(bad[i].name, save(&r, 20));
        DIES(text("the last checkpoint is %s", step_folder(&r, 10)), save(&r, 20));
        expect_latest(&r, 10);
        assert_false(exists(text("%s.tmp", step_folder(&r, 20))) || exists(step_folder(&r, 20)));
        close_run(&r);
        release();
    }
}

/* A -aborted folder lies next to the checkpoints, and is found only by its name. */
TEST(test_set_aside)
{
    Run r;
    long *steps;
    open_small(&r);
    r.config.save_num_checkpoints_to_keep = 1;
    save(&r, 10);
    set_aside(&r, 30);
    set_aside(&r, 30);
    expect_latest(&r, 10);
    assert_int_equal(file_steps(&steps, r.config.save_folder, ""), 1);
    free(steps);
    save(&r, 20);
    assert_false(exists(step_folder(&r, 10)));
    shell(text("test \"$(ls %s | tr '\\n' ' ')\" = 'latest step20 step30-aborted '",
               r.config.save_folder));
    shell(text("rm %s/latest", r.config.save_folder));
    expect_latest(&r, 20);
    load(&r, text("%s-aborted", step_folder(&r, 30)));
    folder_clear(r.config.save_folder);
    assert_false(exists(text("%s-aborted", step_folder(&r, 30))));
    close_run(&r);
    release();
}

TEST(test_not_loaded)
{
    needs_fork();
    Run r;
    open_small(&r);
    for (long step = 10; step <= 40; step += 10)
        save(&r, step);
    const Shard *last = &r.store.shard[1];
    put_float(last->state[1].data, -1);
    set_aside(&r, 30);
    shell(text("cd %s && rm -r step30 && cp -r step30-aborted step30", r.config.save_folder));
    put_float(last->slice[TRAINED].stored.data, INFINITY);
    set_aside(&r, 10);
    /* the last -aborted folder stays */
    assert_false(exists(text("%s-aborted", step_folder(&r, 30))));
    shell(text("cd %s && rm -r step10 && mv step10-aborted step10", r.config.save_folder));
    DIES("step30: tensor model.layers.0.input_layernorm.weight.exp_avg_sq holds a value",
         load(&r, step_folder(&r, 30)));
    DIES("/step20 exists, too", load(&r, step_folder(&r, 30)));
    DIES("step10: tensor model.layers.0.input_layernorm.weight holds a value",
         load(&r, step_folder(&r, 10)));
    DIES("/step20 exists, too", load(&r, step_folder(&r, 10)));
    shell(text("cd %s && rm -r step20 step30 step40 step10/trainer.json step10/optimizer*",
               r.config.save_folder));
    DIES("The folder has no other checkpoint", load(&r, step_folder(&r, 10)));
    close_run(&r);
    release();
}

/* A dropped save leaves no files, and does not affect the next save. */
TEST(test_drop)
{
    Run r;
    open_small(&r);
    checkpoint_drop();
    save(&r, 10);
    begin(&r, 20);
    checkpoint_drop();
    assert_false(checkpoint_poll());
    expect_latest(&r, 10);
    shell(text("test \"$(ls %s | tr '\\n' ' ')\" = 'latest step10 '", r.config.save_folder));
    save(&r, 20);
    load(&r, step_folder(&r, 20));
    expect_latest(&r, 20);
    close_run(&r);
    release();
}

/* The numbers that decide about spikes are restored bit for bit. An invalid text is an error. */
TEST(test_spikes)
{
    Run r;
    TrainState s = state_of(10), found;
    open_small(&r);
    for (int i = 0; i < 200; i++)
        spikes_add(&s.spikes, 1 / (i + 3.0), -1e300 / (i + 7.0));
    checkpoint_begin(&r.config, &r.store, &s, r.file_limit);
    checkpoint_finish();
    checkpoint_load(step_folder(&r, 10), &r.config, &r.store, &found, true);
    assert_memory_equal(&found, &s, sizeof s);
    if (on_cpu()) {
        shell(
            text("sed -i 's/\"loss\": \"0/\"loss\": \"0 0/' %s/trainer.json", step_folder(&r, 10)));
        DIES("trainer.json: spikes", load(&r, step_folder(&r, 10)));
    }
    shell(text("sed -i '/\"spikes\": {/,/}/d' %s/trainer.json", step_folder(&r, 10)));
    checkpoint_load(step_folder(&r, 10), &r.config, &r.store, &found, true);
    assert_int_equal(found.spikes.count, 0);
    close_run(&r);
    release();
}

int main(void)
{
    start_device(NULL);
    return run_all_tests(make_root, remove_root);
}
