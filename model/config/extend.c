/* `extend`: a run of the schedule wsd continues from its stable part, whose learning rate is the
 * highest. A run should not continue from weights of the decay, but from the checkpoint before the
 * decay [Hu et al. 2024, arXiv 2404.06395, section 4]. */
#include "model/config/extend.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/batch_warmup.h"
#include "model/config/load_folder.h"
#include "model/formats/file.h"
#include "model/formats/pointer.h"
#include "model/keys/key.h"
#include "model/keys/value.h"
#include "model/update/schedule.h"

/* A checkpoint's position, and the end of its run's stable part, in steps or tokens. */
typedef struct {
    char *path;
    long step, tokens;
    double at, stable, end;
    const char *unit;
} SchedulePoint;

static long count_of(const char *checkpoint, const char *key)
{
    json_t *state = file_json(checkpoint, "trainer.json", 0), *n = json_object_get(state, key);
    if (!json_is_integer(n) || json_integer_value(n) < 0)
        die("%s/trainer.json: %s: expected a number", checkpoint, key);
    const long count = (long)json_integer_value(n);
    json_decref(state);
    return count;
}

static void set_point(SchedulePoint *p, const Config *c)
{
    p->at = (double)(c->scheduler.in_tokens ? p->tokens : p->step);
    p->end = schedule_end(c, schedule_duration(c));
    p->stable = p->end - (double)c->scheduler.t_decay;
    p->unit = c->scheduler.in_tokens ? "tokens" : "steps";
}

/* Reads the schedule of the run that saved this checkpoint from its config.yaml; NULL: there is
 * none. Free it with free_schedule. */
static Settings *read_schedule(const char *checkpoint)
{
    static const char *const keys[] = { "scheduler.name",
                                        "scheduler.units",
                                        "scheduler.t_warmup",
                                        "scheduler.warmup_fraction",
                                        "scheduler.t_decay",
                                        "scheduler.t_max",
                                        "scheduler.alpha_f",
                                        "scheduler.warmup_min_lr",
                                        "max_duration",
                                        "global_train_batch_size",
                                        "model.max_sequence_length",
                                        "batch_size_warmup" };
    YamlNode *run = load_folder_config(checkpoint);
    if (!run)
        return NULL;
    Settings *s = xcalloc(1, sizeof *s);
    reader_defaults(s, "");
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const YamlNode *n = yaml_find(run, keys[i]);
        if (n)
            value_parse(s, key_find(keys[i]), n);
    }
    yaml_free(run);
    s->c.scheduler.in_tokens = s->scheduler_units == UNITS_TOKENS;
    batch_warmup_read(s, checkpoint);
    return s;
}

static void free_schedule(Settings *s)
{
    reader_free_element(s, "");
    free(s);
}

Config extend_with_schedule_of(const char *checkpoint, const Config *c)
{
    Config with = *c;
    Settings *s = read_schedule(checkpoint);
    if (!s)
        return with;
    with.scheduler = s->c.scheduler;
    with.max_duration = s->c.max_duration;
    with.global_train_batch_size = s->c.global_train_batch_size;
    with.model.max_sequence_length = s->c.model.max_sequence_length;
    with.batch_warmup = s->c.batch_warmup;
    free_schedule(s);
    return with;
}

static SchedulePoint read_point(const char *where, char *checkpoint)
{
    SchedulePoint p = {
        checkpoint, count_of(checkpoint, "step"), count_of(checkpoint, "tokens"), 0, 0, 0, NULL
    };
    Settings *s = read_schedule(checkpoint);
    if (!s || s->c.scheduler.name != WSD)
        die("%s: extend: the run of %s does not have scheduler.name wsd, so it has no stable "
            "phase; --load_path=%s continues this run",
            where, checkpoint, checkpoint);
    set_point(&p, &s->c);
    if (p.end == 0)
        die("%s: extend: the run of %s has a max_duration in epochs, so the start of its decay is "
            "unknown; give a checkpoint from before the decay as --load_path",
            where, checkpoint);
    free_schedule(s);
    return p;
}

/* The last stable checkpoint of a run. */
static SchedulePoint find_last(const char *where, const char *folder)
{
    long *steps;
    const int count = file_steps(&steps, folder, "");
    if (count == 0)
        die("%s: extend %s: there is no checkpoint stepN; expected the save_folder of a run or one "
            "of its checkpoints",
            where, folder);
    for (int i = count - 1; i >= 0; i--) {
        const SchedulePoint p = read_point(where, xasprintf("%s/step%ld", folder, steps[i]));
        if (p.at <= p.stable) {
            free(steps);
            return p;
        }
        if (i == 0)
            die("%s: extend %s: all its checkpoints, step%ld to step%ld, are in the decay, which "
                "begins after %.0f of %.0f %s; a "
                "run can be extended if it keeps an earlier checkpoint (save_interval_unsharded, "
                "save_num_checkpoints_to_keep)",
                where, folder, steps[0], steps[count - 1], p.stable, p.end, p.unit);
        free(p.path);
    }
    CHECK(false, "%s: no checkpoint", folder);
    return (SchedulePoint){ 0 };
}

void extend_find(Reader *r)
{
    Settings *s = r->s;
    const char *where = reader_where(r, "extend");
    if (!s->extend)
        return;
    pointer_replace(&s->extend);
    const bool one = file_is_in(s->extend, "trainer.json");
    const SchedulePoint p =
        one ? read_point(where, xstrdup(s->extend)) : find_last(where, s->extend);
    if (p.at > p.stable)
        die("%s: extend: %s was saved in the decay of its run, which lasts from %.0f to %.0f %s; "
            "give an earlier checkpoint",
            where, p.path, p.stable, p.end, p.unit);
    free(s->c.load_path);
    s->c.load_path = p.path;
    s->extended_step = p.step;
    s->extended_tokens = p.tokens;
}

void extend_check(const Reader *r)
{
    const Settings *s = r->s;
    const Config *c = &s->c;
    const char *where = reader_where(r, "extend");
    if (!s->extend || c->continues)
        return;
    if (c->scheduler.name != WSD)
        die("%s: extend: expected scheduler.name wsd, as in the run of %s", where, c->load_path);
    if (c->reset_trainer_state || c->reset_optimizer_state)
        die("%s: extend continues the state of %s; --reset_trainer_state=false and "
            "--reset_optimizer_state=false are needed",
            where, c->load_path);
    SchedulePoint p = { c->load_path, s->extended_step, s->extended_tokens, 0, 0, 0, NULL };
    set_point(&p, c);
    if (p.end == 0)
        die("%s: extend: the start of the decay must be known: give max_duration in steps or "
            "tokens, not in epochs",
            reader_where(r, "max_duration"));
    if (p.at > p.stable)
        die("%s: extend: %s is at %.0f %s, but the decay would begin at %.0f, %ld before the end "
            "at %.0f; expected an end at %.0f "
            "or later (max_duration)",
            where, p.path, p.at, p.unit, p.stable, c->scheduler.t_decay, p.end,
            p.at + (double)c->scheduler.t_decay);
}
