/* What this rank does now. */
#include "kernels/runtime/watchdog_marks.h"

#include <stdio.h>

#include "kernels/runtime/rank_state.h"

static SharedState alone; /* no watchdog reads it */
static SharedState *own = &alone;

void watchdog_show(SharedState *state)
{
    own = state ? state : &alone;
}

void watchdog_read_own(RankState *s)
{
    state_read(s, own, STATE_WHOLE);
}

static Marks marks(void)
{
    Marks m;
    state_read(&m, own, STATE_PART(main));
    return m;
}

static void show(Marks m)
{
    state_write(own, &m, STATE_PART(main));
}

static void mark(const char *operation, int part, bool together, bool waits)
{
    Marks m = marks();
    snprintf(m.operation, sizeof m.operation, "%s", operation);
    m.part = part;
    m.waits = waits;
    *(m.stage < 0 ? &m.together : &m.inside) += together;
    m.marks++;
    show(m);
}

void watchdog_mark(const char *operation, int part)
{
    mark(operation, part, false, false);
}

void watchdog_mark_together(const char *operation, int part)
{
    mark(operation, part, true, true);
}

/* A neighbour makes other marks, so these are not counted. */
void watchdog_mark_neighbour(const char *operation, int part)
{
    mark(operation, part, false, true);
}

void watchdog_set_stage(int stage)
{
    Marks m = marks();
    m.inside = 0;
    m.stage = stage;
    show(m);
}

void watchdog_set_step(long step)
{
    Marks m = marks();
    m.step = step;
    show(m);
}

void watchdog_set_patient(bool patient)
{
    Marks m = marks();
    m.patient = patient;
    show(m);
}

void watchdog_wait_for(Worker w)
{
    Marks m = marks();
    m.needs = w;
    show(m);
}

void watchdog_beat(Worker w, const char *doing)
{
    const size_t at = offsetof(RankState, worker) + sizeof(WorkerState) * w;
    WorkerState s;
    state_read(&s, own, at, sizeof s);
    if (doing)
        snprintf(s.doing, sizeof s.doing, "%s", doing);
    s.busy = doing != NULL;
    s.beats++;
    state_write(own, &s, at, sizeof s);
}
