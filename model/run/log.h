/* The output of a run: a line per step on stdout, metrics.jsonl in the save folder, a plot of the
 * loss at the end. Rank 0 only. */
#pragma once
#include <jansson.h>

#include "model/evaluate/downstream.h"
#include "model/evaluate/evaluate.h"
#include "model/update/schedule.h"
#include "model/update/spikes.h"

typedef struct {
    long step, tokens; /* number of steps and tokens, this step included */
    /* number of this step's sequences from each source of data.mix, if there is a mixture */
    const uint32_t *share;
    long labels; /* number of targets of the global batch */
    /* loss: what the step minimizes. The others are means per label of the global batch, NaN without
     * labels; zloss is not weighted. With distill.loss, zloss is the divergence */
    double loss, cross_entropy, zloss;
    double grad_norm, clip, lr; /* clip: factor of the gradient */
    /* time for which this rank's computation waited for communication */
    double exposed_ms;
    /* whether the gradient norm and, if there are labels, the loss are finite */
    bool finite;
    bool spike, skipped; /* skipped: no update was made */
    SpikeScores scores;
    const double *pairs;  /* sums over the pairs of the global batch; NULL: no preference.loss */
    const double *policy; /* sums over its labels; NULL: no policy.loss */
    json_t *router;       /* values of router_report, which log_step frees; NULL: none */
} StepStats;

/* speed: tokens per second of a rank; light: speed as a share of the device's peak (0: unknown);
 * memory: bytes in use; seconds_left: time to the end of the run */
typedef struct {
    double speed, light, memory, seconds_left;
} Progress;

/* Writes the terminal's line of a step: at most 100 columns for up to 999,999 steps. All other
 * values are only in metrics.jsonl. */
void log_line(char *line, size_t size, const StepStats *s, long steps, const Progress *p);

typedef struct Log Log;

/* Opens save_folder/metrics.jsonl for appending. `last_step`: the last step of this run.
 * `first_step`: number of earlier steps. If the run `resumes`, existing metrics up to first_step
 * stay; otherwise they are deleted. Dies if another process trains in save_folder. Returns NULL on
 * ranks other than 0, and every function does nothing for NULL. `shape`: layouts of all units, to
 * show the share of peak speed; NULL: the share is not shown. */
Log *log_open(const Config *c, const UnitLayout *shape, RunLength length, long last_step,
              long first_step, bool resumes, int world);

/* As log_open, for eval_only with the model of the folder `from`: appends to
 * save_folder/eval.jsonl, if there is a save_folder. */
Log *log_open_eval(const Config *c, const char *from);

void log_step(Log *l, const StepStats *s);
void log_eval(Log *l, long step, const EvalResult *r);
void log_downstream(Log *l, long step, const DownstreamResult *r);
/* Whether an earlier process wrote the metrics of evaluator i at first_step. Only rank 0 knows
 * this. */
bool log_evaluated(const Log *l, int i);
bool log_sampled(const Log *l); /* whether an earlier process wrote the samples of first_step */
void log_pause(Log *l);         /* the speed excludes the time between log_pause and log_resume */
void log_resume(Log *l);

/* Writes a JSON object, whose first key is "step", as a line of metrics.jsonl, with the Unix "time"
 * in seconds added. Frees the object. */
struct json_t;
void log_object(Log *l, struct json_t *object);
/* writes null if the number is not finite */
void log_set(struct json_t *object, const char *name, double value);

void log_close(Log *l); /* prints first and last loss, and the plot */
