/* What this rank does now. */
#include "kernels/runtime/watchdog_marks.h"

#include <stdio.h>
#include <string.h>

#include "kernels/runtime/watchdog_state.h"

static RankState alone = { .stage = -1 };
RankState *watchdog_own = &alone;

void watchdog_alone(void)
{
    watchdog_own = &alone;
}

void shared_text_write(SharedText *t, const char *text)
{
    uint64_t word[sizeof t->word / sizeof *t->word] = { 0 };
    snprintf((char *)word, sizeof word, "%s", text);
    for (size_t i = 0; i < sizeof word / sizeof *word; i++)
        atomic_store_explicit(&t->word[i], word[i], memory_order_relaxed);
}

void shared_text_read(char text[OPERATION_NAME], const SharedText *t)
{
    for (size_t i = 0; i < sizeof t->word / sizeof *t->word; i++) {
        const uint64_t word = atomic_load_explicit(&t->word[i], memory_order_relaxed);
        memcpy(text + i * sizeof word, &word, sizeof word);
    }
}

static void mark(const char *operation, int part, bool together)
{
    shared_text_write(&watchdog_own->operation, operation);
    watchdog_own->part = part;
    watchdog_own->waits = together;
    if (watchdog_own->stage < 0)
        watchdog_own->together += together;
    else
        watchdog_own->inside += together;
    watchdog_own->marks++;
}

void watchdog_mark(const char *operation, int part)
{
    mark(operation, part, false);
}

void watchdog_mark_together(const char *operation, int part)
{
    mark(operation, part, true);
}

/* A neighbour makes other marks, so these are not counted. */
void watchdog_mark_neighbour(const char *operation, int part)
{
    mark(operation, part, false);
    watchdog_own->waits = true;
}

void watchdog_enter_stage(int stage)
{
    watchdog_own->inside = 0;
    watchdog_own->stage = stage;
}

void watchdog_leave_stage(void)
{
    watchdog_own->stage = -1;
}

void watchdog_set_step(long step)
{
    watchdog_own->step = step;
}

void watchdog_set_patient(bool patient)
{
    watchdog_own->patient = patient;
}

void watchdog_beat(Worker w, const char *doing)
{
    WorkerState *s = &watchdog_own->worker[w];
    if (doing)
        shared_text_write(&s->doing, doing);
    s->busy = doing != NULL;
    s->beats++;
}

void watchdog_wait_for(Worker w)
{
    watchdog_own->needs = (int)w;
}
