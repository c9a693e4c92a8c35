/* What a run tells: a line per step on stdout, metrics.jsonl in the save folder, a plot of the loss at the end. Rank 0 only. */
#pragma once
#include "model/run/downstream.h"
#include "model/run/evaluate.h"
#include "model/schedule.h"
#include "model/spikes.h"

typedef struct {
    long   step, tokens;          /* steps and tokens done, this one included                    */
    long   labels;                /* targets of the global batch                                 */
    double loss, zloss;           /* means per label of the global batch, NaN without any; zloss is not weighted */
    double grad_norm, clip, lr;   /* clip: what the gradient was multiplied by                   */
    double exposed_ms;            /* what this rank's computation waited for communication       */
    bool   finite;                /* gradient norm and, where there are labels, loss are          */
    bool   spike, skipped;        /* skipped: no update was made                                 */
    SpikeScores scores;
} StepStats;

/* tokens per second of a rank, over what its device could do at most (0: unknown); bytes in use; time to the end of the run */
typedef struct { double speed, light, memory, seconds_left; } Progress;

/* The terminal's line of a step: at most 100 columns for up to 999,999 steps; what has no room is in metrics.jsonl. */
void log_line(char *line, size_t size, const StepStats *s, long steps, const Progress *p);

typedef struct Log Log;

/* Opens save_folder/metrics.jsonl for appending. `last_step`: where this run ends. `first_step`: steps done before. Of metrics that
 * are there those up to first_step stay if the run `resumes`, else none: it writes them anew. Dies if another process trains in
 * save_folder. NULL-safe on ranks other than 0: every call does nothing there. `shape`: of all units, what is trained among it, for the
 * speed that the device could reach; NULL: that is not shown. */
Log *log_open (const Config *c, const UnitShape *shape, RunLength length, long last_step, long first_step, bool resumes, int world);

/* The same of a run that evaluates what it loads from the folder `from`, and nothing else: results are
 * added to save_folder/eval.jsonl, if there is a save_folder. */
Log *log_open_eval(const Config *c, const char *from);

void log_step (Log *l, const StepStats *s);
void log_eval (Log *l, long step, const EvalResult *r);
void log_downstream(Log *l, long step, const DownstreamResult *r);
bool log_evaluated(const Log *l, int i);    /* whether evaluator i's metrics are there at first_step, by an earlier process */
bool log_sampled(const Log *l);   /* whether its samples are; of both rank 0 alone asks */
void log_pause (Log *l);          /* from here to log_resume nothing is trained: the speed does not count this time */
void log_resume(Log *l);

/* Writes a JSON object that begins with "step" as a line of metrics.jsonl, with the "time" of writing in seconds of Unix, and frees
 * it. */
struct json_t;
void log_object(Log *l, struct json_t *object);
void log_set(struct json_t *object, const char *name, double value);      /* what is not finite becomes null */

void log_close(Log *l);           /* prints first and last loss, and the plot */
