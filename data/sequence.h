/* Targets, document starts and repetitions of one sequence. Inside data/ only. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* target[t] = token[t+1]. It is -1 at the last position, where the mask (T bools; NULL: no mask) of
 * token t+1 is 0, and where token t+1 is `padding` (-1: none). Returns the number of targets >=
 * 0. */
long sequence_targets(int *target, const int *token, const uint8_t *mask, int T, int padding);

/* begins[t] = 1 where a document begins, else 0. Documents begin at 0 and after each eos (-1:
 * none): the eos belongs to the document that it ends */
void sequence_begins(uint8_t *begins, const int *token, int T, int eos);

/* True if an n-gram of min_period .. max_period tokens occurs max_count times or more in immediate
 * succession. */
bool sequence_repeats(const int *token, int T, int min_period, int max_period, int max_count);
