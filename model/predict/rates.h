/* Predicts how long the events of a rehearsal take on an H100 of 700 W at its power limit. rates.c
 * lists the rates with their sources. */
#pragma once
#include "model/predict/rehearsal.h"

/* Where the ranks are: `network` GB/s of each GPU to other hosts (10^9 bytes; 0: there is one
 * host). */
typedef struct {
    Mesh mesh;
    int rank, gpus_per_host;
    double network;
} Topology;

/* Seconds that an event's work takes; and seconds by which it slows down computation that runs at
 * the same time. */
double rates_seconds(const Event *e, const Topology *p);
double rates_taken(const Event *e, const Topology *p);

/* Dense FLOP/s of operands of `bits`, of the data sheet. */
double rates_peak(int bits);
