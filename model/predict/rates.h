/* Predicts how long the events of a rehearsal take on an H100 of 700 W at its power limit. rates.c
 * lists the rates with their sources. */
#pragma once
#include "model/predict/rehearsal.h"

/* The placement of ranks on hosts. `network`: GB/s of each GPU to other hosts (10^9 bytes); 0:
 * there is one host. */
typedef struct {
    Mesh mesh;
    int rank, gpus_per_host;
    double network;
} Topology;

/* The seconds that an event's work takes. */
double rates_seconds(const Event *e, const Topology *p);
/* The seconds by which this work slows down concurrent computation. */
double rates_taken(const Event *e, const Topology *p);

/* Dense FLOP/s for operands of `bits` bits, by the data sheet. */
double rates_peak(int bits);
