#include "model/block/preference.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "model/block/weights.h"

static int next_begin(const uint8_t *begins, int t, int T)
{
    while (t < T && !begins[t])
        t++;
    return t;
}

bool preference_next(PairRange *p, const uint8_t *begins, int T)
{
    p->begin = p->end;
    p->middle = next_begin(begins, p->begin + 1, T);
    p->end = p->middle < T ? next_begin(begins, p->middle + 1, T) : T;
    return p->middle < T;
}

PairCount preference_count(const int *targets, const uint8_t *begins, int sequences, int T)
{
    PairCount n = { 0 };
    for (int i = 0; i < sequences; i++, targets += T, begins += T)
        for (PairRange p = { 0 }; preference_next(&p, begins, T); n.pairs++)
            for (int t = p.begin; t < p.middle; t++)
                n.labels += targets[t] >= 0;
    return n;
}

/* The labels of a side, and the sums of their log-probabilities under the model (policy) and the
 * reference model. */
typedef struct {
    double labels, policy, reference;
} Side;

static Side sum_side(const Model *m, const float *losses, size_t begin, size_t end)
{
    const bool subtracts = preference_loss(m->preference.kind)->reference;
    Side s = { 0 };
    for (size_t t = begin; t < end; t++)
        if (m->weighed.targets[t] >= 0) {
            s.labels++;
            s.policy -= losses[t];
            s.reference += subtracts ? m->weighed.values[t] : 0;
        }
    return s;
}

static void set_weights(const Model *m, float *weight, size_t begin, size_t end, double value)
{
    for (size_t t = begin; t < end; t++)
        weight[t] = m->weighed.targets[t] >= 0 ? (float)value : 0;
}

/* Metrics as in TRL. With a reference, log-probabilities are sums over a side, and rewards are beta
 * x (policy - reference). Without a reference, both are means over a side if the loss uses means,
 * as for SimPO and ORPO. */
static void add_metrics(double *sum, const PreferenceLoss *l, double beta, Side c, Side r)
{
    const double of_c = !l->reference && l->means ? fmax(c.labels, 1) : 1,
                 of_r = !l->reference && l->means ? fmax(r.labels, 1) : 1;
    const double dc = (c.policy - c.reference) / of_c, dr = (r.policy - r.reference) / of_r;
    sum[PAIR_COUNT] += 1;
    sum[PAIR_LABELS] += c.labels;
    sum[PAIR_NLL] -= c.policy;
    sum[PAIR_CHOSEN_REWARD] += beta * dc;
    sum[PAIR_REJECTED_REWARD] += beta * dr;
    sum[PAIR_ACCURACY] += beta * dc > beta * dr;
    sum[PAIR_CHOSEN_LOGPS] += c.policy / of_c;
    sum[PAIR_REJECTED_LOGPS] += r.policy / of_r;
    sum[PAIR_DIFFERENCE] += dc + dr;
    sum[PAIR_SQUARE] += dc * dc + dr * dr;
}

/* at: index of the sequence's first token in the micro-batch. */
static void weigh_pair(Model *m, const float *losses, float *weight, size_t at, PairRange o)
{
    const PreferenceLoss *l = preference_loss(m->preference.kind);
    const size_t begin = at + (size_t)o.begin, middle = at + (size_t)o.middle,
                 end = at + (size_t)o.end;
    const Side c = sum_side(m, losses, begin, middle), r = sum_side(m, losses, middle, end);
    const double of_c = l->means ? fmax(c.labels, 1) : 1, of_r = l->means ? fmax(r.labels, 1) : 1;
    const PairLoss f =
        l->loss((c.policy - c.reference) / of_c, (r.policy - r.reference) / of_r, &m->preference);
    /* cross entropy is minus the log-probability */
    set_weights(m, weight, begin, middle, m->weighed.sft_scale - f.chosen / of_c);
    set_weights(m, weight, middle, end, -f.rejected / of_r);
    m->pair_sums[PAIR_LOSS] += f.value;
    add_metrics(m->pair_sums, l, m->preference.beta, c, r);
}

float preference_weigh(Model *m)
{
    const int T = m->text.T;
    const size_t N = (size_t)m->text.N;
    float *losses = m->weighed.host, *weight = losses + 2 * N;
    if (!m->weighed.targets) /* a rehearsal */
        return 1;
    device_get(losses, m->losses, N * sizeof *losses);
    memset(weight, 0, N * sizeof *weight);
    for (size_t at = 0; at < N; at += (size_t)T)
        for (PairRange o = { 0 }; preference_next(&o, m->weighed.begins + at, T);)
            weigh_pair(m, losses, weight, at, o);
    return weights_put(m);
}
