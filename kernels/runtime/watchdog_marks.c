/* Records what this rank does now. */
#include "kernels/runtime/watchdog_marks.h"

#include <stdio.h>

#include "kernels/runtime/rank_state.h"

static Marks now = { .unit = -1, .stage = -1 }; /* state of the main thread, as last written */
static SharedState alone;                       /* the state if there is no watchdog */
static SharedState *own = &alone;

static void show(void)
{
    state_write(own, &now, STATE_MEMBER(main));
}

void watchdog_show(SharedState *state)
{
    own = state ? state : &alone;
    show();
}

void watchdog_read_own(RankState *s)
{
    state_read(s, own, STATE_WHOLE);
}

static void mark(const char *operation, int unit, bool together, bool waits)
{
    snprintf(now.operation, sizeof now.operation, "%s", operation);
    now.unit = unit;
    now.waits = waits;
    *(now.stage < 0 ? &now.together : &now.inside) += together;
    now.marks++;
    show();
}

void watchdog_mark(const char *operation, int unit)
{
    mark(operation, unit, false, false);
}

void watchdog_mark_together(const char *operation, int unit)
{
    mark(operation, unit, true, true);
}

/* The neighbour makes different marks, so these marks are not counted in `together`. */
void watchdog_mark_neighbour(const char *operation, int unit)
{
    mark(operation, unit, false, true);
}

void watchdog_set_stage(int stage)
{
    now.inside = 0;
    now.stage = stage;
    show();
}

void watchdog_set_step(long step)
{
    now.step = step;
    show();
}

void watchdog_set_patient(bool patient)
{
    now.patient = patient;
    show();
}

void watchdog_wait_for(Worker w)
{
    now.needs = w;
    show();
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
